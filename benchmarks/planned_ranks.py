"""Planned ranks that really run: do they keep the cap and train as one process?

    python -m benchmarks.planned_ranks [--ranks 2,4] [--models GPT,ViT] [--output DIR]

`plan_parallel` plans each model for each number of ranks under three caps, near the
least peak, in the middle and near that of the fastest step: with AC units, with AC
units that may offload (the least peak may then be lower), and without any. Every rank
is a process on the CPU that gloo connects, with a batch of its own. The measured peak
is what PyTorch's allocator reports on all threads of the process in eight steps. It is
held against the prediction if threads of gloo drop in time what they have reduced, and
against the cap if they are as slow as they can be: when they do so leaves no event.
Exits with 1 if a rank is above its cap, off its prediction by over 1 %, or if losses or
gradients differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import autosac
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import ClusterSpec, cluster_spec
from autosac.parallel.formulating import Setting
from autosac.parallel.plans import ParallelPlan
from autosac.parallel.preparing import chooser_of
from autosac.parallel.racing import shard_degrees
from autosac.profiles.profile import Profile
from autosac.solving.solve_options import SolveOptions
from benchmarks.environment import MIB, environment
from benchmarks.fsdp_ranks import (
    LARGEST_DIFFERENCE,
    LARGEST_ERROR,
    largest_difference,
)
from benchmarks.ranks import RankResult, reference, run_gloo_ranks
from benchmarks.sharded_models import RECIPES

LINKS = "pcie-l40s"  # the cluster that ranks on the CPU borrow their links from
NUM_STEPS = 8  # that are measured
PLAIN = Setting()
SHARES = (0.02, 0.4, 0.9)  # of the way from the least peak to the fastest plan's


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One plan.

    Attributes:
        model: Name of the model.
        ranks: Processes.
        with_sac: Whether modules may be AC units,
        offload: and have in far memory what they keep.
        plan: What was planned.
        is_new: Nothing fits its cap without far memory.
    """

    model: str
    ranks: int
    with_sac: bool
    offload: bool
    plan: ParallelPlan
    is_new: bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """How the ranks of one plan did.

    Attributes:
        model: Name of the model.
        ranks: Processes.
        with_sac: Whether modules might be AC units,
        offload: and use far memory; where it lies in a file,
        offloaded_bytes: so much of a rank did.
        is_new: Nothing fits the cap without far memory.
        mesh: Shape of the mesh.
        num_fsdp_units: FSDP units but the model itself,
        num_ac_units: and AC units.
        recomputed_ms: Predicted recomputation.
        budget_bytes: Cap on the peak of a rank.
        predicted_bytes: Peak of the rank with the highest,
        measured_bytes: and of each rank.
        highest_bytes: The most of any rank, if threads of gloo are slow,
        late_bytes: and what that may add to the prediction.
        same_losses: Losses are those of one process, bit by bit.
        gradient_difference: Largest one, relative to the largest element of any.
        is_kept: Every promise is.
    """

    model: str
    ranks: int
    with_sac: bool
    mesh: tuple[int, ...]
    num_fsdp_units: int
    num_ac_units: int
    recomputed_ms: float
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: tuple[int, ...]
    highest_bytes: int
    late_bytes: int
    same_losses: bool
    gradient_difference: float
    is_kept: bool
    offload: bool = False
    offloaded_bytes: int = 0
    is_new: bool = False

    @property
    def worst_error(self) -> float:
        """Of the prediction, at the rank where it is largest."""
        errors = [self.predicted_bytes / nbytes - 1 for nbytes in self.measured_bytes]
        return max(errors, key=abs)


