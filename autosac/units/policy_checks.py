"""Whether op policies of a file can be true together, and of the model they are for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from autosac.units.policies import DETACHED, RERUN, SAVE, SKIP, VIEW, OpPolicy

STREAMS = ("streamed", "streamed_bytes", "fetched_with", "let_go_with")
_ACTIONS = frozenset((SAVE, RERUN, SKIP, VIEW, DETACHED))


def policies_problem(
    op_policies: tuple[OpPolicy, ...],
    policy: Mapping[str, float],
    model: Iterable[tuple[str, str, tuple[str, ...]]],
) -> str | None:
    """Why op policies cannot be true together, in words; None if they can.

    Args:
        op_policies: Of a plan.
        policy: What it says of its AC units.
        model: Fingerprint of its model.
    """
    for one in op_policies:
        if (wrong := _ops_problem(one) or _far_problem(one)) is not None:
            return f"of its unit `{one.fqn}` {wrong}"
    if {one.label for one in op_policies if not one.streamed} != policy.keys():
        return "its policy and its op policies are for different units"
    modules = {fqn for fqn, _, _ in model}
    ends = ("fqn", "until", "far_until", "around")
    named = {getattr(one, end) for one in op_policies for end in ends} - {""}
    if strange := named - modules:
        return f"its unit `{min(strange)}` is no module of its model"
    return _calls_problem(op_policies)


def _ops_problem(one: OpPolicy) -> str | None:
    if not _ACTIONS.issuperset(one.actions + one.onward):
        return "it does something with ops that autosac does not know"
    lengths = {len(one.names), len(one.actions), len(one.onward or one.names)}
    if len(lengths) > 1:
        return "it does not say of every op what happens to it"
    if not one.chain and (one.around or one.position or one.onward):
        return "it names a place in a chain, and no chain"
    return None


def _far_problem(one: OpPolicy) -> str | None:
    if one.far and not one.far_until:
        return "it never says when the program lets go of what is offloaded"
    if any(one.actions[i : i + 1] != SAVE for i in one.far_ops):
        return "it offloads results that it does not save"
    if len({len(getattr(one, name)) for name in STREAMS}) > 1:
        return "it does not say of all that is streamed when that goes and comes"
    if any(not 0 <= k < len(one.streamed) for k in one.fetched_with):
        return "it fetches something with what it does not stream"
    return None


def _calls_problem(op_policies: Iterable[OpPolicy]) -> str | None:
    """Each call of a unit has one policy at most."""
    calls = sorted((one.label, one.call_index) for one in op_policies)
    if twice := [label for (label, _), n in groupby(calls) if len(list(n)) > 1]:
        return f"it has several policies for one call of `{twice[0]}`"
    for one in op_policies:
        if one.call_index >= one.num_calls:
            return (
                f"it has a policy for call {one.call_index} of `{one.fqn}`, of"
                f" {one.num_calls} that are numbered from 0"
            )
    return _chains_problem(op_policies)


def _chains_problem(op_policies: Iterable[OpPolicy]) -> str | None:
    """Blocks of a chain are numbered, and all or none of them lie in a nest."""
    chains: dict[str, list[OpPolicy]] = {}
    for one in op_policies:
        if one.chain:
            chains.setdefault(one.chain, []).append(one)
    for name, blocks in chains.items():
        if sorted(block.position for block in blocks) != list(range(len(blocks))):
            return f"it does not have all blocks of its chain `{name}`, or some twice"
        if len({block.around for block in blocks}) > 1:
            return f"its chain `{name}` lies in several modules"
    return None
