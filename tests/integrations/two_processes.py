"""Trainings on two processes, in the environment of `torch.distributed.run`."""

import importlib
import os
import socket
import warnings

import torch.distributed as dist

from benchmarks.rank_server import run_processes


def forked(module, kind, folder):
    """What a function of a module returns in each, given a folder.

    Forked, as most of the launcher's time is imports.
    """
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
