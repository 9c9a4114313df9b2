"""The events of PyTorch's allocator on the CPU, as the profiler records them.

Seen with torch 2.15 on Linux:

- Every allocation and free of the recording thread is there with its exact request
  in bytes, kernel-internal workspaces included; no two events shared a timestamp in
  recordings of 60,000, and kineto's list and the event tree agree.
- Other Python threads are not recorded (`profile_all_threads` records no memory at
  all). Workspaces of multi-threaded kernels are: the calling thread allocates them,
  often in proportion to `torch.get_num_threads()`, so peaks depend on it.
- A free of memory allocated before the recording leaves no event, or one with a
  stale size if an earlier recording knew its address.
- Two recordings at once spoil each other: `cpu_events` refuses to be the second one.
- Memory that does not come from PyTorch's allocator (BLAS packing buffers, oneDNN
  primitives, NumPy) is invisible.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.profiler import ProfilerActivity, profile

from autosac._compat_profiler import a_profiler_is_active
from autosac.errors import UnsupportedError


@contextmanager
def cpu_events() -> Iterator[profile]:
    """Record the events of the CPU's allocator: see `recorded_events`.

    Raises:
        UnsupportedError: A profiler is active already.
    """
    if a_profiler_is_active():
        raise UnsupportedError(
            "Memory on the CPU is measured by PyTorch's profiler, and one is active"
            " already; two at once spoil each other. Measure outside of it."
        )
    # Kineto logs to stderr otherwise; it reads this when the first profile starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with ExitStack() as stack:
        with warnings.catch_warnings():
            # Older versions say even of a single cycle that only its events are kept.
            # With `acc_events` they would make an object of each event, which takes
            # longer than all the rest and is not read here.
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            recording = stack.enter_context(
                profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            )
        yield recording


def recorded_events(recording: profile) -> Iterator[Any]:
    """All events, parents before children (iteratively: the tree can be deep).

    They can be read once: a session that has ended goes, without a garbage collection.
    """
    assert recording.profiler is not None
    results = recording.profiler.kineto_results
    assert results is not None
    recording.profiler = None
    pending = list(reversed(results.experimental_event_tree()))
    while pending:
        event = pending.pop()
        yield event
        pending.extend(reversed(event.children))
