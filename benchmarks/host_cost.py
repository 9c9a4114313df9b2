"""What a planned step costs the host: `python -m benchmarks.host_cost`.

Kernels so small that Python is most of the time, as in eager steps on a GPU: 12 blocks
of width 32 on the CPU, forward and backward. Plain, `torch.utils.checkpoint` of every
block, the same with PyTorch's selective contexts, and plans at five budgets. All take
turns in one run, in random order, and steps on the CPU count its own time, as the
machine may be busy: only their ratios count.
"""

from __future__ import annotations

import argparse
import functools
import gc
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autosac.planning.make_plan import floor, make_plan
from autosac.profiles.profile import Profile, profile
from benchmarks.environment import environment

RESULT = Path(__file__).parent / "results" / "host_cost.md"
NUM_BLOCKS, WIDTH, ROWS = 12, 32, 64
SHARES = (0.0, 0.25, 0.5, 0.75, 0.95)  # of the way from the floor to the baseline
_SAVED = {torch.ops.aten.addmm.default}


class Block(nn.Module):
    """A feed-forward block with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_model() -> nn.Sequential:
    """The same model each time, on the default device."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))


def checkpointed(**options: Any) -> nn.Sequential:
    """The model with every block under `torch.utils.checkpoint`."""
    model = make_model()
    for block in model:
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, **options
        )
    return model


def _save_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saves = op in _SAVED
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def planned(profile: Profile, share: float) -> nn.Sequential:
    """The model under the plan for a budget."""
    lowest = floor(profile)
    budget_bytes = int(lowest + share * (profile.baseline_peak_bytes - lowest))
    model = make_model()
    make_plan(profile, budget_bytes).apply(model)
    return model


def contenders() -> dict[str, nn.Sequential]:
    """Models by what they are called in the table."""
    traced = profile(make_model(), torch.randn(ROWS, WIDTH), loss_fn=_loss)
    contexts = functools.partial(create_selective_checkpoint_contexts, _save_matmuls)
    return {
        "plain": make_model(),
        "`torch.utils.checkpoint` of every block": checkpointed(),
        "the same, saving every `addmm`": checkpointed(context_fn=contexts),
        **{f"plan, {share:.0%}": planned(traced, share) for share in SHARES},
    }


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def timed(run: Callable[[], object]) -> float:
    """Milliseconds that a call takes: of the GPU that is the default, or of the CPU."""
    on_gpu = torch.get_default_device().type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    if on_gpu:
        torch.cuda.synchronize()
    begin = clock()
    run()
    if on_gpu:
        torch.cuda.synchronize()
    return 1e3 * (clock() - begin)


def measure(num_rounds: int) -> dict[str, float]:
    """Median milliseconds of a forward and a backward pass, by contender."""
    models = contenders()
    inputs = torch.randn(ROWS, WIDTH)

    def step(model: nn.Sequential) -> None:
        _loss(model(inputs)).backward()

    times: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        for _ in range(5):
            step(model)
    gc.collect()
    order = list(models)
    for _ in range(num_rounds):
        random.shuffle(order)
        for name in order:
            times[name].append(timed(functools.partial(step, models[name])))
    return {name: statistics.median(values) for name, values in times.items()}


def table(medians: dict[str, float]) -> str:
    """Medians and ratios to the plain step, as Markdown."""
    plain = medians["plain"]
    rows = [
        f"| {name} | {median:.2f} | {median / plain:.2f} |"
        for name, median in medians.items()
    ]
    return "\n".join(["| step | ms | ratio |", "| --- | --- | --- |", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    num_rounds = options.rounds
    torch.set_num_threads(1)
    with torch.device(options.device):
        medians = measure(num_rounds)
    title = (
        f"# Host cost: {NUM_BLOCKS} blocks of width {WIDTH}, forward and backward\n\n"
        f"`python -m benchmarks.host_cost --device {options.device}`: medians of"
        f" {num_rounds} rounds in which all"
        f" took turns, in random order{', CPU time' * (options.device == 'cpu')}. Plans"
        " by budget: share of the way from the floor to the baseline.\n"
        + "".join(f"\n- {key}: {value}" for key, value in environment().items())
    )
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(f"{title}\n\n{table(medians)}\n")
    print(options.output.read_text())


if __name__ == "__main__":
    main()
