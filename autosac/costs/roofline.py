"""How long an op takes on a device: a roofline."""

from __future__ import annotations

from collections.abc import Hashable

from autosac.costs import kernels
from autosac.devices.specs import DeviceSpec
from autosac.errors import ArgumentError
from autosac.step.op_signatures import Copies
from autosac.step.tape import Op, Tape


def op_ms(op: Op, device: DeviceSpec) -> float:
    """Predicted time of one op in ms; a view costs nothing.

    Copies from and to far memory take as long as those of the slower way, and as long
    as the program is busy with all of them.
    """
    if isinstance(op.signature, Copies):
        return _copies_ms(op.signature, device)
    if op.is_view:
        return 0.0
    return call_ms(op.name, op.signature, op.dtype, op.flops, op.moved_bytes, device)


def call_ms(
    name: str,
    call: Hashable,
    dtype: str,
    flops: int,
    moved_bytes: int,
    device: DeviceSpec,
) -> float:
    """Predicted time of a call in ms.

    ``max(flops / flops_per_s(dtype), bytes / bandwidth) + launch overhead``, the
    roofline of Williams et al., Communications of the ACM 52(4), 2009, at the shares
    of the data sheet's rates that published steps reach (`DeviceSpec`), on a GPU by the
    kind of its kernel (`autosac.costs.kernels`).

    Args:
        name: Of the op.
        call: Its signature.
        dtype: Of its first floating-point result.
        flops: Its FLOPs.
        moved_bytes: Of its tensor arguments and results.
        device: Where it runs.
    """
    flops = kernels.computed_flops(name, call, flops)
    touched_bytes = kernels.touched_bytes(name, call, moved_bytes)
    if device.type == "cuda":
        kernel = kernels.kernel_of(name, call, dtype)
        return kernels.kernel_ms(kernel, flops, touched_bytes, device)
    compute_s = flops / device.achieved_flops_per_s(dtype)
    memory_s = touched_bytes / device.achieved_bytes_per_s
    return max(compute_s, memory_s) * 1e3 + device.launch_overhead_ms


def compute_ms(op: Op, device: DeviceSpec) -> float:
    """Time in ms that an op's FLOPs take alone."""
    flops = kernels.computed_flops(op.name, op.signature, op.flops)
    if device.type == "cuda":
        kernel = kernels.kernel_of(op.name, op.signature, op.dtype)
        return kernels.compute_ms(kernel, flops, device)
    return 1e3 * flops / device.achieved_flops_per_s(op.dtype)


def _copies_ms(copies: Copies, device: DeviceSpec) -> float:
    link = device.link
    if link is None:
        raise ArgumentError(
            "`optimizer` keeps its state in far memory, and the rates between"
            f" {device.name} and that are not known: pass a `DeviceSpec` with a `link`"
            " as `device`."
        )
    sizes = copies.out_sizes, copies.back_sizes
    out_ms = link.out_ms(copies.out_bytes, len(copies.out_sizes))
    back_ms = link.back_ms(copies.back_bytes, len(copies.back_sizes))
    return max(out_ms, back_ms) + sum(map(link.issued_ms, sizes))


def tape_ms(tape: Tape, device: DeviceSpec) -> tuple[float, ...]:
    """Predicted time of every op of a tape in ms."""
    return tuple(op_ms(op, device) for op in tape.ops)
