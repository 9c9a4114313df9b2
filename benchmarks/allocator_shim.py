"""Live bytes of this process's tensors, by a library that is loaded before all others.

`allocator_shim.c` counts what PyTorch's CPU allocator asks for, on all threads; the
process must run with `environment`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent / "allocator_shim.c"


@functools.cache
def library() -> Path | None:
    """Path of the library, built once; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    path = Path(tempfile.mkdtemp()) / "allocator_shim.so"
    flags = ["-O2", "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-ldl"]
    subprocess.run([compiler, *flags], check=True, capture_output=True)
    return path


def environment() -> dict[str, str]:
    """Variables for a process that counts."""
    return {**os.environ, "LD_PRELOAD": str(library()), "OMP_NUM_THREADS": "1"}


def _function(name: str) -> Any:
    function = getattr(ctypes.CDLL(None), name)
    function.restype = ctypes.c_long
    return function


def live_bytes() -> int:
    """Bytes alive now."""
    return int(_function("shim_live")())


def peak_bytes() -> int:
    """Most bytes alive since `reset`."""
    return int(_function("shim_peak")())


def reset() -> None:
    """Begin a new peak with what is alive now."""
    _function("shim_reset")()


def peak_of(run: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns, and the most bytes alive while it ran."""
    reset()
    result = run()
    return result, peak_bytes()
