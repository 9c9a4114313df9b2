"""Module statistics: where memory and time go in a step, module by module.

The same record comes from a tape or from PyTorch's own trackers
(`autosac.statistics.trackers`). The manner is that of PyTorch's ``ModStats``
(torch/distributed/_tools/ilp_utils.py, torch 2.15). Trade-off curves of a tape are
added by `autosac.profiles.module_curves`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from autosac.errors import ArgumentError
from autosac.optional import needed
from autosac.quantities import format_bytes
from autosac.step.ledger import Ledger
from autosac.step.modules import ModuleTree
from autosac.step.tape import IntArray, ModuleCall, Op, Tape
from autosac.summaries import Summarized, Summary

_DTYPES = {"int": "Int64", "float": "Float64", "str": "string", "bool": "boolean"}
_ORDERS = (
    "forward_pre_order", "forward_post_order", "backward_pre_order",
    "backward_post_order",
)  # fmt: skip


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
        parameter_bytes: Its parameters, to the byte; PyTorch rounds each up to 512 on
            a GPU, buffers too.
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
        backward_temporary_bytes: How much of what backward makes has come to life from
            the beginning of its backward to that peak: activation gradients,
            workspaces, and gradients that no parameter has received yet. PyTorch's
            backward of the model itself begins only after the loss's.
        forward_ms: Time of the ops in its calls.
        backward_ms: Time of the backward ops that belong to it. The model itself owns
            all of backward, that of the loss included. PyTorch attributes to a module
            all that runs until the gradients of its inputs are complete.
        sac_memory: What the shares of its trade-off curve are of, in bytes: a policy
            could save so much. 0 for a module without a curve, such as a leaf. This and
            all that follows are named and counted as in PyTorch's ``ModStats``.
        sac_runtime: What shares of time are of, in ms: all ops of its forward.
        n_segments: Number of lines that stand for the curve,
        slopes: and of each what it rises by,
        intercepts: and its value at 0. Discarding a share r of the memory takes a share
            of the time that is the highest of the lines at r, or 0 if all are below.
        breakpoints: Shares at which these segments begin, and where the last one ends.
        tradeoff_curve: Pairs of a share of the memory that is discarded and the share
            of the time that recomputing it takes.
        max_ratio: Largest share that can be discarded.
    """

    fqn: str
    is_leaf: bool
    calls: int = 0
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
    sac_memory: int = 0
    sac_runtime: float = 0.0
    n_segments: int = 0
    slopes: tuple[float, ...] = ()
    intercepts: tuple[float, ...] = ()
    breakpoints: tuple[float, ...] = ()
    tradeoff_curve: tuple[tuple[float, float], ...] = ()
    max_ratio: float = 1.0


@dataclass(frozen=True, kw_only=True, repr=False)
class Statistics(Summarized):
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

    def summary(self) -> Summary:
        """How many modules there are, and the figures of the model itself."""
        root = self.modules[0]
        return Summary(
            title="Statistics",
            facts=(
                ("modules", f"{len(self.modules)}; see `to_dataframe()`"),
                (
                    "memory",
                    f"{format_bytes(root.parameter_bytes)} of parameters,"
                    f" {format_bytes(root.activation_bytes or 0)} of activations",
                ),
            ),
        )

    def __getitem__(self, fqn: str) -> ModuleStatistics:
        """Figures of one module, by its FQN."""
        return self.modules[self.tree.index[fqn]]

    @property
    def ad_matrix(self) -> npt.NDArray[np.uint8]:
        """Ancestor-descendant matrix, shape (n, n): 1 if j is i or lies inside i."""
        return self.tree.ad_matrix

    def to_dataframe(self) -> Any:
        """The figures as a pandas table, a row for each module, by FQN.

        Bytes stay whole where some are missing. Four columns more give the place of
        each module in the four orders.

        Raises:
            ImportError: pandas is not installed.
        """
        pandas = needed("pandas", "`Statistics.to_dataframe`")
        columns: dict[str, Any] = {}
        for figure in fields(ModuleStatistics):
            values = [getattr(module, figure.name) for module in self.modules]
            kind = _DTYPES.get(str(figure.type).removesuffix(" | None"), "object")
            columns[figure.name] = pandas.array(values, dtype=kind)
        for name in _ORDERS:
            place = {fqn: k for k, fqn in enumerate(getattr(self, name))}
            values = [place.get(module.fqn) for module in self.modules]
            columns[name] = pandas.array(values, dtype="Int64")
        return pandas.DataFrame(columns).set_index("fqn", drop=False)


