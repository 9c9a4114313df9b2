"""Exact trade-off curves against pwlf fits: `python -m benchmarks.fitted_curves`.

A GPT on the meta device, planned at three budgets with the exact points of every curve
and with fits of few segments: predicted recompute time, its bound, planning time.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from autosac.cli.demo import GPT, next_token_loss
from autosac.planning.make_plan import floor, make_plan
from autosac.profiles.profile import profile

RESULT = Path(__file__).parent / "results" / "fitted_curves.md"
NUM_LAYERS, WIDTH, LENGTH = 24, 1024, 1024


def main() -> None:
    tokens = torch.randint(2048, (1, LENGTH))
    with torch.device("meta"):
        model = GPT(num_layers=NUM_LAYERS, width=WIDTH, num_heads=16, length=LENGTH)
    made = profile(
        model, tokens, loss_fn=next_token_loss(tokens), optimizer=torch.optim.AdamW
    )
    lowest, baseline = floor(made), made.baseline_peak_bytes
    rows = [
        "| budget | segments | recompute ms | bound ms | planning s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for share in (0.1, 0.5, 0.9):
        for segments in (None, 4, 3, 2):
            begin = time.perf_counter()
            plan = make_plan(
                made, int(lowest + share * (baseline - lowest)), segments=segments
            )
            seconds = time.perf_counter() - begin
            rows.append(
                f"| {share:.0%} | {segments or 'exact'} | {plan.recompute_ms:.2f}"
                f" | {plan.bound_ms:.2f} | {seconds:.1f} |"
            )
    title = (
        f"# Exact and fitted curves: GPT, {NUM_LAYERS} layers of width {WIDTH}, torch"
        f" {torch.__version__}\n\nBudget: share of the way from the floor to the"
        " baseline. Times are modelled for the nominal CPU.\n\n"
    )
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(title + "\n".join(rows) + "\n")
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
