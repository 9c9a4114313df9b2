"""`torch.compile` with a cap on the real peak: a partition that keeps a byte budget.

AOTAutograd gives the joint graph of forward and backward to a partition function. Ours
plans it (`graphs/plans.py`), writes the recomputations into its backward just before
their first use, and lets PyTorch cut it in two by what backward then reads of forward.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import fx

from autosac import _compat_compiler, _compat_graphs
from autosac.checkpointing import compiled_parts
from autosac.errors import (
    ArgumentError,
    AutosacError,
    InfeasibleBudgetError,
    UnsupportedError,
)
from autosac.graphs import compiled_nodes, compiled_runs, reading
from autosac.graphs.arguments import (
    Strategy,
    check_choice,
    check_graph_offload,
)
from autosac.graphs.compiled_peaks import CompiledPlan, Growth
from autosac.graphs.joint_graphs import JointGraph, normalized, unpack_at_once
from autosac.graphs.plans import GraphPlan, GraphPlanner
from autosac.profiles.mistakes import check_unplanned
from autosac.pytrees import module_tensors
from autosac.quantities import (
    format_bytes,
    parse_bytes,
    read_host_budget,
    whole_number,
)
from autosac.solvers.milp.solution import Backend
from autosac.solving.solve_options import check_solving
from autosac.storages import storage_bytes

CompilerBackend = Literal["aot_eager", "inductor"]

_NUM_RUNGS = 12  # plans between all and as little memory as can be: a heuristic


def compile(
    model: torch.nn.Module,
    *,
    memory_budget: int | str,
    strategy: Strategy = "milp",
    backend: CompilerBackend = "aot_eager",
    extra_bytes: int = 0,
    accumulate: bool = False,
    time_limit_s: float | None = None,
    relative_gap: float = 0.01,
    solver: Backend = "highs",
    offload: bool = False,
    host_budget: int | str | None = None,
    offload_dir: str | None = None,
) -> Any:
    """Compile a model so that forward and backward together keep a memory budget.

    The budget is a cap on all that is alive at once during forward and backward of the
    model: its parameters, buffers, inputs, outputs, activations, temporaries,
    workspaces of kernels, gradients of outputs and of parameters. What the model does
    not do is not seen: let it return the loss, so that the loss is in the graph, and
    say by ``extra_bytes`` what else is alive, such as optimizer state.

    The model is planned and compiled at its first call, and again for every new shape.
    Calls without gradients are compiled, not planned: they keep nothing for backward.
    With ``inductor`` the first call also runs forward and backward once on made-up
    data, to measure the peak.

    Args:
        model: On the CPU; one graph, without a compiled module inside.
        memory_budget: Cap on the peak: bytes, or text such as ``"8GiB"``.
        strategy: ``"milp"``: least recompute time; ``"capuchin"``: greedy.
        backend: ``"aot_eager"``: graphs run op by op; ``"inductor"``: they are fused.
        extra_bytes: What else is alive throughout.
        accumulate: Gradients of earlier backward passes are alive as well.
        time_limit_s: Time of each MILP: of a plan, and of the least peak. None to stop
            after an amount of work, which is the same in every run.
        relative_gap: The MILP stops this close to its bound.
        solver: Which one solves MILPs: ``"highs"`` or ``"cbc"``.
        offload: What forward keeps may lie in far memory, a file, until backward needs
            it. With ``aot_eager`` and ``"milp"`` only: TorchInductor orders ops anew.
        host_budget: Cap on what lies there, in bytes or as text; None for none.
        offload_dir: Where the file is; None for the system's temporary directory.

    Returns:
        What ``torch.compile`` returns. Its first call raises `InfeasibleBudgetError` if
        no plan fits, ``UnsupportedError`` for graphs that cannot be planned, and
        Dynamo's own error if the model is no single graph. Every call raises
        ``RuntimeError`` while another planned forward pass waits for its backward
        pass, or with gradients present that ``accumulate`` did not announce.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: An argument is none of the above, or the model has a plan already.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"`model` must be a module, got {type(model).__name__}.")
    check_unplanned(model)
    for fqn, module in model.named_modules():
        if _compat_compiler.is_compiled(module):
            raise ArgumentError(
                f"`{fqn or 'model'}` is compiled already; the budget caps one graph:"
                " compile the whole model with `autosac.compile`, or leave it out."
            )
        if isinstance(module, torch.nn.RNNBase):
            raise UnsupportedError(
                f"`{fqn or 'model'}` is an `nn.{type(module).__name__}`, which Dynamo"
                " does not compile: use its cell in a loop over time, or plan without"
                " compiling (`autosac.plan`, `autosac.joint_graph`)."
            )
    check_choice("strategy", strategy, get_args(Strategy))
    check_choice("backend", backend, get_args(CompilerBackend))
    check_choice("solver", solver, get_args(Backend))
    check_graph_offload(offload, strategy, offload_dir)
    if offload and backend != "aot_eager":
        raise UnsupportedError(
            f"`offload`=True needs `backend`='aot_eager', got {backend!r}, which orders"
            " and fuses ops anew: the places where memory is freed and copies begin"
            " would not be those of the plan."
        )
    host_bytes = read_host_budget(host_budget, offload=offload)
    whole_number(extra_bytes, name="extra_bytes", least=0)
    check_solving(solver, relative_gap, time_limit_s)
    compiler = _Compiler(
        model=weakref.ref(model),
        budget_bytes=parse_bytes(memory_budget),
        strategy=strategy,
        backend=backend,
        extra_bytes=extra_bytes,
        accumulate=accumulate,
        time_limit_s=time_limit_s,
        relative_gap=relative_gap,
        solver=solver,
        far={
            "offload": offload,
            "host_budget": host_bytes,
            "offload_dir": offload_dir,
        },
    )
    return _compiled(model, compiler)


