"""Cross entropy of a linear head, by chunks of rows: logits never exist all at once.

    loss = autosac.chunked_cross_entropy(hidden, head.weight, targets)

in place of ``cross_entropy(head(hidden).flatten(0, -2), targets.flatten())``. Gradients
are made along with the loss, chunk by chunk, so that no logits are kept for backward
and none are computed twice.

Order of ops, which fixes every bit: for each chunk of rows, first to last, ``linear``,
``log_softmax``, ``nll_loss`` and their backward formulas as autograd has them; losses
and gradients of weight and bias are added to the sum of the chunks before
(``addmm`` for the weight). The gradient that comes from outside multiplies all of them
in the end. With a single chunk that is the plain loss, bit by bit.

Source: chunks with gradients in forward are those of Liger Kernel's
``LigerFusedLinearCrossEntropy`` (arXiv:2410.10989), here with PyTorch's own ops.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.nn import functional

from autosac.errors import ArgumentError, UnsupportedError
from autosac.kinds import check_kind
from autosac.quantities import parse_bytes, whole_number

_aten = torch.ops.aten
_REDUCTIONS = {"mean": 1, "sum": 2}  # numbers of at::Reduction
_NUM_ALIVE = 3  # tensors as large as a chunk's logits at a time, in the loss's type
_DEFAULT_CHUNK_BYTES = 64 * 2**20


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    memory_budget: int | str | None = None,
    num_chunks: int | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    upcast: bool = False,
) -> torch.Tensor:
    """Cross entropy of ``linear(hidden, weight, bias)`` without all logits at once.

    Args:
        hidden: What the head gets, shape (..., width).
        weight: The head's weight, shape (num_classes, width).
        targets: Class of each row, shape (...), integers.
        bias: The head's bias, shape (num_classes,), or None.
        memory_budget: Cap on what a chunk takes besides the gradients: bytes or text.
            None for 64 MiB, or one row if that takes more.
        num_chunks: How many chunks instead.
        ignore_index: Rows with this target do not count.
        reduction: "mean" over the rows that count, or "sum".
        upcast: Compute the loss from logits in float32, whatever type they have; under
            autocast it always is.

    Returns:
        The loss, a scalar.

    Raises:
        ArgumentError: Shapes do not go together, or an argument cannot be read.
    """
    _check(hidden, weight, targets, bias, reduction)
    rows = hidden.reshape(-1, hidden.shape[-1])
    compute, loss_type = _types(hidden, weight, upcast)
    row_bytes = _NUM_ALIVE * weight.shape[0] * loss_type.itemsize
    if num_chunks is not None:
        chunk = -(-len(rows) // whole_number(num_chunks, name="num_chunks"))
    elif memory_budget is not None:
        chunk = _rows_within(parse_bytes(memory_budget), row_bytes)
    else:
        chunk = _DEFAULT_CHUNK_BYTES // row_bytes
    loss: torch.Tensor = _ChunkedCrossEntropy.apply(
        rows,
        weight,
        bias,
        targets.reshape(-1),
        (max(chunk, 1), ignore_index, _REDUCTIONS[reduction], compute, loss_type),
    )
    return loss


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: str,
) -> None:
    tensors = {"hidden": hidden, "weight": weight, "targets": targets}
    for name, tensor in tensors.items():
        check_kind(tensor, torch.Tensor, name=name, wanted="a tensor")
    if weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            f"`hidden` {tuple(hidden.shape)} and `weight` {tuple(weight.shape)} do not"
            " go together: pass what the head gets, (..., width), and its weight,"
            " (num_classes, width)."
        )
    if targets.shape != hidden.shape[:-1] or targets.is_floating_point():
        raise ArgumentError(
            f"`targets` {tuple(targets.shape)} of {targets.dtype} must be integers of"
            f" shape {tuple(hidden.shape[:-1])}: a class for each row of `hidden`."
        )
    if bias is not None:
        shape = tuple(getattr(bias, "shape", ()))
        if shape != tuple(weight.shape[:1]):
            raise ArgumentError(
                f"`bias` {shape} must have shape {tuple(weight.shape[:1])}."
            )
    given = {**tensors, **({} if bias is None else {"bias": bias})}
    devices = {name: tensor.device for name, tensor in given.items()}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"`{name}` on {device}" for name, device in devices.items())
        raise ArgumentError(f"All must be on one device, and are not: {where}.")
    if reduction not in _REDUCTIONS:
        raise ArgumentError(f"`reduction`={reduction!r} must be 'mean' or 'sum'.")


def _types(
    hidden: torch.Tensor, weight: torch.Tensor, upcast: bool
) -> tuple[torch.dtype, torch.dtype]:
    """Types that the logits and the loss are computed in, as autocast has them."""
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type), torch.float32
    if hidden.dtype != weight.dtype:
        raise ArgumentError(
            f"`hidden` is {hidden.dtype} and `weight` {weight.dtype}: they must be of"
            " one type, or autocast on."
        )
    return hidden.dtype, torch.float32 if upcast else hidden.dtype


def _rows_within(budget_bytes: int, row_bytes: int) -> int:
    """How many rows of logits a budget has room for.

    Raises:
        ArgumentError: Not for one.
    """
    if budget_bytes < row_bytes:
        raise ArgumentError(
            f"`memory_budget`={budget_bytes} bytes has no room for one row of logits,"
            f" which takes {row_bytes}: give as many."
        )
    return budget_bytes // row_bytes


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over the chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        how: tuple[int, int, int, torch.dtype, torch.dtype],
    ) -> torch.Tensor:
        needs = ctx.needs_input_grad[:3]
        with torch.autocast(rows.device.type, enabled=False):
            sums = _Sums(rows, weight, bias, how, needs)
            loss = sums.run(targets)
        # Not by `save_for_backward`, which would hold them while they are accumulated,
        # so that autograd copied them.
        ctx.gradients = [sums.of_rows, sums.of_weight, sums.of_bias]
        return loss

    @staticmethod
    def backward(ctx: Any, *factors: torch.Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise UnsupportedError(
                "`chunked_cross_entropy` makes its gradients once: call it again for a"
                " second backward."
            )
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(factors[0])
        return (*gradients, None, None)


class _Sums:
    """What the chunks add up to."""

    def __init__(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        how: tuple[int, int, int, torch.dtype, torch.dtype],
        needs: tuple[bool, ...],
    ) -> None:
        self.rows = rows
        self.chunk, self.ignored, self.reduction, self.compute, self.loss_type = how
        self.weight = weight.to(self.compute)
        self.bias = None if bias is None else bias.to(self.compute)
        self.weight_type = weight.dtype
        self.needs = needs
        self.of_rows = torch.empty_like(rows) if needs[0] else None
        self.of_weight: torch.Tensor | None = None
        self.of_bias: torch.Tensor | None = None

    def run(self, targets: torch.Tensor) -> torch.Tensor:
        """Add up all chunks; the loss."""
        counted = targets != self.ignored
        total = counted.sum().to(self.loss_type)
        loss = torch.zeros((), dtype=self.loss_type, device=targets.device)
        for start in range(0, len(self.rows), self.chunk):
            part = slice(start, start + self.chunk)
            loss = loss + self._add(part, targets[part], total)
        return loss / total if self.reduction == _REDUCTIONS["mean"] else loss

    def _add(
        self, part: slice, targets: torch.Tensor, total: torch.Tensor
    ) -> torch.Tensor:
        """Add the gradients of a chunk; the sum of its losses."""
        rows = self.rows[part].to(self.compute)
        logits = functional.linear(rows, self.weight, self.bias).to(self.loss_type)
        scores = torch.log_softmax(logits, -1)
        del logits
        loss: torch.Tensor
        loss, _ = _aten.nll_loss_forward(
            scores, targets, None, _REDUCTIONS["sum"], self.ignored
        )
        if any(self.needs):
            gradient = _aten.nll_loss_backward(
                torch.ones_like(loss), scores, targets, None, self.reduction,
                self.ignored, total,
            )  # fmt: skip
            gradient = _aten._log_softmax_backward_data(
                gradient, scores, -1, self.loss_type
            )
            del scores
            self._add_gradients(part, rows, gradient.to(self.compute))
        return loss

    def _add_gradients(
        self, part: slice, rows: torch.Tensor, of_logits: torch.Tensor
    ) -> None:
        if self.of_rows is not None:
            self.of_rows[part] = of_logits @ self.weight
        if self.needs[1]:
            if self.of_weight is None:
                self.of_weight = (of_logits.t() @ rows).to(self.weight_type)
            elif self.compute == self.weight_type:
                self.of_weight.addmm_(of_logits.t(), rows)
            else:
                self.of_weight += of_logits.t() @ rows
        if self.needs[2]:
            of_bias = of_logits.sum(0)
            if self.of_bias is None:
                self.of_bias = of_bias.to(self.weight_type)
            else:
                self.of_bias += of_bias
