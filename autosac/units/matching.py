"""Which units op policies are of, say those of a plan from a file."""

from __future__ import annotations

from collections.abc import Iterable

from autosac.step.tape import Tape
from autosac.units.policies import OpPolicy, Policy, is_listed
from autosac.units.streamed import StreamedModel
from autosac.units.unit import Unit

# Module of a nest, what lies in far memory, and calls with their numbers.
_Name = tuple[str, tuple[object, ...], tuple[tuple[str, int], ...]]
_NOTHING_FAR = ((), False, False)


def chosen_by(
    tape: Tape, units: Iterable[Unit], spelled: Iterable[OpPolicy]
) -> dict[Unit, Policy]:
    """The units and policies that `Unit.op_policies` spelled out; the inverse of it.

    Args:
        tape: The traced step.
        units: Candidates, chains included.
        spelled: Op policies of any number of them.

    Raises:
        ValueError: None of the candidates is the module call or the chain.
    """
    wanted: dict[_Name, list[OpPolicy]] = {}
    chains: dict[str, list[OpPolicy]] = {}
    for one in spelled:
        if one.chain:
            chains.setdefault(one.chain, []).append(one)
        else:
            calls = ((one.label, one.call_index),)
            wanted["", one.far_kind, calls] = [one]
    for parts in chains.values():
        parts.sort(key=lambda one: one.position)
        names = tuple((one.fqn, one.call_index) for one in parts)
        wanted[parts[0].around, _NOTHING_FAR, names] = parts
    chosen: dict[Unit, Policy] = {}
    for unit in units:
        names = tuple((call.label, call.call_index) for call in unit.calls)
        parts = wanted.pop((unit.around, unit.far_kind, names), [])
        if isinstance(unit, StreamedModel) and parts:
            chosen[unit] = unit.policy_of(parts[0])
        elif parts:
            pairs = zip(unit.calls, parts, strict=True)
            choices = [_group_choices(tape, call, part) for call, part in pairs]
            chosen[unit] = Policy("".join(choices))
    if wanted:
        *_, calls_left = next(iter(wanted))
        missing = ", ".join(fqn for fqn, _ in calls_left)
        raise ValueError(f"{missing} is no candidate of this profile.")
    return chosen


def _group_choices(tape: Tape, unit: Unit, spelled: OpPolicy) -> str:
    kept = [i for i, op in enumerate(unit.ops) if is_listed(tape.ops[op])]
    actions = dict(zip(kept, spelled.actions, strict=True))
    return "".join(actions[group.ops[0]] for group in unit.groups)
