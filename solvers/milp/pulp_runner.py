"""Run a PuLP model on a backend: the only file that does.

PuLP reports a pair (status, solution status). It says "Optimal" of an incumbent at
a time limit, and the variables hold plausible numbers after a failed solve. Here the
pair becomes a `Termination`, and an incumbent is one only if it keeps every row.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import highspy
import numpy as np
import numpy.typing as npt
import pulp
from pulp import constants

from .highs import QuietHighs
from .solution import Backend, Termination

# Work of a MILP: of presolve and root, by its size, and of each look at the limits.
# Fitted to the times of MILPs of models of many kinds: a few million are a second.
_ROOT_OF_COLUMN, _ROOT_OF_COEFFICIENT = 75, 15
_LOOK_AT_COLUMN, _LOOK_AT_COEFFICIENT = 2.5, 0.5
WIDE_GAP = 0.05  # of a MILP's incumbent to its bound
_ROW_TOLERANCE = 1e-5  # 10 x the absolute row tolerance of HiGHS; rows are in MiB
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
_LOOKS_UNTIL_JUMPED = 2  # HiGHS looks twice before, then once the root is solved
_LIMITS = (  # of time, and of work
    highspy.HighsModelStatus.kTimeLimit,
    highspy.HighsModelStatus.kInterrupt,
)
_CBC_BOUND = "Lower bound:"  # CBC prints it only if a gap is left
_CBC_NODES = "Enumerated nodes:"

_PAIRS = {
    constants.LpSolutionOptimal: Termination.OPTIMAL,
    constants.LpSolutionIntegerFeasible: Termination.FEASIBLE,
    constants.LpSolutionInfeasible: Termination.INFEASIBLE,
    constants.LpSolutionUnbounded: Termination.UNBOUNDED,
    constants.LpSolutionNoSolutionFound: Termination.NO_INCUMBENT,
}


def _forget_importers() -> None:
    """Let go of the frames in which PuLP's optional solvers could not be imported.

    PuLP keeps the errors, they keep their tracebacks, and these all variables of
    whoever was the first to import it: a model that a function planned, for good.
    """
    for solver in vars(pulp.apis).values():
        error = getattr(solver, "err", None)
        while isinstance(error, BaseException):
            error.__traceback__ = None
            error = error.__context__


_forget_importers()

_Answer = tuple[Termination, float | None, float]  # ended, bound, looks at limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a backend says about a model.

    Attributes:
        termination: Why the solve stopped; the variables hold the incumbent, if any.
        bound: Proven lower bound on the objective, in the unit of the model.
        solve_s: Wall-clock time.
        work: Of a MILP, see `run`: the same in every run.
    """

    termination: Termination
    bound: float | None
    solve_s: float
    work: int = 0


