import sys

from hypothesis import given
from hypothesis import strategies as st

from autosac.solvers.graph import lowest, solve
from autosac.solvers.graph.dominance import dominated_values
from autosac.solvers.graph.least_peak import needed_at_once
from autosac.solvers.graph.model import GraphModel
from autosac.solvers.graph.recomputation import (
    GraphProblem,
    Position,
    peak_bytes,
    recompute_ms,
)
from autosac.solvers.milp.solution import Termination
from tests.examples import examples
from tests.solvers.oracles import every_kept_set
from tests.solvers.strategies import MIB, graph_problems
from tests.solvers.test_recomputation import chain


def test_recomputes_the_cheap_end_of_a_chain_when_that_is_enough():
    # Forward holds 1+2+16 at op 1 and cannot do better; the rest fits below it.
    assert lowest(chain()).peak_bytes == 119 * MIB
    assert solve(chain(), budget_bytes=119 * MIB).kept == {0, 1, 2}
    assert solve(chain(), budget_bytes=118 * MIB).termination is Termination.INFEASIBLE


@examples(60)
@given(problem=graph_problems(most=5), data=st.data())
def test_matches_trying_every_set_of_kept_values(problem, data):
    outcomes = every_kept_set(problem)
    least = min(peak for peak, _ in outcomes)
    baseline = peak_bytes(problem, problem.kept_plainly)
    budget = data.draw(st.integers(least // MIB - 1, baseline // MIB)) * MIB
    fitting = [cost for peak, cost in outcomes if peak <= budget]

    found = solve(problem, budget_bytes=budget)

    if not fitting:
        assert found.termination is Termination.INFEASIBLE
        return
    assert found.termination is Termination.OPTIMAL
    assert peak_bytes(problem, found.kept) == found.peak_bytes <= budget
    assert found.objective_ms == recompute_ms(problem, found.kept) == min(fitting)
    assert found.bound_ms <= found.objective_ms


@examples(40)
@given(problem=graph_problems(most=5))
def test_the_lowest_peak_is_that_of_trying_every_set(problem):
    least = min(peak for peak, _ in every_kept_set(problem))

    found = lowest(problem)

    assert found.peak_bytes == peak_bytes(problem, found.kept) == least
    assert needed_at_once(problem) <= found.bound_bytes <= least


@examples(30)
@given(data=st.data())
def test_values_that_several_results_dominate_are_kept_by_no_better_choice(data):
    # Op 0 makes what gates are made of, ops 1 and 2; op 3 reads both, op 4 one more.
    small = data.draw(st.lists(st.integers(0, 3), min_size=4, max_size=4))
    sizes = (small[0] + small[1], *small)
    needs = st.sets(st.integers(1, 4), max_size=2)
    steps = [tuple(sorted(data.draw(needs))) for _ in range(3)]
    problem = GraphProblem(
        value_bytes=tuple(n * MIB for n in sizes),
        runtime_ms=(9.0, 2.0, 1.0, 3.0, 2.0),
        workspace_bytes=(0,) * 5,
        reads=((), (0,), (0,), (1, 2), (data.draw(st.integers(1, 3)),)),
        makes=((0,), (1,), (2,), (3,), (4,)),
        step_reads=tuple(steps),
        carried_bytes=(0, 0, 0),
        step_bytes=tuple(data.draw(st.integers(0, 4)) * MIB for _ in range(3)),
        other_bytes=0,
    )
    outcomes = every_kept_set(problem)
    readers = GraphModel(problem, budget_bytes=None).readers
    if len(readers.get(0, ())) == 2:
        assert 0 in dominated_values(problem, readers)

    for budget in {peak for peak, _ in outcomes}:
        fitting = [cost for peak, cost in outcomes if peak <= budget]
        assert solve(problem, budget_bytes=budget).objective_ms == min(fitting)


def test_what_is_kept_and_made_again_with_its_sibling_counts_twice():
    # Op 0 makes values 0 and 1 in 5 MiB of workspace. If 0 alone is kept and 1 made
    # again, for step 2, the op makes a second 0: 1 + 1 + 2 + 1 (value 2) + 5 = 10 MiB.
    problem = GraphProblem(
        value_bytes=(1 * MIB, 2 * MIB, 1 * MIB, 0, 1 * MIB),
        runtime_ms=(0.0, 0.0, 0.0, 0.0),
        workspace_bytes=(5 * MIB, 0, 0, 0),
        reads=((), (), (), ()),
        makes=((0, 1), (2,), (3,), (4,)),
        pinned=frozenset(),
        returned=frozenset(),
        step_reads=((), (0, 2), (0, 1), (2,), (4,)),
        step_bytes=(0, 5 * MIB, 0, 0, 0),
        carried_bytes=(0,) * 5,
        other_bytes=0,
    )
    assert peak_bytes(problem, frozenset({0})) == 10 * MIB

    found = lowest(problem)

    assert found.termination is Termination.OPTIMAL
    assert found.peak_bytes == 9 * MIB


def test_a_chain_may_be_longer_than_python_can_nest_calls():
    # Forward makes 0, 1, 2, ... one from the other, backward reads them in turn.
    count = sys.getrecursionlimit()
    problem = GraphProblem(
        value_bytes=(MIB,) * count,
        runtime_ms=(1.0,) * count,
        workspace_bytes=(0,) * count,
        reads=((), *((v,) for v in range(count - 1))),
        makes=tuple((v,) for v in range(count)),
        step_reads=tuple((v,) for v in reversed(range(count))),
        step_bytes=(0,) * count,
        carried_bytes=(0,) * count,
        other_bytes=0,
    )
    model = GraphModel(problem, budget_bytes=count * MIB)

    model.add_row(Position(1, None))

    # By step 1, op 0 has run again if what step 0 or 1 reads takes that.
    assert model.again(0, 1) is not model.again(0, 0)
    assert len(model.again(0, 1)) == 1
