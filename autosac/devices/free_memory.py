"""How much memory a machine has, and how much of a device is free."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def physical_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes(device: torch.device) -> int | None:
    """Memory that can be allocated; None where that cannot be known."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(
            device
        )
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    try:  # as `free` does (proc_meminfo(5)); Linux only
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
