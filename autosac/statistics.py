"""Module statistics: where memory and time go in a step, module by module.

The same record comes from a tape or from PyTorch's own trackers
(`autosac.trackers`). The manner is that of PyTorch's ``ModStats``
(torch/distributed/_tools/ilp_utils.py, torch 2.15).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from autosac.modules import ModuleTree
from autosac.simulating import Simulator
from autosac.tape import IntArray, ModuleCall, Op, Tape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleStatistics:
    """Figures of one module in one step, what runs inside it included.

    None means that the source does not tell, that the module is never called, or
    (backward figures) that no op of it runs in backward. Bytes are of whole
    storages, each counted once. Figures of a module called more than once are of
    all its calls; PyTorch's trackers know the last call only, so there None.

    Attributes:
        fqn: Its name.
        is_leaf: Whether it has no child modules.
        calls: How often a step calls it.
        parameter_bytes: Its parameters.
        gradient_bytes: Gradients of its parameters; that of a shared parameter
            belongs to the first module that holds it. PyTorch's ``ModStats`` counts
            frozen parameters too.
        buffer_bytes: Its buffers.
        input_bytes: Tensors in its arguments. PyTorch leaves out keyword arguments,
            and counts two views of one storage twice.
        output_bytes: Tensors in its output. PyTorch counts views as in the input.
        activation_bytes: Forward results made inside it that are alive when its
            forward ends, its output excluded. PyTorch subtracts the output even when
            it was made outside, and what dies inside but was made outside.
        candidate_bytes: Results of its forward ops, its output excluded: what a
            policy could save. PyTorch excludes the last op's result in place of
            the output, and every ``clone``.
        total_activation_bytes: Forward results of the whole step that are alive when
            its forward ends for the last time.
        total_gradient_bytes: Gradients that all parameters have received when its
            backward begins.
        backward_activation_bytes: Forward results of the whole step that are alive at
            the peak of its backward. PyTorch takes the gradient that backward starts
            from, one number, for a forward result.
        backward_temporary_bytes: What backward made since this module's backward
            began that is alive at that peak, gradients handed to parameters
            excluded, minus what has gone since; PyTorch's "activation gradients".
        forward_ms: Time of the ops in its calls.
        backward_ms: Time of the backward ops that belong to it. The model itself owns
            all of backward, that of the loss included. PyTorch attributes to a module
            all that runs until the gradients of its inputs are complete.
    """

    fqn: str
    is_leaf: bool
    calls: int
    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    input_bytes: int | None = None
    output_bytes: int | None = None
    activation_bytes: int | None = None
    candidate_bytes: int | None = None
    total_activation_bytes: int | None = None
    total_gradient_bytes: int | None = None
    backward_activation_bytes: int | None = None
    backward_temporary_bytes: int | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Figures of all modules, and the orders in which a step runs them.

    A module enters forward with its first call and leaves it with its last one. It
    enters backward when its first backward op runs and leaves it after the last one
    (PyTorch: with the gradients of its outputs and of its inputs). Modules that are
    never called are in no order.

    Attributes:
        modules: Figures, index by index those of the tree.
        tree: The module tree.
        forward_pre_order: FQNs in the order of entering forward.
        forward_post_order: FQNs in the order of leaving forward.
        backward_pre_order: FQNs in the order of entering backward.
        backward_post_order: FQNs in the order of leaving backward.
    """

    modules: tuple[ModuleStatistics, ...]
    tree: ModuleTree
    forward_pre_order: tuple[str, ...]
    forward_post_order: tuple[str, ...]
    backward_pre_order: tuple[str, ...]
    backward_post_order: tuple[str, ...]

    def __getitem__(self, fqn: str) -> ModuleStatistics:
        """Figures of one module, by its FQN."""
        return self.modules[self.tree.index[fqn]]


def module_statistics(tape: Tape, op_ms: Sequence[float]) -> Statistics:
    """Work out the statistics of every module of a traced step.

    Args:
        tape: The traced step.
        op_ms: Time of every op of the tape.
    """
    if len(op_ms) != len(tape.ops):
        raise ValueError(
            f"`op_ms` must hold one time for each of the {len(tape.ops)} ops of the"
            f" tape, got {len(op_ms)}."
        )
    tree = tape.modules
    memory = _Memory(tape)
    forward = _forward(tape, op_ms)
    backward = _backward(tape, memory, op_ms)
    gradient_bytes = _sums_of_descendants(tree, memory.gradient_bytes)
    order = _Order(
        tree,
        {i: (f.enter, 0) for i, f in forward.items()},
        {i: (f.exit, 0) for i, f in forward.items()},
    )
    back_order = _Order(
        tree,
        {i: (b.first.start, tree[i].depth) for i, b in backward.items()},
        {i: (b.last.start, -tree[i].depth) for i, b in backward.items()},
    )
    figures = []
    for i, node in enumerate(tree.nodes):
        fore, back = forward.get(i), backward.get(i)
        figures.append(
            ModuleStatistics(
                fqn=node.fqn,
                is_leaf=node.is_leaf,
                calls=fore.calls if fore else 0,
                parameter_bytes=node.parameter_bytes,
                gradient_bytes=gradient_bytes[i],
                buffer_bytes=node.buffer_bytes,
            )
        )
