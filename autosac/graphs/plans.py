"""Plans for joint graphs: which intermediates are recomputed under a budget."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, get_args

from torch import fx

from autosac import _compat
from autosac.errors import InfeasibleBudgetError
from autosac.graphs import module_starts
from autosac.graphs import rewriting as graph_rewriting
from autosac.graphs.joint_graphs import JointGraph
from autosac.graphs.memory import GraphMemory
from autosac.planning.plans import Plan
from autosac.quantities import format_bytes, format_ms, parse_bytes
from autosac.solvers import graph
from autosac.solvers.graph import capuchin, local_search, recomputation
from autosac.solvers.graph.recomputation import GraphProblem
from autosac.solvers.milp.solution import Backend
from autosac.summaries import Summarized, Summary
from autosac.units.groups import BATCH_NORM_OPS, NEVER_RERUN

Strategy = Literal["milp", "capuchin"]

_FUNCTIONAL_BATCH_NORM = "aten._native_batch_norm_legit_functional.default"


@dataclass(frozen=True, kw_only=True, repr=False)
class GraphPlan(Summarized):
    """A joint graph that keeps a budget.

    Attributes:
        joint: The graph, rewritten: run it, or look at its ``module``.
        strategy: What chose.
        budget_bytes: The budget that was asked for.
        peak_bytes: Simulated peak of the rewritten graph.
        baseline_peak_bytes: That of the graph as it was captured.
        recompute_ms: Time of the nodes that run again.
        bound_ms: No choice that recomputes an intermediate at most once takes less;
            None where nothing is proven.
        recomputed: Names of the forward nodes that run again.
    """

    joint: JointGraph
    strategy: Strategy
    budget_bytes: int
    peak_bytes: int
    baseline_peak_bytes: int
    recompute_ms: float
    bound_ms: float | None
    recomputed: tuple[str, ...]

    @property
    def optimality_gap(self) -> float | None:
        """Share of the recompute time that the bound leaves open, None without one."""
        if self.bound_ms is None:
            return None
        if not self.recompute_ms:
            return 0.0
        return (self.recompute_ms - self.bound_ms) / self.recompute_ms

    def summary(self) -> Summary:
        """Budget, peak, time and the nodes that run again."""
        gap = self.optimality_gap
        proven = "nothing is proven" if gap is None else f"gap {gap:.1%}"
        return Summary(
            title="Graph plan",
            facts=(
                ("budget", format_bytes(self.budget_bytes)),
                (
                    "peak",
                    f"{format_bytes(self.peak_bytes)} simulated,"
                    f" {format_bytes(self.baseline_peak_bytes)} without the plan",
                ),
                ("time", f"{format_ms(self.recompute_ms)} recomputation ({proven})"),
                ("nodes", f"{len(self.recomputed)} run again"),
                ("strategy", self.strategy),
            ),
        )


class GraphPlanner:
    """Plans one joint graph under any number of budgets.

    It knows all plans that were made for equal graphs in this process before: no plan
    takes more time than one of them that fits the budget too. So a larger budget is
    never dearer if it is asked for after the smaller one. In another order, or another
    process, it is dearer by no more than its own `GraphPlan.optimality_gap`: its bound
    holds for the smaller budget's plan as well.

    Attributes:
        joint: The graph.
        problem: The same as numbers.
        floor_limit_s: How long the MILP searches its least peak; None for an amount of
            work.
        backend: Which MILP solver runs.
    """

    def __init__(
        self,
        joint: JointGraph,
        *,
        floor_limit_s: float | None = None,
        backend: Backend = "highs",
    ) -> None:
        if backend not in get_args(Backend):
            raise ValueError(f"`backend` must be 'highs' or 'cbc', got {backend!r}.")
        self.joint = joint
        self.floor_limit_s = floor_limit_s
        self.backend: Backend = backend
        self._reader = _Reader(joint)
        self.problem = self._reader.problem()

    @cached_property
    def baseline_peak_bytes(self) -> int:
        """Simulated peak when nothing is recomputed."""
        return self.joint.memory.peak_bytes()

    def floor(self, strategy: Strategy) -> int:
        """The least peak that a strategy reaches in some seconds.

        Before a budget below it is refused, ten times as much is done.
        """
        if strategy == "milp":
            return self.lowest[0]
        return capuchin.solve(self.problem, budget_bytes=0).peak_bytes

    def plan(
        self,
        memory_budget: int | str,
        *,
        strategy: Strategy = "milp",
        time_limit_s: float | None = None,
        relative_gap: float = 0.01,
        modules: Plan | None = None,
    ) -> GraphPlan:
        """Recompute intermediates so that the peak keeps a budget.

        Args:
            memory_budget: Cap on the peak: bytes, or text such as ``"8GiB"``.
            strategy: ``"milp"``: least time, with a bound; ``"capuchin"``: the greedy.
            time_limit_s: Time of the MILP; None to stop after an amount of work, which
                is the same in every run: some 10 s for graphs of 1,500 nodes.
            relative_gap: The MILP stops this close to its bound.
            modules: A plan of `autosac.plan` for the same step, as a start: the result
                takes no more time than to recompute what it recomputes.

        Raises:
            InfeasibleBudgetError: The strategy knows no plan within the budget.
            ValueError: An argument is none of these.
        """
        budget_bytes = parse_bytes(memory_budget)
        if strategy not in get_args(Strategy):
            raise ValueError(
                f"`strategy` must be 'milp' or 'capuchin', got {strategy!r}."
            )
        greedy = capuchin.solve(self.problem, budget_bytes=budget_bytes)
        if strategy == "capuchin":
            if greedy.kept is None:
                raise self._infeasible(budget_bytes, greedy.lowest, strategy)
            return self._made(budget_bytes, greedy.kept, None, strategy)
        starts = self._starts(budget_bytes, greedy, modules)
        solution = _solved(
            self.problem,
            budget_bytes,
            starts,
            time_limit_s,
            relative_gap,
            self.backend,
        )
        if solution.kept is None:
            raise self._infeasible(budget_bytes, self.lowest_at_all, strategy)
        assert solution.bound_ms is not None
        known = _known(self.problem)
        known.add(self.problem, solution.kept)
        bound_ms = known.bound(budget_bytes, solution.bound_ms)
        return self._made(budget_bytes, solution.kept, bound_ms, strategy)

    def _starts(
        self,
        budget_bytes: int,
        greedy: capuchin.CapuchinSolution,
        modules: Plan | None,
    ) -> tuple[frozenset[int], ...]:
        """Choices that the MILP begins with: greedy ones, earlier ones, modules'."""
        problem = self.problem
        additive = capuchin.solve(
            problem,
            budget_bytes=budget_bytes,
            bookkeeping=capuchin.AdditiveBookkeeping,
        )
        # Greedy ends keep again what the budget allows, and are often the better ones.
        starts = [greedy.kept, greedy.lowest, additive.kept]
        starts.append(_known(problem).cheapest(budget_bytes))
        if modules is not None:
            starts.append(
                local_search.repair(problem, self.kept_by(modules), budget_bytes)
            )
        fitting = [kept for kept in starts if kept is not None]
        if all(recomputation.peak_bytes(problem, k) > budget_bytes for k in fitting):
            fitting.append(self.lowest[1])
            if self.lowest[0] > budget_bytes:
                fitting.append(self.lowest_at_all)
        return tuple(dict.fromkeys(fitting))

    def kept_by(self, modules: Plan) -> frozenset[int]:
        """Values that a plan of modules keeps, see `plan`; it may break budgets."""
        return module_starts.kept_by_modules(
            self.problem, self._reader.ops, modules.op_policies
        )

    @cached_property
    def lowest(self) -> tuple[int, frozenset[int]]:
        """Least peak that the MILP finds, and what is kept there."""
        greedy = capuchin.solve(self.problem, budget_bytes=0)
        solution = _lowest(
            self.problem, greedy.lowest, self.floor_limit_s, self.backend
        )
        assert solution.kept is not None and solution.peak_bytes is not None
        _known(self.problem).add(self.problem, solution.kept)
        return solution.peak_bytes, solution.kept

    @cached_property
    def lowest_at_all(self) -> frozenset[int]:
        """What is kept at the least peak found by much more work than `lowest` does.

        That is done before a budget is refused.
        """
        start, limit_s = self.lowest[1], self.floor_limit_s
        solution = _lowest(self.problem, start, limit_s, self.backend, thorough=True)
        assert solution.kept is not None
        return solution.kept

    def _made(
        self,
        budget_bytes: int,
        kept: Set[int],
        bound_ms: float | None,
        strategy: Strategy,
    ) -> GraphPlan:
        again = recomputation.reruns(self.problem, kept)
        joint = self._reader.rewritten(kept, again)
        ops = [op for ops in again.values() for op in ops]
        peak_bytes = joint.memory.peak_bytes()
        assert peak_bytes <= recomputation.peak_bytes(self.problem, kept)
        return GraphPlan(
            joint=joint,
            strategy=strategy,
            budget_bytes=budget_bytes,
            peak_bytes=peak_bytes,
            baseline_peak_bytes=self.baseline_peak_bytes,
            recompute_ms=recomputation.recompute_ms(self.problem, kept),
            bound_ms=bound_ms,
            recomputed=tuple(self._reader.ops[op].name for op in ops),
        )

    def _infeasible(
        self, budget_bytes: int, kept: Set[int], strategy: Strategy
    ) -> InfeasibleBudgetError:
        peak_bytes = recomputation.peak_bytes(self.problem, kept)
        inputs = self.joint.persistent_bytes
        state = ", optimizer state" if self.joint.has_optimizer else ""
        composition = {
            f"parameters, buffers{state} and inputs": inputs,
            "activations, gradients and temporaries": peak_bytes - inputs,
        }
        parts = ", ".join(
            f"{format_bytes(n)} {what}" for what, n in composition.items()
        )
        more = " or use `strategy`='milp'" if strategy == "capuchin" else ""
        return InfeasibleBudgetError(
            f"No plan fits `memory_budget`={budget_bytes}"
            f" ({format_bytes(budget_bytes)}): the lowest peak that"
            f" `strategy`={strategy!r} reaches is {peak_bytes} bytes"
            f" ({format_bytes(peak_bytes)}), made of {parts}. Raise the budget to"
            f" that{more}, or use a smaller batch.",
            budget_bytes=budget_bytes,
            lowest_peak_bytes=peak_bytes,
            composition=composition,
        )


