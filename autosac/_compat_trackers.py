"""PyTorch's trackers of memory, time and trade-offs, which are private, as plain data.

Read off ``torch.distributed._tools`` (torch 2.10 to 2.15); no other file touches them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType, _ModState
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator, SACStats

__all__ = [
    "MemTracker",
    "RuntimeEstimator",
    "SACEstimator",
    "candidate_bytes",
    "devices",
    "fit_trade_offs",
    "memory_of_call",
    "trade_off_figures",
]


def memory_of_call(stats: Any, device: torch.device) -> dict[str, Any]:
    """Memory figures of a module's only call, as ``aggregate_stats`` reads them.

    Args:
        stats: What a `MemTracker` has of the module.
        device: Where it ran.
    """

    def live_bytes(state: _ModState, kind: _MemRefType) -> int:
        return int(stats.snapshots[state][-1].get(device, {}).get(kind, 0))

    act, temp, grad = _MemRefType.ACT, _MemRefType.TEMP, _MemRefType.GRAD
    added = live_bytes(_ModState.POST_FW, act) - live_bytes(_ModState.PRE_FW, act)
    figures = {
        "input_bytes": stats.input_mem,
        "output_bytes": stats.output_mem,
        "activation_bytes": max(0, added - stats.output_mem),
        "total_activation_bytes": live_bytes(_ModState.POST_FW, act),
    }
    if _ModState.PEAK_BW not in stats.snapshots:
        return figures
    temporaries = live_bytes(_ModState.PEAK_BW, temp)
    temporaries -= live_bytes(_ModState.PRE_BW, temp)
    return {
        **figures,
        "total_gradient_bytes": live_bytes(_ModState.PRE_BW, grad),
        "backward_activation_bytes": live_bytes(_ModState.PEAK_BW, act),
        "backward_temporary_bytes": temporaries,
    }


def candidate_bytes(stats: SACStats) -> int:
    """Results of a module's ops; in-place ops, which make none, left out.

    PyTorch's ``sac_memory`` counts what they overwrite once more.
    """
    in_place = {op for op, _ in stats.inplace_ops}
    return sum(n for i, n in enumerate(stats.memory) if i not in in_place)


def devices(stats: Any) -> set[torch.device]:
    """Devices on which a module that a `MemTracker` has seen takes memory."""
    return set(stats.snapshots[_ModState.POST_FW][-1])


def fit_trade_offs(estimator: SACEstimator) -> None:
    """Fit the trade-off curves of those modules that have no fit, as PyTorch does.

    NumPy's generator, at which its fits start, is seeded, and put back afterwards.
    """
    state = np.random.get_state()
    try:
        for name, stats in estimator.sac_mod_stats.items():
            is_known = name in estimator.sac_mod_tradeoff_stats
            if not is_known and _num_points(estimator, name) >= 2:
                np.random.seed(0)
                fitted = estimator._get_sac_tradeoff_pwlf_stats(
                    stats, estimator.sac_mod_greedy_order_meta[name]
                )
                estimator.sac_mod_tradeoff_stats[name] = fitted
    finally:
        np.random.set_state(state)


def _num_points(estimator: SACEstimator, name: str) -> int:
    """Points of a module's curve that PyTorch's fit goes through: with 1 it fails."""
    stats = estimator.sac_mod_stats.get(name)
    if stats is None:
        return 0  # a leaf
    if not sum(stats.memory) or not sum(stats.runtimes):
        return 0
    order = estimator.sac_mod_greedy_order_meta[name]
    is_stored = any(stats.memory[op] for op in order.stored_ops)
    return sum(op.memory > 0 for op in order.msps_meta) + is_stored


def trade_off_figures(estimator: SACEstimator, name: str) -> dict[str, Any]:
    """A module's trade-off curve in PyTorch's own words; empty if it has none.

    Where PyTorch cannot fit it, discarding anything takes what recomputing all does.
    """
    stats = estimator.sac_mod_tradeoff_stats.get(name)
    if stats is not None and not np.isfinite([*stats.slopes, *stats.intercepts]).all():
        stats = None
    if stats is None and _num_points(estimator, name):
        ops = estimator.sac_mod_stats[name]
        return {
            "sac_memory": sum(ops.memory),
            "sac_runtime": float(sum(ops.runtimes)),
            "n_segments": 1,
            "slopes": (0.0,),
            "intercepts": (1.0,),
            "breakpoints": (0.0, 1.0),
            "tradeoff_curve": ((1.0, 1.0),),
        }
    if stats is None:
        return {}
    return {
        "sac_memory": int(stats.sac_memory),
        "sac_runtime": float(stats.sac_runtime),
        "n_segments": int(stats.n_segments),
        "slopes": tuple(map(float, stats.slopes)),
        "intercepts": tuple(map(float, stats.intercepts)),
        "breakpoints": tuple(map(float, stats.fit_breaks)),
        "tradeoff_curve": tuple(stats.tradeoff_curve.items()),
    }
