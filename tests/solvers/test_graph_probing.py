"""Branching on when an op runs again, against every set of kept values."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autosac.solvers.graph import least_peak, probing, solver
from autosac.solvers.graph.limits import Limits
from autosac.solvers.graph.model import GraphModel
from autosac.solvers.graph.recomputation import (
    GraphProblem,
    Position,
    peak_bytes,
    recompute_ms,
    reruns,
)
from autosac.solvers.milp import pulp_runner
from autosac.solvers.milp.solution import Termination
from tests.examples import examples
from tests.solvers.oracles import every_kept_set
from tests.solvers.strategies import MIB, graph_problems


def choices_that_run(problem):
    """Values that are kept -> the step before which each op runs again."""
    values = sorted(GraphModel(problem, budget_bytes=0).keep)
    found = {}
    for count in range(len(values) + 1):
        for kept in itertools.combinations(values, count):
            try:
                again = reruns(problem, frozenset(kept))
            except ValueError:  # it needs a pinned op again
                continue
            found[frozenset(kept)] = {op: t for t, ops in again.items() for op in ops}
    return found


def all_cases(count):
    yield probing.Case(0.0, -1, -1)
    for first in range(count):
        for last in range(first, count):
            yield probing.Case(0.0, first, last)


@examples(60)
@given(problem=graph_problems(most=5), data=st.data())
def test_no_choice_that_fits_breaks_a_row_of_an_interval(problem, data):
    choices = choices_that_run(problem)
    kept = data.draw(st.sampled_from(sorted(choices, key=sorted)))
    model = GraphModel(problem, budget_bytes=peak_bytes(problem, kept))
    # A dominated value is never kept, whatever it saves.
    assume(all(model.keep[v].upBound for v in kept))
    ops = [op for op in model.run if model.occasions(op)]
    assume(ops)
    for op in ops:
        for case in all_cases(len(model.occasions(op))):
            probing.add_rows(model, op, case)

    with model.held(kept, ()):
        outcome = pulp_runner.run(model.model)

    assert outcome.termination is Termination.OPTIMAL


@examples(60)
@given(problem=graph_problems(most=5), data=st.data())
def test_the_bound_of_a_case_is_below_all_choices_of_the_case(problem, data):
    choices = choices_that_run(problem)
    budget = peak_bytes(
        problem, data.draw(st.sampled_from(sorted(choices, key=sorted)))
    )
    model = GraphModel(problem, budget_bytes=budget)
    ops = [op for op in model.run if model.occasions(op)]
    assume(ops)
    op = data.draw(st.sampled_from(ops))
    steps = model.occasions(op)
    case = data.draw(st.sampled_from(list(all_cases(len(steps)))))
    model.add_row(Position(len(problem.step_reads) - 1, None))
    probing.add_rows(model, op, case)

    with probing.within(model, op, case):
        outcome = pulp_runner.run(model.model, relaxed=True)

    allowed = set(steps[case.first : case.last + 1]) if case.last >= 0 else {None}
    costs = [
        recompute_ms(problem, kept)
        for kept, again in choices.items()
        if again.get(op) in allowed and peak_bytes(problem, kept) <= budget
        if all(model.keep[v].upBound for v in kept)
    ]
    if costs:
        assert outcome.termination is Termination.OPTIMAL
        assert model.in_ms(outcome.bound) <= min(costs) + 1e-6


@examples(40)
@given(problem=graph_problems(most=6), data=st.data())
def test_all_cases_of_an_op_together_hold_the_best_choice(problem, data):
    choices = choices_that_run(problem)
    start = data.draw(st.sampled_from(sorted(choices, key=sorted)))
    budget = peak_bytes(problem, start)
    fitting = [cost for peak, cost in every_kept_set(problem) if peak <= budget]
    search = solver.OpSearch(problem, budget, Limits(backend="highs"))
    ops = [op for op in search.model.run if search.model.occasions(op)]
    assume(ops)
    search.try_out(start)

    search.branch_on(data.draw(st.sampled_from(ops)))

    assert search.best[0] == min(fitting)
    assert search.is_done()


@examples(40)
@given(problem=graph_problems(most=5), data=st.data())
def test_cases_of_an_op_bound_the_least_peak(problem, data):
    least = min(peak for peak, _ in every_kept_set(problem))
    start = data.draw(st.sampled_from(sorted(choices_that_run(problem), key=sorted)))
    search = least_peak.LeastPeakSearch(problem, (start,), Limits(backend="highs"))
    model = GraphModel(problem, budget_bytes=None)
    ops = [op for op in model.run if model.occasions(op)]
    assume(ops)
    search.relax(with_ops=data.draw(st.booleans()))

    search.branch_on(data.draw(st.sampled_from(ops)))

    assert search.bound_bytes <= least


def test_cases_of_an_op_prove_more_than_a_relaxation():
    # Value 0 (8 MiB) is made of nothing and takes 8 MiB while steps 0 to 3 each need a
    # value that is made from it. Kept in parts and made again in parts, it never is
    # whole in a relaxation.
    problem = GraphProblem(
        value_bytes=(8 * MIB, *(2 * MIB,) * 4),
        runtime_ms=(1.0,) * 5,
        workspace_bytes=(0,) * 5,
        reads=((), (0,), (0,), (0,), (0,)),
        makes=((0,), (1,), (2,), (3,), (4,)),
        step_reads=((4,), (3,), (2,), (1,)),
        step_bytes=(0, 1 * MIB, 2 * MIB, 3 * MIB),
        carried_bytes=(0, 1 * MIB, 2 * MIB, 3 * MIB),
        other_bytes=0,
    )
    least = min(peak for peak, _ in every_kept_set(problem))
    search = least_peak.LeastPeakSearch(problem, (), Limits(backend="highs"))
    search.relax(with_ops=True)
    relaxed_bytes = search.bound_bytes

    search.branch_on(0)

    assert relaxed_bytes < search.bound_bytes <= least


@examples(40)
@given(problem=graph_problems(most=6), data=st.data())
def test_the_rows_that_bind_hold_the_bound_of_all(problem, data):
    baseline = peak_bytes(problem, problem.kept_plainly)
    budget = data.draw(st.sampled_from([None, baseline * 3 // 4]))
    model = GraphModel(problem, budget_bytes=budget)
    for step in range(len(problem.step_reads)):
        model.add_row(Position(step, None))
    outcome = pulp_runner.run(model.model, relaxed=True)
    assume(outcome.termination is Termination.OPTIMAL)

    fewer = GraphModel(problem, budget_bytes=budget)
    for position in model.binding_rows():
        fewer.add_row(position)

    again = pulp_runner.run(fewer.model, relaxed=True)
    assert again.bound == pytest.approx(outcome.bound, abs=1e-6)
