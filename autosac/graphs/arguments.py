"""What plans of graphs are asked for: read, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autosac.devices.links import Link
from autosac.errors import ArgumentError
from autosac.graphs.joint_graphs import JointGraph
from autosac.kinds import check_kind
from autosac.planning.make_plan import read_offload
from autosac.planning.plans import Plan
from autosac.profiles.fingerprints import parameters_of
from autosac.solving.solve_options import check_limit, check_solving

Strategy = Literal["milp", "capuchin"]


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse what is none of some words.

    Raises:
        ArgumentError: Names them.
    """
    if value not in allowed:
        words = " or ".join(map(repr, allowed))
        raise ArgumentError(f"`{name}` must be {words}, got {value!r}.")


def check_planner(
    joint: object, floor_limit_s: object, backend: object, link: object
) -> None:
    """Refuse what no `GraphPlanner` can be made of.

    Raises:
        ArgumentError: Says which argument, and what it must be.
    """
    wanted = "a graph, as `autosac.joint_graph(model, inputs)` returns it"
    check_kind(joint, JointGraph, name="joint", wanted=wanted)
    check_solving(backend, 0.0)
    check_limit(floor_limit_s, name="floor_limit_s")
    if link is not None:
        check_kind(link, Link, name="link", wanted="a `Link`, or None for a disk's")


def check_modules(modules: Plan, joint: JointGraph) -> None:
    """Refuse a start that is no plan of modules, or one of another model.

    Raises:
        ArgumentError: It is; names the first parameter that it does not know.
    """
    wanted = "a plan of `autosac.plan` for the same step, or None"
    check_kind(modules, Plan, name="modules", wanted=wanted)
    planned = parameters_of(modules.model)
    for name, tensor in zip(joint.input_names, joint.inputs, strict=True):
        kind, _, fqn = name.partition(" ")
        text = f"{fqn} {tuple(tensor.shape)} {str(tensor.dtype)[6:]}"
        if kind == "parameter" and text not in planned:
            raise ArgumentError(
                f"`modules` is a plan of another model: it has no parameter `{text}`,"
                " which the graph has. Pass a plan of the model of the graph."
            )


def check_graph_offload(
    offload: object, strategy: Strategy, directory: str | None = None
) -> None:
    """Refuse what a graph's plan cannot take for `offload`.

    Raises:
        ArgumentError: It is no bool, there is no such directory, or the strategy is
            another than the MILP.
    """
    if offload not in (True, False):
        raise ArgumentError(f"`offload` must be True or False, got {offload!r}.")
    read_offload(offload, directory)
    if offload and strategy != "milp":
        raise ArgumentError(
            f"`offload`=True needs `strategy`='milp', got {strategy!r}: the greedy"
            " only recomputes."
        )
