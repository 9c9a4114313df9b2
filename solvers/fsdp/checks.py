"""What may be fixed before the parallel MILP is solved."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..sac.table import Choice
from .problem import (
    FsdpChoice,
    FsdpProblem,
    broken_rules,
)


def check_fixed(
    problem: FsdpProblem, reshard: Mapping[int, bool], points: Choice | None
) -> None:
    """Check what reshards, and the point of each AC unit.

    Raises:
        ValueError: It breaks a rule of FSDP2 or AC, or names no module or point.
    """
    count = len(problem.modules)
    for index in reshard:
        if not 0 <= index < count:
            raise ValueError(
                f"`fixed_reshard` must name modules below {count}, got {index}."
            )
    if reshard.get(0):
        raise ValueError("`fixed_reshard` names the root, which does not reshard.")
    units = problem.sac.units
    if points is None:
        return
    if len(points) != len(units):
        raise ValueError(
            f"`fixed_points` must have an entry for each of {len(units)} AC units,"
            f" got {len(points)}."
        )
    for unit, point in zip(units, points, strict=True):
        if point is not None and not 0 <= point < len(unit.points):
            raise ValueError(
                f"`fixed_points` of {unit.fqn!r} must be below"
                f" {len(unit.points)}, got {point}."
            )
    alone = FsdpChoice(
        units=(True, *(False,) * (count - 1)),
        reshard=(False,) * count,
        points=tuple(points),
    )
    nested = [text for text in broken_rules(problem, alone) if "nest" in text]
    if nested:
        raise ValueError(f"`fixed_points` breaks rules: {' '.join(nested)}")


def check_units(
    problem: FsdpProblem, chosen: Collection[int], points: Choice | None
) -> None:
    """Check FSDP units, with the points of AC units if they are fixed.

    Raises:
        ValueError: They break a rule of FSDP2 or AC, or name no module.
    """
    count = len(problem.modules)
    if not all(0 <= index < count for index in chosen):
        raise ValueError(
            f"`fixed_units` must name modules below {count}, got {sorted(chosen)}."
        )
    choice = FsdpChoice(
        units=tuple(index in chosen for index in range(count)),
        reshard=(False,) * count,
        points=tuple(points or (None,) * len(problem.sac.units)),
    )
    if broken := broken_rules(problem, choice):
        raise ValueError(f"`fixed_units` breaks rules: {' '.join(broken)}")