def run(
    model: pulp.LpProblem,
    *,
    backend: Backend = "highs",
    time_limit_s: float | None = None,
    work_limit: int | None = None,
    more_if_wide: float = 1.0,
    relative_gap: float = 0.0,
    threads: int = 1,
    relaxed: bool = False,
    warm_start: bool = False,
    again: bool = False,
    jump: int | None = None,
    look_at_root: float = 1.0,
) -> Outcome:
    """Minimise a model; its variables hold the incumbent afterwards.

    Args:
        model: A minimisation; at least one of its rows or its objective has terms.
        backend: Which solver to run.
        time_limit_s: Stop after this long with the incumbent of the moment.
        work_limit: Stop a MILP after so much work: unlike a time, the same in every
            run; unlike nodes, each unit takes a like time. For HiGHS it grows with the
            number of times that it looks at its limits (some ten a node, more at the
            root) and with the size of the model; for CBC, which can only count nodes,
            likewise. None for no limit.
        more_if_wide: HiGHS may do so many times that work as long as the gap of its
            own incumbent is above `WIDE_GAP`.
        relative_gap: Stop as soon as the incumbent is proven this close to the best.
        threads: Number of threads of the solver.
        relaxed: Ignore that variables are integer: solve the LP relaxation.
        warm_start: Offer the values the variables hold now as a first incumbent.
        again: Where this model was solved last in the same way, relaxed or not, HiGHS
            starts from where it ended. Since then right-hand sides, bounds and the
            objective may have changed, and rows and variables have been added.
        jump: Only look for an incumbent, by HiGHS's feasibility jump with this seed:
            a local search that takes little time. CBC has none and finds nothing.
        look_at_root: How many looks one at HiGHS's root counts: between two of them it
            solves the LP of all anew, with cuts.

    Returns:
        How it ended, the proven bound and the time it took.

    Raises:
        ValueError: The backend is unknown or the model is a maximisation.
        FileNotFoundError: The backend is CBC and there is no executable.
        ArithmeticError: The optimum of a backend breaks rows, or HiGHS refuses the
            numbers: they are ill-scaled.
    """
    if model.sense != constants.LpMinimize:
        raise ValueError("`model` must be a minimisation: negate its objective.")
    if backend not in ("highs", "cbc"):
        raise ValueError(f"`backend` must be 'highs' or 'cbc', got {backend!r}.")
    options: dict[str, Any] = {"timeLimit": time_limit_s, "gapRel": relative_gap}
    options["threads"] = threads
    started = time.perf_counter()
    if any(_is_empty(v.lowBound, v.upBound) for v in model.variables()):
        # CBC does not read such a model.
        return Outcome(termination=Termination.INFEASIBLE, bound=None, solve_s=0.0)
    at_root, a_look = work_of(model)
    most_looks = _Looks(at_root=look_at_root)
    if work_limit is not None:
        usual, if_wide = (
            max(0, int(m * work_limit) - at_root) // a_look for m in (1.0, more_if_wide)
        )
        most_looks = _Looks(usual, if_wide, look_at_root)
    if jump is not None:
        if backend == "cbc":
            nothing = Termination.NO_INCUMBENT
            return Outcome(termination=nothing, bound=None, solve_s=0.0)
        most_looks = _Looks(_LOOKS_UNTIL_JUMPED, _LOOKS_UNTIL_JUMPED)
        options |= {"mip_heuristic_run_feasibility_jump": True, "random_seed": jump}
    runner = _run_highs if backend == "highs" else _run_cbc
    if again and backend == "highs" and _was_solved(model, relaxed=relaxed):
        termination, bound, looks = _rerun_highs(model)
    else:
        termination, bound, looks = runner(
            model, options, most_looks, relaxed=relaxed, warm_start=warm_start
        )
    if termination.has_incumbent and not _keeps_rows(model, relaxed=relaxed):
        if termination is Termination.OPTIMAL:
            raise ArithmeticError(
                f"The optimum of {backend} breaks a row of {model.name!r} by more than"
                f" {_ROW_TOLERANCE:g}. Scale the numbers or try the other backend."
            )
        termination = Termination.NO_INCUMBENT
    solve_s = time.perf_counter() - started
    if bound is not None and not math.isfinite(bound):
        bound = None
    return Outcome(
        termination=termination,
        bound=bound,
        solve_s=solve_s,
        work=at_root + int(max(0.0, looks) * a_look),
    )


def row(terms: Iterable[tuple[pulp.LpVariable, float]]) -> pulp.LpAffineExpression:
    """Sum of (variable, coefficient) pairs; repeated variables add up."""
    pairs = list(terms)
    total = pulp.LpAffineExpression(pairs)
    if len(total) < len(pairs):  # of a repeated one it has the last
        total = pulp.LpAffineExpression()
        for variable, coefficient in pairs:
            total.addterm(variable, coefficient)
    return total


class Model(pulp.LpProblem):  # type: ignore[misc]
    """A minimisation that looks at its variables and rows only when there are new ones.

    Right-hand sides and the objective may change at any time.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, pulp.LpMinimize)
        self._in_order: tuple[object, list[pulp.LpVariable]] = (None, [])
        self._matrix: tuple[object, _Matrix] | None = None

    def variables(self) -> list[pulp.LpVariable]:
        """Variables by name; PuLP asks for them several times a solve."""
        size = self._size()
        if size != self._in_order[0]:
            self._in_order = size, super().variables()
        return self._in_order[1]

    def matrix(self) -> _Matrix:
        """Coefficients of the model's variables, row by row."""
        size = self._size()
        if self._matrix is None or size != self._matrix[0]:
            self._matrix = size, _as_matrix(self)
        return self._matrix[1]

    def _size(self) -> tuple[int, int]:
        """Number of rows, and of objective terms: PuLP adds one where there is none."""
        return self.numConstraints(), len(self.objective or ())


