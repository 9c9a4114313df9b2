"""HiGHS by PuLP: models passed in arrays and solved again, limits that count work."""

from __future__ import annotations

import math
from typing import Any

import highspy
import numpy as np
import pulp
from pulp import constants

from .backend_answers import TERMINATIONS, Answer, Looks
from .highs import QuietHighs
from .pulp_models import matrix_of, or_else
from .solution import Termination

WIDE_GAP = 0.05  # of a MILP's incumbent to its bound
# Models are small and rounded elsewhere: HiGHS's own search for incumbents takes most
# of its time and proves nothing.
_NO_HEURISTICS = {
    "mip_heuristic_effort": 0.0,
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
    "mip_allow_restart": False,
    "mip_detect_symmetry": False,
}
_AS_MADE = {"presolve": "off", "simplex_scale_strategy": 0}
_LIMITS = (  # of time, and of work
    highspy.HighsModelStatus.kTimeLimit,
    highspy.HighsModelStatus.kInterrupt,
)


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's in-process HiGHS, with a first incumbent and a model passed as a whole.

    Attributes:
        start: The first incumbent, if there is one.
        most_looks: How often a MILP may look at its limits.
        looks: How often it did, see `Looks`.
        passed: Variables that HiGHS has, by id.
    """

    start: list[float] | None = None
    most_looks: Looks = Looks()
    looks: float = 0.0
    passed: set[int]

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        """Create the solver as PuLP does, but on a HiGHS that prints nothing."""
        lp.solverModel = QuietHighs()  # type: ignore[no-untyped-call]
        limits = {
            "mip_rel_gap": self.gapRel,
            "mip_abs_gap": self.gapAbs,
            "threads": self.threads,
            "time_limit": self.timeLimit,
        }
        for name, value in {**limits, **self.optionsDict}.items():
            if value is not None:
                lp.solverModel.setOptionValue(name, value)

    def buildSolverModel(self, lp: pulp.LpProblem) -> None:
        """Pass columns and rows in arrays: one by one takes longer than most solves."""
        self.passed = {id(v) for v in lp.variables()}
        for numbered in (lp.variables(), matrix_of(lp).rows):
            for i, it in enumerate(numbered):
                it.index = i
        passed = as_highs_lp(lp, relaxed=not self.mip)
        if lp.solverModel.passModel(passed) == highspy.HighsStatus.kError:
            raise ArithmeticError(
                f"HiGHS does not take {lp.name!r}: a coefficient of it is infinite or"
                f" above {lp.solverModel.getOptions().large_matrix_value:g}. Scale it."
            )

    def callSolver(self, lp: pulp.LpProblem) -> None:
        if self.start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = self.start
            lp.solverModel.setSolution(solution)
        if self.mip:
            lp.solverModel.cbMipInterrupt.subscribe(self._look)
        lp.solverModel.run()

    def _look(self, event: highspy.HighsCallbackEvent) -> None:
        is_at_root = event.data_out.mip_node_count == 0
        self.looks += self.most_looks.at_root if is_at_root else 1.0
        if self.looks <= self.most_looks.usual:
            return
        is_wide = event.data_out.mip_gap > WIDE_GAP
        if not is_wide or self.looks > self.most_looks.if_wide:
            event.interrupt()

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:
        """Status as PuLP's pair; PuLP 3.3 has none for some limits."""
        try:
            pair: tuple[int, int] = super().findSolutionValues(lp)
        except KeyError:  # values are assigned by then
            if lp.solverModel.getModelStatus() not in _LIMITS:
                raise
            return constants.LpStatusOptimal, constants.LpSolutionIntegerFeasible
        return pair


def as_highs_lp(model: pulp.LpProblem, *, relaxed: bool) -> highspy.HighsLp:
    """A model in HiGHS's arrays; of its objective without the constant."""
    variables, matrix = model.variables(), matrix_of(model)
    passed = highspy.HighsLp()
    passed.num_col_, passed.num_row_ = len(variables), len(matrix.rows)
    passed.col_cost_ = np.array([model.objective.get(v, 0.0) for v in variables])
    passed.col_lower_ = or_else(-math.inf, (v.lowBound for v in variables))
    passed.col_upper_ = or_else(math.inf, (v.upBound for v in variables))
    if not relaxed:
        kinds = highspy.HighsVarType
        passed.integrality_ = [
            kinds.kInteger if v.cat == pulp.LpInteger else kinds.kContinuous
            for v in variables
        ]
    passed.row_lower_, passed.row_upper_ = matrix.bounds()
    passed.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    passed.a_matrix_.start_ = matrix.starts
    passed.a_matrix_.index_ = matrix.columns
    passed.a_matrix_.value_ = matrix.coefficients
    return passed


