"""Trainings on two processes, as `torch.distributed.run` starts them.

``two_processes.py MODULE KIND FOLDER`` runs a function of that name in a module, with
the folder, and saves what it returns.
"""

import importlib
import os
import socket
import subprocess
import sys
import warnings

import torch
import torch.distributed as dist

from benchmarks import allocator_shim as shim
from benchmarks.rank_server import run_processes


def launched(module, kind, folder):
    """What the function returns in each of two processes of PyTorch's launcher."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    runs = ["-m", "tests.integrations.two_processes", module, kind, str(folder)]
    done = subprocess.run(
        [*launcher, "--standalone", *runs],
        env=shim.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def forked(module, kind, folder):
    """The same without the launcher, most of whose time is imports."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return run_processes(_as_launched, 2, port, module, kind, str(folder))


def _as_launched(rank, port, module, kind, folder):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "run",
    }
    return _run(module, kind, folder)


def _run(module, kind, folder):
    warnings.simplefilter("ignore")
    results = getattr(importlib.import_module(module), kind)(folder)
    dist.barrier()
    dist.destroy_process_group()
    return results


if __name__ == "__main__":
    torch.save(_run(*sys.argv[1:]), f"{sys.argv[3]}/{os.environ['RANK']}.pt")
