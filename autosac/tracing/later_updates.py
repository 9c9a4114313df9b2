"""What an optimizer keeps, and takes, in the steps to come.

PyTorch's own optimizers make all that they keep in their first step. Others keep the
last few gradients, copy the weights every few steps, or do more in every tenth one, and
so may hooks. Such an optimizer steps ahead of the trace, with the gradients that the
step has made, until what it keeps grows no more; that one of its steps is traced which
takes most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autosac import _compat
from autosac._compat_distributed import are_distributed, local
from autosac.errors import UnsupportedError
from autosac.pytrees import tensors_in
from autosac.quantities import format_bytes
from autosac.step.arguments import warn
from autosac.step.optimizer_state import optimizer_tensors
from autosac.step.training_step import AnyOptimizer
from autosac.tracing.account import Account
from autosac.tracing.far_states import put_away
from autosac.tracing.learned import Retrace
from autosac.tracing.recorder import Recorder

# Steps that are looked at: heuristics, what first happens later is not seen.
_FEW, _MORE, _MOST = 12, 24, 400
_MANY_OPS = 50_000  # some seconds: then few steps must do


@dataclass(frozen=True, slots=True, order=True)
class _Update:
    """One step of an optimizer.

    Attributes:
        peak_bytes: Most that is alive in it of what optimizers have made.
        kept_bytes: What of that is alive as it begins.
    """

    peak_bytes: int
    kept_bytes: int


class _UpdateAccount(_compat.PlainDispatchMode, Account):
    """The account of what the steps of an optimizer make while nothing is recorded."""

    def __init__(self, recorder: Recorder) -> None:
        _compat.PlainDispatchMode.__init__(self)
        Account.__init__(self, recorder.device_type, recorder.granularity_bytes)
        self.recorder = recorder
        self.peak_bytes = 0
        self.num_ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if are_distributed(types):
            return NotImplemented
        self.num_ops += 1
        out = func(*args, **(kwargs or {}))
        self._indices(list(tensors_in((out,))), 1, "optimizer")
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return out

    def _counts(self, tensor: torch.Tensor) -> bool:
        known = self.recorder.ids
        if local(tensor).untyped_storage()._cdata in known:  # a view of a parameter
            return False
        return super()._counts(tensor)

    def watched(self, update: Callable[[], object]) -> _Update:
        """Run a step of the optimizer."""
        kept_bytes = self.peak_bytes = self.live_bytes
        update()
        return _Update(self.peak_bytes, kept_bytes)


def settle(
    recorder: Recorder, optimizer: AnyOptimizer, update: Callable[[], object]
) -> None:
    """Step an optimizer until it keeps what it keeps for good, and count that.

    Args:
        recorder: Of the trace; it must be muted.
        optimizer: With gradients in place, which stay there.
        update: Steps it.

    Raises:
        Retrace: Another of its steps must be traced; `Learned` knows which.
        UnsupportedError: What it keeps does not stop growing.
    """
    account, learned = _UpdateAccount(recorder), recorder.learned

    def step() -> None:
        with _other_gradients(optimizer):
            update()

    with account:
        updates = [account.watched(step)]
        if learned.num_later_updates is None:
            updates += _looked_at(account, step)
            learned.num_later_updates, is_steady = _largest(updates)
            if not is_steady:
                raise Retrace
        else:
            for _ in range(learned.num_later_updates):
                step()
    put_away(recorder, optimizer)
    recorder.adopt(account, "optimizer")


def _looked_at(account: _UpdateAccount, step: Callable[[], None]) -> Iterator[_Update]:
    """Steps after the first, until what is kept has not grown in half of them."""
    kept = [account.live_bytes]
    while True:
        enough = _FEW if account.num_ops > _MANY_OPS else _MORE
        if len(kept) > enough and kept[len(kept) // 2] == kept[-1]:
            break
        if len(kept) > _MOST:
            raise UnsupportedError(
                "`optimizer` keeps more with every step,"
                f" {format_bytes(kept[-1])} after {len(kept)} of them, so that no peak"
                " holds for long: let it, or its hooks, keep a bounded number of"
                " tensors."
            )
        yield account.watched(step)
        kept.append(account.live_bytes)


def _largest(updates: list[_Update]) -> tuple[int, bool]:
    """How many steps come between the first and the one that takes most.

    Returns:
        Their number; and whether all from there on are like it.
    """
    later = updates[1:]
    most = max(later)
    kept_bytes = max(update.kept_bytes for update in later)
    if kept_bytes > most.kept_bytes:
        more = format_bytes(kept_bytes - most.kept_bytes)
        warn(
            f"`optimizer` keeps {more} more before other steps than before the one that"
            " takes most, which is planned: leave that much of the budget free."
        )
    first = later.index(most)
    return first, all(update == most for update in later[first:])


@contextmanager
def _other_gradients(optimizer: AnyOptimizer) -> Iterator[None]:
    """Inside, parameters have gradients of an earlier step, which it may keep.

    Afterwards they have those back that they had, and the memory, should the step
    replace it. What the optimizer keeps in the new memory is in theirs then.
    """
    before = [
        (parameter, parameter.grad, parameter.data)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    for parameter, gradient, _ in before:
        parameter.grad = None if gradient is None else gradient.clone()
    yield
    replaced: dict[Any, torch.Tensor] = {}
    for parameter, gradient, data in before:
        parameter.grad = gradient
        if _address(parameter) != _address(data):
            replaced[_address(parameter)] = data
            parameter.data = data
    if replaced:
        _share_again(optimizer, replaced)


def _share_again(optimizer: AnyOptimizer, replaced: dict[Any, torch.Tensor]) -> None:
    """Let an optimizer's state lie in the memory of parameters as it did before.

    Args:
        optimizer: Keeps what it has made the memory of parameters, as SAM does with
            the weights from which it stepped aside.
        replaced: Address of such memory -> what the parameter has instead.
    """
    for kept in optimizer_tensors(optimizer):
        data = replaced.get(_address(kept))
        if data is not None and data.shape == kept.shape:
            kept.data = data


def _address(tensor: torch.Tensor) -> Any:
    return local(tensor.detach()).untyped_storage()._cdata
