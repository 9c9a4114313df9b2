"""What forward keeps and backward needs, for a module and for every module in it.

The terms are those of Colossal-AI's analyzer (``GraphInfo``); the figures come from
the tape of one step, so that any module that can be traced can be asked about, and
each byte is one that the simulation counts as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from autosac.devices.specs import DeviceSpec
from autosac.optional import needed
from autosac.profiles import profile
from autosac.profiles.mistakes import check_unplanned
from autosac.profiles.node_figures import FIGURES, Figures, Staged
from autosac.profiles.node_modules import as_module
from autosac.pytrees import tensors_in
from autosac.quantities import format_bytes
from autosac.statistics.by_module import OpenCalls
from autosac.step.tape import Op, Tape
from autosac.step.training_step import LossFn, default_loss
from autosac.summaries import Summarized, Summary, Table

_PLACEHOLDERS = ("parameter", "buffer", "input")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleInfo(Figures):
    """Figures of one module, what runs inside it included.

    Bytes are of whole storages, each counted once, all calls of the module together.
    Parameters and buffers are alive anyway and count nowhere but as gradients. Not
    counted are the 8 bytes that autograd may keep of a Python number.

    Attributes:
        fqn: Its name, empty for the module that was asked about.
        class_name: Name of its class.
        depth: Number of modules around it.
        is_leaf: Whether it has no child modules.
        calls: How often forward calls it.
        fwd_flop: Floating point operations of its forward ops (PyTorch's formulas,
            ``torch.utils.flop_counter``: products and convolutions only).
        bwd_flop: Those of the backward ops that differentiate them; what is
            recomputed under a checkpoint of the module's own is among them. What is
            inside a reentrant checkpoint or `pipeline_checkpoint` has no graph in
            forward: all of its backward counts for modules around that.
        fwd_mem_in: Bytes that autograd saves in a call and that existed before this
            call: its inputs, and tensors that it reaches in other ways. What counts as
            `fwd_mem_tmp` of another call does not count again.
        fwd_mem_tmp: Bytes that autograd saves in a call and that this call made:
            intermediates, and its output where an op of its own saves that (as ReLU's
            does). What only a later module saves counts there, as `fwd_mem_in`.
        bwd_mem_tmp: Most bytes alive at one moment of what its backward ops make and
            does not leave it: temporaries from birth to death, and the workspaces that
            kernels allocate inside themselves.
        bwd_mem_out: Bytes that its backward ops make and that leave it: gradients of
            its parameters and of its inputs. A gradient leaves if it is given to a
            parameter, is read by backward of another module, is added into a gradient
            that another module made, or outlives backward. One that is handed on
            unchanged or as a view was made elsewhere and does not count.
        bwd_mem_peak: Most bytes alive at one moment of all that its backward ops make,
            what leaves it included until it dies elsewhere: at most the sum of the two.
    """

    fqn: str
    class_name: str
    depth: int
    is_leaf: bool
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode(Staged):
    """One node of the step's graph: a tensor that it begins with, or an op.

    Attributes:
        stage: placeholder, forward, loss or backward.
        name: Of the op; parameter, buffer or input for a placeholder.
        fqn: Module that the op belongs to (in backward: whose forward it
            differentiates); None for placeholders and for the loss.
        flop: Floating point operations.
        made_bytes: Size of the storages that it makes, 0 for a view.
        saved_bytes: Size of those of them that autograd saves in the stage forward.
    """

    stage: str
    name: str
    fqn: str | None
    flop: int
    made_bytes: int
    saved_bytes: int

    @property
    def is_saved(self) -> bool:
        """Whether forward saves what it makes."""
        return self.saved_bytes > 0


@dataclass(frozen=True, kw_only=True, repr=False)
class GraphInfo(Summarized):
    """Figures of a module and of all that are called inside it.

    Attributes:
        modules: Forward pre-order; the module itself comes first.
        nodes: Placeholders, then ops in execution order.
    """

    modules: tuple[ModuleInfo, ...]
    nodes: tuple[GraphNode, ...]

    @cached_property
    def _by_fqn(self) -> dict[str, ModuleInfo]:
        return {info.fqn: info for info in self.modules}

    def __getitem__(self, fqn: str) -> ModuleInfo:
        """Figures of one module, by its FQN."""
        return self._by_fqn[fqn]

    @property
    def total(self) -> ModuleInfo:
        """Figures of the module that was asked about."""
        return self.modules[0]

    @property
    def leaves(self) -> tuple[ModuleInfo, ...]:
        """Figures of the modules that have no child modules."""
        return tuple(info for info in self.modules if info.is_leaf)

    def to_dataframe(self) -> Any:
        """One row a module, as a pandas table.

        Raises:
            ImportError: pandas is not installed.
        """
        pandas = needed("pandas", "`GraphInfo.to_dataframe`")
        columns = [name for name in ModuleInfo.__slots__ if name not in FIGURES]
        return pandas.DataFrame.from_records(
            [asdict(info) for info in self.modules], columns=[*columns, *FIGURES]
        )

    def summary(self) -> Summary:
        """The modules as a tree; the middle of many is left out."""
        rows = tuple(
            (
                "  " * info.depth
                + f"{info.fqn.rpartition('.')[2] or '(all)'} ({info.class_name})",
                f"{info.fwd_flop:.3g}",
                f"{info.bwd_flop:.3g}",
                *(format_bytes(getattr(info, name)) for name in FIGURES[2:]),
            )
            for info in self.modules
        )
        table = Table(heads=("module", *FIGURES), rows=rows, clips=True)
        return Summary(title="Figures of modules", tables=(table,))


def graph_info(
    module: torch.nn.Module | fx.Graph | Callable[..., Any],
    inputs: Any,
    *,
    loss_fn: LossFn | None = None,
    device: str | torch.device | DeviceSpec | None = None,
    autocast: torch.dtype | None = None,
    calibrate: bool = False,
) -> GraphInfo:
    """Work out what forward keeps and backward needs, module by module.

    Nothing is run and nothing is changed: the figures are those of a traced step.

    Args:
        module: Any module that can be traced, in the mode it trains in; a function; or
            an FX graph, with its module or without: then every node that calls
            something, as a function or a residual connection, has figures like a module
            of the node's name.
        inputs: As in `autosac.profile`. Inputs that require gradients get them, and
            these then count in `ModuleInfo.bwd_mem_out`. Those of a function, which has
            no parameters, all do unless one is marked.
        loss_fn: Output -> scalar tensor. Without it ``output.loss`` is used, or every
            output gets a dense gradient, as from a module that follows. The loss is
            no part of the module's figures.
        device: As in `autosac.profile`.
        autocast: Type that forward and loss autocast to.
        calibrate: Measure the workspaces of kernels on the present device (once; see
            `autosac.calibrate`) instead of modelling them.

    Raises:
        TypeError: ``module`` is nothing of the above.
        ArgumentError: It has a plan.
        TraceError: The module cannot be traced, or has no backward pass.
        ValueError: As in `autosac.profile`.
        UnsupportedError: As in `autosac.profile`.
    """
    is_function = not isinstance(module, (torch.nn.Module, fx.Graph))
    if isinstance(module, torch.nn.Module):
        check_unplanned(module)
    traced = profile.profile(
        _Alone(as_module(module)),
        _differentiable(inputs) if is_function else inputs,
        loss_fn=loss_fn or _loss_of_dense_gradients,
        device=device,
        autocast=autocast,
    )
    if calibrate:
        traced = profile.calibrate(traced)
    return _info(traced.tape)


def _differentiable(inputs: Any) -> Any:
    """A function's inputs: floats require gradients unless one of them does so."""
    if any(t.requires_grad for t in tensors_in(inputs)):
        return inputs

    def with_gradient(leaf: Any) -> Any:
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.detach().requires_grad_() if is_float else leaf

    return tree_map(with_gradient, inputs)


