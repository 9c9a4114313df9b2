"""Random draws that decide what a step does: the largest step of a few is planned.

Layer drop and images of drawn sizes make one step take more memory than another. A plan
is for one of them, and must hold for those that take less.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np

from autosac.errors import TraceError
from autosac.tracing.probing import DRAWS
from autosac.tracing.tape import Tape

_FEW, _MANY = 3, 8  # seeds: to see whether draws decide anything, and if they do
_FORWARD = ("forward", "loss")


def may_decide(tape: Tape) -> bool:
    """Whether a shape or a branch of a step depends on random numbers."""
    if any(call.once == DRAWS for call in tape.calls):
        return True
    drawn: set[int] = set()
    for op in tape.ops:
        if op.phase not in _FORWARD:
            continue
        if op.random or not drawn.isdisjoint(op.reads):
            if (not op.shapes and not op.writes) or not drawn.isdisjoint(op.decides):
                return True
            drawn.update(op.creates, op.writes)
            if not drawn.isdisjoint(op.decides):
                return True
    return False


def largest(
    tape: Tape, traced: Callable[[int], Tape], storages_of: Callable[[int], Tape]
) -> tuple[int, list[Tape]]:
    """The seed whose step takes most memory; its tape, and some that differ from it.

    Args:
        tape: That of seed 0.
        traced: Seed -> tape.
        storages_of: Seed -> tape that holds nothing but storages: quicker.
    """
    tapes = {0: tape}
    peaks = {0: plain_peak_bytes(tape)}
    for seed in range(1, _MANY):
        if seed == _FEW and len(set(map(_outline, tapes.values()))) == 1:
            break
        try:
            if seed < _FEW:
                tapes[seed] = traced(seed)
                peaks[seed] = plain_peak_bytes(tapes[seed])
            else:
                peaks[seed] = plain_peak_bytes(storages_of(seed))
        except TraceError:  # nobody trains on what such draws leave
            continue
    seed = max(peaks, key=lambda seed: peaks[seed])
    best = tapes[seed] if seed in tapes else traced(seed)
    others = {_outline(other): other for other in tapes.values()}
    others.pop(_outline(best), None)
    return seed, [best, *others.values()]


def plain_peak_bytes(tape: Tape) -> int:
    """Most bytes alive at once when nothing is recomputed, without workspaces."""
    changes = np.zeros(tape.num_ticks + 2, dtype=np.int64)
    np.add.at(changes, tape.born, tape.nbytes)
    np.add.at(changes, tape.freed + 1, -tape.nbytes)
    return int(np.cumsum(changes).max())


def _outline(tape: Tape) -> Hashable:
    return tuple((op.name, op.shapes) for op in tape.ops if op.phase in _FORWARD)
