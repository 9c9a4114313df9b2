"""autosac: the cheapest way to train a PyTorch model under a memory budget."""

from autosac.compiling import compile, compiled_plans
from autosac.devices import DeviceSpec
from autosac.errors import (
    AutosacError,
    InfeasibleBudgetError,
    PlanMismatchError,
    SolverError,
    TraceError,
)
from autosac.joint_graphs import joint_graph
from autosac.planning import floor, plan, policy
from autosac.plans import Plan
from autosac.profiling import Profile, calibrate, profile
from autosac.stepping import OptimizerInBackward
from autosac.sweeping import Sweep, sweep
from autosac.verifying import Verification, verify

__all__ = [
    "AutosacError",
    "DeviceSpec",
    "InfeasibleBudgetError",
    "OptimizerInBackward",
    "Plan",
    "PlanMismatchError",
    "Profile",
    "SolverError",
    "Sweep",
    "TraceError",
    "Verification",
    "calibrate",
    "compile",
    "compiled_plans",
    "floor",
    "joint_graph",
    "plan",
    "policy",
    "profile",
    "sweep",
    "verify",
]
