"""Handles of the process, which a copied model shares with the user's."""

from __future__ import annotations

import contextvars
import copyreg
import io
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _itself(value: Any) -> str:
    return "itself"  # any text says to `copy.deepcopy` that there is but one


def _written_file(file: Any) -> str:
    if file.closed or file.readable():  # a copy would move where the user reads
        raise TypeError(f"cannot copy {type(file).__name__!r} object")
    return _itself(file)


def _read_only(mapping: types.MappingProxyType[Any, Any]) -> tuple[Any, ...]:
    return types.MappingProxyType, (dict(mapping),)


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    types.ModuleType: _itself,
    type(threading.Lock()): _itself,
    type(threading.RLock()): _itself,
    threading.local: _itself,
    contextvars.ContextVar: _itself,
    torch.jit.ScriptFunction: _itself,
    io.TextIOWrapper: _written_file,
    io.BufferedWriter: _written_file,
    io.FileIO: _written_file,
    types.MappingProxyType: _read_only,
}


@contextmanager
def handles_shared() -> Iterator[None]:
    """Inside, ``copy.deepcopy`` hands on locks, modules, scripts and files to write to.

    It refuses them else, and with them what holds one: queues, events, writers of logs.
    """
    known = copyreg.dispatch_table
    before = {kind: known[kind] for kind in _REDUCERS if kind in known}
    known.update({**_REDUCERS, **before})
    try:
        yield
    finally:
        for kind in _REDUCERS.keys() - before.keys():
            del known[kind]
