"""autosac: the cheapest way to train a PyTorch model under a memory budget."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autosac import plotting
    from autosac.advice.advising import Advice, advise
    from autosac.advice.tiled_mlp import tile_mlp
    from autosac.checkpointing.backward_order import fork, join
    from autosac.checkpointing.early_recompute import (
        Checkpointed,
        is_checkpointing,
        is_recomputing,
        pipeline_checkpoint,
    )
    from autosac.devices.allocator_settings import AllocatorSettings
    from autosac.devices.specs import DeviceSpec
    from autosac.errors import (
        ArgumentError,
        AutosacError,
        InfeasibleBudgetError,
        Interrupted,
        PlanMismatchError,
        SolverError,
        TraceError,
        UnsupportedError,
    )
    from autosac.graphs.compiling import compile, compiled_plans
    from autosac.graphs.joint_graphs import joint_graph
    from autosac.integrations.data_parallel import plan_replicas
    from autosac.parallel.cluster_timing import calibrate_cluster
    from autosac.parallel.clusters import ClusterSpec
    from autosac.parallel.planning import plan_parallel
    from autosac.parallel.plans import ParallelPlan
    from autosac.parallel.sweeping import sweep_parallel
    from autosac.pipelines.fewest import min_gpus
    from autosac.pipelines.planning import plan_pipeline
    from autosac.pipelines.plans import PipelinePlan
    from autosac.planning.batch_sizes import (
        BatchSize,
        best_batch_size,
        max_batch_size,
    )
    from autosac.planning.budget_sweep import sweep
    from autosac.planning.checking import check
    from autosac.planning.make_plan import floor
    from autosac.planning.plan_batches import plan, policy
    from autosac.planning.plans import Plan
    from autosac.planning.statistics_plans import StatisticsPlan
    from autosac.profiles.estimate import Estimate, estimate
    from autosac.profiles.module_curves import ModuleCurve
    from autosac.profiles.module_graph import GraphInfo, graph_info
    from autosac.profiles.profile import Profile, calibrate, profile
    from autosac.results.rows import Row
    from autosac.results.sweeps import Sweep
    from autosac.statistics.by_module import Statistics
    from autosac.statistics.trackers import from_trackers
    from autosac.step.chunked_cross_entropy import chunked_cross_entropy
    from autosac.step.offloaded_optimizer import OffloadedOptimizer
    from autosac.step.training_step import OptimizerInBackward
    from autosac.sweeps.grids import sweep_grid
    from autosac.verification.verifying import Verification, verify

__all__ = [
    "Advice",
    "AllocatorSettings",
    "ArgumentError",
    "AutosacError",
    "BatchSize",
    "Checkpointed",
    "ClusterSpec",
    "DeviceSpec",
    "Estimate",
    "GraphInfo",
    "InfeasibleBudgetError",
    "Interrupted",
    "ModuleCurve",
    "OffloadedOptimizer",
    "OptimizerInBackward",
    "ParallelPlan",
    "PipelinePlan",
    "Plan",
    "PlanMismatchError",
    "Profile",
    "Row",
    "SolverError",
    "Statistics",
    "StatisticsPlan",
    "Sweep",
    "TraceError",
    "UnsupportedError",
    "Verification",
    "advise",
    "best_batch_size",
    "calibrate",
    "calibrate_cluster",
    "check",
    "chunked_cross_entropy",
    "compile",
    "compiled_plans",
    "estimate",
    "floor",
    "fork",
    "from_trackers",
    "graph_info",
    "is_checkpointing",
    "is_recomputing",
    "join",
    "joint_graph",
    "max_batch_size",
    "min_gpus",
    "pipeline_checkpoint",
    "plan",
    "plan_parallel",
    "plan_pipeline",
    "plan_replicas",
    "plotting",
    "policy",
    "profile",
    "sweep",
    "sweep_grid",
    "sweep_parallel",
    "tile_mlp",
    "verify",
]

# Each public name is imported when it is first used: `import autosac` takes no time,
# and planning loads neither the compiler nor FSDP.
_NAMES_OF = {
    "autosac.advice.advising": (
        "Advice",
        "advise",
    ),
    "autosac.advice.tiled_mlp": ("tile_mlp",),
    "autosac.checkpointing.backward_order": (
        "fork",
        "join",
    ),
    "autosac.checkpointing.early_recompute": (
        "Checkpointed",
        "is_checkpointing",
        "is_recomputing",
        "pipeline_checkpoint",
    ),
    "autosac.devices.allocator_settings": ("AllocatorSettings",),
    "autosac.devices.specs": ("DeviceSpec",),
    "autosac.errors": (
        "ArgumentError",
        "AutosacError",
        "InfeasibleBudgetError",
        "Interrupted",
        "PlanMismatchError",
        "SolverError",
        "TraceError",
        "UnsupportedError",
    ),
    "autosac.graphs.compiling": (
        "compile",
        "compiled_plans",
    ),
    "autosac.graphs.joint_graphs": ("joint_graph",),
    "autosac.integrations.data_parallel": ("plan_replicas",),
    "autosac.parallel.cluster_timing": ("calibrate_cluster",),
    "autosac.parallel.clusters": ("ClusterSpec",),
    "autosac.parallel.planning": ("plan_parallel",),
    "autosac.parallel.plans": ("ParallelPlan",),
    "autosac.parallel.sweeping": ("sweep_parallel",),
    "autosac.pipelines.fewest": ("min_gpus",),
    "autosac.pipelines.planning": ("plan_pipeline",),
    "autosac.pipelines.plans": ("PipelinePlan",),
    "autosac.planning.batch_sizes": (
        "BatchSize",
        "best_batch_size",
        "max_batch_size",
    ),
    "autosac.planning.budget_sweep": ("sweep",),
    "autosac.planning.checking": ("check",),
    "autosac.planning.make_plan": ("floor",),
    "autosac.planning.plan_batches": (
        "plan",
        "policy",
    ),
    "autosac.planning.plans": ("Plan",),
    "autosac.planning.statistics_plans": ("StatisticsPlan",),
    "autosac.profiles.estimate": (
        "Estimate",
        "estimate",
    ),
    "autosac.profiles.module_curves": ("ModuleCurve",),
    "autosac.profiles.module_graph": (
        "GraphInfo",
        "graph_info",
    ),
    "autosac.profiles.profile": (
        "Profile",
        "calibrate",
        "profile",
    ),
    "autosac.results.rows": ("Row",),
    "autosac.results.sweeps": ("Sweep",),
    "autosac.statistics.by_module": ("Statistics",),
    "autosac.statistics.trackers": ("from_trackers",),
    "autosac.step.chunked_cross_entropy": ("chunked_cross_entropy",),
    "autosac.step.offloaded_optimizer": ("OffloadedOptimizer",),
    "autosac.step.training_step": ("OptimizerInBackward",),
    "autosac.sweeps.grids": ("sweep_grid",),
    "autosac.verification.verifying": (
        "Verification",
        "verify",
    ),
}
_HOME = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    try:
        if name in _HOME:
            value = getattr(import_module(_HOME[name]), name)
        else:  # a module, such as `autosac.errors`
            value = import_module(f"autosac.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"autosac.{name}":
            raise
        raise AttributeError(f"module 'autosac' has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
