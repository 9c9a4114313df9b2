"""What a model's forward makes, held against the forward that was planned.

Ops outside of AC units are not looked at in general. In a model's steps 2, 4, 8 and so
on, and where a plain attribute of a module was set between two steps (which is looked
for in the first steps, then in every seventh), a dispatch mode adds up what they make:
more than in the planned step is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from operator import is_, itemgetter
from typing import Any

import torch

from autosac import _compat, _compat_dispatch
from autosac._compat_distributed import are_distributed, is_fsdp_unit
from autosac.pytrees import tensors_in
from autosac.quantities import format_bytes
from autosac.step.arguments import warn

_MOST_LOOKS = 16  # for the sake of attributes
_MOST_OF_ONE = 4  # for one attribute, or for one value of it if these are few
_LITTLE = 0.01  # of the planned peak: so little is not said
_PLAIN = (bool, int, float, str, type(None))
_EACH_OF = 16  # first steps begins with a look at attributes,
_ONE_OF = 7  # and then one of so many: odd, as flags go to and fro in even steps
_MOST_RENEWED = 2  # steps: then it is known what forward itself changes
_FEW = (bool, str, type(None))  # types of attributes that take few values
_NEW = object()
# By which FSDP2's hooks make buffers and parameters, and hardly any model a result.
_OF_FSDP = frozenset({"aten.empty.memory_format"})

_Changed = dict[str, Any]  # name of an attribute, with its module's -> its value


class ForwardResults:
    """Adds up what forward makes in steps that may do more than planned; warns once.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._looks = self._steps = 0
        self._is_done = False
        self._looks_for: Counter[tuple[str, Any]] = Counter()
        self._changed: _Changed = {}
        self._attributes = _PlainAttributes(model)

    def begin(self, device_type: str) -> Made | None:
        """A step's forward begins.

        Args:
            device_type: Of the model.

        Returns:
            What its forward is to run under, if anything.
        """
        if self._is_done:
            return None
        self._steps += 1
        self._changed = {}
        is_due = self._steps <= _EACH_OF or self._steps % _ONE_OF == 0
        if self._looks < _MOST_LOOKS and (is_due or self._attributes.moving):
            self._changed = self._attributes.changed(of_all=is_due)
        wanted = self._wanted(self._changed) if self._changed else []
        # The first step may set the model up.
        if wanted or (self._steps > 1 and self._steps & (self._steps - 1) == 0):
            self._looks += bool(wanted)
            self._looks_for.update(wanted)
            is_sharded = any(map(is_fsdp_unit, self._model.modules()))
            return Made(device_type, _OF_FSDP if is_sharded else frozenset())
        return None

    def end(self) -> None:
        """It has run."""
        if self._looks < _MOST_LOOKS and not self._is_done:
            self._attributes.renew()

    def _wanted(self, changed: _Changed) -> list[tuple[str, Any]]:
        """Those of changed attributes that were not looked at often enough."""
        keys = [
            (name, value if type(value) in _FEW else None)
            for name, value in changed.items()
        ]
        return [key for key in keys if self._looks_for[key] < _MOST_OF_ONE]

    def compare(self, made: Made, planned_bytes: int | None, peak_bytes: int) -> None:
        """Hold what forward has made against what its plan knows of it.

        Args:
            made: What it ran under.
            planned_bytes: What it makes there; None if that is not known.
            peak_bytes: The planned peak.
        """
        made_bytes, changed = made.nbytes, self._changed
        if planned_bytes is None or made_bytes - planned_bytes <= _LITTLE * peak_bytes:
            return
        self._is_done = True
        why = "Does it run under other settings, or branch on its step or on draws"
        if changed:
            name, *others = changed
            more = f" and {len(others)} more attributes" if others else ""
            why = f"Did it change with `{name}`{more}, set before this step"
        warn(
            f"The model's forward makes {format_bytes(made_bytes)} of results, and its"
            f" plan is for a step that makes {format_bytes(planned_bytes)}: the peak"
            f" may be above the budget. {why}? Plan again with the model as it trains,"
            " or below the budget where draws decide."
        )


