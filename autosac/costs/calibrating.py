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
from autosac.costs.varying import varying
from autosac.devices.cuda_matmuls import runs_blas
from autosac.step.op_signatures import Signature
from autosac.step.tape import FORWARD_PHASES, Op, Tape


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
    forward = {op.signature for op in ops if op.phase in FORWARD_PHASES}
    varied = varying((s for s in measured if s in forward), device=device)
    if varied:
        ops = tuple(replace(op, varies=op.signature in varied) for op in ops)
    library_bytes = _library_bytes(tape, measured, device)
    return replace(tape, ops=ops, library_bytes=library_bytes), costs


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


def _library_bytes(
    tape: Tape, measured: Found, device: torch.device
) -> tuple[int, ...]:
    """What libraries keep for forward's thread and for backward's.

    Of an op that could not be measured, cuBLAS's workspace if it is known to have one.
    In backward a plan may run again what forward ran.
    """
    if device.type != "cuda":
        return ()
    kept = {False: 0, True: 0}
    unmeasured: set[bool] = set()
    for op in tape.ops:
        is_backward = op.phase == "backward"
        if op.signature in measured:
            own_bytes = measured[op.signature][0].kept_bytes
            kept[is_backward] = max(kept[is_backward], own_bytes)
        elif isinstance(op.signature, Signature) and runs_blas(op.signature.func):
            unmeasured.add(is_backward)
    known_bytes = blas_bytes(device) if unmeasured else 0
    for is_backward in unmeasured:
        kept[is_backward] = max(kept[is_backward], known_bytes)
    if kept[True]:
        kept[True] = max(kept.values())
    return tuple(num_bytes for num_bytes in kept.values() if num_bytes)


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
