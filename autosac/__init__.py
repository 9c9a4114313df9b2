"""autosac: the cheapest way to train a PyTorch model under a memory budget."""

from autosac.batching import BatchSize, best_batch_size, max_batch_size
from autosac.checking import check
from autosac.devices import DeviceSpec
from autosac.errors import (
    AutosacError,
    InfeasibleBudgetError,
    PlanMismatchError,
    SolverError,
    TraceError,
)
from autosac.estimating import Estimate, estimate
from autosac.planning import floor, plan, policy
from autosac.plans import Plan
from autosac.profiling import Profile, calibrate, profile
from autosac.stepping import OptimizerInBackward
from autosac.sweeping import Sweep, sweep
from autosac.verifying import Verification, verify

__all__ = [
    "AutosacError",
    "BatchSize",
    "DeviceSpec",
    "Estimate",
    "InfeasibleBudgetError",
    "OptimizerInBackward",
    "Plan",
    "PlanMismatchError",
    "Profile",
    "SolverError",
    "Sweep",
    "TraceError",
    "Verification",
    "best_batch_size",
    "calibrate",
    "check",
    "estimate",
    "floor",
    "max_batch_size",
    "plan",
    "policy",
    "profile",
    "sweep",
    "verify",
]
