"""Op policies: what happens to every op of an AC unit when it is rerun."""

from __future__ import annotations

from dataclasses import dataclass

from autosac.tape import Tape
from autosac.units import Unit

SAVE = "S"  # its output is kept from the forward pass
RERUN = "R"  # it runs again
SKIP = "-"  # nobody needs its output in backward
VIEW = "V"  # a view: runs again, costs nothing
DETACHED = "X"  # only changes a tensor from outside the unit: must not run twice

# Its number may differ between forward and rerun (see `_compat.IGNORED_OPS`).
_IGNORED_NAME = "aten.detach.default"


@dataclass(frozen=True, slots=True)
class Policy:
    """For every group of a unit: saved, rerun, or skipped as nobody needs it.

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
    """

    fqn: str
    names: tuple[str, ...]
    actions: str
    training: bool
    call_index: int = 0
    num_calls: int = 1


def op_policy(tape: Tape, unit: Unit, policy: Policy, *, training: bool) -> OpPolicy:
    """Spell a policy out for every op of a unit."""
    ops = [tape.ops[i] for i in unit.ops]
    actions = [
        VIEW if op.is_view else RERUN if op.start >= unit.last_pack else DETACHED
        for op in ops
    ]
    for group, choice in zip(unit.groups, policy.choices, strict=True):
        for position in group.ops:
            actions[position] = choice
    kept = [i for i, op in enumerate(ops) if op.name != _IGNORED_NAME]
    return OpPolicy(
        fqn=unit.fqn,
        names=tuple(ops[i].name for i in kept),
        actions="".join(actions[i] for i in kept),
        training=training,
        call_index=unit.call_index,
        num_calls=unit.num_calls,
    )


def group_policy(tape: Tape, unit: Unit, spelled: OpPolicy) -> Policy:
    """The policy that `op_policy` spelled out; the inverse of it."""
    kept = [i for i, op in enumerate(unit.ops) if tape.ops[op].name != _IGNORED_NAME]
    actions = dict(zip(kept, spelled.actions, strict=True))
    return Policy("".join(actions[group.ops[0]] for group in unit.groups))