def main() -> int:
    """Plan, run and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--models", default=",".join(RECIPES))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--timeout", type=float, default=3600)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.models.split(",")
    profiles = {name: autosac.calibrate(RECIPES[name].profile()) for name in names}
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "planned_ranks.json"
    is_kept = True
    for num_ranks in map(int, options.ranks.split(",")):
        cells = [
            cell for name in names for cell in _planned(name, profiles[name], num_ranks)
        ]
        rows = _run(cells, num_ranks, options.timeout)
        is_kept &= all(row.is_kept for row in rows)
        # What was found on other numbers of ranks stays.
        runs = json.loads(path.read_text()) if path.exists() else {}
        runs[str(num_ranks)] = {
            "environment": environment(),
            "rows": [asdict(row) for row in rows],
        }
        path.write_text(json.dumps(dict(sorted(runs.items())), indent=1) + "\n")
        text = "\n".join(_table(runs)) + "\n"
        path.with_suffix(".md").write_text(text)
    print(text)
    return 0 if is_kept else 1


def without_sac(profile: Profile) -> Profile:
    """The same step, in which no module may be an AC unit."""
    every = {module.fqn for module in profile.tape.modules}
    return replace(profile, exclude=tuple(sorted(every)))


def caps(profile: Profile, spec: ClusterSpec, setting: Setting = PLAIN) -> list[int]:
    """Three caps from the least peak of any sharding degree to the fastest plan's.

    Both with what slow threads may hold, and the fastest with all ranks as shards.
    """
    chooser = chooser_of(profile, setting)
    options = SolveOptions()
    least_bytes = floor(profile, spec, setting)
    fastest = chooser.at(spec, spec.num_gpus).search(2**40, options).best
    assert fastest is not None
    between = fastest.highest_peak_bytes - least_bytes
    return [int(least_bytes + share * between) for share in SHARES]


def floor(profile: Profile, spec: ClusterSpec, setting: Setting = PLAIN) -> int:
    """Least peak of any sharding degree, with what slow threads may hold."""
    chooser = chooser_of(profile, setting)
    return min(
        chooser.at(spec, degree).lowest(SolveOptions()).highest_peak_bytes
        for degree in shard_degrees(spec)
    )


def _planned(name: str, profile: Profile, num_ranks: int) -> Iterator[Planned]:
    links = cluster_spec(LINKS, num_gpus=num_ranks)
    spec = replace(links, device=device_spec("cpu"))
    for with_sac, offload in ((True, False), (True, True), (False, False)):
        step_profile = profile if with_sac else without_sac(profile)
        setting = Setting(link=spec.link) if offload else PLAIN
        for cap in caps(step_profile, spec, setting):
            plan = autosac.plan_parallel(
                step_profile, cluster=spec, memory_budget=cap, offload=offload
            )
            print(f"{name}, {num_ranks} ranks, {cap} bytes: planned", flush=True)
            yield Planned(
                model=name,
                ranks=num_ranks,
                with_sac=with_sac,
                offload=offload,
                plan=plan,
                is_new=offload and cap < floor(step_profile, spec),
            )


def _run(cells: list[Planned], num_ranks: int, timeout_s: float) -> list[Row]:
    jobs = [
        (
            RECIPES[cell.model],
            cell.plan.sharding,
            (),
            {"plan": cell.plan, "want_gradients": True, "num_measured": NUM_STEPS},
        )
        for cell in cells
    ]
    measured = run_gloo_ranks(num_ranks, jobs, timeout_s=timeout_s)
    references = {
        name: reference(RECIPES[name], num_ranks) for name in {c.model for c in cells}
    }
    return [
        _row(cell, results, *references[cell.model])
        for cell, results in zip(cells, measured, strict=True)
    ]


def _row(
    cell: Planned,
    results: list[RankResult],
    losses: list[float],
    gradients: dict[str, torch.Tensor],
) -> Row:
    plan = cell.plan
    row = Row(
        model=cell.model,
        ranks=cell.ranks,
        with_sac=cell.with_sac,
        offload=cell.offload,
        offloaded_bytes=plan.offloaded_bytes,
        is_new=cell.is_new,
        mesh=plan.mesh_shape,
        num_fsdp_units=len([unit for unit in plan.sharding.units if unit.fqn]),
        num_ac_units=len(plan.policy),
        recomputed_ms=plan.recompute_ms,
        budget_bytes=plan.budget_bytes,
        predicted_bytes=plan.peak_bytes,
        measured_bytes=tuple(result.peak_bytes for result in results),
        highest_bytes=max(result.highest_peak_bytes for result in results),
        late_bytes=plan.late_bytes,
        same_losses=[result.loss for result in results] == losses,
        gradient_difference=largest_difference(results, gradients),
        is_kept=True,
    )
    return replace(row, is_kept=_is_kept(row))


def _is_kept(row: Row) -> bool:
    return (
        row.highest_bytes <= row.predicted_bytes + row.late_bytes <= row.budget_bytes
        and max(row.measured_bytes) <= row.predicted_bytes
        and abs(row.worst_error) <= LARGEST_ERROR
        and row.same_losses
        and row.gradient_difference <= LARGEST_DIFFERENCE
    )


def _table(runs: dict[str, Any]) -> list[str]:
    every = [Row(**row) for run in runs.values() for row in run["rows"]]
    lines = [
        "# Planned ranks of FSDP2: caps, predicted and measured peaks",
        "",
        f"{sum(row.is_kept for row in every)} of {len(every)} plans keep every promise:"
        " no rank above the cap in any step, none above its prediction or off by"
        f" over {LARGEST_ERROR:.0%}, losses identical to those of one unsharded process"
        f" on the same batches, gradients within {LARGEST_DIFFERENCE:.0e} of the"
        " largest element of any.",
        "",
        "Peaks in MiB a rank; the prediction is for the first one, which has the most."
        " *measured*: the most in eight steps, by rank, if threads of gloo drop in time"
        " what they have reduced. *error*: of the prediction, at the rank where it is"
        " largest. *late*: what slow threads may add to the prediction; the cap leaves"
        " room for it. *highest*: the most in eight steps of any rank, with the largest"
        " copies that threads may still have held. *SAC*: whether modules may be AC"
        " units, and MiB that these have in a file where they may offload. *units*:"
        " FSDP units but the model, and AC units.",
    ]
    for num_ranks, run in sorted(runs.items()):
        lines += [
            "",
            f"## {num_ranks} ranks",
            "",
            "```",
            *(f"{key}: {value}" for key, value in run["environment"].items()),
            "```",
            "",
            "| model | mesh | SAC | units | cap | predicted | measured | error | late |"
            " highest | losses | gradients | kept |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
            *(_line(Row(**row)) for row in run["rows"]),
        ]
    return lines


def _actions(row: Row) -> str:
    if not row.offload:
        return "yes" if row.with_sac else "no"
    below = ", below the floor without" if row.is_new else ""
    return f"offload {row.offloaded_bytes / MIB:.2f}{below}"


def _line(row: Row) -> str:
    low, high = min(row.measured_bytes) / MIB, max(row.measured_bytes) / MIB
    cells = [
        row.model,
        " x ".join(map(str, row.mesh)),
        _actions(row),
        f"{row.num_fsdp_units}, {row.num_ac_units}",
        f"{row.budget_bytes / MIB:.3f}",
        f"{row.predicted_bytes / MIB:.3f}",
        f"{high:.3f}" if high == low else f"{low:.3f} to {high:.3f}",
        f"{row.worst_error:+.4%}",
        f"{row.late_bytes / MIB:.3f}",
        f"{row.highest_bytes / MIB:.3f}",
        "identical" if row.same_losses else "DIFFER",
        f"{row.gradient_difference:.1e}",
        "yes" if row.is_kept else "NO",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
