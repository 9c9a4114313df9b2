"""What the code of a step reaches of the user's own, and may change: put back.

A global name, a closure, or an attribute of a class or an object, such as the trainer
whose method computes the loss, may hold running means, lists, modules and random
generators. Copies of the model share them.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from autosac import _compat, _compat_dispatch, _compat_fakes
from autosac.step import copies_on_write
from autosac.step.containers import set_items, snapshot
from autosac.step.random_streams import GENERATORS, generators_kept
from autosac.tracing.learned import Learned
from autosac.tracing.reached_state import (
    EMPTY,
    ClassTraits,
    Reach,
    attributes_of,
    content_of,
    contents_of,
    empty_parts_of,
    is_of_library,
)


@contextlib.contextmanager
def own_generators_kept(*reaching: Any) -> Iterator[None]:
    """Restore the generators that functions, modules and other objects reach."""
    with generators_kept(own_generators(*reaching)):
        yield


def own_generators(*reaching: Any) -> list[Any]:
    """The generators that functions, modules and other objects reach, each once."""
    reach = Reach(reaching)
    return [value for value in reach.seen.values() if isinstance(value, GENERATORS)]


def own_state_kept(
    *reaching: Any,
    memo: dict[int, Any],
    learned: Learned,
) -> ExitStack:
    """What puts back all that objects reach: see `reached_state_kept`."""
    return reached_state_kept(Reach(reaching), memo, learned)


def reached_state_kept(
    reach: Reach, memo: dict[int, Any], learned: Learned
) -> ExitStack:
    """What puts back, as it closes, all that functions and objects reach as it is now.

    Attributes, items, variables, generators, and values of tensors. Until then leaves
    have no gradient: a step would add to the user's.

    Args:
        reach: What functions, modules and other objects reach.
        memo: Copies by the addresses of what is copied, and runs in place of it.
        learned: Told how large the tensors are that a step writes to.
    """
    stack = ExitStack()
    try:
        _keep(reach, memo, stack, learned)
    except BaseException:  # such as too little memory
        stack.close()
        raise
    return stack


def _keep(
    reach: Reach, memo: dict[int, Any], stack: ExitStack, learned: Learned
) -> None:
    """Let a stack put back what was reached."""
    generators = (v for v in reach.seen.values() if isinstance(v, GENERATORS))
    stack.enter_context(generators_kept(generators))
    copies = set(map(id, memo.values()))
    storages: set[int] = set()
    put_back: list[Callable[[], object]] = []
    stack.callback(_call_all, put_back)
    for value in reach.seen.values():
        if not isinstance(value, torch.Tensor):
            put_back += _restorers(value, reach.traits(value))
        elif _is_kept(value, memo, copies):
            _keep_tensor(value, stack, storages, learned)
    for namespace, names in reach.namespaces.values():
        for name in names:
            old = namespace.get(name, EMPTY)
            stack.callback(set_name, namespace, name, old)


def _is_kept(tensor: torch.Tensor, memo: dict[int, Any], copies: set[int]) -> bool:
    """Whether a tensor is the user's, and not one of many that have copies.

    Buffers are: code that nobody follows may write to them all the same.
    """
    if memo.get(id(tensor), tensor) is not tensor:
        return not tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter)
    return id(tensor) in memo or id(tensor) not in copies


def _call_all(functions: list[Callable[[], object]]) -> None:
    try:
        while functions:
            functions.pop()()
    finally:
        if functions:  # the others, if one fails
            _call_all(functions)


def _restorers(value: Any, traits: ClassTraits) -> Iterator[Callable[[], object]]:
    """What puts an object back to how it is now."""
    if not traits.is_plain:
        if isinstance(value, types.CellType):
            yield partial(set_cell, value, contents_of(value))
        elif isinstance(value, type) and not is_of_library(value):
            yield partial(set_members, value, dict(vars(value)))
        return
    if traits.base not in (None, tuple):
        yield partial(set_items, value, traits.base, snapshot(value, traits.base))
    if traits.is_builtin or traits.is_machinery:
        return
    if isinstance(value, torch.nn.Module):
        yield partial(_empty, empty_parts_of(value))
    if attributes := attributes_of(value):
        yield partial(set_items, attributes, dict, attributes.copy())
    elif type(value).__dictoffset__:
        yield partial(_clear, value)
    for slot in traits.slots:
        yield partial(set_slot, value, slot, content_of(value, slot))


def _keep_tensor(
    tensor: torch.Tensor,
    stack: ExitStack,
    storages: set[int],
    learned: Learned,
) -> None:
    """Let a stack put a tensor back to what it is now.

    Args:
        tensor: The tensor.
        stack: Of callbacks.
        storages: Known by now.
        learned: Told how large the tensors are that a step writes to.
    """
    if tensor.is_leaf and tensor.requires_grad:
        stack.callback(setattr, tensor, "grad", tensor.grad)
        tensor.grad = None
    kinds = (torch.Tensor, torch.nn.Parameter)
    is_here = type(tensor) in kinds and tensor.layout is torch.strided
    if not is_here or tensor.is_meta or _compat_fakes.is_fake(tensor):
        return
    version = 0 if tensor.is_inference() else tensor._version
    stack.callback(_put_back_data, tensor, tensor.detach(), version)
    storage = tensor.untyped_storage()
    if storage._cdata in storages:
        return
    storages.add(storage._cdata)

    def keep() -> None:
        written = max(learned.largest_write or 0, storage.nbytes())
        learned.largest_write = written
        _keep_bytes(storage, stack)

    copies_on_write.wait_for(storage, keep)
    stack.callback(copies_on_write.leave, storage)


def _keep_bytes(storage: torch.UntypedStorage, stack: ExitStack) -> None:
    with _compat.no_modes():
        old = torch.UntypedStorage(storage.nbytes()).copy_(storage)  # on the CPU
    stack.callback(_put_back_bytes, storage, old)


def _put_back_data(tensor: torch.Tensor, data: torch.Tensor, version: int) -> None:
    """Give a tensor the memory that it had, and its version."""
    if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
        tensor.data = data
    if not tensor.is_inference() and tensor._version != version:
        _compat_dispatch.set_version(tensor, version)


def _put_back_bytes(storage: torch.UntypedStorage, old: torch.UntypedStorage) -> None:
    with _compat.no_modes():
        if storage.nbytes() != old.nbytes():
            storage.resize_(old.nbytes())
        now = torch.UntypedStorage(old.nbytes()).copy_(storage)
        if not torch.equal(_bytes(now), _bytes(old)):  # it may be read-only
            storage.copy_(old)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def set_cell(cell: types.CellType, contents: Any) -> None:
    if contents is not EMPTY:
        cell.cell_contents = contents
    elif contents_of(cell) is not EMPTY:
        del cell.cell_contents


def set_name(names: dict[str, Any], name: str, old: Any) -> None:
    if names.get(name, EMPTY) is old:
        return
    if old is EMPTY:
        names.pop(name, None)
    else:
        names[name] = old


def set_members(kind: type, old: dict[str, Any]) -> None:
    for name in [name for name in vars(kind) if name not in old]:
        type.__delattr__(kind, name)
    for name, value in old.items():
        if vars(kind).get(name, EMPTY) is not value:
            type.__setattr__(kind, name, value)


def set_slot(value: Any, slot: Any, content: Any) -> None:
    if content_of(value, slot) is content:
        return
    if content is EMPTY:
        slot.__delete__(value)
    else:
        slot.__set__(value, content)


def _clear(value: Any) -> None:
    """Take away attributes of an object that had none."""
    attributes_of(value).clear()


def _empty(containers: list[dict[Any, Any]]) -> None:
    for container in containers:
        container.clear()
