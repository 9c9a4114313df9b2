"""autosac: the cheapest way to train a PyTorch model under a memory budget."""

from autosac.analyzing import GraphInfo, graph_info
from autosac.batching import BatchSize, best_batch_size, max_batch_size
from autosac.checking import check
from autosac.cluster_timing import calibrate_cluster
from autosac.clusters import ClusterSpec
from autosac.compiling import compile, compiled_plans
from autosac.devices import DeviceSpec
from autosac.errors import (
    AutosacError,
    InfeasibleBudgetError,
    PlanMismatchError,
    SolverError,
    TraceError,
)
from autosac.estimating import Estimate, estimate
from autosac.joint_graphs import joint_graph
from autosac.parallel_planning import min_gpus, plan_parallel
from autosac.parallel_plans import ParallelPlan
from autosac.parallel_sweeping import sweep_parallel
from autosac.planning import floor, plan, policy
from autosac.plans import Plan
from autosac.preceding import (
    Checkpointed,
    is_checkpointing,
    is_recomputing,
    pipeline_checkpoint,
)
from autosac.profiling import Profile, calibrate, profile
from autosac.stepping import OptimizerInBackward
from autosac.sweeping import Sweep, sweep
from autosac.verifying import Verification, verify

__all__ = [
    "AutosacError",
    "BatchSize",
    "Checkpointed",
    "ClusterSpec",
    "DeviceSpec",
    "Estimate",
    "GraphInfo",
    "InfeasibleBudgetError",
    "OptimizerInBackward",
    "ParallelPlan",
    "Plan",
    "PlanMismatchError",
    "Profile",
    "SolverError",
    "Sweep",
    "TraceError",
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
    "policy",
    "profile",
    "sweep",
    "sweep_parallel",
    "verify",
]
