"""Where and when figures were taken."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torchvision
import transformers

MIB = 2**20


def environment() -> dict[str, Any]:
    """Where and when the figures were taken."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "load average": round(os.getloadavg()[0], 1),  # of others as well
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "torchvision": torchvision.__version__,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