class _Known:
    """Choices and bounds that were found for a problem so far."""

    def __init__(self) -> None:
        self._choices: dict[frozenset[int], tuple[float, int]] = {}  # time, peak
        self._bounds: dict[int, float] = {}  # of budgets

    def add(self, problem: GraphProblem, kept: frozenset[int]) -> None:
        """Remember a choice."""
        if kept not in self._choices:
            cost_ms = recomputation.recompute_ms(problem, kept)
            peak_bytes = recomputation.peak_bytes(problem, kept)
            self._choices[kept] = cost_ms, peak_bytes

    def cheapest(self, budget_bytes: int) -> frozenset[int] | None:
        """The choice of least time that fits a budget, None if there is none."""
        fitting = [
            (cost_ms, peak_bytes, kept)
            for kept, (cost_ms, peak_bytes) in self._choices.items()
            if peak_bytes <= budget_bytes
        ]
        return min(fitting, key=lambda one: one[:2])[2] if fitting else None

    def bound(self, budget_bytes: int, bound_ms: float) -> float:
        """A bound, or a better one of a larger budget; and remember it."""
        before_ms = self._bounds.get(budget_bytes, 0.0)
        self._bounds[budget_bytes] = max(before_ms, bound_ms)
        return max(ms for size, ms in self._bounds.items() if size >= budget_bytes)


