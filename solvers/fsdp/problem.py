"""FSDP units, what they do to memory and time: the numbers of the parallel MILP.

Positions are instants of the step in order, as in `sac.problem`: forward, backward,
optimizer. A module's forward is ``forward[0] <= q < forward[1]`` and its backward
``backward[0] <= q < backward[1]``. Three of them are instants of its own, at which
nothing but its collective happens: the first ones are where its parameters are gathered
if it is an FSDP unit, and ``backward[1] - 1`` is where its gradients are reduced.

A parameter belongs to the nearest FSDP unit around it. Of unit m, with G, R and S the
bytes of its parameters, of its reduce-scatter input and of its gradient shards, alive
are, besides what is there in any case (shards of parameters, optimizer state):

    G  parameters            in its forward, and in its backward until its last
                             instant; in between if it stays                         (1)
    G  all-gather buffer     in forward until the next unit begins                   (2)
    G  all-gather buffer     in backward from after the unit before began until its
                             own first instant, if it does not stay; a root without
                             parameters of its own gathers nothing ahead             (3)
       gradients             of each parameter from `grad_from` until backward ends  (4)
    R  reduce-scatter input  from its last instant until that of the next one        (5)
    S  gradient shards       from its last instant on                                (6)
       copies of the largest G or R always: threads that send may be slow to drop
                             them                                                    (7)

This is how FSDP2 allocates (torch/distributed/fsdp/_fully_shard), host's order and
collectives with one input buffer in flight; padding is in the bytes that are given.
Left out: what is copied at an instant beside the buffers above. The root is always a
unit and stays gathered from forward to backward, FSDP2's default for it. No collective
is hidden by waits for copies to far memory and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from ..sac.problem import SacProblem, live_bytes
from .collectives import FREE, AffineCost
from .step_time import BackwardEvent, Schedule, UnitTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpModule:
    """A module that may be an FSDP unit, and the parameters that are its own.

    Own parameters are those of no module inside it in the problem; one that several
    modules share is the own parameter of the innermost module around all of these, and
    none of the modules between may be a unit.

    Attributes:
        fqn: The module.
        parent: Index of the nearest module around it; None for the root, which is
            the first one.
        forward: First position of its forward, and the first one after.
        backward: First position of its backward, and the first one after.
        gather_bytes: Its own parameters, whole, in the dtype that is gathered.
        grad_bytes: Their gradients, whole.
        reduce_bytes: The same in the dtype that is reduced; 0 if they are frozen.
        shard_grad_bytes: This rank's shard of the gradients.
        grad_from: First position at which the gradients are there; None for the first
            of its backward.
        dtype: Of its own parameters, None if there are none.
        can_be_unit: Whether it may be one.
        kind: Modules of one number, 0 or more, are units together or not at all; None
            for those that decide alone.
    """

    fqn: str
    parent: int | None
    forward: tuple[int, int]
    backward: tuple[int, int]
    gather_bytes: int = 0
    grad_bytes: int = 0
    reduce_bytes: int = 0
    shard_grad_bytes: int = 0
    grad_from: int | None = None
    dtype: str | None = None
    can_be_unit: bool = True
    kind: int | None = None

    @property
    def grads_from(self) -> int:
        """First position at which the module's gradients are there."""
        return self.backward[0] if self.grad_from is None else self.grad_from


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpProblem:
    """Which modules are FSDP units, which of them reshard, what is recomputed.

    Attributes:
        modules: The root, then the others, every one after the module around it.
        sac: AC units, the budget per rank, and the live memory of a rank without FSDP
            units and AC: all but (1) to (7).
        inside: Modules strictly inside each AC unit: none may be an FSDP unit with it.
        rerun_at: Position of backward at which each AC unit reruns.
        compute_ms: Compute at each position.
        gather: Cost of an all-gather, by the bytes of the whole buffer.
        reduce: Cost of a reduce-scatter, by the bytes of the whole buffer.
        all_reduce: Cost of the all-reduce between replicas, by the same bytes; its
            own buffer is smaller by the sharding degree.
        late_copies: How many of (7) there may be at once.
        host_bytes: Most bytes of a rank in far memory; None for as many as one likes.
        left_out: AC units that a solve does without, so that it ends sooner.
        contention: Share of the device that a collective takes from compute beside it.
    """

    modules: tuple[FsdpModule, ...]
    sac: SacProblem
    inside: tuple[frozenset[int], ...]
    rerun_at: tuple[int, ...]
    compute_ms: tuple[float, ...]
    gather: AffineCost
    reduce: AffineCost
    all_reduce: AffineCost = FREE
    late_copies: int = 0
    host_bytes: int | None = None
    left_out: frozenset[int] = frozenset()
    contention: float = 0.0

    def __post_init__(self) -> None:
        _check_lengths(self)
        _check_tree(self.modules, len(self.compute_ms))

    def with_budget(self, budget_bytes: int) -> FsdpProblem:
        """The problem with another cap."""
        return replace(self, sac=replace(self.sac, budget_bytes=budget_bytes))

    def raised(self, added_bytes: Sequence[int]) -> FsdpProblem:
        """The problem with more live memory at each position."""
        pairs = zip(self.sac.base_bytes, added_bytes, strict=True)
        base = tuple(before + added for before, added in pairs)
        return replace(self, sac=replace(self.sac, base_bytes=base))

    def keeps_host(self, choice: FsdpChoice) -> bool:
        """Whether AC units have no more in far memory than they may."""
        if self.host_bytes is None:
            return True
        units = zip(self.sac.units, choice.points, strict=True)
        far = (unit.points[k].far_bytes for unit, k in units if k is not None)
        return sum(far) <= self.host_bytes

    def is_below(self, other: FsdpProblem) -> bool:
        """Whether no choice takes more memory anywhere than in another problem.

        The two are of one step at two sharding degrees: all but bytes and times are the
        same in both.
        """
        ours, theirs = self.sac.base_bytes, other.sac.base_bytes
        return (
            all(a <= b for a, b in zip(ours, theirs, strict=True))
            and self.late_copies <= other.late_copies
            and all(
                a.gather_bytes <= b.gather_bytes
                and a.reduce_bytes <= b.reduce_bytes
                and a.shard_grad_bytes <= b.shard_grad_bytes
                and a.grad_bytes <= b.grad_bytes
                for a, b in zip(self.modules, other.modules, strict=True)
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpChoice:
    """Which modules are FSDP units, which reshard, and the point of each AC unit.

    Attributes:
        units: Whether each module is an FSDP unit; the root is one.
        reshard: Whether each module is a unit that frees its parameters after forward
            and gathers them again in backward; the root does not.
        points: Point of each AC unit's curve, None if it is not under AC.
    """

    units: tuple[bool, ...]
    reshard: tuple[bool, ...]
    points: tuple[int | None, ...]


def owners(problem: FsdpProblem, units: Sequence[bool]) -> list[int]:
    """The unit that the own parameters of each module belong to."""
    owner: list[int] = []
    for index, module in enumerate(problem.modules):
        if units[index] or module.parent is None:
            owner.append(index)
        else:
            owner.append(owner[module.parent])
    return owner


def owner_of_shared(
    parents: Sequence[int | None], holders: Sequence[int]
) -> tuple[int, frozenset[int]]:
    """Where a parameter that several modules share belongs.

    Args:
        parents: Module around each module, None for the root; see `FsdpProblem`.
        holders: Modules that hold the parameter.

    Returns:
        The innermost module around all holders (a holder itself if the others are
        inside it), and those that must not be units, because the parameter would be
        gathered with one of them and missing elsewhere.

    Raises:
        ValueError: There are no holders.
    """
    if not holders:
        raise ValueError("`holders` must name at least one module.")
    paths = []
    for holder in holders:
        path: list[int] = []
        ancestor: int | None = holder
        while ancestor is not None:
            path.append(ancestor)
            ancestor = parents[ancestor]
        paths.append(path[::-1])
    common = [
        same for same, *others in zip(*paths, strict=False) if {same} >= {*others}
    ]
    inside = {index for path in paths for index in path[len(common) :]}
    return common[-1], frozenset(inside)


def broken_rules(problem: FsdpProblem, choice: FsdpChoice) -> tuple[str, ...]:
    """Say which rules of FSDP2 and AC a choice breaks, a sentence for each."""
    modules, units = problem.modules, choice.units
    broken = []
    if not units[0] or choice.reshard[0]:
        broken.append("The root must be a unit that stays gathered.")
    kinds: dict[int, bool] = {}
    owner = owners(problem, units)
    dtypes: dict[int, set[str]] = {}
    for index, module in enumerate(modules):
        if index and units[index] and not module.can_be_unit:
            broken.append(f"{module.fqn!r} cannot be a unit.")
        if choice.reshard[index] and not units[index]:
            broken.append(f"{module.fqn!r} reshards without being a unit.")
        kind = -1 - index if module.kind is None else module.kind
        if kinds.setdefault(kind, units[index]) != units[index]:
            broken.append(f"{module.fqn!r} decides otherwise than its kind.")
        if module.gather_bytes:
            dtypes.setdefault(owner[index], set()).add(module.dtype or "")
    for index, module in enumerate(modules):
        if index and units[index] and index not in dtypes:
            broken.append(f"{module.fqn!r} is a unit without parameters.")
        if len(dtypes.get(index, ())) > 1:
            broken.append(
                f"{module.fqn!r} would gather parameters of {sorted(dtypes[index])}."
            )
    if not problem.keeps_host(choice):
        broken.append(f"AC units have over {problem.host_bytes} bytes in far memory.")
    for u, point in enumerate(choice.points):
        if point is None:
            continue
        for index in sorted(problem.inside[u]):
            if units[index]:
                broken.append(
                    f"The AC unit {problem.sac.units[u].fqn!r} lies around the FSDP"
                    f" unit {modules[index].fqn!r}."
                )
        if any(choice.points[v] is not None for v in problem.sac.ancestry(u)[1:]):
            broken.append(f"The AC unit {problem.sac.units[u].fqn!r} is nested.")
    return tuple(broken)


def live(problem: FsdpProblem, choice: FsdpChoice) -> npt.NDArray[np.float64]:
    """Live memory of a rank at each position, (7) included; whole numbers."""
    weights = [
        [int(k == point) for k in range(len(unit.points))]
        for unit, point in zip(problem.sac.units, choice.points, strict=True)
    ]
    return mixed_live(problem, choice.units, choice.reshard, weights)


def mixed_live(
    problem: FsdpProblem,
    units: Sequence[bool],
    reshard: Sequence[float],
    weights: Sequence[Sequence[float]],
) -> npt.NDArray[np.float64]:
    """Live memory, with shares of 0 to 1 of what reshards and of each AC point."""
    points = np.array(live_bytes(problem.sac, weights))
    return points + sharded_live(problem, units, reshard)


def sharded_live(
    problem: FsdpProblem, units: Sequence[bool], reshard: Sequence[float]
) -> npt.NDArray[np.float64]:
    """What (1) to (7) add to the live memory at each position."""
    modules = problem.modules
    size = len(problem.compute_ms)
    change = np.zeros(size + 1)

    def add(start: int, stop: int, nbytes: float) -> None:
        if stop > start:
            change[start] += nbytes
            change[stop] -= nbytes

    owner = owners(problem, units)
    gather, reduce, shard = ([0] * len(modules) for _ in range(3))
    for index, module in enumerate(modules):
        unit = owner[index]
        gather[unit] += module.gather_bytes
        reduce[unit] += module.reduce_bytes
        shard[unit] += module.shard_grad_bytes
        add(module.grads_from, modules[unit].backward[1], module.grad_bytes)  # (4)
    chosen = [index for index in range(len(modules)) if units[index]]
    for unit in chosen:
        (f0, f1), (b0, b1) = modules[unit].forward, modules[unit].backward
        add(f0, f1, gather[unit])  # (1)
        add(f1, b0, gather[unit] * (1.0 - reshard[unit]))
        add(b0, b1 - 1, gather[unit])
        add(b1 - 1, size, shard[unit])  # (6)
    by_forward = sorted(chosen, key=lambda unit: modules[unit].forward[0])
    ends = [modules[unit].forward[0] for unit in by_forward[1:]]
    for unit, end in zip(by_forward, [*ends, modules[0].forward[1]], strict=True):
        add(modules[unit].forward[0], end, gather[unit])  # (2)
    owning = (unit for unit in chosen if gather[unit])
    by_backward = sorted(owning, key=lambda unit: modules[unit].backward[0])
    for before, unit in pairwise(by_backward):
        start, end = modules[before].backward[0] + 1, modules[unit].backward[0] + 1
        add(start, end, gather[unit] * reshard[unit])  # (3)
    by_end = sorted(chosen, key=lambda unit: modules[unit].backward[1])
    ends = [modules[unit].backward[1] - 1 for unit in by_end[1:]]
    for unit, end in zip(by_end, [*ends, modules[0].backward[1]], strict=True):
        add(modules[unit].backward[1] - 1, end, reduce[unit])  # (5)
    late = problem.late_copies * max(*gather, *reduce)  # (7)
    return np.cumsum(change[:-1]) + late


def schedule(problem: FsdpProblem, choice: FsdpChoice) -> Schedule:
    """What `step_time` needs to know of a choice."""
    modules = problem.modules
    extra = [0.0] * len(problem.compute_ms)
    waits_ms = 0.0
    for unit, place, rerun_at in zip(
        problem.sac.units, choice.points, problem.rerun_at, strict=True
    ):
        if place is not None:
            point = unit.points[place]
            extra[rerun_at] += point.rerun_ms
            waits_ms += point.waits_ms
    times = map(float.__add__, map(float, problem.compute_ms), extra)
    until = [0.0, *accumulate(times)]
    owner = owners(problem, choice.units)
    gather, reduce = [0] * len(modules), [0] * len(modules)
    for index, module in enumerate(modules):
        gather[owner[index]] += module.gather_bytes
        reduce[owner[index]] += module.reduce_bytes
    chosen = [index for index in range(len(modules)) if choice.units[index]]
    number = {unit: k for k, unit in enumerate(chosen)}
    root = modules[0]
    by_forward = sorted(chosen, key=lambda unit: modules[unit].forward[0])
    starts = [modules[unit].forward[0] for unit in by_forward] + [root.backward[0]]
    events = [(modules[unit].backward[0], 1, unit) for unit in chosen]
    events += [(modules[unit].backward[1], 0, unit) for unit in chosen]
    events.sort()
    stops = [position for position, _, _ in events[1:]] + [root.backward[1]]
    return Schedule(
        units=tuple(
            UnitTimes(
                gather_ms=problem.gather.ms(gather[unit]),
                regather_ms=problem.gather.ms(gather[unit])
                if choice.reshard[unit]
                else 0.0,
                reduce_ms=problem.reduce.ms(reduce[unit]),
                all_reduce_ms=problem.all_reduce.ms(reduce[unit]),
            )
            for unit in chosen
        ),
        forward=tuple(
            (number[unit], until[stop] - until[start])
            for unit, (start, stop) in zip(by_forward, pairwise(starts), strict=True)
        ),
        backward=tuple(
            BackwardEvent(
                unit=number[unit],
                begins=bool(begins),
                compute_ms=until[stop] - until[position],
            )
            for (position, begins, unit), stop in zip(events, stops, strict=True)
        ),
        rest_ms=until[root.forward[0]] + until[-1] - until[root.backward[1]] + waits_ms,
        contention=problem.contention,
    )


def _check_lengths(problem: FsdpProblem) -> None:
    sac = problem.sac
    if len(problem.compute_ms) != len(sac.base_bytes):
        raise ValueError(
            "`compute_ms` must have a time for each of the"
            f" {len(sac.base_bytes)} positions, got {len(problem.compute_ms)}."
        )
    if problem.late_copies < 0:
        raise ValueError(
            f"`late_copies` must not be negative, got {problem.late_copies}."
        )
    for name in ("inside", "rerun_at"):
        if len(getattr(problem, name)) != len(sac.units):
            raise ValueError(
                f"`{name}` must have an entry for each of {len(sac.units)} AC units,"
                f" got {len(getattr(problem, name))}."
            )
    if any(not (math.isfinite(t) and t >= 0.0) for t in problem.compute_ms):
        raise ValueError("`compute_ms` must be finite and not negative.")
    if not problem.modules or problem.modules[0].parent is not None:
        raise ValueError("`modules` must begin with the root, which has no `parent`.")
    low, high = problem.modules[0].backward
    for position in problem.rerun_at:
        if not low <= position < high:
            raise ValueError(f"`rerun_at` must lie in backward, got {position}.")
    for indices in problem.inside:
        if any(not 0 <= index < len(problem.modules) for index in indices):
            raise ValueError("`inside` must name modules by their index.")


def _check_tree(modules: Sequence[FsdpModule], num_positions: int) -> None:
    root = modules[0]
    if not 0 <= root.forward[0] < root.forward[1] <= root.backward[0]:
        raise ValueError("The root's forward must come before its backward.")
    if not root.backward[0] < root.backward[1] <= num_positions:
        raise ValueError(f"The root's backward must end within {num_positions}.")
    for index, module in enumerate(modules):
        if index:
            if module.parent is None or not 0 <= module.parent < index:
                raise ValueError(
                    f"`parent` of {module.fqn!r} must be a module before it, got"
                    f" {module.parent}."
                )
            around = modules[module.parent]
            for name in ("forward", "backward"):
                (low, high), (start, stop) = (
                    getattr(around, name),
                    getattr(module, name),
                )
                if not low < start < stop <= high:
                    raise ValueError(
                        f"`{name}` of {module.fqn!r} must lie within that of"
                        f" {around.fqn!r}, after its first position."
                    )
        if not 0 <= module.grads_from < module.backward[1]:
            raise ValueError(f"`grad_from` of {module.fqn!r} must be before its end.")
    for name in ("forward", "backward"):
        _check_siblings(modules, name)


def _check_siblings(modules: Sequence[FsdpModule], name: str) -> None:
    ordered = sorted(modules[1:], key=lambda m: (m.parent or 0, getattr(m, name)))
    for before, after in pairwise(ordered):
        overlap = getattr(before, name)[1] > getattr(after, name)[0]
        if before.parent == after.parent and overlap:
            raise ValueError(f"`{name}` of {before.fqn!r} and {after.fqn!r} overlap.")
