"""Memory that a step leaves in reference cycles: freed when Python's collector runs."""

from __future__ import annotations

import gc

from autosac.quantities import format_bytes
from autosac.step.arguments import warn
from autosac.step.ledger import Ledger
from autosac.step.tape import Tape
from autosac.tracing.recorder import Recorder

_MOST_PASSES = 128  # each frees one autograd function of a row that keep their results
_NEAR = 0.001  # of the step's peak: so little is not said, though steps add to it


def warn_of_cycles(recorder: Recorder, tape: Tape, left: set[int]) -> None:
    """Warn of what forward made that only a collector frees.

    Args:
        recorder: Of a step that is over; nothing else holds what it made.
        tape: What it recorded.
        left: Addresses of storages that are alive.
    """
    indices = {address: recorder.ids[address] for address in left}
    num_passes = collect_cycles(recorder)
    freed = sorted(i for i in indices.values() if recorder.died[i] is not None)
    num_bytes = sum(recorder.nbytes[index] for index in freed)
    plain = Ledger(born=tape.born, died=tape.freed, nbytes=tape.nbytes)
    if num_bytes <= _NEAR * plain.peak_bytes:
        return
    largest = max(freed, key=recorder.nbytes.__getitem__)
    made_by = next((op for op in recorder.ops if largest in op.creates), None)
    fqn = "" if made_by is None else recorder.tree[made_by.module].fqn
    place = f"module `{fqn}`" if fqn else "the model itself"
    line = f" at {made_by.source}" if made_by is not None and made_by.source else ""
    times = (
        f" {num_passes} times, as each call frees one of a row,"
        if num_passes > 1
        else ""
    )
    warn(
        f"A step leaves {format_bytes(num_bytes)} in reference cycles, as what {place}"
        f" makes{line}. Each step leaves as much again until Python's collector looks"
        " at all objects, which may be hundreds of steps later: on top of the peak,"
        " and of any budget, with a plan as without. Let autograd functions keep their"
        " results by `ctx.save_for_backward`, not as attributes of `ctx`, or delete"
        f" these in `backward`; where that is not it, call `gc.collect()`{times} after"
        " each step."
    )


def collect_cycles(recorder: Recorder) -> int:
    """Free what only a collector frees of a step; the passes that it took."""
    for num_passes in range(_MOST_PASSES):
        before = len(recorder.ids)
        gc.collect()
        if len(recorder.ids) == before:
            return num_passes
    return _MOST_PASSES