def module_statistics(tape: Tape, op_ms: Sequence[float]) -> Statistics:
    """Work out the statistics of every module of a traced step.

    Args:
        tape: The traced step.
        op_ms: Time of every op of the tape.
    """
    if len(op_ms) != len(tape.ops):
        raise ArgumentError(
            f"`op_ms` must hold one time for each of the {len(tape.ops)} ops of the"
            f" tape, got {len(op_ms)}; take the tape's own, `profile.op_ms`."
        )
    memory = _Memory(tape)
    forward = _forward(tape, op_ms)
    backward = _backward(tape, memory, op_ms)
    gradient_bytes = with_descendants(tape.modules, memory.gradient_bytes)
    return Statistics(
        modules=tuple(
            _figures(tape, memory, i, gradient, forward.get(i), backward.get(i))
            for i, gradient in enumerate(gradient_bytes)
        ),
        tree=tape.modules,
        forward_pre_order=_order(tape, forward, lambda i: forward[i].calls[0].enter),
        forward_post_order=_order(tape, forward, lambda i: forward[i].exit),
        backward_pre_order=_order(
            tape,
            backward.keys() & forward.keys(),
            lambda i: (backward[i].first.start, tape.modules[i].depth),
        ),
        backward_post_order=_order(
            tape,
            backward.keys() & forward.keys(),
            lambda i: (backward[i].last.start, -tape.modules[i].depth),
        ),
    )


def _order(
    tape: Tape, modules: Iterable[int], key: Callable[[int], Any]
) -> tuple[str, ...]:
    return tuple(tape.modules[i].fqn for i in sorted(modules, key=key))


def _figures(
    tape: Tape,
    memory: _Memory,
    module: int,
    gradient_bytes: int,
    forward: _Forward | None,
    backward: _Backward | None,
) -> ModuleStatistics:
    node = tape.modules[module]
    figures = ModuleStatistics(
        fqn=node.fqn,
        is_leaf=node.is_leaf,
        parameter_bytes=node.parameter_bytes,
        gradient_bytes=gradient_bytes,
        buffer_bytes=node.buffer_bytes,
    )
    if forward is None:
        return figures
    inputs = {s for call in forward.calls for s in call.inputs}
    outputs = {s for call in forward.calls for s in call.outputs}
    figures = replace(
        figures,
        calls=len(forward.calls),
        input_bytes=sum(tape.storages[s].nbytes for s in inputs),
        output_bytes=sum(tape.storages[s].nbytes for s in outputs),
        activation_bytes=forward.activation_bytes,
        candidate_bytes=forward.candidate_bytes,
        total_activation_bytes=int(memory.activations[forward.exit]),
        forward_ms=forward.ms,
        backward_ms=0.0,
    )
    if backward is None:
        return figures
    begin, peak = backward.first.start, backward.peak
    growth = memory.temporaries[peak] - memory.temporaries[begin]
    return replace(
        figures,
        total_gradient_bytes=int(memory.gradients[begin]),
        backward_activation_bytes=int(memory.activations[peak]),
        backward_temporary_bytes=int(growth),
        backward_ms=backward.ms,
    )


class _Memory:
    """Live bytes after every tick when nothing is recomputed, by kind.

    A gradient counts as a temporary of backward until its parameter receives it,
    which is what the last backward op that touches it does (AccumulateGrad).
    """

    def __init__(self, tape: Tape) -> None:
        category = np.array([storage.category for storage in tape.storages])
        is_gradient = category == "gradient"
        receiver = _last_touches(tape, is_gradient)
        received = tape.born.copy()
        self.gradient_bytes = [0] * len(tape.modules)
        for storage, op in receiver.items():
            self.gradient_bytes[op.module] += tape.storages[storage].nbytes
            if received[storage]:
                received[storage] = op.start
        self.size = tape.num_ticks + 1
        used = [op for op in tape.ops if op.workspace_bytes]
        workspaces = self._live(
            np.array([op.made for op in used], dtype=np.int64),
            np.array([op.end for op in used], dtype=np.int64),
            np.array([op.workspace_bytes for op in used], dtype=np.int64),
        )
        born, freed, nbytes = tape.born, tape.freed, tape.nbytes
        kind = category == "activation"
        self.activations = self._live(born[kind], freed[kind], nbytes[kind])
        kind = is_gradient
        self.gradients = self._live(received[kind], freed[kind], nbytes[kind])
        in_flight = self._live(born[kind], received[kind], nbytes[kind])
        kind = category == "temporary"
        temporaries = self._live(born[kind], freed[kind], nbytes[kind])
        self.temporaries = temporaries + in_flight + workspaces
        self.total = self._live(born, freed, nbytes) + workspaces

    def _live(self, born: IntArray, died: IntArray, nbytes: IntArray) -> IntArray:
        ledger = Ledger(born=born, died=died, nbytes=nbytes)
        return ledger.after_ticks(self.size - 1)


