"""Private PyTorch APIs for global settings by which kernels round and choose.

Those that are read by public names raise where legacy names and new ones were mixed, or
take several times as long; a trace asks at each op (checked for torch 2.10 to 2.15).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

_C: Any = torch._C
_SMALLEST = 5e-324  # is zero while denormal numbers are flushed
_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # reads it and sets it


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
    return getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}")


def _flags(name: str) -> _Setting:
    """Several of one name."""
    set_all = getattr(_C, f"_set_{name}")
    return getattr(_C, f"_get_{name}"), lambda values: set_all(*values)


def _precision(backend: str, op: str) -> _Setting:
    """What float32 is computed in.

    That of oneDNN and of products is as it is written where none is set: whoever sets
    one by its legacy name for a while leaves "ieee" behind.
    """
    read = partial(_C._get_fp32_precision_getter, backend, op)

    def read_or_ieee() -> Any:
        value = read()
        return "ieee" if value == "none" else value

    is_ieee = backend == "mkldnn" or op == "matmul"
    write = partial(_C._set_fp32_precision_setter, backend, op)
    return (read_or_ieee if is_ieee else read), write


def _precisions(backend: str) -> list[_Setting]:
    return [_precision(backend, op) for op in ("matmul", "conv", "rnn")]


_ANYWHERE: list[_Setting] = [
    (_flushes_denormals, torch.set_flush_denormal),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, _set_deterministic),
    _flag("deterministic_fill_uninitialized_memory"),
]
_OF_DEVICE: dict[str, list[_Setting]] = {
    "cpu": [
        (torch.get_num_threads, torch.set_num_threads),
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
_READ_ALL = [read for read, _ in _ALL]
_READ_OF_DEVICE = {
    kind: [read for read, _ in (*_ANYWHERE, *own)] for kind, own in _OF_DEVICE.items()
}


def settings(device_type: str) -> tuple[Any, ...]:
    """All that decides what kernels of a device compute, besides their arguments."""
    reads = _READ_OF_DEVICE.get(device_type)
    return tuple([read() for read in reads or [read for read, _ in _ANYWHERE]])


def all_settings() -> list[Any]:
    """What `with_settings` takes."""
    return [read() for read in _READ_ALL]


def with_settings(values: list[Any]) -> contextlib.AbstractContextManager[None]:
    """Inside, settings as they were when `all_settings` was called."""
    if values == (present := all_settings()):
        return _NOTHING
    return _with_others(present, values)


@contextlib.contextmanager
def _with_others(present: list[Any], values: list[Any]) -> Iterator[None]:
    others = [
        (setter, before, value)
        for (_, setter), before, value in zip(_ALL, present, values, strict=True)
        if before != value
    ]
    try:
        for setter, _, value in others:
            setter(value)
        yield
    finally:
        for setter, before, _ in others:
            setter(before)


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