def _compiled(model: torch.nn.Module, compiler: _Compiler) -> Any:
    """What `compile` returns; copies of it are made alike, for a copy of the model."""
    compiled: Any = torch.compile(
        model, backend=compiler.run, fullgraph=True, dynamic=False
    )
    # As in a call Dynamo traces: what the model tells loggers is left out.
    compiled.forward = _compat_graphs.without_logging()(compiled.forward)
    compiled.forward = _graph_of_each_kind()(compiled.forward)

    def copied(memo: dict[int, Any]) -> Any:
        twin = copy.deepcopy(model, memo)
        return _compiled(twin, replace(compiler, model=weakref.ref(twin), plans=[]))

    # An attribute that is set the usual way becomes one of the model.
    vars(compiled)["__deepcopy__"] = copied  # Dynamo's own would run `forward` bare
    _plans[compiled] = compiler.plans
    return compiled


@contextmanager
def _graph_of_each_kind() -> Iterator[None]:
    """Calls in it are compiled for every new shape, mode or number of Python's.

    Raises:
        UnsupportedError: There are too many, or the model got a plan.
    """
    try:
        with _compat_graphs.many_graphs():
            yield
    except RuntimeError as error:  # as all of Dynamo's
        compiled_parts.check_error(error)
        raise
    except _compat_graphs.CaptureError as error:
        raise UnsupportedError(
            f"The model was called with {error} Each is compiled and planned: pad"
            " batches to a few shapes, keep what changes from step to step in tensors"
            " and not in Python's numbers, or call `torch.compiler.reset()` to begin"
            " anew."
        ) from error


_plans: weakref.WeakKeyDictionary[Any, list[CompiledPlan]] = weakref.WeakKeyDictionary()


def compiled_plans(compiled: Any) -> tuple[CompiledPlan, ...]:
    """Plans of the graphs that calls of a compiled model have made so far.

    Raises:
        ValueError: ``compiled`` does not come from `compile`.
    """
    if compiled not in _plans:
        raise ArgumentError("`compiled` must be what `autosac.compile` returned.")
    return tuple(_plans[compiled])


def _with_beside(plan: GraphPlan, beside_bytes: int) -> CompiledPlan:
    return CompiledPlan(graph=plan, peak_bytes=plan.peak_bytes + beside_bytes)


