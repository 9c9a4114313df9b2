"""Op policies: what happens to every op of an AC unit when it is rerun."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from autosac.candidates.units import Block, Unit
from autosac.tracing.tape import Op, Tape

SAVE = "S"  # its output is kept from the forward pass
RERUN = "R"  # it runs again
SKIP = "-"  # nobody needs its output in backward
VIEW = "V"  # a view: runs again, costs nothing
DETACHED = "X"  # only changes a tensor from outside the unit: must not run twice

# Its number may differ between forward and rerun (see `_compat.IGNORED_OPS`).
_IGNORED_NAME = "aten.detach.default"


class Policy(NamedTuple):
    """For every group of a unit: saved, rerun, or skipped as nobody needs it.

    A tuple, as these are looked up all the time.

    Attributes:
        choices: One of `SAVE`, `RERUN`, `SKIP` per group of `Unit.groups`.
    """

    choices: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPolicy:
    """What to do with the ops of one AC unit, in execution order.

    Attributes:
        fqn: The unit's module.
        names: Overload name of each op.
        actions: One of `SAVE`, `RERUN`, `SKIP`, `VIEW`, `DETACHED` per op.
        training: Mode that the module was traced in; in the other one the plan
            is not in force.
        call_index: Which call of the module in a step it is for, from 0,
        num_calls: and how often the step calls the module.
        chain: Name of the chain that the call is a block of, if it is,
        position: its place there, from 0,
        onward: and what to do with its ops when only its output is made again.
        around: FQN of the module of the nest that the chain is, if it is one.
        until: FQN of the last layer of a slice, of which `fqn` is the first.
    """

    fqn: str
    names: tuple[str, ...]
    actions: str
    training: bool
    call_index: int = 0
    num_calls: int = 1
    chain: str = ""
    position: int = 0
    onward: str = ""
    around: str = ""
    until: str = ""

    @property
    def label(self) -> str:
        """As `Unit.label`."""
        return f"{self.fqn}-{self.until}" if self.until else self.fqn


def block_policies(unit: Unit, policy: Policy) -> list[tuple[Block, Policy]]:
    """The blocks of a chain, each with its part of the chain's policy."""
    found = []
    first = 0
    for block in unit.blocks:
        last = first + len(block.unit.groups)
        found.append((block, Policy(policy.choices[first:last])))
        first = last
    return found


def onward(block: Block, policy: Policy) -> str:
    """Choice for each group of a block, and of its tail, to make its output again.

    Nothing that was saved is made twice. What its own rerun needs is made with it.
    """
    groups = (*block.unit.groups, *block.tail)
    own = policy.choices + RERUN * len(block.tail)
    needed = set(block.outward)
    choices = []
    for g in reversed(range(len(groups))):
        choice = RERUN if own[g] == SKIP and g in needed else own[g]
        if choice == RERUN:
            needed.update(groups[g].inputs)
        choices.append(choice)
    return "".join(reversed(choices))


def op_policies(
    tape: Tape, unit: Unit, policy: Policy, *, training: bool
) -> tuple[OpPolicy, ...]:
    """Spell a policy out for every op of a unit, block by block if it is a chain."""
    if not unit.blocks:
        return (_op_policy(tape, unit, policy, training, after=DETACHED),)
    found = []
    for position, (block, part) in enumerate(block_policies(unit, policy)):
        spelled = _op_policy(tape, block.unit, part, training, after=RERUN)
        ops = [tape.ops[i] for i in block.unit.ops]
        actions = [VIEW if op.is_view else DETACHED for op in ops]
        groups = (*block.unit.groups, *block.tail)
        for group, choice in zip(groups, onward(block, part), strict=True):
            for i in group.ops:
                actions[i] = choice
        kept = [a for a, op in zip(actions, ops, strict=True) if _is_listed(op)]
        found.append(
            replace(
                spelled,
                chain=f"{unit.fqn} {unit.call_index}",
                position=position,
                onward="".join(kept),
                around=unit.around,
            )
        )
    return tuple(found)


def _op_policy(
    tape: Tape, unit: Unit, policy: Policy, training: bool, *, after: str
) -> OpPolicy:
    """Spelled out; `after` its last saved tensor only a chain needs what ops make."""
    ops = [tape.ops[i] for i in unit.ops]
    actions = [
        VIEW if op.is_view else after if op.start >= unit.last_pack else DETACHED
        for op in ops
    ]
    for group, choice in zip(unit.groups, policy.choices, strict=True):
        for position in group.ops:
            actions[position] = choice
    kept = [a for a, op in zip(actions, ops, strict=True) if _is_listed(op)]
    return OpPolicy(
        fqn=unit.fqn,
        names=op_names(tape, unit),
        actions="".join(kept),
        training=training,
        call_index=unit.call_index,
        num_calls=unit.num_calls,
        until=unit.until,
    )


def op_names(tape: Tape, unit: Unit) -> tuple[str, ...]:
    """Names of the ops of a unit for which an op policy says what to do."""
    ops = (tape.ops[i] for i in unit.ops)
    return tuple(op.name for op in ops if _is_listed(op))


def _is_listed(op: Op) -> bool:
    return op.name != _IGNORED_NAME


def chosen_by(
    tape: Tape, units: Iterable[Unit], spelled: Iterable[OpPolicy]
) -> dict[Unit, Policy]:
    """The units and policies that `op_policies` spelled out; the inverse of it.

    Args:
        tape: The traced step.
        units: Candidates, chains included.
        spelled: Op policies of any number of them.

    Raises:
        ValueError: None of the candidates is the module call or the chain.
    """
    wanted: dict[tuple[str, tuple[tuple[str, int], ...]], list[OpPolicy]] = {}
    chains: dict[str, list[OpPolicy]] = {}
    for one in spelled:
        if one.chain:
            chains.setdefault(one.chain, []).append(one)
        else:
            wanted["", ((one.label, one.call_index),)] = [one]
    for parts in chains.values():
        parts.sort(key=lambda one: one.position)
        names = tuple((one.fqn, one.call_index) for one in parts)
        wanted[parts[0].around, names] = parts
    chosen = {}
    for unit in units:
        calls = [block.unit for block in unit.blocks] or [unit]
        names = tuple((u.label, u.call_index) for u in calls)
        parts = wanted.pop((unit.around, names), [])
        if parts:
            pairs = zip(calls, parts, strict=True)
            choices = [_group_choices(tape, call, part) for call, part in pairs]
            chosen[unit] = Policy("".join(choices))
    if wanted:
        _, calls_left = next(iter(wanted))
        missing = ", ".join(fqn for fqn, _ in calls_left)
        raise ValueError(f"{missing} is no candidate of this profile.")
    return chosen


def _group_choices(tape: Tape, unit: Unit, spelled: OpPolicy) -> str:
    kept = [i for i, op in enumerate(unit.ops) if _is_listed(tape.ops[op])]
    actions = dict(zip(kept, spelled.actions, strict=True))
    return "".join(actions[group.ops[0]] for group in unit.groups)
