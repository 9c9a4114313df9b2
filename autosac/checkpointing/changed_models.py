"""What comes into a model, or changes in it, after a plan was applied.

Whatever is done to a model between two steps is seen as the next one begins. What the
model's own ``forward`` makes in its first steps, or on another batch than in the step
before, is of the step that was planned. What is as planned again is nothing new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from operator import attrgetter, is_not
from typing import Any

import torch

from autosac import _compat_compiler
from autosac._compat_distributed import sharded_types
from autosac.step.arguments import warn

_MOST_RENEWED = 16  # steps in a row in which forward may change nothing
_VALUES: Callable[[dict[str, Any]], Iterable[Any]] = dict.values
_NBYTES = attrgetter("nbytes")
_IS_THERE: Callable[[Any], bool] = partial(is_not, None)
_COMPILED = _compat_compiler.compiled_call
_Tensors = frozenset[tuple[str, torch.Size, torch.dtype]]
_Hooks = frozenset[int]
_Part = tuple[torch.nn.Module, type, _Tensors, _Hooks]
_Planned = tuple[torch.nn.Module | None, type, _Tensors, _Hooks]
_Parts = dict[str, _Part]


class Outline:
    """The modules of a model, with their parameters, buffers and forward hooks.

    Args:
        model: The model.

    Attributes:
        differs: A part of it is not as planned.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.differs = False
        self._is_renewed = True
        self._renewals_left = _MOST_RENEWED
        self._look()
        self._planned: dict[str, _Planned] = dict(self._parts)

    def _look(self) -> None:
        self._parts = _parts(self.model)
        modules = [module for module, *_ in self._parts.values()]
        self._modules = modules
        children = [module._modules for module in modules]
        tensors: list[dict[str, Any]] = [module._parameters for module in modules]
        tensors += [module._buffers for module in modules]
        self._children = [own for own in children if own]
        self._tensors = [own for own in tensors if own]
        self._empty = [own for own in (*children, *tensors) if not own]
        self._hooks = [module._forward_hooks for module in modules]
        self._last = self._glance()

    def _glance(self) -> tuple[list[Any], ...]:
        """What changes with any part, told without a line of Python for each module."""
        tensors = [*chain.from_iterable(map(_VALUES, self._tensors))]
        return (
            [*chain.from_iterable(map(_VALUES, self._children))],
            [*map(id, tensors)],
            [*map(_NBYTES, filter(_IS_THERE, tensors))],
            [*filter(None, self._empty)],
            [*map(len, self._hooks)],
        )

    @property
    def device_type(self) -> str:
        """Type of the device that its first parameter or buffer is on."""
        for own in self._tensors:
            for tensor in own.values():
                if tensor is not None:
                    return str(tensor.device.type)
        return "cpu"

    def may_have_changed(self) -> bool:
        """Whether anything is other than at the last `check`."""
        return (
            self._is_renewed
            or any(map(_COMPILED, self._modules))
            or self._glance() != self._last
        )

    def renew(self, *, is_alike: bool = False) -> None:
        """Take the model as it is, once forward has run.

        Args:
            is_alike: On a batch like that of the step before. After some steps it is
                then known whether forward changes anything.
        """
        if is_alike and not self._renewals_left:
            return
        self._renewals_left -= bool(self._renewals_left)
        if self._glance() != self._last:
            self._is_renewed, self._renewals_left = True, _MOST_RENEWED
            before = self._parts
            self._look()
            for fqn, part in self._parts.items():
                if part != before.get(fqn):
                    self._planned[fqn] = part

    def check(self, *, is_said: bool = False) -> None:
        """Warn of parts that are new, or others than before and planned; of each once.

        Args:
            is_said: Of what changed since the step before, enough was said.
        """
        before = self._parts
        self._look()
        self._is_renewed = False
        now, planned = self._parts, self._planned
        differing = {
            fqn: part
            for fqn, part in now.items()
            if _difference(planned.get(fqn), part)
        }
        self.differs = bool(differing)
        self._planned = {
            fqn: _without_others(part, now.get(fqn)) for fqn, part in planned.items()
        }
        changed: dict[str, str] = {}
        last = None
        for fqn, part in differing.items():
            if last is not None and fqn.startswith(f"{last}."):
                continue
            if what := _difference(before.get(fqn), part):
                changed[fqn], last = what, fqn
        if changed and not is_said:
            warn_of_changed(changed)


def _parts(model: torch.nn.Module) -> _Parts:
    types = sharded_types(model)
    return {
        fqn: (
            module,
            type(module),
            frozenset(_tensors(module, types)),
            frozenset(_hooks(module)),
        )
        for fqn, module in model.named_modules()
    }


def _tensors(
    module: torch.nn.Module, types: Mapping[tuple[int, str], torch.dtype]
) -> Iterator[tuple[str, torch.Size, torch.dtype]]:
    """Those of a module; what FSDP2 has gathered is in the type of its shards."""
    for own in (module._parameters, module._buffers):
        for name, tensor in own.items():
            if tensor is not None:
                dtype = types.get((id(module), name), tensor.dtype)
                yield name, tensor.shape, dtype


def _hooks(module: torch.nn.Module) -> Iterator[int]:
    """Numbers of its forward hooks, but for those of PyTorch, as of FSDP2."""
    for number, hook in module._forward_hooks.items():
        if not str(getattr(hook, "__module__", "")).startswith(("torch.", "autosac.")):
            yield number


def _without_others(planned: _Planned, now: _Part | None) -> _Planned:
    """What is planned of a module, without one that the model has let go of."""
    if now is not None and planned[0] is now[0]:
        return planned
    return (None, *planned[1:])


def _difference(before: _Planned | None, now: _Part) -> str:
    """What is new of a module since it, or another one in its place, was looked at.

    One that is its like is not new, nor one whose class was changed, as FSDP2 does.
    """
    if before is None:
        return "was added"
    if before[0] is not now[0] and before[1:3] != now[1:3]:
        return "was replaced"
    if not now[2] <= before[2]:
        return "got other parameters or buffers"
    return "" if now[3] <= before[3] else "got a forward hook"


def warn_of_changed(changed: dict[str, str]) -> None:
    """Warn of modules that a plan knows nothing of.

    Args:
        changed: Name of a module -> what is new of it; at least one.
    """
    (fqn, what), *others = changed.items()
    which = f"`{fqn}`" if fqn else "The model itself"
    more = f", and {len(others)} more modules changed" if others else ""
    warn(
        f"{which} {what} after a plan was applied{more}. The plan knows nothing of it,"
        " and the peak may be above the budget. Call `plan.unapply(model)` (of a model"
        " that ranks divide: make it anew) and plan again."
    )
