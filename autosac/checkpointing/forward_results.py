"""What a model's forward makes, held against the forward that was planned.

Ops outside of AC units are not looked at in general. In a model's first two steps, and
where a plain attribute of a module was set between two steps, a dispatch mode adds up
what they make: more than in the planned step is said.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from operator import is_, itemgetter
from typing import Any

import torch

from autosac import _compat, _compat_dispatch
from autosac._compat_distributed import are_distributed
from autosac.pytrees import tensors_in
from autosac.quantities import format_bytes
from autosac.step.arguments import warn

_FIRST_LOOKS = 2  # steps; a model may set itself up in its first one
_MOST_LOOKS = 16
_MOST_OF_ONE = 4  # for one attribute, if it is a number, or for one value of it
_LITTLE = 0.01  # of the planned peak: so little is not said
_PLAIN = (bool, int, float, str, type(None))

_Changed = dict[str, Any]  # name of an attribute, with its module's -> its value
_Planned = Callable[[], tuple[int | None, int]]  # bytes that forward makes; the peak


class ForwardResults:
    """Adds up what forward makes in steps that may do more than planned; warns once.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._looks = 0
        self._looks_for: Counter[tuple[str, Any]] = Counter()
        self._attributes = _PlainAttributes(model)

    @contextlib.contextmanager
    def watching(self, planned: _Planned) -> Iterator[None]:
        """A step's forward runs inside.

        Args:
            planned: Says, once it has run, what its plan knows of it.
        """
        if self._looks >= _MOST_LOOKS or _compat_dispatch.is_transformed():
            yield
            return
        changed = self._attributes.changed()
        keys = {
            (name, None if type(value) in (int, float) else value)
            for name, value in changed.items()
        }
        wanted = [key for key in keys if self._looks_for[key] < _MOST_OF_ONE]
        if not wanted and self._looks >= _FIRST_LOOKS:
            yield
        else:
            self._looks += 1
            self._looks_for.update(wanted)
            with _Made(self._model) as made:
                yield
            self._compare(made.nbytes, *planned(), changed)
        self._attributes.renew()

    def _compare(
        self,
        made_bytes: int,
        planned_bytes: int | None,
        peak_bytes: int,
        changed: _Changed,
    ) -> None:
        if planned_bytes is None or made_bytes - planned_bytes <= _LITTLE * peak_bytes:
            return
        self._looks = _MOST_LOOKS
        why = "Does it run under other settings, or branch on its step"
        if changed:
            name, *others = changed
            more = f" and {len(others)} more attributes" if others else ""
            why = f"Did it change with `{name}`{more}, set before this step"
        warn(
            f"The model's forward makes {format_bytes(made_bytes)} of results, and its"
            f" plan is for a step that makes {format_bytes(planned_bytes)}: the peak"
            f" may be above the budget. {why}? Plan again with the model as it trains."
        )


class _Made(_compat.PlainDispatchMode):
    """Adds up the memory that ops allocate for their results.

    Attributes:
        nbytes: Of all of them, on the device of the model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0
        self._type = next((p.device.type for p in model.parameters()), "cpu")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if types and are_distributed(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if not _compat_dispatch.traits(func).is_view:
            seen = {_storage(tensor) for tensor in tensors_in((args, kwargs))}
            for tensor in tensors_in((out,)):
                address = _storage(tensor)
                if address not in seen and tensor.device.type == self._type:
                    seen.add(address)
                    self.nbytes += tensor.untyped_storage().nbytes()
        return out


def _storage(tensor: torch.Tensor) -> int | None:
    """Address of a tensor's storage; None if it has none of its own."""
    if tensor.layout is not torch.strided or not _compat_dispatch.is_plain(
        type(tensor)
    ):
        return None
    return int(tensor.untyped_storage()._cdata)


class _PlainAttributes:
    """Flags, numbers and texts that the modules of a model have for attributes.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._sort()

    def _sort(self) -> None:
        self._owners: list[tuple[str, dict[str, Any], tuple[str, ...], Any]] = []
        for fqn, module in self._model.named_modules():
            own = vars(module)
            names = tuple(name for name, v in own.items() if type(v) in _PLAIN)
            if len(names) > 1:  # `training`, and one more of PyTorch's own
                self._owners.append((fqn, own, names, itemgetter(*names)))
        self.renew()

    def renew(self) -> None:
        """Take the attributes as they are."""
        try:
            self._values = [take(own) for _, own, _, take in self._owners]
        except KeyError:  # one was deleted
            self._sort()

    def changed(self) -> _Changed:
        """Those that have other values than when they were taken last."""
        try:
            pairs = zip(self._owners, self._values, strict=True)
            return {
                f"{fqn}.{name}".removeprefix("."): now
                for (fqn, own, names, take), values in pairs
                if not all(map(is_, take(own), values))
                for name, before, now in zip(names, values, take(own), strict=True)
                if type(before) is not type(now) or before != now
            }
        except KeyError:
            self._sort()
            return {"": None}