# What is compiled again, as for the next budget, is the same problem again.


@lru_cache(maxsize=64)
def _known(problem: GraphProblem) -> _Known:
    return _Known()


@lru_cache(maxsize=64)
def _solved(
    problem: GraphProblem,
    budget_bytes: int,
    starts: tuple[frozenset[int], ...],
    time_limit_s: float | None,
    relative_gap: float,
    backend: Backend,
) -> graph.GraphSolution:
    return graph.solve(
        problem,
        budget_bytes=budget_bytes,
        start=starts,
        time_limit_s=time_limit_s,
        relative_gap=relative_gap,
        backend=backend,
    )


@lru_cache(maxsize=16)
def _lowest(
    problem: GraphProblem,
    start: frozenset[int],
    time_limit_s: float | None,
    backend: Backend,
    *,
    thorough: bool = False,
) -> graph.GraphSolution:
    return graph.lowest(
        problem,
        start=(start,),
        time_limit_s=time_limit_s,
        backend=backend,
        thorough=thorough,
    )


class _Reader:
    """Numbers of a joint graph, and the way back from them.

    Attributes:
        joint: The graph.
        ops: Forward nodes that make memory or update inputs.
        steps: Nodes of backward and optimizer, and the output.
        values: Storages that forward makes -> their numbers.
    """

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint
        self.memory: GraphMemory = joint.memory
        self.ops = [n for n in joint.forward_nodes if self._is_op(n)]
        self.steps = [*joint.nodes_after_forward, joint.module.graph.output_node()]
        storages = [s for n in self.ops for s in self.memory.nodes[n].makes]
        self.values = {storage: value for value, storage in enumerate(storages)}

    def _is_op(self, node: fx.Node) -> bool:
        return bool(self.memory.nodes[node].makes) or node.is_impure()

    def _of(self, nodes: Any) -> tuple[int, ...]:
        """Values that some nodes refer to."""
        storages = (s for n in nodes for s in self.memory.nodes[n].storages)
        return tuple(
            dict.fromkeys(self.values[s] for s in storages if s in self.values)
        )

    def problem(self) -> GraphProblem:
        """The graph as numbers."""
        nodes, nbytes = self.memory.nodes, self.memory.nbytes
        results: Any = self.steps[-1].args[0]
        returned = [
            r
            for r in results[: self.joint.num_forward_outputs]
            if isinstance(r, fx.Node)
        ]
        carried, during = self._beside_values()
        tensors = [
            r for r in results[self.joint.num_forward_outputs :] if r is not None
        ]
        step_reads = (
            *(self._of(n.all_input_nodes) for n in self.steps[:-1]),
            self._of(tensors),
        )
        return GraphProblem(
            value_bytes=tuple(nbytes[storage] for storage in self.values),
            runtime_ms=tuple(nodes[n].runtime_ms for n in self.ops),
            workspace_bytes=tuple(nodes[n].workspace_bytes for n in self.ops),
            reads=tuple(self._of(n.all_input_nodes) for n in self.ops),
            makes=tuple(
                tuple(self.values[s] for s in nodes[n].makes) for n in self.ops
            ),
            pinned=frozenset(i for i, n in enumerate(self.ops) if self._is_pinned(n)),
            returned=frozenset(self._of(returned)) | self._only_updating(step_reads),
            step_reads=step_reads,
            step_bytes=during,
            carried_bytes=carried,
            other_bytes=self.memory.input_bytes,
        )

    def _only_updating(self, step_reads: tuple[tuple[int, ...], ...]) -> frozenset[int]:
        """Values that an optimizer reads and backward does not: gradients, so results.

        They are not made again: what they are made from may be updated by then.
        """
        if not self.joint.has_optimizer:
            return frozenset()
        stages = self.joint.stages
        in_backward = [stages.get(node) == "backward" for node in self.steps]
        pairs = list(zip(step_reads, in_backward, strict=True))
        before = {v for values, is_backward in pairs if is_backward for v in values}
        return frozenset(v for values, _ in pairs for v in values) - before

    def _beside_values(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """All memory but values just before and during each step."""
        places = {node: place for place, node in enumerate(self.memory.nodes)}
        first_place = places[self.steps[0]]
        before = [self.memory.input_bytes] * len(self.steps)
        during = list(before)
        for storage, (first, last) in self.memory.lives().items():
            if storage in self.values:
                continue
            size = self.memory.nbytes[storage]
            for place in range(first, last + 1):
                during[place - first_place] += size
                if place > first:
                    before[place - first_place] += size
        for i, node in enumerate(self.steps):
            during[i] += self.memory.nodes[node].workspace_bytes
        return tuple(before), tuple(during)

    def _is_pinned(self, node: fx.Node) -> bool:
        """Whether a node must not run twice, such as random draws and updates."""
        target: Any = node.target
        name = str(target)
        if _compat.is_random(target) or node.is_impure():
            return True
        if name.rpartition(".")[0] in NEVER_RERUN:
            return True
        if name in BATCH_NORM_OPS or name == _FUNCTIONAL_BATCH_NORM:
            return not node.args[5]  # in evaluation it reads running statistics
        storages = (
            s for n in node.all_input_nodes for s in self.memory.nodes[n].storages
        )
        return any(storage in self._updated for storage in storages)

    @cached_property
    def _updated(self) -> frozenset[int]:
        """Storages of inputs that forward changes at its end."""
        return frozenset(
            storage
            for node in self.joint.forward_nodes
            if node.is_impure() and node.all_input_nodes
            for storage in self.memory.nodes[node.all_input_nodes[0]].storages
            if storage not in self.values
        )

    def rewritten(
        self, kept: Set[int], again: dict[int, tuple[int, ...]]
    ) -> JointGraph:
        """The graph that keeps some values and runs some ops again."""
        problem = self.problem()
        remade = {v for ops in again.values() for op in ops for v in problem.makes[op]}
        dropped = remade - set(kept) - problem.returned
        return graph_rewriting.rewritten(
            self.joint,
            {
                self.steps[step]: tuple(self.ops[op] for op in ops)
                for step, ops in again.items()
            },
            [storage for storage, value in self.values.items() if value in dropped],
        )
