"""Rivals that decide by the kind of op."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autosac.profiles.profile import Profile
from autosac.solving.rules_of_thumb import Choice
from autosac.step.tape import Tape
from autosac.units.unit import Unit
from benchmarks.rivals.blocks import find_blocks, overlap, policy_saving

_SOFTMAX = frozenset({"_softmax", "_safe_softmax"})
_PRODUCTS = frozenset({"bmm", "baddbmm"})
_MATMULS = frozenset({"mm", "addmm", "linear"})
# What trainers save by default (torchtitan/distributed/activation_checkpoint.py and
# the compute-intensive ops of torch/_functorch/partitioners.py), with the names that
# the CPU has for the same ops.
_SAVED = _MATMULS | {
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_mm",
    "_grouped_mm",
    "mkldnn_rnn_layer",
    "upsample_bilinear2d",
}


def _is_attention(name: str) -> bool:
    """Whether an op is an attention kernel in one."""
    return name.startswith(("_scaled_dot_product_", "_flash_attention_forward")) or (
        name in ("_efficient_attention_forward", "flex_attention")
    )


def _names(tape: Tape, unit: Unit, group: int) -> set[str]:
    """Names of the ops of a group, without namespace and overload."""
    positions = unit.groups[group].ops
    return {tape.ops[unit.ops[i]].name.split(".")[1] for i in positions}


def save_matmuls(profile: Profile, every_second: bool = False) -> Choice:
    """Every block saves matmuls and attention, and reruns the rest.

    Args:
        profile: The traced step.
        every_second: Rerun every second matmul, as torchtitan does: the 2nd, 4th, ...
            of each block. Without it all are saved.
    """
    return {
        unit: policy_saving(unit, _listed(profile.tape, unit, every_second))
        for unit in find_blocks(profile)
    }


def _listed(tape: Tape, unit: Unit, every_second: bool) -> set[int]:
    saved = set()
    num_matmuls = 0
    for g in range(len(unit.groups)):
        names = _names(tape, unit, g)
        if names & _MATMULS:
            num_matmuls += 1
            if every_second and num_matmuls % 2 == 0:
                continue
        if names & _SAVED or any(map(_is_attention, names)):
            saved.add(g)
    return saved


def megatron_selective(profile: Profile) -> Choice:
    """Only the core of attention is recomputed (Korthikanti et al., 2022).

    The core is the attention kernel; without one, the softmax and what lies between
    it and the products before and behind it: scaling, mask, dropout. The unit is the
    smallest module around it. Empty for a model without attention.
    """
    cores = {
        unit: core
        for unit in profile.units.candidates
        if (core := _attention_core(profile.tape, unit))
    }
    chosen: dict[Unit, Collection[int]] = {}
    for unit in reversed(cores):  # those inside a unit come after it
        if not any(overlap(unit, inner) for inner in chosen):
            chosen[unit] = cores[unit]
    return {u: policy_saving(u, _around(u, chosen[u])) for u in reversed(chosen)}


def _around(unit: Unit, core: Collection[int]) -> set[int]:
    """What is saved if only the core is rerun: what backward and the core read."""
    read = {h for g in core for h in unit.groups[g].inputs}
    needed = {g for g, group in enumerate(unit.groups) if group.needed}
    return (read | needed) - set(core)


def _attention_core(tape: Tape, unit: Unit) -> set[int]:
    """Groups of a unit that are the core of attention."""
    names = [_names(tape, unit, g) for g in range(len(unit.groups))]
    core = {
        g for g, own_names in enumerate(names) if any(map(_is_attention, own_names))
    }
    readers: list[list[int]] = [[] for _ in names]
    for g, group in enumerate(unit.groups):
        for h in group.inputs:
            readers[h].append(g)
    before = [group.inputs for group in unit.groups]
    for g, own_names in enumerate(names):
        if own_names & _SOFTMAX:
            above = _until_product(g, before, names)
            below = _until_product(g, readers, names)
            if above is not None and below is not None:
                core |= above | below
    return core


def _until_product(
    start: int, edges: Sequence[Collection[int]], names: list[set[str]]
) -> set[int] | None:
    """Groups from one to the next batched products; None if there are none.

    Paths that lead to other matmuls or to none, such as that of a mask or of a
    router's softmax, do not count.
    """
    reaches: dict[int, bool] = {}

    def reach(g: int) -> bool:
        if g not in reaches:
            reaches[g] = False
            if names[g] & _PRODUCTS:
                reaches[g] = True
            elif not names[g] & _MATMULS:
                reaches[g] = any([reach(h) for h in edges[g]])
        return reaches[g]

    if not reach(start):
        return None
    reached, pending = {start}, [start]
    while pending:
        g = pending.pop()
        if not names[g] & _PRODUCTS:
            onward = {h for h in edges[g] if reach(h)} - reached
            reached |= onward
            pending += onward
    return reached