class _Matrix(NamedTuple):
    """Coefficients of a model, row by row.

    Attributes:
        rows: The rows.
        starts: Where each row begins in the next two, and their length.
        columns: Numbers of variables, in the order of `LpProblem.variables`,
        coefficients: and their coefficients.
    """

    rows: list[pulp.LpConstraint]
    starts: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    coefficients: npt.NDArray[np.float64]

    @property
    def constants(self) -> npt.NDArray[np.float64]:
        """The constant that each row adds to its terms."""
        return np.array([row.constant for row in self.rows], np.float64)

    def bounds(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Lower and upper bound on the sum of the terms of each row."""
        lowest = _or(-math.inf, (row.getLb() for row in self.rows))
        return lowest, _or(math.inf, (row.getUb() for row in self.rows))


def _as_matrix(model: pulp.LpProblem) -> _Matrix:
    rows = list(model.constraints())
    number = {id(v): i for i, v in enumerate(model.variables())}
    sizes = [len(row) for row in rows]
    pairs = [
        (number[id(v)], coefficient) for row in rows for v, coefficient in row.items()
    ]
    columns, coefficients = zip(*pairs, strict=True) if pairs else ((), ())
    return _Matrix(
        rows=rows,
        starts=np.cumsum([0, *sizes]),
        columns=np.array(columns, np.int64),
        coefficients=np.array(coefficients, np.float64),
    )


def _matrix(model: pulp.LpProblem) -> _Matrix:
    return model.matrix() if isinstance(model, Model) else _as_matrix(model)


def _is_empty(low: float | None, high: float | None) -> bool:
    """Whether no number lies between two bounds."""
    return low is not None and high is not None and low > high


def work_of(model: pulp.LpProblem) -> tuple[int, int]:
    """Work of a MILP's root, and of each look at its limits: see `run`."""
    columns, coefficients = len(model.variables()), len(_matrix(model).columns)
    at_root = _ROOT_OF_COLUMN * columns + _ROOT_OF_COEFFICIENT * coefficients
    a_look = _LOOK_AT_COLUMN * columns + _LOOK_AT_COEFFICIENT * coefficients
    return at_root, max(1, int(a_look))


def _or(instead: float, values: Iterable[float | None]) -> npt.NDArray[np.float64]:
    """Values as an array, with a given number instead of each None."""
    return np.array([instead if v is None else v for v in values], np.float64)


class _Looks(NamedTuple):
    """How often a MILP may look at its limits; more often while its gap is wide.

    Looks at the root count as so many.
    """

    usual: float = math.inf
    if_wide: float = math.inf
    at_root: float = 1.0


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's in-process HiGHS, with a first incumbent and a model passed as a whole.

    Attributes:
        start: The first incumbent, if there is one.
        most_looks: How often a MILP may look at its limits.
        looks: How often it did, see `_Looks`.
        passed: Variables that HiGHS has, by id.
    """

    start: list[float] | None = None
    most_looks: _Looks = _Looks()
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
        variables, matrix = lp.variables(), _matrix(lp)
        passed = highspy.HighsLp()
        passed.num_col_, passed.num_row_ = len(variables), len(matrix.rows)
        self.passed = {id(v) for v in variables}
        for i, v in enumerate(variables):
            v.index = i
        passed.col_cost_ = np.array([lp.objective.get(v, 0.0) for v in variables])
        passed.col_lower_ = _or(-math.inf, (v.lowBound for v in variables))
        passed.col_upper_ = _or(math.inf, (v.upBound for v in variables))
        if self.mip:
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
        for i, constraint in enumerate(matrix.rows):
            constraint.index = i
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


def _run_highs(
    model: pulp.LpProblem,
    options: dict[str, Any],
    most_looks: _Looks,
    *,
    relaxed: bool,
    warm_start: bool,
) -> _Answer:
    start = [v.varValue or 0.0 for v in model.variables()] if warm_start else None
    status = highspy.HighsModelStatus.kNotset
    for extra in ({}, {}, {"presolve": "off"}):
        solver = _Highs(
            msg=False,
            mip=not relaxed,
            gapAbs=0.0,
            **{**_NO_HEURISTICS, **options, **extra},
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


def _was_solved(model: pulp.LpProblem, *, relaxed: bool) -> bool:
    """Whether the model has a HiGHS that solved it last, in this way."""
    solver = getattr(model, "solver", None)
    return isinstance(solver, _Highs) and solver.mip != relaxed


def _pass_new(model: pulp.LpProblem) -> None:
    """Add the variables and rows that HiGHS does not have yet."""
    solver, highs = model.solver, model.solverModel
    variables, matrix = model.variables(), _matrix(model)
    if len(variables) > highs.getNumCol():
        new = [v for v in variables if id(v) not in solver.passed]
        for i, v in enumerate(new, highs.getNumCol()):
            v.index = i
        solver.passed.update(id(v) for v in new)
        lowest = _or(-math.inf, (v.lowBound for v in new))
        highs.addVars(len(new), lowest, _or(math.inf, (v.upBound for v in new)))
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


def _rerun_highs(model: pulp.LpProblem) -> _Answer:
    _pass_new(model)
    variables = model.variables()
    count, columns = len(variables), np.array([v.index for v in variables], np.int32)
    costs = np.array([model.objective.get(v, 0.0) for v in variables])
    model.solverModel.changeColsCost(count, columns, costs)
    lowest = _or(-math.inf, (v.lowBound for v in variables))
    highest = _or(math.inf, (v.upBound for v in variables))
    model.solverModel.changeColsBounds(count, columns, lowest, highest)
    matrix = _matrix(model)
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
) -> _Answer:
    termination = _PAIRS[model.sol_status]
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


def _run_cbc(
    model: pulp.LpProblem,
    options: dict[str, Any],
    most_looks: _Looks,
    *,
    relaxed: bool,
    warm_start: bool,
) -> _Answer:
    if math.isfinite(most_looks.usual):  # it can only be told "enough nodes"
        options = options | {"maxNodes": max(1, int(most_looks.usual))}
    with tempfile.TemporaryDirectory(prefix="autosac-cbc-") as folder:
        log = Path(folder, "cbc.log")
        solver = pulp.COIN_CMD(
            path=_cbc_path(),
            msg=False,
            mip=not relaxed,
            logPath=str(log),
            gapAbs=0.0,
            warmStart=warm_start,
            **options,
        )
        model.solve(solver)
        text = log.read_text(errors="replace")
    termination = _PAIRS[model.sol_status]
    # An infeasible LP has no status, but a line in the log.
    is_undefined = model.status == constants.LpStatusUndefined
    is_infeasible = model.status == constants.LpStatusInfeasible
    if is_infeasible or (is_undefined and "nfeasible" in text):
        termination = Termination.INFEASIBLE
    bound = _last_number(text, _CBC_BOUND)
    if bound is not None:
        bound += model.objective.constant
    elif termination is Termination.OPTIMAL:
        bound = pulp.value(model.objective)
    return termination, bound, int(_last_number(text, _CBC_NODES) or 0)


def _last_number(text: str, label: str) -> float | None:
    """Number in the last line of a log that begins with a label; None without one."""
    lines = [line for line in text.splitlines() if line.startswith(label)]
    return float(lines[-1].removeprefix(label)) if lines else None


def _cbc_path() -> str:
    """The CBC on the search path, else the one that PuLP 3 brings along."""
    bundled = getattr(pulp, "PULP_CBC_CMD", None)
    for candidate in ("cbc", getattr(bundled, "pulp_cbc_path", None)):
        path = shutil.which(candidate) if candidate else None
        if path:
            return path
    raise FileNotFoundError(
        "`backend`='cbc' needs the CBC executable, and none was found. Put `cbc` on"
        " the search path (apt install coinor-cbc, brew install cbc), or use"
        " `backend`='highs'."
    )


def _keeps_rows(model: pulp.LpProblem, *, relaxed: bool) -> bool:
    """Whether the values of the variables keep bounds, rows and integrality.

    The tolerance of a row is relative to the size of its terms: HiGHS checks scaled
    rows, CBC prints 7 digits or more.
    """
    variables = model.variables()
    # PuLP's own variable, for an objective without terms, may have no value.
    assigned = (0.0 if v is model.dummyVar else v.varValue for v in variables)
    values = _or(math.nan, assigned)
    if not np.isfinite(values).all():
        return False
    slack = _ROW_TOLERANCE * np.maximum(1.0, np.abs(values))
    lowest = _or(-math.inf, (v.lowBound for v in variables))
    highest = _or(math.inf, (v.upBound for v in variables))
    if ((values < lowest - slack) | (values > highest + slack)).any():
        return False
    if not relaxed:
        is_whole = np.array([v.cat == constants.LpInteger for v in variables], bool)
        if (is_whole & (np.abs(values - values.round()) > slack)).any():
            return False
    matrix, added = _matrix(model), _matrix(model).constants
    terms = matrix.coefficients * values[matrix.columns]
    row_of = np.repeat(np.arange(len(matrix.rows)), np.diff(matrix.starts))
    totals = np.bincount(row_of, terms, len(matrix.rows)) + added
    sizes = np.maximum(1.0, np.abs(added))
    np.maximum.at(sizes, row_of, np.abs(terms))
    senses = np.array([row.sense for row in matrix.rows])
    over = (totals > _ROW_TOLERANCE * sizes) & (senses != constants.LpConstraintGE)
    under = (totals < -_ROW_TOLERANCE * sizes) & (senses != constants.LpConstraintLE)
    return not (over | under).any()
