"""Time of one step under FSDP2: compute, and what communication adds to it.

Two answers. `simulate` plays the step event by event, as FSDP2 orders them on its
streams. `linear` is what a MILP can state: with units numbered in the order in which
their forward (their backward) begins, C_k the compute from there to the beginning of
the next one, g_k and r_k all-gather and reduce-scatter of unit k, a_k its all-reduce
between replicas,

    forward  = g_1 + sum_k max(C_k, g_k+1)                                          (1)
    backward = max over ends of  sum_k C_k + e_k                                    (2)
    e_k      = max(0, R_k-1 + g_k+1 - C_k)                                          (3)

with R_k the reduce-scatters of units whose backward ends between the beginnings of
units k and k + 1. The ends of (2) are those of the compute; for each unit m, of the
reduce-scatters that are left when its backward ends; and of the all-reduces:

    t_m + sum r_j,   t_m + r_m + sum a_j,   j = m and all units that end after it   (4)

with t_m the compute until m ends and the e of all units begun by then.

What is hidden is not free: kernels of collectives hold multiprocessors, a share s of
all (`Schedule.contention`), so that beside them compute runs at 1 - s of its speed,

    step = forward + backward + rest + s (all collectives - what is exposed)        (5)

in both answers. To first order in s: compute that is slower hides more, at most s times
the exposed part, which is left out, as is that collectives slow down, too.

What FSDP2 does, and `simulate` plays (torch/distributed/fsdp/_fully_shard):

- All-gathers run on a stream of their own. In forward that of a unit is issued when the
  unit begins; the host runs ahead, so that it starts when the one before it is done and
  the unit two before has copied its own out. In backward a unit issues the next one's
  when it begins.
- Reduce-scatters run on another stream. A unit whose backward ends first waits for the
  reduce-scatter before it, and then issues its own.
- Collectives of one communicator take turns (NCCL), in the order in which they are
  issued: both streams share one channel, unless told otherwise.
- All-reduces between replicas have a stream and a communicator of their own.

Where the two agree: (2) is exact if

- units do not nest but for the first to begin and last to end, the root, which alone
  is not gathered again,
- no compute lies between the end of a unit and the next beginning or end,
- there are no replicas.

With replicas the rest being so, an all-reduce of (4) starts r_m after t_m. Until t_m
the links carry all that unit m was issued after, as e_k holds the all-gather issued
while m computes; so the two agree but for two units. The root ends right after the
unit before it, in no time, and waits for that one's reduce-scatter first: if the root
all-reduces, (2) may be less by this r, never more. And a unit with an all-reduce but
without a reduce-scatter does not wait for the all-gather in e_k: there (2) may exceed
by this g_k+1. FSDP2 has such units if it shards over one rank only, and then nothing
is gathered: its (2) never exceeds.

Elsewhere (1) overstates forward, where FSDP2 gathers up to two units ahead, by at most
sum g_k; it is exact for equal units. After units that are not gathered again the next
all-gather may start sooner than (3) has it, in forward even: at most its g. Nested
units that end one right after the other wait for each other's reduce-scatter, which (2)
leaves out: at most the r of those that are not the last to end before a beginning, and
the compute between.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTimes:
    """Communication of one FSDP unit; 0.0 for what it does not do.

    Attributes:
        gather_ms: All-gather of its parameters in forward.
        regather_ms: The same in backward, if it reshards after forward.
        reduce_ms: Reduce-scatter of its gradients.
        all_reduce_ms: All-reduce of its gradient shards between replicas.
    """

    gather_ms: float
    regather_ms: float
    reduce_ms: float
    all_reduce_ms: float = 0.0

    def __post_init__(self) -> None:
        values = (self.gather_ms, self.regather_ms, self.reduce_ms, self.all_reduce_ms)
        if not all(math.isfinite(value) and value >= 0.0 for value in values):
            raise ValueError(f"Times must be finite and not negative, got {values}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardEvent:
    """The beginning or the end of a unit's backward.

    Attributes:
        unit: Its index.
        begins: Whether it begins.
        compute_ms: Backward and recomputation from here to the next event.
    """

    unit: int
    begins: bool
    compute_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A step: forward, then backward.

    Attributes:
        units: Communication of each unit.
        forward: Pairs of a unit and the compute from the beginning of its forward to
            that of the next one (or to the end), in order.
        backward: Beginnings and ends of their backward, in order.
        rest_ms: Compute after backward: the optimizer step.
        contention: Share of the device, 0 to 1, that a collective takes from compute
            beside it.
    """

    units: tuple[UnitTimes, ...]
    forward: tuple[tuple[int, float], ...]
    backward: tuple[BackwardEvent, ...]
    rest_ms: float = 0.0
    contention: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.contention <= 1.0:
            raise ValueError(f"`contention` must be 0 to 1, got {self.contention}.")
        begun, ended = set[int](), set[int]()
        for event in self.backward:
            before = begun - ended if not event.begins else ended | begun
            if (event.unit in before) == event.begins:
                raise ValueError(
                    "`backward` must begin and end each unit once, in this order; unit"
                    f" {event.unit} does not."
                )
            (begun if event.begins else ended).add(event.unit)
        if begun != ended:
            raise ValueError(f"The backward of units {begun - ended} does not end.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Where the time of a step goes.

    Attributes:
        compute_ms: Forward, recomputation, backward and optimizer step.
        exposed_forward_ms: What forward waits for all-gathers.
        exposed_backward_ms: What backward waits for collectives, its end included.
        contention_ms: By how much collectives slow the compute that hides them.
    """

    compute_ms: float
    exposed_forward_ms: float
    exposed_backward_ms: float
    contention_ms: float

    @property
    def total_ms(self) -> float:
        """Time of the whole step."""
        exposed_ms = self.exposed_forward_ms + self.exposed_backward_ms
        return self.compute_ms + exposed_ms + self.contention_ms


def linear(schedule: Schedule) -> StepTime:
    """Time of a step by formulas (1) to (5)."""
    units = schedule.units
    gathers = [units[u].gather_ms for u, _ in schedule.forward]
    hidden = [0.0, *(compute for _, compute in schedule.forward)]
    forward = [max(0.0, g - c) for g, c in zip(gathers, hidden, strict=False)]
    return _step_time(schedule, math.fsum(forward), _linear_backward(schedule))


def simulate(schedule: Schedule, *, shared_channel: bool = True) -> StepTime:
    """Play the step event by event.

    Args:
        schedule: The step.
        shared_channel: Whether all-gathers and reduce-scatters take turns, as those of
            one NCCL communicator do; otherwise each kind has the links to itself.
    """
    channels = _Channels(shared=shared_channel)
    forward_ms = channels.forward(schedule)
    backward_ms = channels.backward(schedule, forward_ms) - forward_ms
    compute_forward = math.fsum(compute for _, compute in schedule.forward)
    compute_backward = math.fsum(event.compute_ms for event in schedule.backward)
    return _step_time(
        schedule,
        max(0.0, forward_ms - compute_forward),
        max(0.0, backward_ms - compute_backward),
    )


def _step_time(schedule: Schedule, forward_ms: float, backward_ms: float) -> StepTime:
    """Formula (5), of what is exposed in forward and in backward."""
    gathers = [schedule.units[u].gather_ms for u, _ in schedule.forward]
    others = [
        own_ms
        for unit in schedule.units
        for own_ms in (unit.regather_ms, unit.reduce_ms, unit.all_reduce_ms)
    ]
    hidden_ms = math.fsum((*gathers, *others, -forward_ms, -backward_ms))
    return StepTime(
        compute_ms=_compute_ms(schedule),
        exposed_forward_ms=forward_ms,
        exposed_backward_ms=backward_ms,
        contention_ms=schedule.contention * max(0.0, hidden_ms),
    )


def _compute_ms(schedule: Schedule) -> float:
    forward = (compute for _, compute in schedule.forward)
    backward = (event.compute_ms for event in schedule.backward)
    return math.fsum((*forward, *backward, schedule.rest_ms))


def _linear_backward(schedule: Schedule) -> float:
    """Exposed communication of backward: by how much (2) is longer than the compute."""
    units = schedule.units
    waits = iter(_linear_waits(schedule))
    clock, compute = 0.0, 0.0
    clocks: list[tuple[float, int]] = []  # when each unit ends
    for event in schedule.backward:
        if event.begins:
            clock += next(waits)
        else:
            clocks.append((clock, event.unit))
        clock += event.compute_ms
        compute += event.compute_ms
    end = clock
    reduces, all_reduces = 0.0, 0.0
    for ended, unit in reversed(clocks):
        reduces += units[unit].reduce_ms
        all_reduces += units[unit].all_reduce_ms
        end = max(end, ended + reduces)
        if units[unit].all_reduce_ms:
            end = max(end, ended + units[unit].reduce_ms + all_reduces)
    return end - compute


def _linear_waits(schedule: Schedule) -> Iterator[float]:
    """Wait (3) of each unit in the order in which they begin, with the first gather."""
    units = schedule.units
    begins = [k for k, event in enumerate(schedule.backward) if event.begins]
    edges = [*begins, len(schedule.backward)]
    reduced = 0.0
    first = units[schedule.backward[0].unit].regather_ms if begins else 0.0
    for start, stop in itertools.pairwise(edges):
        inside = schedule.backward[start:stop]
        following = schedule.backward[stop].unit if stop < edges[-1] else None
        gather = 0.0 if following is None else units[following].regather_ms
        compute = math.fsum(event.compute_ms for event in inside)
        yield first + max(0.0, reduced + gather - compute)
        first = 0.0
        reduced = math.fsum(
            units[event.unit].reduce_ms for event in inside if not event.begins
        )


class _Channels:
    """When each kind of collective can start next."""

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._free = {"gather": 0.0, "reduce": 0.0, "all_reduce": 0.0}
        self._copied_out = 0.0  # when the unit gathered last copied its buffer out

    def forward(self, schedule: Schedule) -> float:
        """Play forward; returns when its compute ends."""
        clock = 0.0
        starts: list[float] = []
        gathers = [schedule.units[u].gather_ms for u, _ in schedule.forward]
        for k, (_, compute) in enumerate(schedule.forward):
            ready = starts[k - 2] if k >= 2 else 0.0
            clock = max(clock, self._run("gather", ready, gathers[k]))
            starts.append(clock)
            clock += compute
        self._copied_out = starts[-1] if starts else 0.0
        return clock

    def backward(self, schedule: Schedule, clock: float) -> float:
        """Play backward from a time on; returns when all is done."""
        units = schedule.units
        order = [event.unit for event in schedule.backward if event.begins]
        following = dict(itertools.pairwise(order))
        gathered: dict[int, float] = {}  # unit -> when its all-gather is done
        reduced, end = 0.0, clock
        for event in schedule.backward:
            unit = units[event.unit]
            if event.begins:
                self._gather(schedule, event.unit, gathered)
                if unit.regather_ms:
                    clock = max(clock, gathered[event.unit])
                    self._copied_out = clock
                if (target := following.get(event.unit)) is not None:
                    self._gather(schedule, target, gathered)
            else:
                clock = max(clock, reduced)
                if unit.reduce_ms:
                    reduced = self._run("reduce", clock, unit.reduce_ms)
                    end = max(end, reduced)
                if unit.all_reduce_ms:
                    ready = max(clock, reduced)
                    end = max(end, self._run("all_reduce", ready, unit.all_reduce_ms))
            clock += event.compute_ms
        return max(clock, end)

    def _gather(
        self, schedule: Schedule, unit: int, gathered: dict[int, float]
    ) -> None:
        duration = schedule.units[unit].regather_ms
        if duration and unit not in gathered:
            gathered[unit] = self._run("gather", self._copied_out, duration)

    def _run(self, kind: str, ready: float, duration: float) -> float:
        """Occupy a channel; returns when that is over."""
        if self._shared and kind == "reduce":
            kind = "gather"
        self._free[kind] = max(self._free[kind], ready) + duration
        return self._free[kind]
