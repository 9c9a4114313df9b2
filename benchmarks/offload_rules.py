"""Rules of offload: every large saved tensor, as torchtune's hooks do it, or inputs.

Nothing is recomputed under the first. A tensor that autograd saves is sent as it is
saved; when five later ones are sent (`max_fwd_stash_size`), or backward begins, the
program waits for the copy and lets go of it. Backward allocates it where it first reads
it, waits for the copy back, and keeps it until it has used it. It is simulated at its
best: a storage moves once however many tensors of it are saved, and no stream keeps
memory back.

Source: torchtune, torchtune/training/_activation_offloading.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from autosac.profiles.traced_step import TracedStep
from autosac.simulation.allocator_steps import first_step, handed_out

LEAST_BYTES = 2**20
_STASH = 5  # copies that are waited for later
_STAYS = {"parameter", "buffer", "optimizer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleStep:
    """What a step under the rule takes.

    Attributes:
        peak_bytes: As the device counts it,
        waits_ms: what the step waits for copies,
        moved_bytes: and what it moves each way.
    """

    peak_bytes: int
    waits_ms: float
    moved_bytes: int


class _Moved(NamedTuple):
    """A storage: ticks at which it is sent, let go of, read again and done with."""

    storage: int
    sent: int
    let_go: int
    read: int
    until: int


def every_saved(step: TracedStep, least_bytes: int = LEAST_BYTES) -> RuleStep:
    """Peak and time of a step whose saved tensors of over so many bytes are moved."""
    moved = list(_moved(step, least_bytes))
    simulator, tape = step.simulator, step.tape
    ledger = simulator.ledger({})
    died, span = ledger.died.copy(), simulator.span
    for one in moved:
        died[one.storage] = one.let_go * span
    again = np.array([(m.read, m.until) for m in moved], dtype=np.int64).reshape(-1, 2)
    nbytes = tape.nbytes[[m.storage for m in moved]]
    ledger = replace(
        ledger,
        born=np.concatenate([ledger.born, again[:, 0] * span]),
        died=np.concatenate([died, again[:, 1] * span]),
        nbytes=np.concatenate([ledger.nbytes, nbytes]),
    )
    peak_bytes = ledger.timeline().peak_bytes
    if tape.device_type == "cuda":
        first = first_step(tape, span)
        steps = handed_out(ledger, first=first, settings=simulator.settings)
        peak_bytes = max(one.peak_bytes for one in steps)
    return RuleStep(
        peak_bytes=peak_bytes,
        waits_ms=_waits_ms(step, moved) + _issued_ms(step, moved),
        moved_bytes=int(nbytes.sum()),
    )


def _moved(step: TracedStep, least_bytes: int) -> Iterator[_Moved]:
    tape, backward = step.tape, step.tape.phases["backward"]
    sent: dict[int, int] = {}
    read: dict[int, int] = {}
    until: dict[int, int] = {}
    for saved in tape.saved:
        storage = tape.storages[saved.storage]
        is_large = storage.nbytes > least_bytes and storage.born > 0
        if not is_large or storage.category in _STAYS or saved.unpacked is None:
            continue
        key = saved.storage
        sent.setdefault(key, saved.packed)
        read[key] = min(read.get(key, saved.unpacked), saved.unpacked)
        last = max(saved.released, saved.used_until)
        until[key] = max(until.get(key, 0), last)
    ticks = list(sent.values())
    for number, (key, tick) in enumerate(sent.items()):
        later = ticks[number + _STASH] if number + _STASH < len(ticks) else backward
        let_go = max(tape.storages[key].died, later)
        if let_go < read[key]:
            yield _Moved(key, tick, let_go, read[key], until[key])


def _issued_ms(step: TracedStep, moved: list[_Moved]) -> float:
    """Time for which the program is busy with copies, and with hooks of the model."""
    link, followed_ms = step.device.link, 0.0
    assert link is not None
    if step.streamed is not None:
        followed_ms = step.streamed.followed_ms
    sizes = [step.tape.storages[one.storage].nbytes for one in moved]
    return followed_ms + 2 * link.issued_ms(sizes)


def _waits_ms(step: TracedStep, moved: list[_Moved]) -> float:
    """Time that a step waits, played op by op."""
    link, tape = step.device.link, step.tape
    assert link is not None
    events: list[tuple[int, int, int]] = [
        (op.start, 3, i) for i, op in enumerate(tape.ops)
    ]
    for number, one in enumerate(moved):
        ticks = (one.sent, one.let_go, one.read)
        events += [(tick, kind, number) for kind, tick in enumerate(ticks)]
    now_ms = waits_ms = out_ms = 0.0
    sent_ms: dict[int, float] = {}
    for _, kind, number in sorted(events):
        if kind == 3:
            now_ms += step.op_ms[number]
            continue
        nbytes = tape.storages[moved[number].storage].nbytes
        if kind == 0:
            out_ms = sent_ms[number] = max(out_ms, now_ms) + link.out_ms(nbytes, 1)
            continue
        wait_ms = sent_ms[number] - now_ms if kind == 1 else link.back_ms(nbytes, 1)
        waits_ms += max(0.0, wait_ms)
        now_ms += max(0.0, wait_ms)
    return waits_ms


def every_input(profile: Any) -> dict[Any, Any]:
    """Every block recomputed whole, with its arguments in far memory if they can be."""
    twins = {unit.call: unit for unit in profile.far_units if unit.fetched is None}
    every = profile.rules.every_kth_block(1)
    return {twins.get(unit.call, unit): policy for unit, policy in every.items()}
