"""The same program on the machine as it is, and as on a busy one."""

import contextlib
import io
import os
import signal
import tempfile
import time

import torch.distributed as dist

from benchmarks.rank_server import run_processes

_RUNS_S, _WAITS_S = 0.05, 0.05


def alone_and_in_turns(code):
    """What a program prints on its own, and where others take every other turn.

    Clocks go on while it waits for its turn, which is all that it notices of the
    others. There are none: waiting takes nothing from the tests that run meanwhile.
    """
    (alone,) = run_processes(_printed, 1, code)
    with tempfile.TemporaryDirectory() as folder:
        in_turns, num_turns = run_processes(_in_turns, 2, f"{folder}/store", code)
    assert num_turns > 1
    return alone, in_turns


def _printed(_, code):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        exec(code, {"__name__": "__main__"})
    return text.getvalue()


def _in_turns(rank, store_path, code):
    """One process runs the program; the other one stops it again and again."""
    store = dist.FileStore(store_path, 2)
    if rank == 0:
        store.set("runs", str(os.getpid()))
        text = _printed(rank, code)
        store.set("is done", "")
        store.wait(["is left alone"])
        return text
    process, num_turns = int(store.get("runs")), 0
    while not store.check(["is done"]):
        os.kill(process, signal.SIGSTOP)
        time.sleep(_WAITS_S)
        os.kill(process, signal.SIGCONT)
        time.sleep(_RUNS_S)
        num_turns += 1
    store.set("is left alone", "")
    return num_turns