def run_highs(
    model: pulp.LpProblem,
    options: dict[str, Any],
    most_looks: Looks,
    *,
    relaxed: bool,
    warm_start: bool,
    presolves: bool,
) -> Answer:
    start = [v.varValue or 0.0 for v in model.variables()] if warm_start else None
    as_made = {} if presolves else _AS_MADE
    status = highspy.HighsModelStatus.kNotset
    for extra in ({}, {}, {"presolve": "off"}):
        solver = _Highs(
            msg=False,
            mip=not relaxed,
            gapAbs=0.0,
            **{**_NO_HEURISTICS, **as_made, **options, **extra},
        )
        solver.start, solver.most_looks = start, most_looks
        model.solve(solver)
        status = model.solverModel.getModelStatus()
        if status == highspy.HighsModelStatus.kNotset:
            # HiGHS refuses another number of threads than in its last run.
            highspy.Highs.resetGlobalScheduler(True)
        elif status != highspy.HighsModelStatus.kUnboundedOrInfeasible:
            break  # else only a run without presolve can tell which of the two it is
    return _highs_outcome(model, status, solver.looks, relaxed=relaxed)


def was_solved(model: pulp.LpProblem, *, relaxed: bool) -> bool:
    """Whether the model has a HiGHS that solved it last, in this way."""
    solver = getattr(model, "solver", None)
    return isinstance(solver, _Highs) and solver.mip != relaxed


def _pass_new(model: pulp.LpProblem) -> None:
    """Add the variables and rows that HiGHS does not have yet."""
    solver, highs = model.solver, model.solverModel
    variables, matrix = model.variables(), matrix_of(model)
    if len(variables) > highs.getNumCol():
        new = [v for v in variables if id(v) not in solver.passed]
        for i, v in enumerate(new, highs.getNumCol()):
            v.index = i
        solver.passed.update(id(v) for v in new)
        lowest = or_else(-math.inf, (v.lowBound for v in new))
        highs.addVars(len(new), lowest, or_else(math.inf, (v.upBound for v in new)))
    first = highs.getNumRow()
    if len(matrix.rows) > first:
        for i, constraint in enumerate(matrix.rows[first:], first):
            constraint.index = i
        index = np.array([v.index for v in variables], np.int32)
        start = int(matrix.starts[first])
        starts = (matrix.starts[first:-1] - start).astype(np.int32)
        columns, coefficients = matrix.columns[start:], matrix.coefficients[start:]
        low, high = (bounds[first:] for bounds in matrix.bounds())
        count, size = len(matrix.rows) - first, len(columns)
        highs.addRows(count, low, high, size, starts, index[columns], coefficients)


def rerun_highs(model: pulp.LpProblem) -> Answer:
    _pass_new(model)
    variables = model.variables()
    count, columns = len(variables), np.array([v.index for v in variables], np.int32)
    costs = np.array([model.objective.get(v, 0.0) for v in variables])
    model.solverModel.changeColsCost(count, columns, costs)
    lowest = or_else(-math.inf, (v.lowBound for v in variables))
    highest = or_else(math.inf, (v.upBound for v in variables))
    model.solverModel.changeColsBounds(count, columns, lowest, highest)
    matrix = matrix_of(model)
    numbers = np.arange(len(matrix.rows), dtype=np.int32)
    model.solverModel.changeRowsBounds(len(numbers), numbers, *matrix.bounds())
    model.solver.callSolver(model)
    model.assignStatus(*model.solver.findSolutionValues(model))
    status = model.solverModel.getModelStatus()
    return _highs_outcome(model, status, 0, relaxed=not model.solver.mip)


def _highs_outcome(
    model: pulp.LpProblem,
    status: highspy.HighsModelStatus,
    looks: float,
    *,
    relaxed: bool,
) -> Answer:
    termination = TERMINATIONS[model.sol_status]
    info = model.solverModel.getInfo()
    if status in _LIMITS:
        feasible = info.primal_solution_status == highspy.kSolutionStatusFeasible
        termination = Termination.FEASIBLE if feasible else Termination.NO_INCUMBENT
    if relaxed or not model.isMIP():
        is_optimal = termination is Termination.OPTIMAL
        bound = info.objective_function_value if is_optimal else None
    else:
        bound = info.mip_dual_bound
    if bound is not None:
        bound += model.objective.constant
    return termination, bound, looks
