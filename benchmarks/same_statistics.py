"""PyTorch's `sac_milp` and autosac on the same statistics.

    python -m benchmarks.same_statistics [--models gpt2,llama] [--budgets 12]

PyTorch's trackers watch one step of each model; their statistics go to `sac_milp`, as
it is and solved to the end, and to `autosac.plan(autosac.from_trackers(...))` with
either backend. Budgets lie between the least that these statistics allow and the peak
of the plain step by them. *True* peaks are those of autosac's simulation, which equals
the allocator's events: of PyTorch's ratios as its own op policies, applied op by op,
and of `autosac.plan(profile)` under the same budget. Times of recomputation are those
of the trackers (roofline of an H100), but for the last two columns, which are of the
trace (roofline of the CPU). Nothing has an optimizer. Where PyTorch's fit of a curve
fails (too few points: its lines are NaN, at which `sac_milp` raises), both sides take
recomputing all of the module in its place. Models of the zoo at which PyTorch's chain
itself raises (modules of views alone, in-place ops on clones, modules that are made and
dropped within a step) cannot be compared and are not among these.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import autosac
from autosac.errors import InfeasibleBudgetError
from autosac.planning.statistics_plans import StatisticsPlan
from autosac.profiles.profile import Profile, profile
from autosac.solvers.milp.solution import Backend
from benchmarks.environment import MIB, environment
from benchmarks.models import Workload, zoo
from benchmarks.rivals.sac_milp import Chain, chain_of_step, milp_choice
from benchmarks.rivals.settings import priced

_OUTPUT = Path(__file__).parent / "results" / "same_statistics.md"
_MODELS = "gpt2,llama,qwen3,two-towers,swin,resnet,dit,unet"
_EQUAL_MS = 1e-4

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model under one budget.

    Attributes:
        model: Its name.
        budget_bytes: The cap.
        torch_ms: Optimum of `sac_milp`, solved to the end; None if infeasible.
        torch_s: Seconds that takes,
        default_s: and as `sac_milp` is: within 5 %.
        own_ms: Optimum of autosac by backend; None if infeasible.
        own_s: Seconds that takes.
        torch_true: Simulated peak and time of what `sac_milp` chooses as it is.
        exact: The same of `autosac.plan(profile)`; None if nothing fits.
    """

    model: str
    budget_bytes: int
    torch_ms: float | None
    torch_s: float
    default_s: float
    own_ms: dict[str, float | None]
    own_s: dict[str, float]
    torch_true: tuple[int, float] | None
    exact: tuple[int, float] | None

    @property
    def differences_ms(self) -> list[float]:
        """How far each backend's optimum is from PyTorch's."""
        values = [v for v in self.own_ms.values() if v is not None]
        return [abs(v - self.torch_ms) for v in values if self.torch_ms is not None]

    @property
    def is_equal(self) -> bool:
        """Whether both backends have PyTorch's optimum."""
        if self.torch_ms is None:
            return list(self.own_ms.values()) == [None, None]
        differences = self.differences_ms
        return len(differences) == 2 and max(differences) <= _EQUAL_MS


def timed(call: Callable[[], _T]) -> tuple[_T, float]:
    """Result and seconds of a call, what it prints left out."""
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        result = call()
    return result, time.perf_counter() - started


def planned(chain: Chain, budget_bytes: int, backend: Backend) -> float | None:
    """Optimum of autosac on the trackers' statistics."""
    try:
        plan = autosac.plan(
            chain.statistics, memory_budget=budget_bytes, backend=backend
        )
    except InfeasibleBudgetError:
        return None
    return float(plan.recompute_ms)


def true_choice(
    traced: Profile, chain: Chain, budget_bytes: int
) -> tuple[int, float] | None:
    """Simulated peak and time of what `sac_milp` chooses."""
    choice = milp_choice(traced, chain, budget_bytes)
    if choice is None:
        return None
    setting = priced(traced, "", choice)
    return setting.peak_bytes, setting.recompute_ms


def exact_plan(traced: Profile, budget_bytes: int) -> tuple[int, float] | None:
    """Peak and time of autosac's own plan."""
    try:
        plan = autosac.plan(traced, memory_budget=budget_bytes)
    except InfeasibleBudgetError:
        return None
    return plan.peak_bytes, plan.recompute_ms


def cell(name: str, traced: Profile, chain: Chain, budget_bytes: int) -> Cell:
    """All planners under one budget."""
    torch_ms, torch_s = timed(lambda: chain.optimum_ms(budget_bytes))
    torch_true, default_s = timed(lambda: true_choice(traced, chain, budget_bytes))
    own_ms: dict[str, float | None] = {}
    own_s: dict[str, float] = {}
    backends: tuple[Backend, ...] = ("highs", "cbc")
    for backend in backends:
        call = lambda b=backend: planned(chain, budget_bytes, b)  # noqa: E731
        own_ms[backend], own_s[backend] = timed(call)
    return Cell(
        model=name,
        budget_bytes=budget_bytes,
        torch_ms=torch_ms,
        torch_s=torch_s,
        default_s=default_s,
        own_ms=own_ms,
        own_s=own_s,
        torch_true=torch_true,
        exact=exact_plan(traced, budget_bytes),
    )


