"""How a program uses PyTorch's caching allocator for CUDA, as far as memory tells."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal, get_args

from autosac.errors import ArgumentError, UnsupportedError
from autosac.quantities import is_positive, whole_number

Cap = Literal["allocated", "reserved"]

_LEAST_SPLIT_MB = 20  # kLargeBuffer in c10/core/AllocatorConfig.h
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NOT_SIMULATED = ("backend", "roundup_power2_divisions")
_OUTER_COMMA = re.compile(r",(?![^\[]*\])")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Settings of the allocator, and when the program makes its optimizer's state.

    The first three are what ``PYTORCH_ALLOC_CONF`` sets, by the same names.

    Attributes:
        expandable_segments: Segments grow page by page in place of new ones.
        max_split_size_mb: Blocks of this many MiB and more are not split, and serve
            only requests of nearly their size; None for no limit.
        garbage_collection_threshold: Share of `memory_limit_bytes` above which free
            segments go, those that were not used for long first; None for never.
        memory_limit_bytes: What ``torch.cuda.set_per_process_memory_fraction`` allows.
            Without it PyTorch collects no garbage.
        state_is_loaded: The optimizer's state is there before the first step, as after
            a checkpoint was loaded. Otherwise the first ``optimizer.step()`` makes it,
            when the cache is full of free segments.

    Raises:
        ArgumentError: PyTorch refuses such a value, or it would have no effect.
    """

    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    garbage_collection_threshold: float | None = None
    memory_limit_bytes: int | None = None
    state_is_loaded: bool = False

    def __post_init__(self) -> None:
        most, threshold = self.max_split_size_mb, self.garbage_collection_threshold
        for name in ("expandable_segments", "state_is_loaded"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(
                    f"`{name}`={getattr(self, name)!r} must be True or False."
                )
        for name in ("max_split_size_mb", "memory_limit_bytes"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name=name)
        if most is not None and most <= _LEAST_SPLIT_MB:
            raise ArgumentError(
                f"`max_split_size_mb`={most} is refused by PyTorch: it must be above"
                f" {_LEAST_SPLIT_MB}."
            )
        if threshold is None:
            return
        if not is_positive(threshold) or threshold >= 1.0:
            raise ArgumentError(
                f"`garbage_collection_threshold`={threshold!r} is refused by PyTorch:"
                " it must be above 0 and below 1."
            )
        if self.memory_limit_bytes is None:
            raise ArgumentError(
                f"`garbage_collection_threshold`={threshold} has no effect without"
                " `memory_limit_bytes`, what `set_per_process_memory_fraction` allows."
            )


def program_settings() -> AllocatorSettings:
    """What this program's environment says of the allocator of its GPU.

    The variables are those that c10/cuda/CUDAAllocatorConfig.h reads, in its order.
    Garbage is collected only under a memory limit, which is not read.

    Raises:
        UnsupportedError: Blocks would not be those of the allocator that is simulated.
    """
    name = next((name for name in _VARIABLES if name in os.environ), None)
    if name is None:
        return AllocatorSettings()
    text = "".join(os.environ[name].split())  # whitespace is ignored there, too
    said = dict(part.partition(":")[::2] for part in _OUTER_COMMA.split(text))
    for key in _NOT_SIMULATED:
        if said.get(key, "native") != "native":
            raise UnsupportedError(
                f"{name} has {key}:{said[key]}, and memory that is handed out so is not"
                " simulated: take that out of it, or say how the program will run with"
                " `allocator=autosac.AllocatorSettings()`."
            )
    most = said.get("max_split_size_mb")
    return AllocatorSettings(
        expandable_segments=said.get("expandable_segments") == "True",
        max_split_size_mb=int(most) if most and most.isdecimal() else None,
    )


def check_allocator(allocator: object) -> None:
    """Refuse what does not say how a program uses the allocator.

    Raises:
        ArgumentError: It is neither settings nor None.
    """
    if not isinstance(allocator, AllocatorSettings | None):
        raise ArgumentError(
            f"`allocator`={allocator!r} must be an `AllocatorSettings`, such as"
            " autosac.AllocatorSettings(expandable_segments=True)."
        )


def check_cap(cap: str) -> None:
    """Refuse what a budget cannot cap.

    Raises:
        ArgumentError: Names what it can.
    """
    if cap not in get_args(Cap):
        raise ArgumentError(f"`cap`={cap!r} must be 'allocated' or 'reserved'.")
