"""Replace modelled times and workspaces of a tape by measured ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from autosac.costs import caching
from autosac.costs.sources import OpCosts, Source, modelled
from autosac.costs.timing import (
    PROFILED,
    OpMeasurement,
    OpSizes,
    blas_bytes,
    measure_ops,
)
from autosac.step.op_signatures import Signature
from autosac.step.tape import Op, Tape

_PRODUCTS = frozenset(  # ops that call cuBLAS
    f"aten.{name}.default"
    for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot")
)


def calibrated(
    tape: Tape,
    op_ms: tuple[float, ...],
    *,
    device: torch.device,
    cache: bool,
    refresh: bool,
    progress: bool | None,
) -> tuple[Tape, OpCosts]:
    """Look up or measure every distinct op of a tape that does some work.

    Args:
        tape: The step.
        op_ms: Modelled times, for ops that cannot be measured.
        device: As in `look_up`, like what follows.

    Returns:
        The tape with measured workspaces, and what its ops cost.
    """
    measured, failures = look_up(
        _sizes(tape), device=device, cache=cache, refresh=refresh, progress=progress
    )
    ops, costs = _replaced(tape, op_ms, measured, failures)
    return replace(tape, ops=ops, library_bytes=_library_bytes(tape, device)), costs


Found = dict[Signature, tuple[OpMeasurement, Source]]


def look_up(
    needed: Mapping[Signature, OpSizes],
    *,
    device: torch.device,
    cache: bool = True,
    refresh: bool = False,
    progress: bool | None = False,
) -> tuple[Found, dict[Signature, str]]:
    """Costs of ops from the table on disk, or measured now; why others have none.

    What the table knows from runs that disagreed is measured again. Interrupted, what
    was measured by then is in the table.

    Args:
        needed: The ops, and what is counted of each anyway.
        device: Where to measure.
        cache: Use the table on disk, and add to it.
        refresh: Measure what the table knows, too.
        progress: As in `measure_ops`.
    """
    texts = {s: text for s in needed if (text := caching.text_of(s))} if cache else {}
    costs: Found = {}
    unsteady: dict[Signature, OpMeasurement] = {}
    if cache:
        environment = caching.environment(device)
        path = caching.path_of(environment)
        table = {} if refresh else caching.read(path)
        for signature, text in texts.items():
            if (cached := table.get(text)) is None:
                continue
            if cached.is_steady:
                costs[signature] = (cached, "cached")
            else:
                unsteady[signature] = cached
    missing = {s: sizes for s, sizes in needed.items() if s not in costs}
    measured = measure_ops(missing, device=device, progress=progress)
    for signature, cost in measured.costs.items():
        if signature in unsteady:
            cost = cost.or_earlier(unsteady[signature])
        costs[signature] = (cost, "measured")
    if cache:
        new = {texts[s]: costs[s][0] for s in measured.costs if s in texts}
        caching.add(path, environment, new)
    if measured.is_cut:
        raise KeyboardInterrupt
    return costs, measured.failures


def _library_bytes(tape: Tape, device: torch.device) -> tuple[int, ...]:
    """Workspaces of cuBLAS: of forward's thread and of backward's, if they use it."""
    threads = {op.phase == "backward" for op in tape.ops if op.name in _PRODUCTS}
    if device.type != "cuda" or not threads:
        return ()
    return (blas_bytes(device),) * len(threads)


def _sizes(tape: Tape) -> dict[Signature, OpSizes]:
    """Distinct ops that do some work -> what the tape counts of each."""
    sizes: dict[Signature, OpSizes] = {}
    for op in tape.ops:
        if isinstance(op.signature, Signature) and not op.is_view:
            made_bytes = sum(tape.storages[i].nbytes for i in op.creates)
            sizes[op.signature] = OpSizes(
                moved_bytes=op.moved_bytes, made_bytes=made_bytes
            )
    return sizes


def _replaced(
    tape: Tape,
    op_ms: tuple[float, ...],
    costs: Found,
    failed: dict[Signature, str],
) -> tuple[tuple[Op, ...], OpCosts]:
    ops, times, sources, unsteady_ms = [], [], [], 0.0
    for op, modelled_ms in zip(tape.ops, op_ms, strict=True):
        cost_and_source = None
        if isinstance(op.signature, Signature) and not op.is_view:
            cost_and_source = costs.get(op.signature)
        if cost_and_source is None:
            ops.append(op)
            times.append(modelled_ms)
            source = modelled(op)
        else:
            cost, source = cost_and_source
            ops.append(replace(op, workspace_bytes=cost.workspace_bytes))
            times.append(cost.runtime_ms)
            unsteady_ms += 0.0 if cost.is_steady else cost.runtime_ms
        sources.append(source)
    return tuple(ops), OpCosts(
        op_ms=tuple(times),
        sources=tuple(sources),
        calibrated=PROFILED not in failed.values(),
        failures={str(signature.func): reason for signature, reason in failed.items()},
        unsteady_ms=unsteady_ms,
    )
