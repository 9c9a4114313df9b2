"""Which modules of a step may be FSDP units, and when their hooks run.

Candidates are blocks (modules that have siblings like themselves) and their children
that hold a good part of a block's parameters; outside blocks all modules with
parameters that do not lie around blocks. That leaves out what nobody would make a unit
of its own, such as a norm inside a layer, and keeps the MILP small.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from autosac.errors import ArgumentError, UnsupportedError
from autosac.parallel.fsdp_schedule import Hooks, Schedule
from autosac.parallel.sharding import unit_around
from autosac.solvers.fsdp import owner_of_shared
from autosac.step.tape import Parameter, Tape

_LEAST_SHARE = 0.05  # of a block's parameters, to be a candidate inside it


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A module that may be an FSDP unit; the first one is the model itself.

    Attributes:
        fqn: Its name.
        module: Its index in the module tree.
        parent: Place of the nearest candidate around it, None for the model.
        hooks: When its hooks run.
        parameters: Those of no candidate inside it.
        can_be_unit: Not so if that would part a parameter from modules that share or
            read it.
        kind: Equal for modules that look alike, None for one that is alone.
    """

    fqn: str
    module: int
    parent: int | None
    hooks: Hooks
    parameters: tuple[Parameter, ...]
    can_be_unit: bool
    kind: int | None


def find_candidates(
    schedule: Schedule, param_dtype: str | None, given: Collection[int] | None = None
) -> list[Candidate]:
    """Candidates of a step, each after those around it.

    Args:
        schedule: Places of hooks.
        param_dtype: Type of gathered parameters, None for their own.
        given: Modules that are units in any case, each decided by itself; None for
            candidates that the MILP decides on.

    Raises:
        ArgumentError: One that is given has a parameter that is read outside of it, or
            its output is changed in place.
        UnsupportedError: The model itself cannot be a unit, or one that is given.
    """
    tape = schedule.tape
    looks = _looks(tape)
    try:
        hooks = {0: _hooks(schedule, 0, param_dtype)}
    except UnsupportedError as error:
        raise UnsupportedError(
            "The model's own forward is not called once in the step, or its output gets"
            " no gradient; call the model itself and give a loss of its output."
        ) from error
    for module in sorted({*_wanted(tape, looks), *(given or ())}):
        try:
            hooks[module] = _hooks(schedule, module, param_dtype)
        except UnsupportedError as error:
            if given and module in given:
                raise _not_modelled(tape, module, given, error) from error
            continue
        why = schedule.why_gathered(module) if module else None
        if why and given and module in given:
            raise _no_unit(tape.modules[module].fqn, why)
        if why:
            del hooks[module]
    modules = sorted(hooks)
    places = {module: place for place, module in enumerate(modules)}
    parents: list[int | None] = [None]
    for module in modules[1:]:
        around = tape.modules.ancestors(module)
        parents.append(next(places[outer] for outer in around if outer in places))
    owned, barred = _owned(schedule, modules, parents)
    for module in sorted({modules[place] for place in barred} & {*(given or ())}):
        fqn = tape.modules[module].fqn
        if why := schedule.reads.outside(fqn, tape.parameters):
            raise _no_unit(fqn, why)
    counts = Counter(looks.get(module) for module in modules)
    kinds: dict[Hashable, int] = {}
    return [
        Candidate(
            fqn=tape.modules[module].fqn,
            module=module,
            parent=parent,
            hooks=hooks[module],
            parameters=tuple(owned[place]),
            can_be_unit=place not in barred,
            kind=kinds.setdefault(looks[module], len(kinds))
            if given is None and counts[looks[module]] > 1
            else None,
        )
        for place, (module, parent) in enumerate(zip(modules, parents, strict=True))
    ]


def with_parameters(tape: Tape, modules: Collection[int]) -> set[int]:
    """Those of some modules that have a parameter which no other of them holds."""
    names = {tape.modules[module].fqn: module for module in modules}
    holders = set()
    for parameter in tape.parameters:
        for fqn in parameter.fqns:
            while fqn and fqn not in names:
                fqn = fqn.rpartition(".")[0]
            holders.add(fqn)
    return {module for fqn, module in names.items() if fqn in holders}


