"""Parallel plans that people write by hand: every block a unit, one rule for AC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.formulating import ParallelFormulation
from autosac.solvers.fsdp import FsdpChoice, schedule, step_time
from autosac.step.ledger import Ledger
from autosac.step.tape import Tape
from autosac.units import curves
from autosac.units.policies import RERUN, SAVE, SKIP, Policy
from autosac.units.unit import Unit

_HEAVY = ("aten.mm.", "aten.addmm.", "aten.bmm.", "scaled_dot_product")


@dataclass(frozen=True, kw_only=True)
class ByHand:
    """A rule.

    Attributes:
        name: For people.
        saved: Names of a block's ops in order -> places of those whose output is kept.
    """

    name: str
    saved: Callable[[Sequence[str]], set[int]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rule takes at one sharding degree; the ledger is that of a rank."""

    degree: int
    ledger: Ledger
    peak_bytes: int
    step_ms: float
    recompute_ms: float
    exposed_ms: float


def _heavy(names: Sequence[str]) -> set[int]:
    return {i for i, name in enumerate(names) if any(op in name for op in _HEAVY)}


def _half_of_products(names: Sequence[str]) -> set[int]:
    """Attention, and every second product from the first on, as in torchtitan."""
    products = [i for i, name in enumerate(names) if name.startswith("aten.mm.")]
    return _heavy(names) - set(products[1::2])


ALL_RECOMPUTED = ByHand(name="blocks, all recomputed", saved=lambda names: set())
HALF_SAVED = ByHand(
    name="blocks, attention and every second product saved", saved=_half_of_products
)
BY_HAND = (
    ALL_RECOMPUTED,
    ByHand(name="blocks, products and attention saved", saved=_heavy),
)


def at_degree(
    form: ParallelFormulation, spec: ClusterSpec, degree: int, rule: ByHand
) -> Outcome:
    """Every block an FSDP unit that reshards and an AC unit that follows a rule."""
    problem = form.problem(spec, degree, 1)
    blocks = [c.fqn.rpartition(".")[2].isdigit() for c in form.candidates]
    pairs = zip(form.candidates, blocks, strict=True)
    names = {candidate.fqn for candidate, is_block in pairs if is_block}
    choice = FsdpChoice(
        units=(True, *blocks[1:]),
        reshard=(False, *blocks[1:]),
        points=(None,) * len(form.units),
    )
    tape = form.ranks.tape
    chosen = {u: policy(tape, u, rule) for u in form.units if u.fqn in names}
    times = list(problem.compute_ms)
    for unit, at in zip(form.units, problem.rerun_at, strict=True):
        if unit in chosen:
            times[at] += curves.recompute_ms(unit, chosen[unit])
    step = step_time.simulate(schedule(replace(problem, compute_ms=times), choice))
    sharding = form.sharding(choice, degree, spec.num_gpus // degree)
    timeline = form.ranks.timeline(sharding, chosen)
    return Outcome(
        degree=degree,
        ledger=timeline.ledger,
        peak_bytes=timeline.peak_bytes,
        step_ms=step.total_ms,
        recompute_ms=sum(times) - sum(problem.compute_ms),
        exposed_ms=step.exposed_forward_ms + step.exposed_backward_ms,
    )


def policy(tape: Tape, unit: Unit, rule: ByHand) -> Policy:
    """Save what the rule says, rerun what backward then needs."""
    saved = rule.saved([tape.ops[i].name for i in unit.ops])
    choices = []
    wanted: set[int] = set()
    for index in reversed(range(len(unit.groups))):
        group = unit.groups[index]
        saves = not saved.isdisjoint(group.ops) and not group.unsavable
        if saves or group.pinned:
            choices.append(SAVE)
        elif group.needed or index in wanted:
            choices.append(RERUN)
            wanted.update(group.inputs)
        else:
            choices.append(SKIP)
    return Policy("".join(reversed(choices)))
