"""PyTorch's own planner as a rival: MemTracker, RuntimeEstimator, SACEstimator and
`sac_milp` of `torch.distributed._tools`.

Its ratios become op policies as its own `get_optimal_checkpointing_policy_per_module`
says, and these the policies of units here, op by op.
"""

from __future__ import annotations

import contextlib
import io
import math
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pulp
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import sac_ilp
from torch.distributed._tools.ilp_utils import (
    Graph,
    aggregate_stats,
    get_peak_memory_runtime_baseline,
    parse_module_info,
)
from torch.distributed._tools.mem_tracker import MemTracker, _ModState
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator, SACStats
from torch.distributed._tools.sac_ilp import (
    get_optimal_checkpointing_policy_per_module,
    sac_milp,
)
from torch.utils._pytree import tree_map_only

from autosac.profiles.profile import Profile
from autosac.solving.rules_of_thumb import Choice
from autosac.statistics.by_module import Statistics
from autosac.statistics.trackers import from_trackers
from autosac.step.training_step import (
    LossFn,
    default_loss,
    normalize_inputs,
)
from autosac.units.unit import Unit
from benchmarks.rivals.blocks import policy_saving
from benchmarks.rivals.settings import Rival, priced

_DATASHEET = "NVIDIA H100"  # of the roofline: there is no entry for CPUs
_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)  # of the chain's own baseline
_NAME = "sac_milp"
_NEVER_LISTED = "aten.detach.default"  # neither there nor in the chain's statistics


@dataclass(frozen=True, kw_only=True)
class Chain:
    """What PyTorch's trackers found out about a step.

    Attributes:
        graph: Statistics per module.
        stats: Ops of each module.
        statistics: What autosac makes of the same trackers.
    """

    graph: Graph
    stats: dict[str, SACStats]
    statistics: Statistics

    @property
    def baseline_bytes(self) -> int:
        """Peak of the plain step, as the chain sees it."""
        return int(get_peak_memory_runtime_baseline(self.graph)[0])

    def ratios(self, budget_bytes: int) -> tuple[dict[str, float], int] | None:
        """FQN of each AC unit -> ratio, and the predicted peak; None if infeasible.

        Infeasible and timed out look alike there, and it raises where the solver
        leaves variables without a value.
        """
        with _old_names():
            try:
                observed, _, predicted = sac_milp(self.graph, budget_bytes / 2**30)
            except TypeError:
                return None
        if predicted < 0:
            return None
        root = self.graph.nodes[0]["fqn"]
        named = {
            fqn.removeprefix(root).removeprefix("."): r for fqn, r in observed.items()
        }
        return named, int(predicted)

    def optimum_ms(self, budget_bytes: int, **options: Any) -> float | None:
        """Least recompute time by PyTorch's MILP, None if it is infeasible.

        Solved to the end, where it stops within 5 % itself, and not rounded.

        Args:
            budget_bytes: Cap on the memory of a rank.
            options: As in `sac_milp`; FQNs are the trackers' own.
        """
        values: list[float] = []

        def recorded(objective: Any) -> float:
            values.append(pulp.value(objective))
            return values[-1]

        with (
            _old_names(),
            mock.patch.object(sac_ilp, "value", recorded),
            mock.patch.object(sac_ilp, "PULP_CBC_CMD", _to_the_end),
        ):
            try:
                _, _, peak = sac_milp(self.graph, budget_bytes / 2**30, **options)
            except TypeError:  # a variable without a value
                return None
        return None if peak < 0 else values[-1]

    def saved_ops(self, fqn: str, ratio: float) -> tuple[list[str], list[int]]:
        """Names of a module's ops, and whether each is saved.

        None is where its own MILP finds nothing (some random op must be saved).
        """
        root = self.graph.nodes[0]["fqn"]
        stats = self.stats[f"{root}.{fqn}" if fqn else root]
        with _old_names():
            try:
                flags = get_optimal_checkpointing_policy_per_module(stats, 1 - ratio)
            except TypeError:  # a variable without a value, as that of an op in no row
                flags = []
        return stats.func_names, flags or [0] * len(stats.func_names)


def _to_the_end(**options: Any) -> pulp.LpSolver:
    return pulp.PULP_CBC_CMD(gapRel=0.0, msg=False)


@contextlib.contextmanager
def _old_names() -> Iterator[None]:
    """PyTorch calls PuLP by names that PuLP 3.3 deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


class _WithLoss(nn.Module):
    """The loss inside the model: PyTorch's statistics are those of modules."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn or default_loss

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.loss_fn(self.model(*args, **kwargs))