def budgets(chain: Chain, count: int) -> list[int]:
    """Budgets from just above the least feasible one to just below the baseline."""
    free: StatisticsPlan = autosac.plan(chain.statistics, memory_budget="1024TiB")
    try:
        autosac.plan(chain.statistics, memory_budget=1)
        raise AssertionError("no step fits in one byte")
    except InfeasibleBudgetError as error:
        lowest = error.lowest_peak_bytes
    room = free.baseline_peak_bytes - lowest
    return [lowest + room * (2 * i + 1) // (2 * count) for i in range(count)]


def run(name: str, workload: Workload, count: int) -> tuple[str, list[Cell]]:
    """All budgets of a model, and a line about its statistics."""

    def watched() -> Chain:
        model, inputs = workload.make_model(), workload.make_inputs()
        return chain_of_step(model, inputs, workload.loss_fn)

    chain, chain_s = timed(watched)
    traced, traced_s = timed(
        lambda: profile(
            workload.make_model(), workload.make_inputs(), loss_fn=workload.loss_fn
        )
    )
    own, own_s = timed(lambda: traced.statistics)
    line = (
        f"| {name} | {len(chain.graph.nodes)} | {chain_s:.1f} |"
        f" {traced_s + own_s:.1f} | {sum(m.n_segments > 0 for m in own.modules)} |"
    )
    return line, [cell(name, traced, chain, b) for b in budgets(chain, count)]


def row(one: Cell) -> str:
    """A row of the table."""

    def ms(value: float | None) -> str:
        return "infeasible" if value is None else f"{value:.5f}"

    def true(pair: tuple[int, float] | None) -> str:
        if pair is None:
            return "none | "
        over = pair[0] / one.budget_bytes - 1
        shown = f"{pair[0] / MIB:.1f} ({over:+.1%})"
        return f"{f'**{shown}**' if over > 0 else shown} | {pair[1]:.3f}"

    return (
        f"| {one.model} | {one.budget_bytes / MIB:.1f} | {ms(one.torch_ms)} |"
        f" {ms(one.own_ms['highs'])} | {ms(one.own_ms['cbc'])} |"
        f" {'yes' if one.is_equal else '**NO**'} | {one.torch_s:.2f} |"
        f" {one.default_s:.2f} | {one.own_s['highs']:.2f} | {one.own_s['cbc']:.2f} |"
        f" {true(one.torch_true)} | {true(one.exact)} |"
    )


def summary(cells: list[Cell]) -> list[str]:
    """What the table says, in a few lines."""

    def seconds(values: list[float]) -> str:
        return f"{sum(values):.0f} s"

    over = [c for c in cells if c.torch_true and c.torch_true[0] > c.budget_bytes]
    both = [(c.torch_true, c.exact) for c in cells if c.torch_true and c.exact]
    fair = [(t, e) for t, e in both if t[1] > 0.0]
    return [
        f"- Equal optima, to {_EQUAL_MS:g} ms, with both backends:"
        f" {sum(c.is_equal for c in cells)} of {len(cells)}; the largest difference is"
        f" {max((d for c in cells for d in c.differences_ms), default=0.0):.1e} ms.",
        "- Solves in all: `sac_milp` to the end"
        f" {seconds([c.torch_s for c in cells])}, as it is (with its op policies)"
        f" {seconds([c.default_s for c in cells])}, autosac with HiGHS"
        f" {seconds([c.own_s['highs'] for c in cells])}, with CBC"
        f" {seconds([c.own_s['cbc'] for c in cells])}.",
        f"- True peaks above the budget: `sac_milp` {len(over)} of"
        f" {sum(c.torch_true is not None for c in cells)}, `autosac.plan(profile)`"
        f" {sum(bool(c.exact) and c.exact[0] > c.budget_bytes for c in cells)} of"
        f" {sum(c.exact is not None for c in cells)}."
        if cells
        else "",
        "- Recompute time of `autosac.plan(profile)` under the same budgets:"
        f" {sum(e[1] for _, e in fair) / max(1e-9, sum(t[1] for t, _ in fair)):.0%} of"
        f" that of `sac_milp`'s choices, both by the trace, over {len(fair)} budgets.",
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run all models and write the table; 1 if an optimum differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_statistics")
    parser.add_argument("--models", default=_MODELS)
    parser.add_argument("--budgets", type=int, default=12)
    parser.add_argument("--output", type=Path, default=_OUTPUT)
    options: Any = parser.parse_args(arguments)
    known = zoo()
    lines, cells = [], []
    for name in options.models.split(","):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            line, own = run(name, known[name], options.budgets)
        print(line, flush=True)
        print("\n".join(map(row, own)), flush=True)
        lines.append(line)
        cells += own
    told = ", ".join(f"{key} {value}" for key, value in environment().items())
    page = [
        "# PyTorch's sac_milp and autosac on the same statistics\n",
        told + "\n",
        (__doc__ or "").split("\n\n", 2)[2],
        *summary(cells),
        "\n| model | modules | trackers, s | own trace and curves, s | curves |",
        f"|{' --- |' * 5}",
        *lines,
        "\n| model | budget MiB | sac_milp ms | HiGHS ms | CBC ms | equal |"
        " sac_milp s | as it is, s | HiGHS s | CBC s | sac_milp true MiB | ms |"
        " plan(profile) MiB | ms |",
        f"|{' --- |' * 14}",
        *map(row, cells),
    ]
    options.output.write_text("\n".join(page) + "\n")
    return 0 if all(one.is_equal for one in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