class Made(_compat.PlainDispatchMode):
    """Adds up the memory that ops allocate for their results.

    Args:
        device_type: Of the device that counts.
        left_out: Names of ops that do not count.

    Attributes:
        nbytes: Of all of them, on that device.
    """

    def __init__(self, device_type: str, left_out: frozenset[str]) -> None:
        super().__init__()
        self.nbytes = 0
        self._type = device_type
        self._left_out = left_out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if types and are_distributed(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        is_counted = not self._left_out or _compat.op_name(func) not in self._left_out
        if is_counted and not _compat_dispatch.traits(func).is_view:
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

    Those in dicts and objects that are attributes count too, as of a config.

    Args:
        model: The model.

    Attributes:
        moving: Owners of such that change from time to time.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._owners: list[_Owner] = []  # found in the first step
        self.moving: list[_Owner] = []
        self._num_renewed = 0

    def __reduce__(self) -> tuple[type[_PlainAttributes], tuple[torch.nn.Module]]:
        return _PlainAttributes, (self._model,)  # a copy has attributes of its own

    def renew(self) -> None:
        """Take the attributes as they are, once forward has run."""
        self._num_renewed += 1
        if self._num_renewed <= _MOST_RENEWED:
            self._move(owner for owner in self._owners if owner.has_changed())
        for owner in self.moving:
            owner.renew()

    def changed(self, *, of_all: bool) -> _Changed:
        """Those that have other values than when they were taken last.

        Args:
            of_all: Else only of those that are taken after each step.
        """
        if not self._owners:
            self._owners = list(_owners(self._model))
        owners = self._owners if of_all else self.moving
        changed = [owner for owner in owners if owner.has_changed()]
        self._move(changed)
        return {
            f"{owner.name}.{name}".removeprefix("."): value
            for owner in changed
            for name, value in owner.changed()
        }

    def _move(self, owners: Iterable[_Owner]) -> None:
        self.moving += [owner for owner in owners if owner not in self.moving]


class _Owner:
    """Plain values of one module, dict or object.

    Args:
        name: Its name,
        own: and its values.
    """

    __slots__ = ("_names", "_own", "_take", "_values", "name")

    def __init__(self, name: str, own: dict[Any, Any]) -> None:
        self.name, self._own = name, own
        self._sort()

    def _sort(self) -> None:
        own = self._own
        names = [name for name, value in own.items() if type(value) in _PLAIN]
        self._names = tuple(names)
        self._take = itemgetter(*names[:1], *names) if names else tuple  # a tuple
        self._values = (len(own), *self._take(own)) if names else (len(own),)

    def has_changed(self) -> bool:
        """Whether any value may be another object, or a name is new or gone."""
        own, values = self._own, self._values
        try:
            now = self._take(own) if self._names else ()
        except KeyError:
            return True
        return len(own) != values[0] or not all(map(is_, now, values[1:]))

    def renew(self) -> None:
        """Take the values as they are."""
        if self.has_changed():
            self._sort()

    def changed(self) -> Iterator[tuple[str, Any]]:
        """Names of values that differ, and what they are now."""
        before = dict(zip(self._names, self._values[2:], strict=True))
        for name, value in self._own.items():
            old = before.get(name, _NEW)
            is_plain = type(value) in _PLAIN or old is not _NEW
            if is_plain and (type(value) is not type(old) or value != old):
                yield str(name), value


def _owners(model: torch.nn.Module) -> Iterator[_Owner]:
    """Modules, and what they have in public attributes: dicts, and objects."""
    seen: set[int] = set()
    for fqn, module in model.named_modules():
        yield _Owner(fqn, vars(module))
        for name, value in vars(module).items():
            settings = value if type(value) is dict else _own(value)
            if name.startswith("_") or settings is None or id(settings) in seen:
                continue
            seen.add(id(settings))
            yield _Owner(f"{fqn}.{name}".removeprefix("."), settings)


def _own(value: Any) -> dict[str, Any] | None:
    """Attributes of an object that may hold settings."""
    if isinstance(value, (torch.nn.Module, torch.Tensor, type)) or callable(value):
        return None
    own: dict[str, Any] | None = getattr(value, "__dict__", None)
    return own