def chain_of_step(
    model: nn.Module, inputs: Any, loss_fn: LossFn | None = None
) -> Chain:
    """Run PyTorch's trackers on forward, loss and backward of a step.

    Args:
        model: On the CPU or the meta device; used up: its tensors become fake ones.
        inputs: As in `autosac.profile`.
        loss_fn: As in `autosac.profile`.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    args, kwargs = normalize_inputs(inputs)
    with (
        mode,
        # The roofline asserts an accelerator, though it needs only a datasheet.
        mock.patch("torch.accelerator.is_available", return_value=True),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        _make_fake(model)
        args, kwargs = tree_map_only(torch.Tensor, _fake, (args, kwargs))
        whole = _WithLoss(model, loss_fn)
        memory = MemTracker()
        runtime = RuntimeEstimator(gpu_type=_DATASHEET)
        sac = SACEstimator(gpu_type=_DATASHEET)
        memory.track_external(whole, *(a for a in args if _is_tensor(a)))
        for tracker in (
            memory,
            runtime("operator-level-cost-model"),
            sac("operator-level-cost-model"),
        ):
            with tracker:
                whole(*args, **kwargs).backward()
            whole.zero_grad()
        _drop_what_it_cannot_read(memory, runtime)
        info = aggregate_stats(whole, memory, runtime, sac, torch.device("cpu"))
        statistics = from_trackers(whole, memory, runtime, sac)
    graph = parse_module_info(info)
    _replace_failed_fits(graph)
    return Chain(graph=graph, stats=sac.sac_mod_stats, statistics=statistics)


def _replace_failed_fits(graph: Graph) -> None:
    """Recompute all of a module whose curve of one point has no fit: it is not finite.

    `sac_milp` raises at the first.
    """
    for node in graph.nodes:
        if not all(map(math.isfinite, (*node["slopes"], *node["intercepts"]))):
            node["slopes"], node["intercepts"] = [0.0], [1.0]
            node["n_segments"] = 1


def _drop_what_it_cannot_read(memory: MemTracker, runtime: RuntimeEstimator) -> None:
    """Leave out modules that have no backward, and later calls of the same module.

    `aggregate_stats` raises at the first and `parse_module_info` at the second; without
    them the chain plans what is left.
    """
    for module, stats in list(memory.memory_tracking.items()):
        if not {_ModState.PRE_BW, _ModState.PEAK_BW} <= stats.snapshots.keys():
            del memory.memory_tracking[module]
    known = {stats.mod_fqn for stats in memory.memory_tracking.values()}
    for order in (
        runtime.mod_fw_pre_order,
        runtime.mod_fw_post_order,
        runtime.mod_bw_pre_order,
        runtime.mod_bw_post_order,
    ):
        order[:] = [fqn for fqn in dict.fromkeys(order) if fqn in known]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """Fake CPU tensor like another one; made under a fake mode."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
    )


def _make_fake(model: nn.Module) -> None:
    """Replace parameters and buffers by fake ones; shared ones stay shared."""
    known: dict[torch.Tensor, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in known:
                    known[parameter] = nn.Parameter(
                        _fake(parameter), requires_grad=parameter.requires_grad
                    )
                module._parameters[name] = known[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = known.setdefault(buffer, _fake(buffer))


def milp_choice(profile: Profile, chain: Chain, budget_bytes: int) -> Choice | None:
    """What PyTorch's chain chooses under a budget of its own; None if infeasible.

    Its budget does not count the optimizer. A unit that is refused here is left
    alone; a module called several times runs each call under the same policy.
    """
    shares = chain.ratios(budget_bytes)
    if shares is None:
        return None
    chosen = {}
    for unit in profile.units.candidates:
        fqn = f"model.{unit.fqn}"
        if fqn in shares[0]:
            names, flags = chain.saved_ops(fqn, shares[0][fqn])
            saved = _groups_saved(profile, unit, names, flags)
            chosen[unit] = policy_saving(unit, saved)
    return chosen


def _groups_saved(
    profile: Profile, unit: Unit, names: list[str], flags: list[int]
) -> set[int]:
    """Groups with an op that is saved; ops are matched by name and count."""
    flags_of: dict[str, Iterator[int]] = {}
    for name in set(names):
        its = [flag for n, flag in zip(names, flags, strict=True) if n == name]
        flags_of[name] = iter(its)
    is_saved = {}
    for position, index in enumerate(unit.ops):
        name = profile.tape.ops[index].name
        if name != _NEVER_LISTED:
            is_saved[position] = next(flags_of.get(name.split(".")[1], iter(())), 0)
    return {
        g
        for g, group in enumerate(unit.groups)
        if any(is_saved.get(position) for position in group.ops)
    }


def milp_rival(profile: Profile, chain: Chain) -> Rival:
    """PyTorch's chain at budgets all over the range of its own baseline.

    Below the first one that it finds no plan for, which may take it minutes, it is not
    asked again: less memory allows no more.
    """
    settings = []
    for share in _SHARES:
        choice = milp_choice(profile, chain, int(share * chain.baseline_bytes))
        if choice is None:
            break
        settings.append(priced(profile, f"{share:.0%}", choice))
    note = "" if settings else "finds no plan at any budget"
    return Rival(name=_NAME, settings=tuple(settings), note=note)


def rival_of_step(
    profile: Profile, model: nn.Module, inputs: Any, loss_fn: LossFn | None
) -> Rival:
    """PyTorch's chain on a step, or a rival without settings that says why.

    Args:
        profile: The same step, traced.
        model: Used up, as in `chain_of_step`.
        inputs: As in `autosac.profile`.
        loss_fn: As in `autosac.profile`.
    """
    try:
        return milp_rival(profile, chain_of_step(model, inputs, loss_fn))
    except Exception as error:  # whatever its trackers raise is this rival's result
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.name} ({Path(where.filename).name}:{where.lineno})"
        why = f"fails: {type(error).__name__} in {place} {error}".strip()
        return Rival(name=_NAME, settings=(), note=why)
