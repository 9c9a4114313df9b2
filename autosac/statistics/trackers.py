"""Module statistics from PyTorch's own trackers.

Names there are class names for the model itself, such as ``GPT``, and ``GPT.blocks.0``
for what lies inside; here they become FQNs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from autosac import _compat_trackers
from autosac._compat_trackers import MemTracker, RuntimeEstimator, SACEstimator
from autosac.errors import ArgumentError
from autosac.statistics.by_module import ModuleStatistics, Statistics, with_descendants
from autosac.step.modules import ModuleTree
from autosac.tracing.probing import module_tree


def from_trackers(
    model: torch.nn.Module,
    mem_tracker: MemTracker,
    runtime_estimator: RuntimeEstimator,
    sac_estimator: SACEstimator,
    device: torch.device | str | None = None,
) -> Statistics:
    """Module statistics of a step that PyTorch's trackers have watched.

    They are ``MemTracker``, ``RuntimeEstimator`` and ``SACEstimator`` of
    ``torch.distributed._tools``, and the figures those of its ``aggregate_stats``,
    trade-off curves included: fits that the estimator has already are taken as they
    are, the others are made as PyTorch makes them, with two segments.

    Args:
        model: The model that they watched.
        mem_tracker: Has watched at least forward and backward; inputs that are to
            count were registered with its ``track_external``.
        runtime_estimator: Has watched at least forward and backward.
        sac_estimator: Has watched at least forward.
        device: Where the model ran; None for where its parameters are.

    Returns:
        What `autosac.plan` and `autosac.policy` take in place of a model.

    Raises:
        ArgumentError: A tracker is of another kind, or has not seen the model; or the
            model has no parameter that says where it ran.
    """
    ran_on = _checked(model, mem_tracker, runtime_estimator, sac_estimator, device)
    _compat_trackers.fit_trade_offs(sac_estimator)
    tracked = [mem_tracker.memory_tracking.get(module) for module in model.modules()]
    tree = module_tree(model)
    gradient_bytes = _gradient_bytes(model, tree)
    calls = Counter(runtime_estimator.mod_fw_pre_order)
    figures = []
    for node, gradient, memory in zip(tree.nodes, gradient_bytes, tracked, strict=True):
        module_figures = ModuleStatistics(
            fqn=node.fqn,
            is_leaf=node.is_leaf,
            parameter_bytes=node.parameter_bytes,
            gradient_bytes=gradient,
            buffer_bytes=node.buffer_bytes,
        )
        if memory is not None:
            name = memory.mod_fqn
            owner = name if node.fqn else "Global"  # all of backward is the model's
            stats = sac_estimator.sac_mod_stats.get(name)  # none of leaves
            module_figures = replace(
                module_figures,
                calls=calls[name],
                parameter_bytes=memory.parameter_mem,
                buffer_bytes=memory.buffer_mem,
                candidate_bytes=None
                if stats is None
                else _compat_trackers.candidate_bytes(stats),
                forward_ms=_ms(runtime_estimator, name, "fw"),
                backward_ms=_ms(runtime_estimator, owner, "bw"),
                **_compat_trackers.trade_off_figures(sac_estimator, name),
            )
            if calls[name] == 1:
                of_call = _compat_trackers.memory_of_call(memory, ran_on)
                module_figures = replace(module_figures, **of_call)
        figures.append(module_figures)
    fqn_of = {
        memory.mod_fqn: node.fqn
        for node, memory in zip(tree.nodes, tracked, strict=True)
        if memory is not None
    }
    return Statistics(
        modules=tuple(figures),
        tree=tree,
        forward_pre_order=_firsts(fqn_of, runtime_estimator.mod_fw_pre_order),
        forward_post_order=_lasts(fqn_of, runtime_estimator.mod_fw_post_order),
        backward_pre_order=_firsts(fqn_of, runtime_estimator.mod_bw_pre_order),
        backward_post_order=_lasts(fqn_of, runtime_estimator.mod_bw_post_order),
    )


def _checked(
    model: torch.nn.Module,
    mem_tracker: MemTracker,
    runtime_estimator: RuntimeEstimator,
    sac_estimator: SACEstimator,
    device: torch.device | str | None,
) -> torch.device:
    """The device that the model ran on, if the trackers are what they must be."""
    _check_kinds(mem_tracker, runtime_estimator, sac_estimator)
    if model not in mem_tracker.memory_tracking:
        raise ArgumentError(
            f"`mem_tracker` has not seen a forward of this {type(model).__name__}; run"
            " the step inside `with mem_tracker:`."
        )
    root = mem_tracker.memory_tracking[model].mod_fqn
    for name, seen in (
        ("runtime_estimator", runtime_estimator.mod_runtimes),
        ("sac_estimator", sac_estimator.sac_mod_stats),
    ):
        if root not in seen and next(model.children(), None) is not None:
            raise ArgumentError(
                f"`{name}` has not seen a forward of this {type(model).__name__}; run"
                f" the step inside `with {name}(...):`."
            )
    ran_on = _device_of(model) if device is None else torch.device(device)
    known = _compat_trackers.devices(mem_tracker.memory_tracking[model])
    if ran_on not in known:
        raise ArgumentError(
            f"`device`={str(ran_on)!r} is not where `mem_tracker` has seen the model:"
            f" it has figures of {', '.join(sorted(map(str, known)))}."
        )
    return ran_on


def _check_kinds(
    mem_tracker: object, runtime_estimator: object, sac_estimator: object
) -> None:
    for name, tracker, kind in (
        ("mem_tracker", mem_tracker, MemTracker),
        ("runtime_estimator", runtime_estimator, RuntimeEstimator),
        ("sac_estimator", sac_estimator, SACEstimator),
    ):
        if not isinstance(tracker, kind):
            raise ArgumentError(
                f"`{name}` must be a {kind.__name__} of torch.distributed._tools, got"
                f" {type(tracker).__name__}."
            )


def _device_of(model: torch.nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ArgumentError(
            f"This {type(model).__name__} has no parameter that says where it ran:"
            " pass `device`."
        )
    return parameter.device


def _firsts(fqn_of: dict[str, str], names: Sequence[str]) -> tuple[str, ...]:
    """FQNs in the order of first appearance; a loss module is not of the model."""
    return tuple(dict.fromkeys(fqn_of[name] for name in names if name in fqn_of))


def _lasts(fqn_of: dict[str, str], names: Sequence[str]) -> tuple[str, ...]:
    """FQNs in the order of last appearance."""
    return _firsts(fqn_of, names[::-1])[::-1]


def _ms(estimator: RuntimeEstimator, name: str, phase: str) -> float:
    return float(estimator.mod_runtimes.get(name, {}).get(phase, 0.0))


def _gradient_bytes(model: torch.nn.Module, tree: ModuleTree) -> list[int]:
    """Bytes of trained parameters, each owned by the first module that holds it."""
    own = [0] * len(tree)
    seen = set()
    for i, module in enumerate(model.modules()):
        for _, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                own[i] += parameter.nbytes
    return with_descendants(tree, own)
