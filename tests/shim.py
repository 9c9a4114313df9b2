"""Live bytes of this process's tensors, by a library that is loaded before all others.

`allocator_shim.c` counts what PyTorch's CPU allocator asks for, on all threads; the
process must run with `environment`.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "allocator_shim.c"


@functools.cache
def library():
    """Path of the library, built once; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    path = Path(tempfile.mkdtemp()) / "allocator_shim.so"
    flags = ["-O2", "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-ldl"]
    subprocess.run([compiler, *flags], check=True, capture_output=True)
    return path


def environment():
    """Variables for a process that counts."""
    return {**os.environ, "LD_PRELOAD": str(library()), "OMP_NUM_THREADS": "1"}


def _function(name):
    function = getattr(ctypes.CDLL(None), name)
    function.restype = ctypes.c_long
    return function


def live_bytes():
    """Bytes alive now."""
    return _function("shim_live")()


def peak_of(run):
    """What a function returns, and the most bytes alive while it ran."""
    _function("shim_reset")()
    result = run()
    return result, _function("shim_peak")()
