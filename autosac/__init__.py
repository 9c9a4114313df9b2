"""autosac: the cheapest way to train a PyTorch model under a memory budget."""

from autosac.applying.preceding import (
    Checkpointed,
    is_checkpointing,
    is_recomputing,
    pipeline_checkpoint,
)
from autosac.costs.devices import DeviceSpec
from autosac.errors import (
    ArgumentError,
    AutosacError,
    InfeasibleBudgetError,
    PlanMismatchError,
    SolverError,
    TraceError,
    UnsupportedError,
)
from autosac.graphs.analyzing import GraphInfo, graph_info
from autosac.graphs.compiling import compile, compiled_plans
from autosac.graphs.joint_graphs import joint_graph
from autosac.measuring.verifying import Verification, verify
from autosac.parallel.cluster_timing import calibrate_cluster
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.planning import min_gpus, plan_parallel
from autosac.parallel.plans import ParallelPlan
from autosac.parallel.sweeping import sweep_parallel
from autosac.planning.batching import BatchSize, best_batch_size, max_batch_size
from autosac.planning.checking import check
from autosac.planning.estimating import Estimate, estimate
from autosac.planning.plan_batches import plan, policy
from autosac.planning.planning import floor
from autosac.planning.plans import Plan
from autosac.planning.profiling import Profile, calibrate, profile
from autosac.planning.sweeping import Sweep, sweep
from autosac.showing import plotting
from autosac.sweeps.grids import sweep_grid
from autosac.sweeps.results import GridRow, GridSweep
from autosac.tracing.stepping import OptimizerInBackward

__all__ = [
    "ArgumentError",
    "AutosacError",
    "BatchSize",
    "Checkpointed",
    "ClusterSpec",
    "DeviceSpec",
    "Estimate",
    "GraphInfo",
    "GridRow",
    "GridSweep",
    "InfeasibleBudgetError",
    "OptimizerInBackward",
    "ParallelPlan",
    "Plan",
    "PlanMismatchError",
    "Profile",
    "SolverError",
    "Sweep",
    "TraceError",
    "UnsupportedError",
    "Verification",
    "best_batch_size",
    "calibrate",
    "calibrate_cluster",
    "check",
    "compile",
    "compiled_plans",
    "estimate",
    "floor",
    "graph_info",
    "is_checkpointing",
    "is_recomputing",
    "joint_graph",
    "max_batch_size",
    "min_gpus",
    "pipeline_checkpoint",
    "plan",
    "plan_parallel",
    "plotting",
    "policy",
    "profile",
    "sweep",
    "sweep_grid",
    "sweep_parallel",
    "verify",
]
