"""Module statistics from PyTorch's own trackers.

They are private (``torch.distributed._tools``, read for torch 2.15); this is the
only file that touches them. Names there are class names for the model itself, such
as ``GPT``, and ``GPT.blocks.0`` for what lies inside; here they become FQNs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType, _ModState
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator, SACStats

from autosac.statistics.by_module import ModuleStatistics, Statistics, with_descendants
from autosac.step.modules import ModuleTree
from autosac.tracing.probing import module_tree


def from_trackers(
    model: torch.nn.Module,
    mem_tracker: MemTracker,
    runtime_estimator: RuntimeEstimator,
    sac_estimator: SACEstimator,
    device: torch.device | str,
) -> Statistics:
    """Module statistics of a step that PyTorch's trackers have watched.

    Args:
        model: The model that they watched.
        mem_tracker: Has watched at least forward and backward; inputs that are to
            count were registered with its ``track_external``.
        runtime_estimator: Has watched at least forward and backward.
        sac_estimator: Has watched at least forward.
        device: Where the model ran.

    Raises:
        ValueError: The memory tracker has not seen the model.
    """
    if model not in mem_tracker.memory_tracking:
        raise ValueError(
            f"`mem_tracker` has not seen a forward of this {type(model).__name__}; run"
            " the step inside `with mem_tracker:`."
        )
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
            module_figures = replace(
                module_figures,
                calls=calls[name],
                candidate_bytes=_candidate_bytes(sac_estimator.sac_mod_stats.get(name)),
                forward_ms=_ms(runtime_estimator, name, "fw"),
                backward_ms=_ms(runtime_estimator, owner, "bw"),
            )
            module_figures = _with_memory(module_figures, memory, torch.device(device))
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


def _firsts(fqn_of: dict[str, str], names: Sequence[str]) -> tuple[str, ...]:
    """FQNs in the order of first appearance; a loss module is not of the model."""
    return tuple(dict.fromkeys(fqn_of[name] for name in names if name in fqn_of))


def _lasts(fqn_of: dict[str, str], names: Sequence[str]) -> tuple[str, ...]:
    """FQNs in the order of last appearance."""
    return _firsts(fqn_of, names[::-1])[::-1]


def _ms(estimator: RuntimeEstimator, name: str, phase: str) -> float:
    return float(estimator.mod_runtimes.get(name, {}).get(phase, 0.0))


def _with_memory(
    figures: ModuleStatistics, stats: Any, device: torch.device
) -> ModuleStatistics:
    """Add the figures of a module's only call, as ``aggregate_stats`` reads them."""
    figures = replace(
        figures, parameter_bytes=stats.parameter_mem, buffer_bytes=stats.buffer_mem
    )
    if figures.calls != 1:
        return figures

    def live_bytes(state: _ModState, kind: _MemRefType) -> int:
        return int(stats.snapshots[state][-1].get(device, {}).get(kind, 0))

    act, temp, grad = _MemRefType.ACT, _MemRefType.TEMP, _MemRefType.GRAD
    added = live_bytes(_ModState.POST_FW, act) - live_bytes(_ModState.PRE_FW, act)
    figures = replace(
        figures,
        input_bytes=stats.input_mem,
        output_bytes=stats.output_mem,
        activation_bytes=max(0, added - stats.output_mem),
        total_activation_bytes=live_bytes(_ModState.POST_FW, act),
    )
    if _ModState.PEAK_BW not in stats.snapshots:
        return figures
    return replace(
        figures,
        total_gradient_bytes=live_bytes(_ModState.PRE_BW, grad),
        backward_activation_bytes=live_bytes(_ModState.PEAK_BW, act),
        backward_temporary_bytes=live_bytes(_ModState.PEAK_BW, temp)
        - live_bytes(_ModState.PRE_BW, temp),
    )


def _candidate_bytes(stats: SACStats | None) -> int | None:
    """Results of a module's ops; in-place ops, which make none, left out.

    PyTorch's ``sac_memory`` counts what they overwrite once more.
    """
    if stats is None:  # PyTorch has no figures for leaves
        return None
    in_place = {op for op, _ in stats.inplace_ops}
    return sum(n for i, n in enumerate(stats.memory) if i not in in_place)


def _gradient_bytes(model: torch.nn.Module, tree: ModuleTree) -> list[int]:
    """Bytes of trained parameters, each owned by the first module that holds it."""
    own = [0] * len(tree)
    seen = set()
    for i, module in enumerate(model.modules()):
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                own[i] += parameter.nbytes
    return with_descendants(tree, own)