class _Alone(torch.nn.Module):
    """Holds the module, so that the loss belongs to something else: tree index 0."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


_ASKED = 1  # tree index of the module that was asked about


def _loss_of_dense_gradients(output: Any) -> torch.Tensor:
    """`default_loss`, but no gradient is one number expanded to a shape."""

    def scaled(leaf: Any) -> Any:
        wanted = isinstance(leaf, torch.Tensor) and leaf.requires_grad
        return leaf * 1.0 if wanted else leaf

    return default_loss(tree_map(scaled, output))


def _info(tape: Tape) -> GraphInfo:
    calls = [call for call in tape.calls if call.phase == "forward"]
    num_calls = Counter(call.module for call in calls)
    open_calls = OpenCalls(calls)
    figures = {
        **_flops(tape, open_calls),
        **_saved_bytes(tape, open_calls),
        **_backward_bytes(tape),
    }
    outer = tape.modules[_ASKED]
    return GraphInfo(
        modules=tuple(
            ModuleInfo(
                fqn=_own_name(tape, i),
                class_name=tape.modules[i].class_name,
                depth=tape.modules[i].depth - outer.depth,
                is_leaf=tape.modules[i].is_leaf,
                calls=num_calls[i],
                **{name: by_module.get(i, 0) for name, by_module in figures.items()},
            )
            for i in range(_ASKED, len(tape.modules))
            if num_calls[i]
        ),
        nodes=tuple(_nodes(tape)),
    )


def _own_name(tape: Tape, module: int) -> str:
    """FQN inside the module that was asked about."""
    return tape.modules[module].fqn.partition(".")[2]


def _flops(tape: Tape, open_calls: OpenCalls) -> dict[str, dict[int, int]]:
    """Floating point operations of forward and backward, per module."""
    forward: dict[int, int] = defaultdict(int)
    backward: dict[int, int] = defaultdict(int)
    for op in tape.ops:
        if op.phase == "forward" and op.flops:
            for call in open_calls.at(op.start):
                forward[call.module] += op.flops
    for op in _backward_ops(tape):
        for module in _chain(tape, op.module):
            backward[module] += op.flops
    return {"fwd_flop": forward, "bwd_flop": backward}


def _backward_ops(tape: Tape) -> Iterator[Op]:
    return (op for op in tape.ops if op.phase == "backward")


def _chain(tape: Tape, module: int) -> tuple[int, ...]:
    return (module, *tape.modules.ancestors(module))


def _saved_bytes(tape: Tape, open_calls: OpenCalls) -> dict[str, dict[int, int]]:
    """What autograd saves in forward, per module: made before a call, or in it."""
    before: dict[int, set[int]] = defaultdict(set)
    inside: dict[int, set[int]] = defaultdict(set)
    for one in tape.saved:
        storage = tape.storages[one.storage]
        if storage.category not in ("parameter", "buffer"):
            for call in open_calls.at(one.packed):
                storages = before if storage.born < call.enter else inside
                storages[call.module].add(one.storage)
    sizes = [storage.nbytes for storage in tape.storages]
    return {
        "fwd_mem_in": {m: _total(sizes, s - inside[m]) for m, s in before.items()},
        "fwd_mem_tmp": {m: _total(sizes, s) for m, s in inside.items()},
    }


def _total(sizes: list[int], storages: Iterable[int]) -> int:
    return sum(sizes[storage] for storage in storages)


def _backward_bytes(tape: Tape) -> dict[str, dict[int, int]]:
    """Bytes that backward makes, per module: peak of what stays, what leaves, peak."""
    leaves = _leaving(tape)
    freed = tape.freed.tolist()
    out: dict[int, int] = defaultdict(int)
    staying: dict[int, _Changes] = defaultdict(list)
    leaving: dict[int, _Changes] = defaultdict(list)
    for op in _backward_ops(tape):
        workspace = _span(op.made, op.end, op.workspace_bytes)
        for module in _chain(tape, op.module):
            staying[module] += workspace
            for storage in op.creates:
                nbytes = tape.storages[storage].nbytes
                span = _span(tape.storages[storage].born, freed[storage], nbytes)
                if leaves(storage, module):
                    out[module] += nbytes
                    leaving[module] += span
                else:
                    staying[module] += span
    return {
        "bwd_mem_tmp": {m: _peak(changes) for m, changes in staying.items()},
        "bwd_mem_out": out,
        "bwd_mem_peak": {m: _peak(staying[m] + leaving[m]) for m in staying},
    }


_Changes = list[tuple[int, int]]  # tick and bytes


def _span(born: int, freed: int, nbytes: int) -> _Changes:
    return [(born, nbytes), (freed, -nbytes)] if nbytes else []


def _peak(changes: _Changes) -> int:
    live = peak = 0
    for _, nbytes in sorted(changes):  # what is freed at a tick goes first
        live += nbytes
        peak = max(peak, live)
    return peak


def _leaving(tape: Tape) -> Callable[[int, int], bool]:
    """Tells whether a storage that backward of a module makes leaves the module."""
    freed = tape.freed.tolist()
    end = tape.phases["optimizer"]
    readers: dict[int, set[int]] = defaultdict(set)
    maker: dict[int, int] = {}
    for op in _backward_ops(tape):
        maker.update(dict.fromkeys(op.creates, op.module))
        # What is added into a gradient goes to the module that made this gradient.
        into = {maker.get(storage, 0) for storage in op.writes}
        for storage in op.reads:
            readers[storage] |= {op.module, *into}

    def leaves(storage: int, module: int) -> bool:
        if tape.storages[storage].category == "gradient" or freed[storage] > end:
            return True
        return not all(tape.modules.contains(module, r) for r in readers[storage])

    return leaves


def _nodes(tape: Tape) -> Iterator[GraphNode]:
    sizes = [storage.nbytes for storage in tape.storages]
    loss_begins = tape.phases["loss"]
    saved = {one.storage for one in tape.saved if one.packed < loss_begins}
    for index, storage in enumerate(tape.storages):
        if not storage.born and storage.category in _PLACEHOLDERS:
            yield GraphNode(
                stage="placeholder",
                name=storage.category,
                fqn=None,
                flop=0,
                made_bytes=storage.nbytes,
                saved_bytes=storage.nbytes if index in saved else 0,
            )
    for op in tape.ops:
        if op.phase != "optimizer":
            yield GraphNode(
                stage=op.phase,
                name=op.name,
                fqn=_own_name(tape, op.module) if op.module >= _ASKED else None,
                flop=op.flops,
                made_bytes=_total(sizes, op.creates),
                saved_bytes=_total(sizes, saved.intersection(op.creates)),
            )
