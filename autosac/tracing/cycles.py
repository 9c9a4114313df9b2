"""Memory that a step leaves in reference cycles: freed when Python's collector runs."""

from __future__ import annotations

import gc

from autosac.quantities import format_bytes
from autosac.step.arguments import warn
from autosac.tracing.recorder import Recorder

_MOST_PASSES = 16  # one for each autograd function in a row that keeps its own result
_NEAR = 0.005  # of what the step makes: so little is not said


def warn_of_cycles(recorder: Recorder, left: set[int]) -> None:
    """Warn of what forward made that only a collector frees.

    Args:
        recorder: Of a step that is over; nothing else holds what it made.
        left: Addresses of storages that are alive.
    """
    indices = {address: recorder.ids[address] for address in left}
    for _ in range(_MOST_PASSES):
        before = len(recorder.ids)
        gc.collect()
        if len(recorder.ids) == before:
            break
    freed = sorted(i for i in indices.values() if recorder.died[i] is not None)
    num_bytes = sum(recorder.nbytes[index] for index in freed)
    if num_bytes <= _NEAR * sum(recorder.nbytes):
        return
    largest = max(freed, key=recorder.nbytes.__getitem__)
    made_by = next((op for op in recorder.ops if largest in op.creates), None)
    fqn = "" if made_by is None else recorder.tree[made_by.module].fqn
    place = f"module `{fqn}`" if fqn else "the model itself"
    line = f" at {made_by.source}" if made_by is not None and made_by.source else ""
    warn(
        f"A step leaves {format_bytes(num_bytes)} in reference cycles, as what {place}"
        f" makes{line}. That is freed when Python's collector happens to run, and until"
        " then comes on top of the peak of later steps. Let autograd functions keep"
        " their results by `ctx.save_for_backward`, not as attributes of `ctx`; where"
        " that is not it, call `gc.collect()` after each step."
    )
