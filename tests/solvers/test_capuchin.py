from hypothesis import given
from hypothesis import strategies as st

from autosac.solvers.graph.capuchin import Bookkeeping, choices, solve
from autosac.solvers.graph.recomputation import peak_bytes, recompute_ms
from tests.solvers.oracles import separate_recompute_ms
from tests.solvers.strategies import MIB, graph_problems
from tests.solvers.test_recomputation import chain


def test_bookkeeping_of_a_chain_is_as_counted_by_hand():
    books = Bookkeeping(chain())
    assert books.remaining == {0: 1.0, 1: 2.0, 2: 4.0}

    books.choose(1)  # 2 must reach past 1; 1 has 0 as its source
    assert books.sources == {0: frozenset(), 1: {0}, 2: {0}}
    # Without 0, it runs for itself and once more for 1.
    assert books.remaining == {0: 2.0, 2: 6.0}

    books.choose(2)
    assert books.repeats == {1: 2, 2: 1}
    assert books.remaining == {0: 3.0}
    assert books.total_ms == 8.0


@given(problem=graph_problems(most=9), data=st.data())
def test_added_time_equals_that_of_recomputing_by_brute_force(problem, data):
    books = Bookkeeping(problem)
    plain = problem.kept_plainly
    chosen: set[int] = set()
    while books.remaining:
        before = separate_recompute_ms(problem, plain - chosen, chosen)
        assert books.total_ms == before
        for value, added_ms in books.remaining.items():
            more = chosen | {value}
            after = separate_recompute_ms(problem, plain - more, more)
            assert added_ms == after - before
        value = data.draw(st.sampled_from(sorted(books.remaining)))
        books.choose(value)
        chosen.add(value)


@given(problem=graph_problems(most=9))
def test_merged_recomputations_never_cost_more_than_separate_ones(problem):
    plain = problem.kept_plainly
    for kept in choices(problem):
        separate = separate_recompute_ms(problem, kept, plain - kept)
        assert recompute_ms(problem, kept) <= separate


@given(problem=graph_problems(), data=st.data())
def test_the_peak_is_within_the_budget_and_never_rises_as_it_falls(problem, data):
    baseline = peak_bytes(problem, problem.kept_plainly)
    falling = sorted(
        data.draw(st.lists(st.integers(0, baseline), max_size=5)), reverse=True
    )
    peaks = []
    for budget in [baseline, *falling]:
        found = solve(problem, budget_bytes=budget)
        if found.kept is None:
            assert found.peak_bytes > budget
            assert found.peak_bytes == peak_bytes(problem, found.lowest)
            continue
        assert peak_bytes(problem, found.kept) == found.peak_bytes <= budget
        assert found.objective_ms == recompute_ms(problem, found.kept)
        peaks.append(found.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)


def test_nothing_is_recomputed_under_an_ample_budget():
    assert solve(chain(), budget_bytes=10**9).kept == {0, 1, 2}


def test_a_budget_below_the_reach_of_the_greedy_has_no_solution():
    found = solve(chain(), budget_bytes=100 * MIB)

    assert found.kept is None
    assert found.objective_ms is None
    assert found.peak_bytes == 119 * MIB
