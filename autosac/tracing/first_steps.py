"""What a step before the planned one takes besides, such as one that sets things up.

Both are traced. Their ops are matched, and wherever more is alive in the earlier step
than in the planned one, the difference counts there: so a peak covers both. Where units
free memory, they free about as much of either.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from difflib import SequenceMatcher

import numpy as np

from autosac.quantities import format_bytes
from autosac.step.arguments import warn
from autosac.step.ledger import Ledger, Timeline
from autosac.step.tape import Excess, IntArray, Tape

_LITTLE = 0.01  # of a peak, that nobody has to do something about


def covering(planned: Tape, *earlier: Tape) -> Tape:
    """A tape with what earlier steps take besides.

    Args:
        planned: The step that is planned.
        *earlier: Some that come before it.
    """
    ticks, own = _starts(planned), _timeline(planned)
    most = own.most_from(ticks)
    excess = np.zeros_like(most)
    for tape in earlier:
        timeline = _timeline(tape)
        places, highest = _matched(tape, planned), timeline.most_from(_starts(tape))
        np.maximum.at(excess, places, highest - most[places])
    begins = np.flatnonzero(np.diff(excess, prepend=0))
    ends = np.append(ticks, planned.num_ticks)[np.append(begins, len(ticks))[1:]]
    excesses = zip(ticks[begins], ends, excess[begins], strict=True)
    return replace(
        planned,
        earlier=tuple(Excess(*map(int, row)) for row in excesses if row[2]),
        earlier_tapes=earlier,
    )


def warn_of_first_step(tape: Tape) -> None:
    """Warn if another step takes a higher peak than the one that is planned."""
    peaks = [_timeline(earlier).peak_bytes for earlier in tape.earlier_tapes]
    peak_bytes = _timeline(tape).peak_bytes
    more_bytes = max(peaks, default=0) - peak_bytes
    if more_bytes <= _LITTLE * peak_bytes:
        return
    more = f"{format_bytes(more_bytes)} more"
    if max(peaks) > peaks[0]:
        warn(
            f"Some step takes {more} than the one that is planned, which takes most in"
            " forward and backward; plans count that."
        )
    else:
        warn(
            f"The first step takes {more} than later ones, as it does what they do not,"
            " and plans count that. Run the model once before you plan and train, and"
            " they need not."
        )


def _starts(tape: Tape) -> IntArray:
    """Ticks at which the step and each of its ops but the first begin."""
    return np.array([0, *(op.start for op in tape.ops[1:])], dtype=np.int64)


def _timeline(tape: Tape) -> Timeline:
    """Memory of the plain step, with workspaces."""
    works = [(op.made, op.end, op.workspace_bytes) for op in tape.ops]
    made, end, nbytes = np.array(works, dtype=np.int64).reshape(-1, 3).T
    return Ledger(
        born=np.concatenate([tape.born, made]),
        died=np.concatenate([tape.freed, end]),
        nbytes=np.concatenate([tape.nbytes, nbytes]),
    ).timeline()


def _matched(tape: Tape, planned: Tape) -> IntArray:
    """For each op of a step the same one of the planned step, or the last before it."""
    places = np.zeros(max(len(tape.ops), 1), dtype=np.int64)
    own, other = _names(tape), _names(planned)
    alike = _num_alike(own, other)  # matching these takes long where names recur
    last = _num_alike(own[alike:][::-1], other[alike:][::-1])
    ends = len(own) - last, len(other) - last
    matcher = SequenceMatcher(
        None, own[alike : ends[0]], other[alike : ends[1]], autojunk=False
    )
    blocks = [(alike + i, alike + j, n) for i, j, n in matcher.get_matching_blocks()]
    for ours, theirs, size in [(0, 0, alike), *blocks, (*ends, last)]:
        places[ours : ours + size] = np.arange(theirs, theirs + size)
    return np.maximum.accumulate(places)


def _num_alike(own: list[Hashable], other: list[Hashable]) -> int:
    """How many are the same from the first one on."""
    differ = (i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b)
    return next(differ, min(len(own), len(other)))


def _names(tape: Tape) -> list[Hashable]:
    fqns = [node.fqn for node in tape.modules.nodes]
    return [(op.phase, op.name, fqns[op.module], op.shapes) for op in tape.ops]
