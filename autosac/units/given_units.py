"""Which modules may be AC units, where the user says so.

A chain, a nest or a slice runs several modules: it is allowed if all of them are. None
of the three is where FSDP units are given, as each of these gathers its parameters when
it is called, and these run parts of several at other times.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from autosac.step.modules import ModuleTree
from autosac.units.candidates import Units
from autosac.units.slices import Slice
from autosac.units.unit import Unit


@dataclass(frozen=True, slots=True)
class GivenUnits:
    """What the user says of AC units.

    Attributes:
        ac_units: FQNs of the only modules that may be AC units; None for all.
        fsdp_units: FQNs of FSDP units: no module around one may be an AC unit.
    """

    ac_units: Set[str] | None = None
    fsdp_units: Set[str] = frozenset()

    def of(self, units: Units, tree: ModuleTree) -> Units:
        """The candidates that are left, and why the others are none."""
        if self == ALL_UNITS:
            return units
        refused = dict(units.refused)
        for unit in units.candidates:
            if self._is_around(unit.fqn, tree):
                refused[unit.fqn] = "it lies around an FSDP unit that was given"
            elif not self.may_be_unit(unit, tree):
                refused[unit.fqn] = "it is not among the `ac_units` that were given"
        candidates = tuple(u for u in units.candidates if self.may_be_unit(u, tree))
        return replace(units, candidates=candidates, refused=refused)

    def may_be_unit(self, unit: Unit, tree: ModuleTree) -> bool:
        """Whether a candidate is left."""
        if self.fsdp_units and (
            type(unit) is not Unit or self._is_around(unit.fqn, tree)
        ):
            return False
        return self.ac_units is None or _modules(unit, tree) <= self.ac_units

    def _is_around(self, fqn: str, tree: ModuleTree) -> bool:
        around = tree.index[fqn]
        return any(
            around in tree.ancestors(tree.index[inside]) for inside in self.fsdp_units
        )


ALL_UNITS = GivenUnits()


def _modules(unit: Unit, tree: ModuleTree) -> set[str]:
    """FQNs of the modules that a unit runs under AC."""
    if isinstance(unit, Slice):
        first, last = tree.index[unit.fqn], tree.index[unit.until]
        layers = range(first, last + 1)
        return {tree[i].fqn for i in layers if tree[i].parent == tree[first].parent}
    return {call.fqn for call in unit.calls} | ({unit.around} if unit.around else set())
