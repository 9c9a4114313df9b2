"""Private PyTorch APIs for global settings by which kernels round and choose.

Those that are read by public names raise where legacy names and new ones were mixed, or
take several times as long; a trace asks at each op (checked for torch 2.10 to 2.15).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

_C: Any = torch._C
_SMALLEST = 5e-324  # is zero while denormal numbers are flushed


@dataclass(frozen=True, slots=True)
class _Setting:
    """How a setting is read, and how it is set for a while and as it was again."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    put_back: Callable[[Any], Any] | None = None  # if not by `write`
    is_ieee: bool = False  # where none is set


def _flushes_denormals() -> bool:
    return not _SMALLEST > 0.0


def _deterministic() -> tuple[bool, bool]:
    return (
        _C._get_deterministic_algorithms(),
        _C._get_deterministic_algorithms_warn_only(),
    )


def _set_deterministic(value: tuple[bool, bool]) -> None:
    _C._set_deterministic_algorithms(value[0], warn_only=value[1])


def _flag(name: str) -> _Setting:
    return _Setting(getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}"))


def _flags(name: str) -> _Setting:
    """Several of one name."""
    set_all = getattr(_C, f"_set_{name}")
    return _Setting(getattr(_C, f"_get_{name}"), lambda values: set_all(*values))


def _precision(backend: str, op: str) -> _Setting:
    """What float32 is computed in, for an op or else for all of a backend."""
    read = partial(_C._get_fp32_precision_getter, backend, op)
    read_all = partial(_C._get_fp32_precision_getter, backend, "all")
    write = partial(_C._set_fp32_precision_setter, backend, op)

    def put_back(value: str) -> None:
        write("none" if value == read_all() else value)  # it follows that again

    is_ieee = backend == "mkldnn" or op == "matmul"
    return _Setting(read, write, put_back, is_ieee)


def _precisions(backend: str) -> list[_Setting]:
    return [_precision(backend, op) for op in ("matmul", "conv", "rnn")]


_ANYWHERE: list[_Setting] = [
    _Setting(_flushes_denormals, torch.set_flush_denormal),
    _Setting(torch.get_default_dtype, torch.set_default_dtype),
    _Setting(_deterministic, _set_deterministic),
    _flag("deterministic_fill_uninitialized_memory"),
]
_OF_DEVICE: dict[str, list[_Setting]] = {
    "cpu": [
        _Setting(torch.get_num_threads, torch.set_num_threads),
        *map(_flag, ("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled")),
        *_precisions("mkldnn"),
    ],
    "cuda": [
        *map(_flag, ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic")),
        _flags("cublas_allow_fp16_reduced_precision_reduction"),
        _flags("cublas_allow_bf16_reduced_precision_reduction"),
        _flag("cublas_allow_fp16_accumulation"),
        *map(_flag, ("linalg_preferred_backend", "blas_preferred_backend")),
        *_precisions("cuda"),
    ],
}
_ALL = [*_ANYWHERE, *_OF_DEVICE["cpu"], *_OF_DEVICE["cuda"]]
_READ_ALL = [setting.read for setting in _ALL]
_READ_CPU = _READ_ALL[: -len(_OF_DEVICE["cuda"])]  # where no GPU is in use


def settings(device_type: str) -> tuple[Any, ...]:
    """All that decides what kernels of a device compute, besides their arguments."""
    own = [*_ANYWHERE, *_OF_DEVICE.get(device_type, ())]
    return tuple([_value(setting, setting.read()) for setting in own])


def all_settings() -> list[Any]:
    """What `with_settings` takes."""
    return [read() for read in (_READ_ALL if _uses_cuda() else _READ_CPU)]


_of_backward: tuple[int, list[Any]] = (-1, [])


def _present() -> list[Any]:
    """Settings as they are now, read once in a backward pass."""
    global _of_backward
    number = _C._current_graph_task_id()
    if number == -1:
        return all_settings()
    known = _of_backward  # another thread may replace it
    if number != known[0]:
        known = _of_backward = number, all_settings()
    return known[1]


def with_settings(
    values: list[Any] | None,
) -> contextlib.AbstractContextManager[None]:
    """Inside, settings as they were when `all_settings` was called; None for as now."""
    if values is None or values == (present := _present()):
        return _NOTHING
    return _with_others(present, values)


@contextlib.contextmanager
def _with_others(present: list[Any], values: list[Any]) -> Iterator[None]:
    others = [
        (setting, before, _value(setting, value))
        for setting, before, value in zip(_ALL, present, values, strict=False)
        if _value(setting, before) != _value(setting, value)
    ]
    global _of_backward
    known, _of_backward = _of_backward, (-1, [])
    try:
        for setting, _, value in others:
            setting.write(value)
        yield
    finally:
        for setting, before, _ in others:
            (setting.put_back or setting.write)(before)
        _of_backward = known


def _value(setting: _Setting, value: Any) -> Any:
    return "ieee" if setting.is_ieee and value == "none" else value


_uses_cuda: Callable[[], bool] = torch.cuda.is_initialized
_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
