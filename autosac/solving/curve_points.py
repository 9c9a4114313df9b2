"""Points of the candidates' trade-off curves that the MILP has, and its numbers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from autosac.simulation.simulator import Simulator
from autosac.simulation.usual_blocks import in_usual_blocks
from autosac.solvers.curves import curve, knapsack
from autosac.solving.formulation import Formulation, formulate
from autosac.solving.rules_of_thumb import Rules
from autosac.units import curves
from autosac.units.chains import Chain
from autosac.units.far_units import FarUnit
from autosac.units.slices import Slice
from autosac.units.unit import Unit

_MOST_POINTS = 1600  # of all units; curves of large models are thinned out
_FAR_POINTS = 6  # of a unit without offload that its twin has, too
_EARLY_POINTS = 4  # and one that is prefetched: memory is not scarcest there
_MOST_LOOKED_AT = 64  # of its points, for those of which most is moved


def formulate_candidates(
    simulator: Simulator,
    candidates: Sequence[Unit],
    single: Sequence[Unit],
    chains: Sequence[Chain],
    fronts: Mapping[Hashable, knapsack.Front],
    far_units: Sequence[FarUnit] = (),
    host_bytes: int | None = None,
) -> Formulation:
    """The MILP's numbers for the candidates that free memory.

    Args:
        simulator: Of the step.
        candidates: All of them in forward order, those around others first.
        single: Those that are no chain.
        chains: The others.
        fronts: Pareto points of single units, by key.
        far_units: Twins of some of these, with arguments in far memory,
        host_bytes: and most bytes there; None for as many as one likes.
    """
    sizes = [len(fronts[unit.key]) for unit in single]
    num_points = curves.affordable_points(sizes, _MOST_POINTS)
    by_key = {
        key: curves.trade_off(unit, fronts[key], num_points=num_points)
        for key, unit in {unit.key: unit for unit in single}.items()
    }
    for chain in chains:
        if chain.key not in by_key:
            of_blocks = [by_key[block.unit.key] for block in chain.blocks]
            by_key[chain.key] = curves.chain_trade_off(chain, of_blocks)
    of_plain = {unit.call: unit.key for unit in single if not isinstance(unit, Slice)}
    for twin in far_units:
        if twin.key not in by_key:
            key = of_plain[twin.call]
            by_key[twin.key] = far_curve(twin, by_key[key], fronts[key])
    useful = [
        (unit, curve) for unit in candidates if (curve := by_key[unit.key]) is not None
    ]
    return formulate(
        simulator.in_blocks,
        [unit for unit, _ in useful],
        [curve for _, curve in useful],
        host_bytes=host_bytes,
    )


def formulate_in_usual_blocks(
    simulator: Simulator, rules: Rules, known: Formulation
) -> Formulation | None:
    """The same MILP in blocks as large as an allocator's usually are under a plan.

    Args:
        simulator: Of the step.
        rules: Some of its choices are replayed to know.
        known: The MILP in the blocks of the plain step.

    Returns:
        None if those foretell peaks no worse.
    """
    in_blocks = in_usual_blocks(simulator, rules.greedy_path())
    if in_blocks is None or not known.units:
        return None
    return known.in_blocks(in_blocks)


def far_curve(
    twin: FarUnit, plain: curves.UnitCurve | None, front: knapsack.Front
) -> curves.UnitCurve | None:
    """Points of a unit whose arguments lie in far memory.

    They are some of those that it has without, and that which reruns least.

    Args:
        twin: The unit.
        plain: Its curve without; None if it frees nothing then.
        front: Its Pareto points without.
    """
    if twin.results:
        return _results_curve(twin, front)
    policies = [curves.policy_of(front, 0)]
    if plain is not None:
        last = len(plain.policies) - 1
        number = _FAR_POINTS if twin.fetched is None else _EARLY_POINTS
        places = {last * k // (number - 1) for k in range(number)}
        policies += [plain.policies[place] for place in sorted(places)]
    most = max(twin.activation_bytes, twin.sole_bytes, 1)
    freed = {}
    for policy in policies:
        nbytes = max(0, most - curves.kept(twin, policy))
        freed[nbytes] = (curves.recompute_ms(twin, policy), policy)
    points = curve.pareto((nbytes, ms) for nbytes, (ms, _) in freed.items())
    return curves.UnitCurve(
        points=curve.TradeoffCurve(
            freed_bytes=tuple(n + twin.arguments_bytes for n in points.freed_bytes),
            recompute_ms=points.recompute_ms,
        ),
        policies=tuple(freed[nbytes][1] for nbytes in points.freed_bytes),
        ratios=tuple(min(1.0, nbytes / most) for nbytes in points.freed_bytes),
    )


def _results_curve(twin: FarUnit, front: knapsack.Front) -> curves.UnitCurve | None:
    """Points of a unit whose saved results lie in far memory; None if none pays.

    Bytes are those that are not saved at all: memory is scarce where results are back.
    """
    stride = -(-len(front) // _MOST_LOOKED_AT)
    policies = [curves.policy_of(front, i) for i in range(0, len(front), stride)]
    policies = [policy for policy in policies if twin.results_bytes(policy)]
    if not policies:
        return None
    kept = {curves.kept(twin, policy): policy for policy in policies}
    most = max(*kept, twin.activation_bytes, twin.sole_bytes)
    by_freed = {most - nbytes: policy for nbytes, policy in kept.items()}
    timed = ((n, curves.recompute_ms(twin, p)) for n, p in by_freed.items())
    points = curve.pareto(timed)
    last = len(points.freed_bytes) - 1
    places = sorted({last * k // (_EARLY_POINTS - 1) for k in range(_EARLY_POINTS)})
    freed = [points.freed_bytes[k] for k in places]
    return curves.UnitCurve(
        points=curve.TradeoffCurve(
            freed_bytes=tuple(n + twin.arguments_bytes for n in freed),
            recompute_ms=tuple(points.recompute_ms[k] for k in places),
        ),
        policies=tuple(by_freed[n] for n in freed),
        ratios=tuple(n / most for n in freed),
    )