@dataclass(kw_only=True)
class _Compiler:
    """A backend for Dynamo; the attributes are arguments of `compile`.

    Those on offload are together in ``far``.
    """

    model: weakref.ref[torch.nn.Module]
    budget_bytes: int
    strategy: Strategy
    backend: CompilerBackend
    extra_bytes: int
    accumulate: bool
    time_limit_s: float | None
    relative_gap: float
    solver: Backend
    far: dict[str, Any]
    plans: list[CompiledPlan] = field(default_factory=list)

    def run(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile a graph. Dynamo would wrap our errors: they are raised by a call."""
        try:
            if self.backend == "aot_eager":
                return self._compile_eagerly(gm, inputs)
            return self._compile_with_inductor(gm, inputs)
        except AutosacError as error:
            return _raising(error)

    def _beside_bytes(self, inputs: Sequence[Any]) -> int:
        """Bytes alive beside a graph of some inputs.

        Tensors of the model that it does not read, accumulated gradients, and what the
        user says.
        """
        held = self.extra_bytes
        if self.accumulate:
            held += sum(p.nbytes for p in self._parameters() if p.requires_grad)
        if (model := self.model()) is None:
            return held
        read = [value for value in inputs if isinstance(value, torch.Tensor)]
        both = storage_bytes([*read, *module_tensors(model)])
        return held + both - storage_bytes(read)

    def _parameters(self) -> list[torch.nn.Parameter]:
        model = self.model()
        return [] if model is None else list(model.parameters())

    def _compile_eagerly(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        beside_bytes = self._beside_bytes(inputs)
        partition = _Partition(self, self.budget_bytes - beside_bytes)
        compiled = _compat_graphs.compile_eagerly(
            gm, inputs, partition.run, partition.guarded
        )
        if (plan := partition.plan) is None:
            return compiled
        compiled_plan = _with_beside(plan, beside_bytes)
        correct = partition.growth.add(self.plans, compiled_plan, self.budget_bytes)

        def lower(dropped: frozenset[fx.Node]) -> None:
            peak_bytes = reading.peak_bytes(plan.joint, dropped)
            known = replace(plan, peak_bytes=peak_bytes)
            correct(_with_beside(known, beside_bytes))

        assert partition.outside is not None
        partition.outside.tell = lower
        return compiled

    def _compile_with_inductor(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile and measure plans, less and less memory, until one fits.

        The order of plans does not depend on the budget. So the real peak of what is
        returned never rises as the budget falls, though that of single plans may.
        """
        beside_bytes = self._beside_bytes(inputs)
        wanted_bytes = self.budget_bytes - beside_bytes
        least_bytes = rung = 0
        while rung <= _NUM_RUNGS:
            partition = _Partition(self, wanted_bytes, rung=rung)
            compiled = _compat_graphs.compile_with_inductor(
                _compat_graphs.copy_graph(gm), inputs, partition.run, partition.guarded
            )
            if partition.plan is None:  # no backward pass
                return compiled
            real_bytes = partition.measured_bytes()
            if real_bytes <= wanted_bytes:
                peak_bytes = real_bytes + beside_bytes
                plan = CompiledPlan(graph=partition.plan, peak_bytes=peak_bytes)
                partition.growth.add(self.plans, plan, self.budget_bytes)
                return compiled
            least_bytes = min(real_bytes, least_bytes or real_bytes)
            assert partition.rung is not None
            rung = partition.rung + 1
        raise InfeasibleBudgetError(
            f"No plan fits `memory_budget`={self.budget_bytes}"
            f" ({format_bytes(self.budget_bytes)}): the least peak that was measured"
            f" with `backend`='inductor' is {least_bytes + beside_bytes} bytes"
            f" ({format_bytes(least_bytes + beside_bytes)}). Raise the budget to"
            " that, or use a smaller batch.",
            budget_bytes=self.budget_bytes,
            lowest_peak_bytes=least_bytes + beside_bytes,
            composition={
                "graph": least_bytes,
                "beside the graph": beside_bytes,
            },
        )

    def check_gradients(self) -> None:
        """Refuse gradients that are not counted."""
        if self.accumulate:
            return
        for parameter in self._parameters():
            if parameter.grad is not None:
                raise RuntimeError(
                    "Parameters have gradients when forward begins, which the budget"
                    " does not count: call `optimizer.zero_grad()` (with"
                    " `set_to_none=True`) before, or compile with `accumulate=True`."
                )


def _raising(error: Exception) -> Callable[..., Any]:
    def run(*_args: Any) -> Any:
        raise error

    return run


class _Partition:
    """Plans and cuts one joint graph, and watches what is compiled of it.

    Attributes:
        budget_bytes: What is left for the graph.
        rung: None to plan for the budget. Else the plan to begin with, from 0, which
            recomputes nothing, to `_NUM_RUNGS`, whose simulated peak is the least;
            afterwards the one that was taken.
        plan: Of the graph, once there is one.
        outside: What callers drop of its results and gradients, likewise.
        growth: What the model holds more since.
    """

    def __init__(
        self, compiler: _Compiler, budget_bytes: int, *, rung: int | None = None
    ) -> None:
        self.compiler = compiler
        self.budget_bytes = budget_bytes
        self.rung = rung
        self.plan: GraphPlan | None = None
        self.growth = Growth(compiler.model)
        self._runs: dict[bool, compiled_runs.Run] = {}
        self.outside: compiled_runs.Outside | None = None
        self._num_outputs = 0

    def run(
        self, module: fx.GraphModule, num_outputs: int, static: Sequence[int]
    ) -> _compat_graphs.Partition:
        """Forward and backward of a joint graph, within the budget."""
        is_eager = self.compiler.backend == "aot_eager"  # Inductor fuses sums itself
        captured = normalized(module, num_outputs, in_place=is_eager)
        joint = JointGraph(
            module=module,
            num_forward_outputs=num_outputs,
            memory=captured.memory.measured(),
        )
        self.plan = self._planned(
            GraphPlanner(
                joint,
                floor_limit_s=self.compiler.time_limit_s,
                backend=self.compiler.solver,
                begins_anew=self.rung is not None,  # what is said is so next time
            )
        )
        self._num_outputs = num_outputs
        saved = compiled_nodes.saved_nodes(self.plan.joint)
        for node in compiled_nodes.kept_by_graph_alone(self.plan.joint, saved):
            _compat_graphs.free_once_read(node)
        parts = _compat_graphs.split(self.plan.joint.module, saved, num_outputs, static)
        for part in parts:
            unpack_at_once(part.graph)
            part.recompile()
        results: Any = self.plan.joint.module.graph.output_node().args[0]
        outputs = results[:num_outputs]
        self.outside = compiled_runs.Outside(
            [node if isinstance(node, fx.Node) else None for node in outputs],
            compiled_nodes.tangents_of(self.plan.joint, parts[1]),
            compiled_nodes.outputs_in_saved_memory(self.plan.joint, saved),
        )
        return parts

    def _planned(self, planner: GraphPlanner) -> GraphPlan:
        if self.rung is not None:
            return self._climbed_down(planner, self.rung)
        try:
            return self._plan(planner, max(self.budget_bytes, 1))
        except InfeasibleBudgetError as error:
            raise self._with_all_bytes(error) from None

    def _plan(self, planner: GraphPlanner, budget_bytes: int) -> GraphPlan:
        return planner.plan(
            budget_bytes,
            strategy=self.compiler.strategy,
            time_limit_s=self.compiler.time_limit_s,
            relative_gap=self.compiler.relative_gap,
            **self.compiler.far,
        )

    def _climbed_down(self, planner: GraphPlanner, first: int) -> GraphPlan:
        """The first plan from some rung on that may fit whatever is fused."""
        high = planner.baseline_peak_bytes
        span_bytes = high - planner.floor(self.compiler.strategy)
        if compiled_nodes.least_bytes_of_any_plan(planner.joint) > self.budget_bytes:
            first = _NUM_RUNGS  # to say the least peak
        for rung in range(first, _NUM_RUNGS + 1):
            plan = self._plan(planner, high - span_bytes * rung // _NUM_RUNGS)
            self.rung = rung
            if compiled_nodes.least_real_bytes(plan.joint) <= self.budget_bytes:
                break
        return plan

    def _with_all_bytes(self, error: InfeasibleBudgetError) -> InfeasibleBudgetError:
        """An infeasible budget's error in terms of the whole budget."""
        beside_bytes = self.compiler.budget_bytes - self.budget_bytes
        if not beside_bytes:
            return error
        lowest_bytes = error.lowest_peak_bytes + beside_bytes
        return InfeasibleBudgetError(
            f"No plan fits `memory_budget`={self.compiler.budget_bytes}: beside"
            f" {format_bytes(beside_bytes)} that are alive throughout (`extra_bytes`,"
            " accumulated gradients, what the model holds and this graph does not"
            f" read), the lowest peak is {error.lowest_peak_bytes} bytes."
            f" Raise the budget to {lowest_bytes}, or use a smaller batch.",
            budget_bytes=self.compiler.budget_bytes,
            lowest_peak_bytes=lowest_bytes,
            composition={**error.composition, "beside the graph": beside_bytes},
        )

    def guarded(
        self, compiled: Callable[..., Any], example: Sequence[Any], is_backward: bool
    ) -> Callable[..., Any]:
        """A compiled graph that refuses to run where the budget would not hold."""
        self._runs[is_backward] = compiled_runs.Run(compiled, tuple(example))
        assert self.outside is not None  # it is partitioned before it is compiled
        if is_backward:
            return compiled_runs.guarded_backward(compiled, self.outside)
        return compiled_runs.guarded_forward(
            compiled, self._num_outputs, self._check, self.outside
        )

    def _check(self) -> None:
        self.compiler.check_gradients()
        self.growth.check()

    def measured_bytes(self) -> int:
        """Real peak of what was compiled, on made-up data."""
        return compiled_runs.measured_peak(
            self._runs[False], self._runs[True], self._num_outputs
        )
