"""What a plan of modules keeps, as a choice for the joint graph of the same step.

Units are found by the modules that nodes of the graph were captured in, ops by their
names and order. Both steps differ a little (in-place ops are ordinary ones in a graph):
what has no counterpart is recomputed, but for ops that never run twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from torch import fx

from autosac.solvers.graph.recomputation import GraphProblem
from autosac.units.policies import SAVE, OpPolicy

_UNDERSCORES = "_"  # of in-place variants and of functional ones
_BATCH_NORM = "native_batch_norm"


def kept_by_modules(
    problem: GraphProblem, ops: Sequence[fx.Node], policies: Sequence[OpPolicy]
) -> frozenset[int]:
    """Values that are kept when units rerun what their policies say.

    Args:
        problem: The graph as numbers.
        ops: The nodes of its forward ops.
        policies: Of a plan's units.
    """
    kept = set(problem.kept_plainly)
    for policy in policies:
        places = _places(ops, policy)
        inside = set(places)
        made = {v for i in places for v in problem.makes[i]}
        read = {v for i in places for v in problem.reads[i]}
        elsewhere = {
            v
            for i, values in enumerate(problem.reads)
            if i not in inside
            for v in values
        }
        held = {i for i in places if i in problem.pinned}.union(
            _saved(ops, places, policy)
        )
        saved = {v for i in held for v in problem.makes[i]}
        results = made & elsewhere & problem.kept_plainly
        kept = kept - made | saved | results | (read - made)
    return frozenset(kept) - problem.returned


def _places(ops: Sequence[fx.Node], policy: OpPolicy) -> list[int]:
    """Places of the ops of a unit: of one call, where its module has several."""
    places = [i for i, node in enumerate(ops) if _is_inside(node, policy)]
    size, rest = divmod(len(places), policy.num_calls)
    if rest:  # its calls do not do the same
        return places
    return places[policy.call_index * size :][:size]


def _is_inside(node: fx.Node, policy: OpPolicy) -> bool:
    """Whether a node belongs to the module of a unit, or to one layer of a slice."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    paths = [_fqn(path) for path, _ in stack]
    if not policy.until:
        return policy.fqn in paths
    first, last = _place(policy.fqn), _place(policy.until)
    return any(first <= _place(path) <= last for path in paths if path)


def _fqn(path: str) -> str:
    """FQN in a path of Dynamo's such as ``L['model'].blocks.0``."""
    return path.partition(".")[2].replace("._modules['", ".").replace("']", "")


def _place(fqn: str) -> tuple[str, int]:
    """The container of a layer, and its place there; (name, -1) of any other."""
    container, _, name = fqn.rpartition(".")
    return (container, int(name)) if name.isdigit() else (fqn, -1)


def _saved(
    ops: Sequence[fx.Node], places: Sequence[int], policy: OpPolicy
) -> Iterator[int]:
    """Places of the ops that a policy saves."""
    names = [_kind(str(ops[i].target)) for i in places]
    wanted = [_kind(name) for name in policy.names]
    matcher = SequenceMatcher(None, wanted, names, autojunk=False)
    for one in matcher.get_matching_blocks():
        for k in range(one.size):
            if policy.actions[one.a + k] == SAVE:
                yield places[one.b + k]


def _kind(name: str) -> str:
    """Name of an op without its overload and its variant."""
    kind = name.removeprefix("aten.").partition(".")[0].strip(_UNDERSCORES)
    return _BATCH_NORM if kind.startswith(_BATCH_NORM) else kind
