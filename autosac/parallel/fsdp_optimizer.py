"""Which memory of a step is sharded with a parameter: its state, what is made of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autosac.parallel.sharding import local_numel
from autosac.step.tape import IntArray, Op, Parameter, Tape

_ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Storages that have an element for each of a parameter, on a rank for its rows.

    Attributes:
        parameters: The parameters of the tape.
        storages: Optimizer state, and what the optimizer makes of it.
        owners: Place of the parameter that each belongs to.
        itemsizes: Bytes of an element of each.
    """

    parameters: tuple[Parameter, ...]
    storages: IntArray
    owners: IntArray
    itemsizes: IntArray

    def local_numel(self, degree: int, rank: int) -> IntArray:
        """Elements of every parameter that a rank has, shape (num_parameters,)."""
        numels = [local_numel(p, degree, rank) for p in self.parameters]
        return np.array(numels, dtype=np.int64)


def find_shards(tape: Tape) -> Shards:
    """Follow parameters, gradients and state through the optimizer's ops."""
    parameters = tape.parameters
    owner: dict[int, int] = {}
    itemsize: dict[int, int] = {}
    for i, parameter in enumerate(parameters):
        states = zip(parameter.states, parameter.state_itemsizes, strict=True)
        for storage, size in states:
            itemsize[storage] = _real_itemsize(parameter, size)
        storages = (parameter.storage, parameter.gradient, *parameter.states)
        owner.update({s: i for s in storages if s is not None})
    for op in tape.ops:
        if op.phase == "optimizer" and op.creates:
            for storage, source, shape in _made(op, owner, parameters):
                if shape == parameters[source].shape:
                    owner[storage] = source
                    size = _ITEMSIZES.get(op.dtype, parameters[source].itemsize)
                    itemsize[storage] = _real_itemsize(parameters[source], size)
    return Shards(
        parameters=parameters,
        storages=np.array(list(itemsize), dtype=np.int64),
        owners=np.array([owner[s] for s in itemsize], dtype=np.int64),
        itemsizes=np.array(list(itemsize.values()), dtype=np.int64),
    )


def _real_itemsize(parameter: Parameter, traced: int) -> int:
    """State follows the type of its parameter, which may be traced in another one."""
    return parameter.itemsize if traced == parameter.traced_itemsize else traced


def _made(
    op: Op, owner: dict[int, int], parameters: tuple[Parameter, ...]
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Each storage an op makes, with the parameter it is made of and its shape.

    Ops on lists of tensors make their results in the order of their first list.
    """
    sources = [s for s in op.reads if s in owner]
    if len(op.shapes) != len(op.creates):
        return
    for i, (storage, shape) in enumerate(zip(op.creates, op.shapes, strict=True)):
        if len(op.creates) == 1:
            matching = [s for s in sources if parameters[owner[s]].shape == shape]
            if matching:
                yield storage, owner[matching[0]], shape
        elif i < len(op.reads) and op.reads[i] in owner:
            yield storage, owner[op.reads[i]], shape