def _hooks(schedule: Schedule, module: int, param_dtype: str | None) -> Hooks:
    """Hooks of a module.

    Raises:
        UnsupportedError: FSDP2's memory with it as a unit is not modelled; says why.
    """
    call, hooks = schedule.call(module), schedule.hooks(module)
    unit = f"FSDP unit `{schedule.tape.modules[module].fqn}`"
    if call is None or hooks is None:
        raise UnsupportedError(f"{unit} is never called itself; name what is.")
    for dtype in call.input_dtypes if param_dtype and module else ():
        if dtype != param_dtype:
            raise UnsupportedError(
                f"{unit} gets arguments of {dtype}, which FSDP2 would cast to"
                f" {param_dtype}; cast them in the model."
            )
    if hooks.pre_backward is None:
        raise UnsupportedError(f"{unit} takes no part in backward.")
    return hooks


def _no_unit(fqn: str, why: str) -> ArgumentError:
    return ArgumentError(
        f"`fsdp_units` names `{fqn}`, which can be no FSDP unit: {why}."
    )


def _not_modelled(
    tape: Tape, module: int, given: Collection[int], error: UnsupportedError
) -> UnsupportedError:
    """Says why a module that is given cannot be a unit."""
    around = next((m for m in tape.modules.ancestors(module) if m in given), None)
    pattern = ""
    if around is not None:
        pattern = (
            f" It lies in `{tape.modules[around].fqn}`, which is named as well: a"
            " pattern such as 'blocks.*' stands for all modules inside blocks, too, and"
            " the class of the blocks for them alone."
        )
    return UnsupportedError(
        f"`fsdp_units` names `{tape.modules[module].fqn}`, whose memory as an FSDP unit"
        f" is not modelled: {error}{pattern}"
    )


def _looks(tape: Tape) -> dict[int, Hashable]:
    """Module -> what modules that look alike have in common."""
    parts: dict[int, list[Hashable]] = defaultdict(list)
    for parameter in tape.parameters:
        for fqn in parameter.fqns:
            owner, _, name = fqn.rpartition(".")
            module = tape.modules.index.get(owner)
            if module is None:  # another name of a module that several share
                continue
            for around in (module, *tape.modules.ancestors(module)):
                inner = owner[len(tape.modules[around].fqn) :]
                parts[around].append((inner, name, parameter.shape, parameter.dtype))
    return {
        module: (
            re.sub(r"\d+", "*", tape.modules[module].fqn),
            tape.modules[module].class_name,
            tuple(parameter_looks),
        )
        for module, parameter_looks in parts.items()
    }


def _wanted(tape: Tape, looks: Mapping[int, Hashable]) -> list[int]:
    """Modules with parameters that are candidates if their hooks are known."""
    tree = tape.modules
    repeated = Counter((tree[m].parent, look) for m, look in looks.items() if m)
    blocks: set[int] = set()
    for module, look in looks.items():
        is_repeated = module and repeated[tree[module].parent, look] > 1
        # A list of parts that are alike is no block; they must do something together.
        if is_repeated and not tree[module].is_leaf:
            blocks.add(module)
    outermost = {m for m in blocks if not blocks & {*tree.ancestors(m)}}
    around = {outer for block in outermost for outer in tree.ancestors(block)}
    wanted = []
    for module in sorted(looks):
        block = next((b for b in tree.ancestors(module) if b in outermost), None)
        if module in outermost:
            wanted.append(module)
        elif block is not None:
            least = _LEAST_SHARE * tree[block].parameter_bytes
            is_large = tree[module].parameter_bytes >= least
            if tree[module].parent == block and is_large:
                wanted.append(module)
        elif module and module not in around:
            wanted.append(module)
    return wanted


def _owned(
    schedule: Schedule, modules: Sequence[int], parents: Sequence[int | None]
) -> tuple[list[list[Parameter]], set[int]]:
    """Parameters of each candidate, and candidates that must not be units."""
    tape, homes = schedule.tape, schedule.reads.homes
    places = {tape.modules[module].fqn: place for place, module in enumerate(modules)}
    owned: list[list[Parameter]] = [[] for _ in modules]
    barred: set[int] = set()
    for parameter in tape.parameters:
        names = [*parameter.fqns, *(homes[fqn] for fqn in parameter.fqns)]
        holders = {places[unit_around(name, places)] for name in names}
        owner, inside = owner_of_shared(parents, sorted(holders))
        owned[owner].append(parameter)
        barred |= inside
    return owned, barred - {0}
