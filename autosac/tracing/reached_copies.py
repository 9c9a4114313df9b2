"""A run of copies that wrote to the user's modules is followed by one that does not.

A class may keep a list of its instances, and a function go through a weak set, a global
name or a closure to modules of the model. `copy.deepcopy` leaves all these with the
user's own modules: a function that resets the state of all would never reset a copy's.
Where a run is seen to do so, what it reaches holds copies while the next one runs.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from functools import partial
from operator import is_not
from typing import Any

import torch

from autosac.step.arguments import warn
from autosac.step.containers import set_items, snapshot
from autosac.tracing.learned import Learned, Retrace
from autosac.tracing.own_state import (
    set_cell,
    set_members,
    set_name,
    set_slot,
)
from autosac.tracing.reached_state import (
    ATOMS,
    ClassTraits,
    Reach,
    attributes_of,
    content_of,
    contents_of,
    is_of_library,
)


def hold_copies(reach: Reach, copies: dict[int, Any], copied: set[int]) -> None:
    """Let all that is reached hold copies, where it holds what was copied.

    Args:
        reach: All of it is put back later.
        copies: By the addresses of the originals.
        copied: Addresses of objects that stay as they are, as the copied ones.
    """
    of = partial(copy_of, copies=copies)
    for value in reach.seen.values():
        if id(value) not in copied:
            _hold(value, reach.traits(value), of)
    for namespace, names in reach.namespaces.values():
        for name in names & namespace.keys():
            set_name(namespace, name, of(namespace[name]))


def copy_of(value: Any, copies: dict[int, Any]) -> Any:
    """What stands for a value: itself, if neither it nor what it is of was copied."""
    if type(value) in ATOMS:
        return value
    if id(value) in copies:
        return copies[id(value)]
    of = partial(copy_of, copies=copies)
    if type(value) is tuple:
        items = tuple(map(of, value))
        return items if any(map(is_not, items, value)) else value
    if type(value) in (weakref.ref, weakref.KeyedRef):
        return ref_to(of(value()), value)
    if isinstance(value, types.MethodType):
        owner = of(value.__self__)
        is_same = owner is value.__self__
        return value if is_same else types.MethodType(value.__func__, owner)
    if type(value) is partial:
        parts = (value.func, value.args, tuple(value.keywords.values()))
        func, args, items = own = of(parts)
        named = dict(zip(value.keywords, items, strict=True))
        return value if own is parts else partial(func, *args, **named)
    return value


def ref_to(referent: Any, ref: weakref.ref[Any]) -> weakref.ref[Any]:
    """A weak reference to another object, if it is one, with what the first one has."""
    if referent is ref():
        return ref
    if isinstance(ref, weakref.KeyedRef):
        callback: Any = ref.__callback__
        return weakref.KeyedRef(referent, callback, ref.key)
    return weakref.ref(referent, ref.__callback__)


def notices_writes(
    model: torch.nn.Module, copies: dict[int, Any], learned: Learned
) -> Callable[..., None]:
    """What notices, at the end of a run of copies, if it wrote to the user's model.

    It raises `Retrace` for a run in which all that is reached holds copies; if this was
    one, it warns.
    """
    before = [
        (fqn, module, _state(module), _versions(module))
        for fqn, module in model.named_modules()
        if copies.get(id(module), module) is not module  # one may be its own copy
    ]

    def notice_writes(error: type[BaseException] | None, *_: Any) -> None:
        if error is not None:
            return
        for fqn, module, state, versions in before:
            name = _written(module, state, versions)
            if name is not None and learned.reached:
                return _warn_of_write(fqn, module, name)
            if name is not None:
                learned.reached = True
                raise Retrace

    return notice_writes


def _written(
    module: torch.nn.Module, state: dict[str, Any], versions: dict[str, int]
) -> str | None:
    """An attribute or buffer that was written to since."""
    now, versions_now = _state(module), _versions(module)
    for name in dict.fromkeys([*state, *now]):
        if state.get(name) is not now.get(name):
            return name
    changed = (name for name, v in versions_now.items() if v != versions[name])
    return next(changed, None)


def _warn_of_write(fqn: str, module: torch.nn.Module, name: str) -> None:
    warn(
        f"Planning ran a copy of the model, and the step wrote to `{name}` of the model"
        f" itself, in `{fqn}` ({type(module).__name__}): code of a library, or a cache,"
        " reaches that module in a way that was not followed. It is put back, but the"
        " plan is of a copy that this code never met: its peak may be wrong. Let"
        " `forward` reach its modules by `self`, as `for module in self.modules():"
        " ...`, or by a list, a dict or a global name of your own code."
    )


def _state(module: torch.nn.Module) -> dict[str, Any]:
    attributes = attributes_of(module)
    buffers: dict[str, Any] = attributes.get("_buffers", {})
    return attributes | buffers


def _versions(module: torch.nn.Module) -> dict[str, int]:
    buffers = attributes_of(module).get("_buffers", {}).items()
    plain = ((n, b) for n, b in buffers if isinstance(b, torch.Tensor))
    counted = ((n, b) for n, b in plain if not (b.is_meta or b.is_inference()))
    return {name: buffer._version for name, buffer in counted}


def _hold(value: Any, traits: ClassTraits, of: Callable[[Any], Any]) -> None:
    if not traits.is_plain:
        if isinstance(value, types.CellType):
            set_cell(value, of(contents_of(value)))
        elif isinstance(value, type) and not is_of_library(value):
            set_members(value, {n: of(v) for n, v in vars(value).items()})
        return
    if traits.is_machinery or traits.is_loop:
        return
    if traits.base not in (None, tuple):
        items = snapshot(value, traits.base)
        set_items(value, traits.base, _with_copies(items, of))
    if traits.is_builtin:
        return
    if attributes := attributes_of(value):
        set_items(attributes, dict, _with_copies(attributes.copy(), of))
    for slot in traits.slots:
        set_slot(value, slot, of(content_of(value, slot)))


def _with_copies(items: Any, of: Callable[[Any], Any]) -> Any:
    if isinstance(items, dict):
        return {of(key): of(item) for key, item in items.items()}
    return type(items)(map(of, items))
