"""Asynchronous tensor parallelism: products hide the collectives beside them.

A product whose argument is gathered, or whose result is reduced and scattered, is done
in as many chunks as ranks share slices, one for what each rank has. The chunk that is
there runs while the next one is on its way; nothing hides one of the chunks. So what a
step waits for of a collective besides its products is

    max(0, collective - (degree - 1) / degree * products)

PyTorch does so under `torch.compile` alone, with symmetric memory between GPUs, and for
products that are right beside a collective, but for copies: what several layers add to
one gradient is exposed. Copy engines move the chunks, which takes no multiprocessors
from products. Not counted: that smaller products are slower.

Source: torch/_inductor/fx_passes/micro_pipeline_tp.py and `_pipelined_*` of
torch/distributed/_symmetric_memory/__init__.py, torch 2.14.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autosac.solvers.fsdp.collectives import Collective
from autosac.step.tape import Op

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.")
_COPIES = ("aten.cat.", "aten.clone.", "aten._to_copy.", "aten.split")


def exposed_ms(
    ops: Sequence[Op],
    op_ms: Sequence[float],
    collectives: Mapping[int, Collective],
    degree: int,
) -> dict[int, float]:
    """What is waited for of each collective of a step.

    Args:
        ops: Of a rank, in order.
        op_ms: Their times alone.
        collectives: Places of collectives among ranks that share slices.
        degree: How many ranks that are.
    """
    places = sorted(collectives)
    hiding: set[int] = set()
    exposed = {}
    for number, place in enumerate(places):
        before = places[number - 1] if number else -1
        behind = places[number + 1] if number + 1 < len(places) else len(ops)
        products: list[int] = []
        if collectives[place] == "all_gather":
            products = _readers(ops, place, range(place + 1, behind))
        elif collectives[place] == "reduce_scatter":
            products = _maker(ops, place, range(place - 1, before, -1))
        own_ms = sum(op_ms[i] for i in products if i not in hiding)
        hiding.update(products)
        exposed[place] = max(0.0, op_ms[place] - own_ms * (degree - 1) / degree)
    return exposed


def _readers(ops: Sequence[Op], place: int, behind: Collection[int]) -> list[int]:
    """Products that read what an op gathers, or a copy of it, in the same pass."""
    gathered = set(ops[place].creates)
    found = []
    for i in behind:
        op = ops[i]
        if op.phase != ops[place].phase or gathered.isdisjoint(op.reads):
            continue
        if op.name.startswith(_PRODUCTS):
            found.append(i)
        elif op.name.startswith(_COPIES):
            gathered.update(op.creates)
    return found


def _maker(ops: Sequence[Op], place: int, before: Collection[int]) -> list[int]:
    """The product that makes what an op scatters, or what that is a copy of."""
    scattered = set(ops[place].reads)
    for i in before:
        op = ops[i]
        if scattered.isdisjoint((*op.creates, *op.writes)):
            continue
        if op.name.startswith(_PRODUCTS):
            return [i]
        if not op.name.startswith(_COPIES):
            break
        scattered.update(op.reads)
    return []
