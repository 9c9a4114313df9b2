"""Local search, fractional rows and bounds of graph plans against brute force."""

import dataclasses
import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autosac.solvers.graph import fractional, local_search, lowest, rounding, solve
from autosac.solvers.graph.capuchin import AdditiveBookkeeping, Bookkeeping, choices
from autosac.solvers.graph.capuchin import solve as greedy
from autosac.solvers.graph.model import GraphModel
from autosac.solvers.graph.recomputation import (
    GraphProblem,
    Position,
    peak_bytes,
    recompute_ms,
    timeline,
)
from autosac.solvers.milp import pulp_runner
from autosac.solvers.milp.solution import Termination
from tests.examples import examples
from tests.solvers.oracles import every_kept_set
from tests.solvers.strategies import MIB, graph_problems
from tests.solvers.test_recomputation import chain


def budgets_of(problem, data):
    baseline = peak_bytes(problem, problem.kept_plainly)
    least = min(peak for peak, _ in every_kept_set(problem))
    return data.draw(st.integers(least // MIB, baseline // MIB)) * MIB


@examples(60)
@given(problem=graph_problems(most=6), data=st.data())
def test_keeping_again_fits_and_never_costs_more(problem, data):
    budget = budgets_of(problem, data)
    found = greedy(problem, budget_bytes=budget)
    assume(found.kept is not None)

    kept = local_search.keep_again(problem, found.kept, budget)

    assert kept >= found.kept
    assert peak_bytes(problem, kept) <= budget
    assert recompute_ms(problem, kept) <= found.objective_ms


@examples(60)
@given(problem=graph_problems(most=6), data=st.data())
def test_nothing_more_can_be_kept_again_that_saves_time(problem, data):
    budget = budgets_of(problem, data)
    found = greedy(problem, budget_bytes=budget)
    assume(found.kept is not None)

    kept = local_search.keep_again(problem, found.kept, budget)

    for value in problem.kept_plainly - kept:
        is_within = peak_bytes(problem, kept | {value}) <= budget
        saves = recompute_ms(problem, kept | {value}) < recompute_ms(problem, kept)
        assert not (is_within and saves)


def test_reverse_delete_takes_back_what_the_end_of_a_greedy_makes_needless():
    # The greedy drops value 0 first (most bytes a millisecond), then, as that is not
    # enough, value 1, which is enough by itself: 0 comes back.
    problem = GraphProblem(
        value_bytes=(2 * MIB, 8 * MIB),
        runtime_ms=(1.0, 5.0),
        workspace_bytes=(0, 0),
        reads=((), ()),
        makes=((0,), (1,)),
        step_reads=((), (1,), (0,)),
        step_bytes=(8 * MIB, 0, 0),
        carried_bytes=(0, 0, 0),
        other_bytes=0,
    )
    budget = 10 * MIB
    end = greedy(problem, budget_bytes=budget)
    assert end.kept == frozenset() and end.objective_ms == 6.0

    assert local_search.keep_again(problem, end.kept, budget) == {0}


@examples(60)
@given(problem=graph_problems(most=6), data=st.data())
def test_a_repair_ends_with_a_choice_that_fits_or_is_no_higher(problem, data):
    budget = budgets_of(problem, data)

    kept = local_search.repair(problem, problem.kept_plainly, budget)

    assert peak_bytes(problem, kept) <= peak_bytes(problem, problem.kept_plainly)


def test_a_value_is_kept_where_making_it_again_is_the_peak():
    # Before step 0 ops 0, 1 and 2 run again; op 1 has a workspace of 16 MiB.
    problem = dataclasses.replace(chain(), other_bytes=50 * MIB)
    assert peak_bytes(problem, frozenset()) == 119 * MIB

    kept = local_search.repair(problem, frozenset(), 110 * MIB)

    assert 1 in kept
    assert peak_bytes(problem, kept) <= 110 * MIB


@examples(60)
@given(problem=graph_problems(most=5), data=st.data())
def test_no_position_has_more_in_fractions_than_in_a_replay(problem, data):
    # At whole points what the rows ask for is what is there, up to what an op that
    # runs again makes once more.
    outcomes = [kept for kept in all_kept(problem) if can_run(problem, kept)]
    kept = data.draw(st.sampled_from(outcomes))
    model = GraphModel(problem, budget_bytes=0)
    again = {op for moment, op in runs(problem, kept)}
    read = {v for op in again for v in problem.reads[op]}
    # Rows of forward count what is kept for nothing; a replay drops it.
    assume(kept <= read | problem.first_need.keys())
    for v, k in model.keep.items():
        k.varValue = float(v in kept)
    for op, x in model.run.items():
        x.varValue = float(op in again)
    # Ops without a choice of their own run again with the only one that reads them.
    assume(all(x.varValue == (op in again) for op, x in model.run.items()))

    forward, places, backward = fractional.live_bytes(model)

    pairs = zip(places.steps.tolist(), places.ops.tolist(), strict=True)
    by_place = dict(zip(pairs, backward.tolist(), strict=True))
    for moment in timeline(problem, kept):
        step, op = moment.position
        if step < 0:
            assert forward[op] <= moment.live_bytes
        elif op is None:
            live = by_place.pop((step, len(problem.reads)))
            assert live == pytest.approx(moment.live_bytes, abs=1e-6)
        else:
            assert by_place.pop((step, op)) <= moment.live_bytes + 1e-6
    assert not by_place


def all_kept(problem):
    kept = [frozenset()]
    for v in sorted(GraphModel(problem, budget_bytes=0).keep):
        kept += [one | {v} for one in kept]
    return kept


def can_run(problem, kept):
    try:
        timeline(problem, kept)
    except ValueError:
        return False
    return True


def runs(problem, kept):
    return [
        moment.position
        for moment in timeline(problem, kept)
        if moment.position.step >= 0 and moment.position.op is not None
    ]


def rows_and_optimum(problem, data):
    """A model with rows for all positions of a drawn budget, and its least time."""
    budget = budgets_of(problem, data)
    fitting = [cost for peak, cost in every_kept_set(problem) if peak <= budget]
    assume(fitting)
    model = GraphModel(problem, budget_bytes=budget)
    for moment in timeline(problem, problem.kept_plainly):
        model.add_row(moment.position)
    return model, min(fitting)


@examples(60)
@given(problem=graph_problems(most=5), data=st.data())
def test_relaxations_and_reduced_costs_cut_off_no_better_choice(problem, data):
    model, least_ms = rows_and_optimum(problem, data)
    outcome = pulp_runner.run(model.model, relaxed=True)
    assume(outcome.bound is not None)

    bound_ms = outcome.bound / model.time_scale - model.tie_break_ms
    assert bound_ms <= least_ms + 1e-6
    model.fix(least_ms)
    again = pulp_runner.run(model.model)
    assert again.bound / model.time_scale <= least_ms + model.tie_break_ms + 1e-6


@examples(40)
@given(problem=graph_problems(most=5), data=st.data())
def test_a_known_choice_is_never_made_worse(problem, data):
    budget = budgets_of(problem, data)
    fitting = [k for k in all_kept(problem) if can_run(problem, k)]
    fitting = [k for k in fitting if peak_bytes(problem, k) <= budget]
    assume(fitting)
    known = data.draw(st.sampled_from(fitting))

    found = solve(problem, budget_bytes=budget, start=(known,), relative_gap=0.9)

    assert found.objective_ms <= recompute_ms(problem, known)
    assert found.bound_ms <= found.objective_ms


@examples(60)
@given(problem=graph_problems(most=5), data=st.data())
def test_rounded_rows_cut_off_no_better_choice(problem, data):
    model, least_ms = rows_and_optimum(problem, data)

    for _ in range(5):
        outcome = pulp_runner.run(model.model, relaxed=True)
        assume(outcome.bound is not None)
        bound_ms = outcome.bound / model.time_scale - model.tie_break_ms
        assert bound_ms <= least_ms + 1e-6
        if not rounding.add_rounded_rows(model):
            break

    best = pulp_runner.run(model.model)
    assert best.bound / model.time_scale <= least_ms + model.tie_break_ms + 1e-6


def test_rounded_rows_know_that_ten_hold_two_of_four():
    # Three values of 4 MiB, 10 MiB for them: half a value is dropped, for 0.5 ms,
    # unless the row says that only two whole ones fit.
    problem = GraphProblem(
        value_bytes=(4 * MIB,) * 3,
        runtime_ms=(1.0,) * 3,
        workspace_bytes=(0,) * 3,
        reads=((),) * 3,
        makes=((0,), (1,), (2,)),
        step_reads=((), (2,), (1,), (0,)),
        step_bytes=(0,) * 4,
        carried_bytes=(0,) * 4,
        other_bytes=0,
    )
    model = GraphModel(problem, budget_bytes=10 * MIB)
    model.add_row(Position(0, None))
    before = pulp_runner.run(model.model, relaxed=True).bound / model.time_scale

    assert rounding.add_rounded_rows(model)

    after = pulp_runner.run(model.model, relaxed=True).bound / model.time_scale
    assert before == pytest.approx(0.5, abs=1e-4)
    assert after == pytest.approx(1.0, abs=1e-4)


def test_parts_that_are_recomputed_by_one_op_are_recomputed_whole():
    # Two parts: of 8 MiB that an op of 10 ms makes two free ops make 4 MiB each that
    # backward reads. Of these 16 MiB 10 MiB may stay: one part frees 8 MiB, for 10 ms;
    # in fractions three quarters of one do.
    problem = GraphProblem(
        value_bytes=(8 * MIB, 4 * MIB, 4 * MIB) * 2,
        runtime_ms=(10.0, 0.0, 0.0) * 2,
        workspace_bytes=(0,) * 6,
        reads=((), (0,), (0,), (), (3,), (3,)),
        makes=((0,), (1,), (2,), (3,), (4,), (5,)),
        step_reads=((), (5,), (4,), (2,), (1,)),
        step_bytes=(0,) * 5,
        carried_bytes=(0,) * 5,
        other_bytes=0,
    )
    model = GraphModel(problem, budget_bytes=10 * MIB)
    model.add_row(Position(0, None))
    bounds = []
    for _ in range(4):
        outcome = pulp_runner.run(model.model, relaxed=True)
        bounds.append(outcome.bound / model.time_scale)
        if not rounding.add_rounded_rows(model):
            break

    assert bounds[0] == pytest.approx(7.5, abs=1e-3)
    assert bounds[-1] >= 10.0 - 1e-3


@examples(60)
@given(problem=graph_problems(most=6), data=st.data())
def test_exchanging_fits_and_never_costs_more(problem, data):
    budget = budgets_of(problem, data)
    start = greedy(problem, budget_bytes=budget)
    assume(start.kept is not None)

    kept = local_search.exchange(problem, start.kept, budget)

    assert peak_bytes(problem, kept) <= budget
    assert recompute_ms(problem, kept) <= start.objective_ms


def test_a_value_is_exchanged_for_two_that_take_longer_to_make():
    # 8 MiB hold value 0 (5 ms), or values 1 and 2 (4 ms each).
    problem = GraphProblem(
        value_bytes=(8 * MIB, 4 * MIB, 4 * MIB),
        runtime_ms=(5.0, 4.0, 4.0),
        workspace_bytes=(0,) * 3,
        reads=((),) * 3,
        makes=((0,), (1,), (2,)),
        step_reads=((), (2,), (1,), (0,)),
        step_bytes=(4 * MIB, 0, 0, 0),
        carried_bytes=(0,) * 4,
        other_bytes=0,
    )
    budget = 12 * MIB

    assert local_search.exchange(problem, frozenset({0}), budget) == {1, 2}


@pytest.mark.parametrize("backend", ["highs", "cbc"])
def test_both_backends_find_the_cheap_end_of_a_chain(backend):
    assert solve(chain(), budget_bytes=119 * MIB, backend=backend).kept == {0, 1, 2}
    assert lowest(chain(), backend=backend).peak_bytes == 119 * MIB
    infeasible = solve(chain(), budget_bytes=118 * MIB, backend=backend)
    assert infeasible.termination is Termination.INFEASIBLE


@given(problem=graph_problems(most=9))
def test_the_additive_order_takes_the_same_candidates_in_another_order(problem):
    exact = list(choices(problem))
    additive = list(choices(problem, AdditiveBookkeeping))

    assert exact[0] == additive[0] and exact[-1] == additive[-1]
    assert len(exact) == len(additive)
    for before, after in itertools.pairwise(additive):
        assert len(before - after) == 1 and after < before


def test_additive_times_of_a_chain_are_as_counted_by_hand():
    # After 1, value 2 runs for 2 + 4 ms; 0 runs for itself and once more for 1.
    books, exact = AdditiveBookkeeping(chain()), Bookkeeping(chain())
    books.choose(1)
    exact.choose(1)

    assert {v: books.msps(v) for v in (0, 2)} == {v: exact.msps(v) for v in (0, 2)}


def test_positions_that_a_relaxation_breaks_come_worst_first():
    problem = chain()
    model = GraphModel(problem, budget_bytes=100 * MIB)
    for k in model.keep.values():
        k.varValue = 1.0
    for x in model.run.values():
        x.varValue = 0.0

    broken = fractional.broken(model, 100 * MIB)

    live = {m.position: m.live_bytes for m in timeline(problem, problem.kept_plainly)}
    sizes = [live[position] for position in broken]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size > 100 * MIB for size in sizes)
    assert all(isinstance(position, Position) for position in broken)
