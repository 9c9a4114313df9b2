"""What FSDP2 on several GPUs makes of a step: planned as by `plan_parallel`."""

from __future__ import annotations

from dataclasses import replace

from autosac.errors import UnsupportedError
from autosac.parallel.clusters import KNOWN_CLUSTERS, ClusterSpec
from autosac.parallel.formulating import Setting
from autosac.parallel.planning import plan_parallel
from autosac.parallel.preparing import chooser_of, profile_for
from autosac.profiles.profile import Profile
from autosac.results.rows import Row, figures_of
from autosac.solving.solve_options import SolveOptions

SHARDED = "FSDP2 on several GPUs"
_NUMS_GPUS = (2, 4, 8)  # of one node


def sharded_row(step: Profile, budget_bytes: int | None) -> Row:
    """The fewest of 2, 4 and 8 GPUs on which a step fits; each has its batch.

    Figures are those of a rank with all parameters sharded. The peak without
    recomputation is that of the FSDP units of least peak.

    Args:
        step: The step on one GPU.
        budget_bytes: Cap on the peak of a rank; None for 2 GPUs.

    Raises:
        UnsupportedError: No cluster of such GPUs is known, or the memory of the step
            under FSDP2 is not modelled.
    """
    if step.cap != "allocated":
        raise UnsupportedError(
            "What PyTorch's allocator reserves on a rank of FSDP2 is not modelled: plan"
            " with `autosac.plan_parallel` for what is allocated."
        )
    node = _node_of(step)
    chooser = chooser_of(profile_for(node, step, None, {}, sharded_row), Setting())
    for num_gpus in _NUMS_GPUS:
        sharded = chooser.at(node.resized(num_gpus), num_gpus)
        lowest = sharded.lowest(SolveOptions())
        if budget_bytes is None or lowest.highest_peak_bytes <= budget_bytes:
            break
    kept = replace(lowest.choice, points=(None,) * len(lowest.choice.points))
    plain = sharded.simulated(kept)
    how = f'autosac.plan_parallel(..., cluster="{node.name}", num_gpus={num_gpus})'
    row = Row(
        cell={
            "change": f"FSDP2 on {num_gpus} GPUs",
            "results": "rounded",
            "how": how,
        },
        status="feasible",
        budget_bytes=budget_bytes,
        step_ms=plain.step.total_ms,
        mesh_shape=str(num_gpus),
        floor_bytes=lowest.highest_peak_bytes,
        baseline_peak_bytes=plain.highest_peak_bytes,
        planned_for=step.device.name,
        calibrated=step.calibrated,
    )
    if budget_bytes is None:
        return row
    if lowest.highest_peak_bytes > budget_bytes:
        return replace(row, status="infeasible", step_ms=None)
    plan = plan_parallel(
        step,
        cluster=node,
        num_gpus=num_gpus,
        degrees=[num_gpus],
        memory_budget=budget_bytes,
    )
    return replace(row, **figures_of(plan))


def _node_of(step: Profile) -> ClusterSpec:
    """The known node of such GPUs."""
    for cluster in KNOWN_CLUSTERS.values():
        if cluster.device.name == step.device.name:
            return cluster
    raise UnsupportedError(
        f"No node with several devices like {step.device.name!r} is known, nor its"
        " links: pass a `ClusterSpec` to `autosac.plan_parallel`."
    )
