"""Plans for joint graphs: which intermediates are recomputed under a budget."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from autosac.devices.links import Link
from autosac.devices.specs import device_spec
from autosac.errors import ArgumentError, InfeasibleBudgetError
from autosac.far_memory import FarMemory
from autosac.graphs import far_nodes, far_plans, known_plans, module_starts, reading
from autosac.graphs.arguments import (
    Strategy,
    check_choice,
    check_graph_offload,
    check_modules,
    check_planner,
)
from autosac.graphs.joint_graphs import JointGraph
from autosac.graphs.reading import GraphReader
from autosac.planning.plans import Plan
from autosac.quantities import (
    format_bytes,
    format_ms,
    parse_bytes,
    read_host_budget,
)
from autosac.solvers.graph import GraphSolution, capuchin, local_search, recomputation
from autosac.solvers.graph.moving import (
    Choice,
    MovePlan,
    MoveProblem,
    late_peak_bytes,
    moved_at_floor,
    plan_moves,
)
from autosac.solvers.milp.solution import Backend, Termination
from autosac.solving.solve_options import check_solving
from autosac.summaries import Summarized, Summary


@dataclass(frozen=True, kw_only=True, repr=False)
class GraphPlan(Summarized):
    """A joint graph that keeps a budget.

    Attributes:
        joint: The graph, rewritten: run it, or look at its ``module``.
        strategy: What chose.
        budget_bytes: The budget that was asked for.
        peak_bytes: Simulated peak of the rewritten graph.
        baseline_peak_bytes: That of the graph as it was captured.
        recompute_ms: Time of the nodes that run again, and `exposed_ms`.
        bound_ms: No choice that recomputes an intermediate at most once, and with
            offload moves it at most once, takes less; None where nothing is proven.
        recomputed: Names of the forward nodes that run again.
        offloaded: Names of the forward nodes whose results lie in far memory for a
            while,
        offloaded_bytes: their bytes,
        exposed_ms: and for how long the step waits for copies of them, or is busy with
            them.
        far_memory: Where they lie; None where nothing is offloaded.
    """

    joint: JointGraph
    strategy: Strategy
    budget_bytes: int
    peak_bytes: int
    baseline_peak_bytes: int
    recompute_ms: float
    bound_ms: float | None
    recomputed: tuple[str, ...]
    offloaded: tuple[str, ...] = ()
    offloaded_bytes: int = 0
    exposed_ms: float = 0.0
    far_memory: FarMemory | None = None

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
        rerun_ms = self.recompute_ms - self.exposed_ms
        moved: tuple[tuple[str, str], ...] = ()
        if self.offloaded:
            size = format_bytes(self.offloaded_bytes)
            waits = f"the step waits {format_ms(self.exposed_ms)} for copies"
            moved = (("offload", f"{size} of {len(self.offloaded)} nodes, {waits}"),)
        return Summary(
            title="Graph plan",
            facts=(
                ("budget", format_bytes(self.budget_bytes)),
                (
                    "peak",
                    f"{format_bytes(self.peak_bytes)} simulated,"
                    f" {format_bytes(self.baseline_peak_bytes)} without the plan",
                ),
                ("time", f"{format_ms(rerun_ms)} recomputation ({proven})"),
                ("nodes", f"{len(self.recomputed)} run again"),
                *moved,
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
        link: To far memory; None for that of `device_spec("cpu")`, a file on a disk.
        begins_anew: It knows none of these plans, so that a budget has the same one
            whatever was planned before.

    Raises:
        ArgumentError: An argument is none of these, or the graph offloads already.
    """

    def __init__(
        self,
        joint: JointGraph,
        *,
        floor_limit_s: float | None = None,
        backend: Backend = "highs",
        link: Link | None = None,
        begins_anew: bool = False,
    ) -> None:
        check_planner(joint, floor_limit_s, backend, link)
        targets = {node.target for node in joint.module.graph.nodes}
        if far_nodes.fetch in targets:
            raise ArgumentError(
                "`joint` is the graph of a plan that offloads already: plan the graph"
                " that it was made of."
            )
        self.joint = joint
        self.floor_limit_s = floor_limit_s
        self.backend: Backend = backend
        self.link = link or device_spec("cpu").link
        self.begins_anew = begins_anew
        self._reader = GraphReader(joint)
        self.problem = self._reader.problem()

    @cached_property
    def baseline_peak_bytes(self) -> int:
        """Simulated peak when nothing is recomputed."""
        return reading.peak_bytes(self.joint)

    def floor(
        self,
        strategy: Strategy,
        *,
        offload: bool = False,
        host_budget: int | str | None = None,
    ) -> int:
        """The least peak that a strategy reaches in some seconds.

        A smaller budget is refused at once where it is proven that nothing fits, and
        looked for else.

        Args:
            strategy: As in `plan`.
            offload, host_budget: Likewise.

        Raises:
            ArgumentError: An argument is none of these, or without effect.
        """
        check_choice("strategy", strategy, get_args(Strategy))
        check_graph_offload(offload, strategy)
        host_bytes = read_host_budget(host_budget, offload=offload)
        if offload:
            return self._lowest_with_moves(self.move_problem(host_bytes))[0]
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
        offload: bool = False,
        host_budget: int | str | None = None,
        offload_dir: str | None = None,
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
            offload: Intermediates may lie in far memory between their last use in
                forward and their first in backward. The plan without is found first,
                as far as `floor` finds one, and none with it takes more time.
            host_budget: Cap on what lies there, in bytes or as text; None for none.
            offload_dir: Where the files of far memory are; None for the system's
                temporary directory.

        Raises:
            InfeasibleBudgetError: The strategy knows no plan within the budget.
            ArgumentError: An argument is none of these, or without effect.
        """
        budget_bytes = parse_bytes(memory_budget)
        check_choice("strategy", strategy, get_args(Strategy))
        check_graph_offload(offload, strategy, offload_dir)
        host_bytes = read_host_budget(host_budget, offload=offload)
        if modules is not None:
            check_modules(modules, self.joint)
        check_solving("highs", relative_gap, time_limit_s)
        greedy = capuchin.solve(self.problem, budget_bytes=budget_bytes)
        if strategy == "capuchin":
            if greedy.kept is None:
                peak_bytes = recomputation.peak_bytes(self.problem, greedy.lowest)
                raise self._infeasible(budget_bytes, peak_bytes, strategy)
            return self._made(budget_bytes, Choice(greedy.kept), None, strategy)
        starts = self._starts(budget_bytes, greedy, modules)
        if self._is_below_any(budget_bytes, starts):
            solution = GraphSolution(termination=Termination.INFEASIBLE)
        else:
            solution = known_plans.solved(
                self.problem,
                budget_bytes,
                starts,
                time_limit_s,
                relative_gap,
                self.backend,
            )
        if solution.kept is not None:
            known_plans.known(self.problem).add(self.problem, solution.kept)
        if offload:
            limits = (time_limit_s, relative_gap)
            moves = self.move_problem(host_bytes)
            return self._with_moves(moves, budget_bytes, solution, limits, offload_dir)
        if solution.kept is None:
            known = known_plans.known(self.problem)
            known.add(self.problem, self.lowest[1])
            peak_bytes = known.least_peak_bytes()
            hint = self._what_offload_reaches(peak_bytes)
            raise self._infeasible(budget_bytes, peak_bytes, strategy, hint)
        assert solution.bound_ms is not None
        known = known_plans.known(self.problem)
        bound_ms = known.bound(budget_bytes, solution.bound_ms)
        return self._made(budget_bytes, Choice(solution.kept), bound_ms, strategy)

    def move_problem(self, host_budget: int | str | None = None) -> MoveProblem:
        """The graph as numbers, with far memory; `host_budget` as in `plan`."""
        assert self.link is not None  # the CPU's is known
        host_bytes = None
        if host_budget is not None:
            host_bytes = parse_bytes(host_budget, name="host_budget")
        return self._reader.move_problem(self.link, host_bytes)

    def _lowest_with_moves(self, moves: MoveProblem) -> tuple[int, Choice]:
        kept = self.lowest[1]
        return far_plans.lowest(moves, kept, self.floor_limit_s, self.backend)

    def _with_moves(
        self,
        moves: MoveProblem,
        budget_bytes: int,
        without: GraphSolution,
        limits: tuple[float | None, float],
        directory: str | None,
    ) -> GraphPlan:
        """A plan that may offload; limits are of time and of the gap."""
        if without.kept is not None:
            choice = Choice(without.kept)
        else:
            lowest_bytes, choice = self._lowest_with_moves(moves)
            if lowest_bytes > budget_bytes:
                raise self._infeasible(budget_bytes, lowest_bytes, "milp")
        start = plan_moves(moves, choice, budget_bytes)
        time_limit_s, relative_gap = limits
        found = far_plans.with_moves(
            moves,
            budget_bytes,
            start,
            time_limit_s=time_limit_s,
            relative_gap=relative_gap,
            backend=self.backend,
        )
        assert found is not None  # there was a start
        plan, bound_ms = found
        memory = FarMemory(directory) if plan.choice.moved else None
        return self._made(budget_bytes, plan.choice, bound_ms, "milp", plan, memory)

    def _starts(
        self,
        budget_bytes: int,
        greedy: capuchin.CapuchinSolution,
        modules: Plan | None,
    ) -> tuple[frozenset[int], ...]:
        """Choices that the MILP begins with: greedy ones, earlier ones, modules'.

        That of the least peak as well where no other fits.
        """
        problem = self.problem
        additive = capuchin.solve(
            problem,
            budget_bytes=budget_bytes,
            bookkeeping=capuchin.AdditiveBookkeeping,
        )
        # Greedy ends keep again what the budget allows, and are often the better ones.
        starts = [greedy.kept, greedy.lowest, additive.kept]
        if not self.begins_anew:
            starts.append(known_plans.known(problem).cheapest(budget_bytes))
        if modules is not None:
            starts.append(
                local_search.repair(problem, self.kept_by(modules), budget_bytes)
            )
        fitting = [kept for kept in starts if kept is not None]
        if all(self._peak(kept) > budget_bytes for kept in fitting):
            fitting.append(self.lowest[1])
        return tuple(dict.fromkeys(fitting))

    def _is_below_any(
        self, budget_bytes: int, starts: tuple[frozenset[int], ...]
    ) -> bool:
        """Whether it is proven that no choice fits; starts are looked at first."""
        return (
            all(self._peak(kept) > budget_bytes for kept in starts)
            and budget_bytes < self.floor_bound_bytes
        )

    def _peak(self, kept: frozenset[int]) -> int:
        return recomputation.peak_bytes(self.problem, kept)

    def kept_by(self, modules: Plan) -> frozenset[int]:
        """Values that a plan of modules keeps, see `plan`; it may break budgets."""
        return module_starts.kept_by_modules(
            self.problem, self._reader.ops, modules.op_policies
        )

    @property
    def lowest(self) -> tuple[int, frozenset[int]]:
        """Least peak that the MILP finds, and what is kept there."""
        solution = self._lowest
        assert solution.kept is not None and solution.peak_bytes is not None
        return solution.peak_bytes, solution.kept

    @property
    def floor_bound_bytes(self) -> int:
        """No choice that recomputes an intermediate at most once has a lower peak."""
        assert self._lowest.bound_bytes is not None
        return self._lowest.bound_bytes

    @cached_property
    def _lowest(self) -> GraphSolution:
        greedy = capuchin.solve(self.problem, budget_bytes=0)
        solution = known_plans.lowest(
            self.problem, greedy.lowest, self.floor_limit_s, self.backend
        )
        assert solution.kept is not None
        known_plans.known(self.problem).add(self.problem, solution.kept)
        return solution

    def _made(
        self,
        budget_bytes: int,
        choice: Choice,
        bound_ms: float | None,
        strategy: Strategy,
        plan: MovePlan | None = None,
        memory: FarMemory | None = None,
    ) -> GraphPlan:
        problem, (kept, moved) = self.problem, choice
        again = recomputation.reruns(problem, kept)
        joint = self._reader.rewritten(kept, plan, memory)
        ops = [op for ops in again.values() for op in ops]
        peak_bytes = reading.peak_bytes(joint)
        most_bytes = recomputation.peak_bytes(problem, kept)
        assert peak_bytes <= (most_bytes if plan is None else plan.peak_bytes)
        exposed_ms = 0.0 if plan is None else plan.exposed_ms
        return GraphPlan(
            joint=joint,
            strategy=strategy,
            budget_bytes=budget_bytes,
            peak_bytes=peak_bytes,
            baseline_peak_bytes=self.baseline_peak_bytes,
            recompute_ms=recomputation.recompute_ms(problem, kept) + exposed_ms,
            bound_ms=bound_ms,
            recomputed=tuple(self._reader.ops[op].name for op in ops),
            offloaded=self._reader.names(moved),
            offloaded_bytes=sum(problem.value_bytes[v] for v in moved),
            exposed_ms=exposed_ms,
            far_memory=memory,
        )

    def _what_offload_reaches(self, peak_bytes: int) -> str:
        """A sentence if moving what is kept at the least peak lowers that."""
        moves, kept = self.move_problem(), self.lowest[1]
        choice = Choice(kept, moved_at_floor(moves, kept))
        far_bytes = late_peak_bytes(moves, choice)
        if far_bytes >= peak_bytes:
            return ""
        return (
            f" With `offload`=True {far_bytes} bytes ({format_bytes(far_bytes)}) or"
            " less are enough (not with TorchInductor)."
        )

    def _infeasible(
        self, budget_bytes: int, peak_bytes: int, strategy: Strategy, hint: str = ""
    ) -> InfeasibleBudgetError:
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
            f" that{more}, or use a smaller batch.{hint}",
            budget_bytes=budget_bytes,
            lowest_peak_bytes=peak_bytes,
            composition=composition,
        )
