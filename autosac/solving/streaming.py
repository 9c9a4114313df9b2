"""Which saved tensors of a model are streamed under a budget, and how early each comes.

A heuristic beside the MILP, which has no such unit. It begins with all of them in far
memory, let go of as the next one is sent, and none prefetched: that peaks lowest. Then
it uses the memory that the budget leaves: what is saved last stays on the device,
nothing of it or up to all that fits, the program lets go of others when their copies
are done, and copies back begin as early as the link has to have them; or both as memory
allows. The fastest of these is taken.

That is done for a few levels of memory, the same for all budgets, and a budget gets
what is fastest of those up to it: with more memory no choice is slower.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from math import inf

import numpy as np

from autosac.simulation.simulator import Simulator
from autosac.solving.rules_of_thumb import Choice
from autosac.step.tape import IntArray
from autosac.units.curves import recompute_ms
from autosac.units.policies import SAVE, Policy
from autosac.units.streamed import StreamedModel, letter, moved

_BY_RULE = 5  # sent before the program waits for one: torchtune's `max_fwd_stash_size`
_SHARES = 4  # of what may stay on the device: so many are looked at
_OCTAVES = 10  # of memory above the least peak, up to that of the plain step:
_IN_OCTAVE = 6  # levels of memory in each,
_MOST_STREAMS = 40_000  # fewer of a long step: of all levels, in a simulation each
_MOST_TRIES = 4  # of using less memory, where an allocator adds more than at first


class Streaming:
    """Choices that stream a model, for one step.

    Args:
        simulator: Of the step.
        unit: The model as a unit.
        host_bytes: Most bytes in far memory; None for as many as one likes.
    """

    def __init__(
        self, simulator: Simulator, unit: StreamedModel, host_bytes: int | None
    ) -> None:
        self._simulator = simulator
        self._unit = unit
        self._host_bytes = host_bytes
        self._of_level: dict[int, Policy | None] = {}

    @cached_property
    def _least(self) -> Policy:
        """As much in far memory as may be, for as long as can be."""
        streams = self._unit.streams
        first, left = len(streams), sum(stream.nbytes for stream in streams)
        while self._host_bytes is not None and left > self._host_bytes:
            first -= 1
            left -= streams[first].nbytes
        stay = SAVE * (len(streams) - first)
        return Policy(f"{letter(0) * first}{stay}{letter(1) * first}{stay}")

    @cached_property
    def _ruled(self) -> Policy:
        """As people's rule has it, but for what the cap on far memory keeps here."""
        half = self._least.choices[: len(self._unit.streams)]
        return Policy(half + half.replace(letter(0), letter(_BY_RULE)))

    def lowest(self) -> Choice:
        """The choice of least peak."""
        return {self._unit: self._least}

    def cheapest(self, budget_bytes: int, most_ms: float = inf) -> Choice | None:
        """The fastest choice of the levels of memory within a budget; None if none is.

        It has at most the time of any smaller budget's, whichever is asked for first.

        Args:
            budget_bytes: Cap on the peak.
            most_ms: None if no choice takes less.
        """
        best, best_ms = None, most_ms
        for level_bytes in reversed(self._levels):
            if level_bytes > budget_bytes:
                continue
            if self.least_ms(level_bytes) >= best_ms:
                break  # and so it is with less memory
            if level_bytes not in self._of_level:
                self._of_level[level_bytes] = self._find(level_bytes)
            policy = self._of_level[level_bytes]
            if policy is not None and recompute_ms(self._unit, policy) < best_ms:
                best, best_ms = policy, recompute_ms(self._unit, policy)
        return None if best is None else {self._unit: best}

    @cached_property
    def _levels(self) -> list[int]:
        """Levels of memory, dense where it is scarce, and the peak of people's rule."""
        least_bytes = self._peak_bytes(self._least, is_true=True)
        span = self._simulator.true_peak_bytes({}) - least_bytes
        number = _MOST_STREAMS // (_OCTAVES * len(self._unit.streams))
        number = max(2, min(_IN_OCTAVE, number))
        levels = {least_bytes, self._peak_bytes(self._ruled, is_true=True)}
        for octave in range(1, _OCTAVES + 1):
            divisor = number << octave
            levels |= {
                least_bytes + span * (number + k) // divisor for k in range(number)
            }
        return sorted(levels)

    def least_ms(self, budget_bytes: int) -> float:
        """No choice that streams the model under a budget takes less.

        What is missing at an instant has left before it and comes back after it.
        """
        unit, ticks = self._unit, np.arange(self._simulator.tape.num_ticks + 1)
        missing_bytes = (self._live(None) - budget_bytes).clip(0)
        passed_ms = np.array(unit.passed_ms)[np.searchsorted(unit.starts, ticks)]
        first_ms = unit.passed(unit.streams[0].packed)
        last_ms = unit.passed(max(stream.read for stream in unit.streams))
        out_ms = 1e3 * missing_bytes / unit.link.out_bytes_per_s
        back_ms = 1e3 * missing_bytes / unit.link.back_bytes_per_s
        waits_ms = (out_ms - (passed_ms - first_ms).clip(0)).clip(0)
        waits_ms += (back_ms - (last_ms - passed_ms).clip(0)).clip(0)
        fewest = int(np.searchsorted(self._largest_bytes, missing_bytes.max()))
        issued_ms = 2 * min(unit.link.issued_ms([s.nbytes]) for s in unit.streams)
        return float(waits_ms.max()) + unit.followed_ms + fewest * issued_ms

    @cached_property
    def _largest_bytes(self) -> IntArray:
        """Bytes of no stream, of the largest one, of the two largest ones, ..."""
        sizes = sorted((stream.nbytes for stream in self._unit.streams), reverse=True)
        return np.cumsum([0, *sizes])

    def _find(self, budget_bytes: int) -> Policy | None:
        least_bytes = self._peak_bytes(self._least)
        if least_bytes > budget_bytes:  # an allocator adds to it
            return None
        peak_bytes = self._peak_bytes(self._least, is_true=True)
        if peak_bytes > budget_bytes:
            return None
        target_bytes = budget_bytes - (peak_bytes - least_bytes)
        for _ in range(_MOST_TRIES):
            policies = sorted(self._fillings(target_bytes), key=self._unit.waits_ms)
            fitting = (p for p in policies if self._peak_bytes(p) <= target_bytes)
            best = next(fitting, self._least)
            excess_bytes = self._peak_bytes(best, is_true=True) - budget_bytes
            if excess_bytes <= 0:
                return best
            target_bytes -= excess_bytes
        return self._least

    def _peak_bytes(self, policy: Policy, *, is_true: bool = False) -> int:
        choice: Choice = {self._unit: policy}
        simulator = self._simulator
        peak_bytes = simulator.true_peak_bytes if is_true else simulator.peak_bytes
        return peak_bytes(choice)

    def _fillings(self, target_bytes: int) -> Iterator[Policy]:
        """Policies that use the memory up to a target, by how much stays.

        The first one lets go as people's rule has it, and so is no slower.
        """
        yield self._prefetched(self._ruled, target_bytes)
        most = self._most_kept(target_bytes)
        for number in sorted({most * share // _SHARES for share in range(_SHARES + 1)}):
            late = self._let_go_late(self._keeping(number), target_bytes)
            yield self._prefetched(late, target_bytes)

    def _keeping(self, number: int) -> Policy:
        """What stays least long, but so many more stay that are saved last."""
        choices, half = list(self._least.choices), len(self._unit.streams)
        order = moved(self._least)
        for k in order[len(order) - number :]:
            choices[k] = choices[half + k] = SAVE
        return Policy("".join(choices))

    def _most_kept(self, target_bytes: int) -> int:
        """How many may stay: more of them never take less memory."""
        fits, fails = 0, len(moved(self._least)) + 1
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self._peak_bytes(self._keeping(middle)) <= target_bytes:
                fits = middle
            else:
                fails = middle
        return fits

    def _live(self, policy: Policy | None) -> IntArray:
        """Most bytes alive from each tick until the next one; None: of no plan."""
        span = self._simulator.span
        choice: Choice = {} if policy is None else {self._unit: policy}
        timeline = self._simulator.timeline(choice)
        return timeline.most_from(np.arange(self._simulator.tape.num_ticks + 1) * span)

    def _let_go_late(self, policy: Policy, target_bytes: int) -> Policy:
        """The policy, waiting for copies out when they are done, or memory is scarce.

        At each place where something is sent the oldest go until the others fit.
        """
        unit, order, live = self._unit, moved(policy), self._live(policy)
        choices, half = list(policy.choices), len(unit.streams)
        ticks = [*(unit.streams[k].packed for k in order), unit.call.exit]
        done_ms, waited_ms, held_bytes = list[float](), 0.0, 0
        first = 0  # that is held
        for number, k in enumerate(order):
            now_ms = unit.passed(ticks[number]) + waited_ms
            begun_ms = max(now_ms, done_ms[-1]) if done_ms else now_ms
            done_ms.append(begun_ms + unit.link.out_ms(unit.streams[k].nbytes, 1))
            most_bytes = int(live[ticks[number] : ticks[number + 1]].max(initial=0))
            while first < number and (
                done_ms[first] <= now_ms or most_bytes + held_bytes > target_bytes
            ):
                waited_ms += max(0.0, done_ms[first] - now_ms)
                now_ms = max(now_ms, done_ms[first])
                choices[half + order[first]] = letter(number - first)
                held_bytes -= unit.streams[order[first]].nbytes
                first += 1
            held_bytes += unit.streams[k].nbytes
        for number in range(first, len(order)):
            choices[half + order[number]] = letter(len(order) - number)
        return Policy("".join(choices))

    def _prefetched(self, policy: Policy, target_bytes: int) -> Policy:
        """The policy, which prefetches nothing, with copies back as early as is of use.

        Before a copy can begin, memory for it would be wasted.
        """
        unit = self._unit
        live, order = self._live(policy), unit.reads(policy)
        streams = [unit.streams[k] for k in order]
        needed = self._needed(order)
        choices, read_ms = list(policy.choices), list[float]()
        free_ms = waited_ms = 0.0
        first, reads = 0, [stream.read for stream in streams]
        for number, (k, stream) in enumerate(zip(order, streams, strict=True)):
            useful = bisect_right(read_ms, free_ms) - 1  # the link is busy before
            first = max(first, useful, bisect_right(reads, stream.freed))
            first = min(max(first, needed[number]), number)
            above = live[reads[first] : stream.read] + stream.nbytes > target_bytes
            if above.any():
                last = reads[first] + int(np.flatnonzero(above)[-1])
                first = min(bisect_right(reads, last), number)
            live[reads[first] : stream.read] += stream.nbytes
            choices[k] = letter(number - first)
            now_ms = unit.passed(stream.read) + waited_ms
            begun_ms = now_ms if first == number else read_ms[first]
            free_ms = max(free_ms, begun_ms) + unit.link.back_ms(stream.nbytes, 1)
            waited_ms += max(0.0, free_ms - now_ms)
            read_ms.append(now_ms)
        return Policy("".join(choices))

    def _needed(self, order: list[int]) -> list[int]:
        """The last read with which each copy back may begin and none is waited for."""
        unit = self._unit
        passed_ms = [unit.passed(unit.streams[k].read) for k in order]
        needed, start_ms = [0] * len(order), float("inf")
        for number in reversed(range(len(order))):
            own_ms = unit.link.back_ms(unit.streams[order[number]].nbytes, 1)
            start_ms = min(start_ms, passed_ms[number]) - own_ms
            needed[number] = max(bisect_right(passed_ms, start_ms) - 1, 0)
        return needed
