"""Draws and training that decide what a step does: the largest of a few is planned.

Layer drop and images of drawn sizes make one step take more memory than another, and so
do routers and detectors that learn. A plan is for one of these steps, and must hold for
those that take less.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable

from autosac.errors import TraceError
from autosac.step.ledger import Ledger
from autosac.step.random_streams import HIGHEST, LOWEST
from autosac.step.tape import FORWARD_PHASES, Tape
from autosac.tracing.probing import DRAWS

# Seeds: to see whether draws decide anything, and if they do. A traced step comes after
# fewer than `FEW` training steps.
FEW, _MANY = 3, 8
# A step with extreme draws that allocates so many times as often as others is no step
# that anybody sees, such as a loop until a low number is drawn.
_MUCH = 2


def may_decide(tape: Tape) -> bool:
    """Whether a shape or a branch of a step depends on random numbers."""
    if any(call.once == DRAWS for call in tape.calls):
        return True
    return _decide(tape, set(), with_draws=True)


def training_may_decide(tape: Tape) -> bool:
    """Whether a shape or a branch of a step depends on what is trained."""
    trained = {p.storage for p in tape.parameters if p.trained}
    return _decide(tape, trained, with_draws=False)


def _decide(tape: Tape, changing: set[int], *, with_draws: bool) -> bool:
    """Whether a shape or a branch depends on storages whose values change.

    Args:
        tape: A step.
        changing: The storages.
        with_draws: What random ops make changes, too.
    """
    changing = set(changing)
    for op in tape.ops:
        if op.phase not in FORWARD_PHASES:
            continue
        if (with_draws and op.random) or not changing.isdisjoint(op.reads):
            if (not op.shapes and not op.writes) or not changing.isdisjoint(op.decides):
                return True
            changing.update(op.creates, op.writes)
            if not changing.isdisjoint(op.decides):
                return True
    return False


def largest(
    tape: Tape,
    traced: Callable[[int], Tape],
    storages_of: Callable[[int], Tape],
    draws_extremes: Callable[[], bool],
    *,
    drawn: bool,
) -> tuple[int, list[Tape], bool]:
    """The variant of a step that takes most memory; its tape, and some that differ.

    And whether it does what the step of extreme draws does, if that does all that
    others do.

    Args:
        tape: That of variant 0.
        traced: Variant -> tape.
        storages_of: Variant -> tape that holds nothing but storages: quicker.
        draws_extremes: Whether the last run drew what `HIGHEST` and `LOWEST` change.
        drawn: Random numbers tell variants apart, not training alone.
    """
    tapes = {0: tape}
    peaks = {0: plain_peak_bytes(tape)}
    for variant in range(1, FEW):
        with contextlib.suppress(TraceError):  # nobody trains on what such draws leave
            tapes[variant] = traced(variant)
            peaks[variant] = plain_peak_bytes(tapes[variant])
    extremes: dict[int, Tape] = {}
    if drawn and len(set(map(_outline, tapes.values()))) > 1:
        most = _MUCH * max(len(tape.storages) for tape in tapes.values())
        peak_bytes = max(peaks.values())
        for variant in (HIGHEST, LOWEST):
            with contextlib.suppress(TraceError):
                tape = storages_of(variant)
                if not draws_extremes() or len(tape.storages) > most:
                    continue
                if plain_peak_bytes(tape) >= peak_bytes:
                    tape = traced(variant)
                    if all(_covers(tape, other) for other in tapes.values()):
                        extremes[variant] = tape
                        peaks[variant] = plain_peak_bytes(tape)
        for variant in range(FEW, _MANY) if not extremes else ():
            with contextlib.suppress(TraceError):
                peaks[variant] = plain_peak_bytes(storages_of(variant))
    variant = max(peaks, key=lambda variant: peaks[variant])
    known = tapes | extremes
    best = known[variant] if variant in known else traced(variant)
    others = {_outline(other): other for other in tapes.values()}
    others.pop(_outline(best), None)
    is_extreme = _outline(best) in map(_outline, extremes.values())
    return variant, [best, *others.values()], is_extreme


def plain_peak_bytes(tape: Tape) -> int:
    """Most bytes alive at once when nothing is recomputed, without workspaces."""
    ledger = Ledger(born=tape.born, died=tape.freed + 1, nbytes=tape.nbytes)
    return ledger.timeline().peak_bytes


def _covers(one: Tape, other: Tape) -> bool:
    """Whether all modules make in one step what they make in another, or more.

    They do if all layers are kept; not if all rows go through one of two experts.
    """
    made = _bytes_by_module(one)
    return all(made[module] >= n for module, n in _bytes_by_module(other).items())


def _bytes_by_module(tape: Tape) -> Counter[int]:
    made: Counter[int] = Counter()
    for op in tape.ops:
        if op.phase in FORWARD_PHASES:
            made[op.module] += sum(tape.storages[s].nbytes for s in op.creates)
    return made


def _outline(tape: Tape) -> Hashable:
    return tuple((op.name, op.shapes) for op in tape.ops if op.phase in FORWARD_PHASES)
