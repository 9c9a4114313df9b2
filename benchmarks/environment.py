"""Where and when figures were taken."""

from __future__ import annotations

import os
import resource
import time
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

MIB = 2**20


def environment() -> dict[str, Any]:
    """Where and when the figures were taken."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "load average": round(os.getloadavg()[0], 1),  # of others as well
        "torch": torch.__version__,
        "transformers": package_version("transformers"),
        "torchvision": package_version("torchvision"),
    }


def cpu_s() -> float:
    """CPU seconds of this process so far, and of its children that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)  # MILPs may be solved there
    return time.process_time() + children.ru_utime + children.ru_stime


def package_version(name: str) -> str:
    """Version of a package, or that there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
