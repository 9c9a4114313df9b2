"""Processes that a server forks, as ranks that gloo connects or each on its own.

Most jobs take less time than to start an interpreter and to import PyTorch. So a server
that has imported what ranks need forks them; it runs no op itself, has one thread, and
ends with the process that started it. What PyTorch's allocator holds is counted in all
of them (`allocator_shim`) where there is a C compiler.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import allocator_shim

# What takes ranks longest to import; PyTorch imports its compiler with an optimizer.
_IMPORTED = (
    "benchmarks.mesh_ranks",
    "benchmarks.stage_ranks",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
)


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 300
) -> list[Any]:
    """What ``function(rank, *args)`` returns on each rank of a gloo group.

    Args:
        function: Of a module.
        num_ranks: Size of the group.
        args: Can be pickled.
        timeout_s: After this long the ranks are killed.

    Raises:
        RuntimeError: A rank failed, or they did not end in time.
    """
    with tempfile.TemporaryDirectory() as directory:
        job = f"{directory}/store", num_ranks, function, args
        return run_processes(_connected, num_ranks, *job, timeout_s=timeout_s)


def run_processes(
    function: Callable[..., Any],
    num_processes: int,
    *args: Any,
    timeout_s: float = 300,
) -> list[Any]:
    """As `run_ranks`, in processes that nothing connects."""
    with tempfile.TemporaryDirectory() as directory:
        job = directory, num_processes, function, args, timeout_s
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        pickle.dump(pickle.dumps(job), server.stdin)
        server.stdin.flush()
        failure = pickle.load(server.stdout)
        if failure is not None:
            raise RuntimeError(f"{num_processes} processes failed.\n{failure}")
        return [
            torch.load(f"{directory}/{rank}", weights_only=False)
            for rank in range(num_processes)
        ]


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    """Of this process, started once."""
    counting = allocator_shim.library() is not None
    server = subprocess.Popen(
        [sys.executable, "-c", "from benchmarks import rank_server as s; s.serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **(allocator_shim.environment() if counting else os.environ),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )
    atexit.register(server.communicate)  # which closes its input
    return server


def serve() -> None:
    """Run one job after the other: what the server does."""
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)  # what ranks print is no reply
        for name in _IMPORTED:
            importlib.import_module(name)
        gc.freeze()  # ranks look at what they make, not at what libraries made
        while job := sys.stdin.buffer.peek(1) and pickle.load(sys.stdin.buffer):
            try:
                _run(*pickle.loads(job))
                failure = None
            except Exception:
                failure = traceback.format_exc()
            pickle.dump(failure, replies)
            replies.flush()


def _run(
    directory: str,
    num_processes: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout_s: float,
) -> None:
    context = mp.start_processes(
        _save_result,
        args=(directory, function, args),
        nprocs=num_processes,
        join=False,
        start_method="fork",
    )
    deadline = time.monotonic() + timeout_s
    try:
        while not context.join(timeout=max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"They ran over {timeout_s} s.")
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def _save_result(
    rank: int, directory: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    torch.save(function(rank, *args), f"{directory}/{rank}")


def _connected(
    rank: int,
    store_path: str,
    num_ranks: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    store = dist.FileStore(store_path, num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    result = function(rank, *args)
    # Whoever ends first must not take the others' connections along.
    store.set(f"rank {rank} is done", "")
    store.wait([f"rank {other} is done" for other in range(num_ranks)])
    dist.destroy_process_group()
    return result