def _last_touches(tape: Tape, wanted: npt.NDArray[np.bool_]) -> dict[int, Op]:
    """The last backward op that touches each wanted storage."""
    last_ops = {}
    for op in tape.ops:
        if op.phase == "backward":
            for storage in (*op.reads, *op.writes, *op.creates):
                if wanted[storage]:
                    last_ops[storage] = op
    return last_ops


def with_descendants(tree: ModuleTree, own: Sequence[int]) -> list[int]:
    """Sums over each module and its descendants."""
    total = list(own)
    for i in range(len(tree) - 1, 0, -1):  # children come after their parent
        total[tree[i].parent] += total[i]
    return total


@dataclass(slots=True)
class _Forward:
    """What the calls of one module do in forward."""

    calls: list[ModuleCall] = field(default_factory=list)
    exit: int = 0
    activation_bytes: int = 0
    candidate_bytes: int = 0
    ms: float = 0.0


def _forward(tape: Tape, op_ms: Sequence[float]) -> dict[int, _Forward]:
    by_module: dict[int, _Forward] = defaultdict(_Forward)
    for call in tape.calls:
        figures = by_module[call.module]
        figures.calls.append(call)
        figures.exit = max(figures.exit, call.exit)
    open_calls = OpenCalls(tape.calls)
    for op, ms in zip(tape.ops, op_ms, strict=True):
        for call in open_calls.at(op.start):
            by_module[call.module].ms += ms
    freed = tape.freed.tolist()
    for index, storage in enumerate(tape.storages):
        if storage.category == "activation":
            for call in open_calls.at(storage.born):
                if index not in call.outputs:
                    by_module[call.module].candidate_bytes += storage.nbytes
                    if freed[index] > call.exit:
                        by_module[call.module].activation_bytes += storage.nbytes
    return dict(by_module)


class OpenCalls:
    """Finds the module calls that are open at a tick."""

    def __init__(self, calls: Sequence[ModuleCall]) -> None:
        self.calls = calls
        self.enters = [call.enter for call in calls]
        self.parents: list[int] = []
        last = -1
        for i, call in enumerate(calls):
            while last >= 0 and calls[last].exit < call.enter:
                last = self.parents[last]
            self.parents.append(last)
            last = i

    def at(self, tick: int) -> Iterator[ModuleCall]:
        """Open calls from the innermost one out; of nested ones of a module one."""
        seen = set()
        i = bisect_left(self.enters, tick) - 1
        while i >= 0:
            call = self.calls[i]
            if call.exit > tick and call.module not in seen:
                seen.add(call.module)
                yield call
            i = self.parents[i]


@dataclass(slots=True)
class _Backward:
    """What the backward ops of one module do; `peak` is a tick."""

    first: Op
    last: Op
    peak: int
    ms: float = 0.0


def _backward(
    tape: Tape, memory: _Memory, op_ms: Sequence[float]
) -> dict[int, _Backward]:
    chains = [(i, *tape.modules.ancestors(i)) for i in range(len(tape.modules))]
    live = memory.total.tolist()
    by_module: dict[int, _Backward] = {}
    for op, ms in zip(tape.ops, op_ms, strict=True):
        if op.phase != "backward":
            continue
        for module in chains[op.module]:
            figures = by_module.get(module)
            if figures is None:
                figures = by_module[module] = _Backward(op, op, op.made)
            if live[op.made] > live[figures.peak]:
                figures.peak = op.made
            figures.last = op
            figures.ms += ms
    return by_module
