"""Steps that the host of an H200 decided: `python -m benchmarks.gpu_host`.

The measured ones are of `results/gpu_rivals.md`, under plans that were chosen by
kernels alone, in bfloat16. Without a GPU: such plans for the same budgets are made anew
for an H200 as it is modelled, and timed as plans count a host of 54 us an op, which
was fitted to these steps; then come the plans that count it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

import autosac
from autosac.planning.eager_steps import times_of
from autosac.units.matching import chosen_by
from benchmarks.environment import MIB, environment
from benchmarks.models.full_size import full_size

RESULT = Path(__file__).parent / "results" / "gpu_host.md"
_HOST_OP_MS = 0.054
# Whose peak the budget is; MiB; ms under the plan; ms of whose peak it is.
MEASURED = {
    "full/gpt2-small": (
        ("every block", 7399.5, 101.6, 81.8),
        ("every block, selective", 8844.0, 94.6, 110.6),
        ("every second block", 10441.0, 79.8, 70.9),
    ),
    "full/bert-base": (
        ("every block", 7852.0, 106.4, 79.9),
        ("every second block", 10684.2, 89.7, 67.2),
    ),
    "full/resnet50": (
        ("every block", 1548.7, 59.3, 67.9),
        ("every second block", 2199.1, 46.6, 50.0),
        ("every block, selective", 2647.6, 38.1, 98.5),
    ),
}


def rows(name: str) -> Iterator[str]:
    """A line of the table for each budget of a model."""
    work = full_size()[name]()
    with torch.device("meta"):
        model = work.make_model()
    by_kernels = autosac.profile(
        model,
        work.make_inputs(),
        loss_fn=work.loss_fn,
        optimizer=torch.optim.AdamW,
        autocast=torch.bfloat16,
        device="h200",
    )
    by_both = replace(  # as if it had been measured
        by_kernels,
        costs=replace(by_kernels.costs, calibrated=True),
        device=replace(by_kernels.device, host_op_ms=_HOST_OP_MS),
    )
    for rival, mib, measured_ms, rival_ms in MEASURED[name]:
        budget_bytes = int(mib * MIB)
        plan = autosac.plan(by_kernels, memory_budget=budget_bytes)
        chosen = chosen_by(by_both.tape, by_both.candidates, plan.op_policies)
        predicted_ms = times_of(by_both, chosen, 0.0).step_ms
        # That leaves something to the allocator of a GPU that is here.
        within = by_both.budget_for(budget_bytes)
        present = autosac.plan(by_both, memory_budget=within)
        yield (
            f"| {name} | {rival} | {mib:,.1f} | {measured_ms:.1f} |"
            f" {predicted_ms:.1f} | {predicted_ms / measured_ms - 1:+.0%} |"
            f" {present.step_ms:.1f} | {present.optimality_gap:.1%} | {rival_ms:.1f} |"
        )


def main() -> None:
    """Predict all, and write the table."""
    lines = [
        "# Steps that an H200's host decided, and what is predicted of them",
        "",
        "ms. *measured*: under plans chosen by kernels alone ([table](gpu_rivals.md));"
        " *predicted*: of such, at 54 us an op of the host, to which the figures of"
        " `costs/host.py` were fitted; *present*: predicted of plans that count the"
        " host, not run; *by hand*: measured, the checkpointing whose peak it is.",
        "",
        *(f"- {key}: {value}" for key, value in environment().items()),
        "",
        "| step | peak of | MiB | measured | predicted | error | present | gap"
        " | by hand |",
        f"| --- | --- |{' ---: |' * 7}",
        *(row for name in MEASURED for row in rows(name)),
    ]
    RESULT.write_text("\n".join(lines) + "\n")
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
