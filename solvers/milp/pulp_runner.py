"""Run a PuLP model on a backend: nothing else does.

PuLP reports a pair (status, solution status). It says "Optimal" of an incumbent at
a time limit, and the variables hold plausible numbers after a failed solve. Here the
pair becomes a `Termination`, and an incumbent is one only if it keeps every row.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pulp
from pulp import constants

from .backend_answers import Looks
from .cbc_runner import has_cbc, run_cbc
from .highs_runner import rerun_highs, run_highs, was_solved
from .pulp_models import matrix_of, or_else
from .quick_cbc import run_quick_cbc
from .solution import Backend, Termination

# Work of a MILP: of presolve and root, by its size, and of each look at the limits.
# Fitted to the times of MILPs of models of many kinds: a few million are a second.
_ROOT_OF_COLUMN, _ROOT_OF_COEFFICIENT = 75, 15
_LOOK_AT_COLUMN, _LOOK_AT_COEFFICIENT = 2.5, 0.5
_QUICKER_ROOT, _QUICK_NODE = 4, 2  # CBC without cuts: a part of the one, looks a node
_QUICK_ROOT = 100_000  # work of a root, below which a process takes longer than HiGHS
_ROW_TOLERANCE = 1e-5  # 10 x the absolute row tolerance of HiGHS; rows are in MiB
_LOOKS_UNTIL_JUMPED = 2  # HiGHS looks twice before, then once the root is solved


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a backend says about a model.

    Attributes:
        termination: Why the solve stopped; the variables hold the incumbent, if any.
        bound: Proven lower bound on the objective, in the unit of the model.
        solve_s: Wall-clock time.
        work: Of a MILP, see `run`: the same in every run.
        num_nodes: Of a branch and bound without cuts that ended; 0 without one.
    """

    termination: Termination
    bound: float | None
    solve_s: float
    work: int = 0
    num_nodes: int = 0


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
    presolves: bool = True,
    cutoff: float = math.inf,
    quick_nodes: int = 0,
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
        presolves: HiGHS simplifies and scales the model first. Small LPs whose numbers
            are scaled take half the time without, and some a hundredth: scaled again,
            the simplex method stalls on their many equal columns.
        cutoff: Solutions with an objective above it are of no interest: nothing more is
            proven than that there are no others. HiGHS then calls a MILP infeasible, or
            one that it happened to find optimal.
        quick_nodes: A MILP of HiGHS's is given to CBC first, without cuts, for so many
            nodes: see `quick_cbc`. Small ones are not, nor with a time limit, nor where
            there is no CBC. What it does counts as work, and no limit ends it.

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
    if backend == "highs" and math.isfinite(cutoff):
        options["objective_bound"] = cutoff
    started = time.perf_counter()
    if any(_is_empty(v.lowBound, v.upBound) for v in model.variables()):
        # CBC does not read such a model.
        return Outcome(termination=Termination.INFEASIBLE, bound=None, solve_s=0.0)
    at_root, a_look = work_of(model)
    most_looks = Looks(at_root=look_at_root)
    if work_limit is not None:
        usual, if_wide = (
            max(0, int(m * work_limit) - at_root) // a_look for m in (1.0, more_if_wide)
        )
        most_looks = Looks(usual, if_wide, look_at_root)
    if jump is not None:
        if backend == "cbc":
            nothing = Termination.NO_INCUMBENT
            return Outcome(termination=nothing, bound=None, solve_s=0.0)
        most_looks = Looks(_LOOKS_UNTIL_JUMPED, _LOOKS_UNTIL_JUMPED)
        options |= {"mip_heuristic_run_feasibility_jump": True, "random_seed": jump}
    spent = 0
    is_usual = backend == "highs" and not relaxed and jump is None
    is_large = at_root > _QUICK_ROOT and time_limit_s is None
    if quick_nodes and is_usual and is_large and has_cbc():
        quick = run_quick_cbc(
            model, most_nodes=quick_nodes, relative_gap=relative_gap, cutoff=cutoff
        )
        spent = at_root // _QUICKER_ROOT + _QUICK_NODE * a_look * quick.num_nodes
        is_optimal = quick.termination is Termination.OPTIMAL
        is_kept = is_optimal and _keeps_rows(model, relaxed=False)
        if is_kept or quick.termination is Termination.INFEASIBLE:
            return Outcome(
                termination=quick.termination,
                bound=None if quick.bound is None else min(quick.bound, cutoff),
                solve_s=time.perf_counter() - started,
                work=spent,
                num_nodes=quick.num_nodes,
            )
    runner = run_cbc
    if backend == "highs":
        runner = partial(run_highs, presolves=presolves)
    if again and backend == "highs" and was_solved(model, relaxed=relaxed):
        termination, bound, looks = rerun_highs(model)
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
    if bound is not None:
        bound = min(bound, cutoff) if math.isfinite(bound) else None
    return Outcome(
        termination=termination,
        bound=bound,
        solve_s=solve_s,
        work=spent + at_root + int(max(0.0, looks) * a_look),
    )


def _is_empty(low: float | None, high: float | None) -> bool:
    """Whether no number lies between two bounds."""
    return low is not None and high is not None and low > high


def work_of(model: pulp.LpProblem) -> tuple[int, int]:
    """Work of a MILP's root, and of each look at its limits: see `run`."""
    columns, coefficients = len(model.variables()), len(matrix_of(model).columns)
    at_root = _ROOT_OF_COLUMN * columns + _ROOT_OF_COEFFICIENT * coefficients
    a_look = _LOOK_AT_COLUMN * columns + _LOOK_AT_COEFFICIENT * coefficients
    return at_root, max(1, int(a_look))


def _keeps_rows(model: pulp.LpProblem, *, relaxed: bool) -> bool:
    """Whether the values of the variables keep bounds, rows and integrality.

    The tolerance of a row is relative to the size of its terms: HiGHS checks scaled
    rows, CBC prints 7 digits or more.
    """
    variables = model.variables()
    # PuLP's own variable, for an objective without terms, may have no value.
    assigned = (0.0 if v is model.dummyVar else v.varValue for v in variables)
    values = or_else(math.nan, assigned)
    if not np.isfinite(values).all():
        return False
    slack = _ROW_TOLERANCE * np.maximum(1.0, np.abs(values))
    lowest = or_else(-math.inf, (v.lowBound for v in variables))
    highest = or_else(math.inf, (v.upBound for v in variables))
    if ((values < lowest - slack) | (values > highest + slack)).any():
        return False
    if not relaxed:
        is_whole = np.array([v.cat == constants.LpInteger for v in variables], bool)
        if (is_whole & (np.abs(values - values.round()) > slack)).any():
            return False
    matrix, added = matrix_of(model), matrix_of(model).constants
    terms = matrix.coefficients * values[matrix.columns]
    row_of = np.repeat(np.arange(len(matrix.rows)), np.diff(matrix.starts))
    totals = np.bincount(row_of, terms, len(matrix.rows)) + added
    sizes = np.maximum(1.0, np.abs(added))
    np.maximum.at(sizes, row_of, np.abs(terms))
    senses = np.array([row.sense for row in matrix.rows])
    over = (totals > _ROW_TOLERANCE * sizes) & (senses != constants.LpConstraintGE)
    under = (totals < -_ROW_TOLERANCE * sizes) & (senses != constants.LpConstraintLE)
    return not (over | under).any()
