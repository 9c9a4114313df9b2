"""Outputs of a model that the training loop keeps until the model is called again.

The planned step lets go of its output once backward is done. A loop that collects them,
detached or not, keeps more with every step; and one whose variable holds the last one
until it gets the next has that beside the optimizer's step and the next forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from autosac import _compat_dispatch
from autosac.pytrees import held_tensors, tensors_in
from autosac.quantities import format_bytes
from autosac.step.arguments import warn
from autosac.storages import addresses_of

_LITTLE = 0.01  # of the planned peak: so little is not said


class Headroom(NamedTuple):
    """What a plan says of memory beside its step.

    Attributes:
        nbytes: See `Plan.headroom_bytes`,
        peak_bytes: and its peak.
    """

    nbytes: dict[str, int]
    peak_bytes: int


class _Output(NamedTuple):
    """A tensor of an output.

    Attributes:
        number: Of the call that made it.
        storage: Weak reference to its memory,
        nbytes: and the size of that.
    """

    number: int
    storage: Any
    nbytes: int


def is_looked_at(number: int) -> bool:
    """Whether a call of a model is one of 1, 2, 4, 8 and so on, or that after.

    Of calls of one step any but the last tells.
    """
    before = number - 1
    return not (before & number and before & (before - 1))


class KeptOutputs:
    """Looks whether outputs of some of a model's calls are there later; warns once.

    Args:
        model: The model.
        may_keep: The planned step calls the model several times, or that is not known.
    """

    def __init__(self, model: torch.nn.Module, *, may_keep: bool) -> None:
        self._model = model
        self._is_done = may_keep
        self._num_calls = 0
        self._outputs: list[_Output] = []
        self._left: list[_Output] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_outputs": [], "_left": []}

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward begins."""
        self._num_calls += 1
        self._left = []
        if self._is_done or not self._outputs or not is_looked_at(self._num_calls):
            return
        self._outputs = [one for one in self._outputs if not one.storage.expired()]
        if self._outputs:
            own = [vars(module) for module in self._model.modules()]
            held = held_tensors(own, in_objects=False)
            known = addresses_of([*held, *tensors_in([*args, *kwargs.values()])])
            self._left = [o for o in self._outputs if o.storage.cdata not in known]

    def end(self, output: Any, planned: Callable[[], Headroom | None]) -> None:
        """Forward has returned its output.

        Args:
            output: The output.
            planned: Says what the plan has room for; None if that cannot be said.
        """
        if self._is_done or not is_looked_at(self._num_calls):
            return
        room = planned()
        if room is None:
            return
        if self._left and self._over_bytes(room) > _LITTLE * room.peak_bytes:
            self._say()
            return
        met = {one.storage.cdata for one in self._outputs}
        for tensor in tensors_in((output,)):
            if tensor.grad_fn is None or not _compat_dispatch.is_plain(type(tensor)):
                continue
            storage = _compat_dispatch.weak_storage(tensor)
            if storage.cdata not in met:
                met.add(storage.cdata)
                nbytes = tensor.untyped_storage().nbytes()
                self._outputs.append(_Output(self._num_calls, storage, nbytes))

    def _over_bytes(self, room: Headroom) -> int:
        """What is there besides that the plan has no room for."""
        last = self._num_calls - 1
        last_bytes = sum(one.nbytes for one in self._left if one.number == last)
        older_bytes = sum(one.nbytes for one in self._left if one.number != last)
        return older_bytes + max(0, last_bytes - room.nbytes["kept"])

    def _say(self) -> None:
        calls = {one.number for one in self._left}
        nbytes = sum(one.nbytes for one in self._left)
        self._is_done, self._outputs, self._left = True, [], []
        which = f"{len(calls)} of them" if len(calls) > 1 else "one of them"
        warn(
            f"Outputs of earlier calls of the model ({format_bytes(nbytes)} of {which})"
            " are there as it is called again, and the planned step lets go of its own"
            " after backward: the peak may be higher by as much, and by more if the"
            " loop keeps those of every step. Delete them after backward, keep"
            " `loss.item()` and copies of what is needed, or lower the budget by them."
        )
