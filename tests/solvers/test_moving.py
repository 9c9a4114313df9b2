from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.solvers.graph import move_solver
from autosac.solvers.graph.move_search import repair
from autosac.solvers.graph.moving import (
    Choice,
    Move,
    MovedStep,
    MoveProblem,
    late_peak_bytes,
    plan_moves,
)
from autosac.solvers.graph.recomputation import GraphProblem, peak_bytes
from autosac.solvers.graph.solver import solve as solve_without
from tests.examples import examples
from tests.solvers import moving_oracles
from tests.solvers.strategies import MIB, graph_problems
from tests.solvers.test_recomputation import chain


@st.composite
def move_problems(draw, *, most=4):
    graph = draw(graph_problems(most=most))

    def times(count):
        drawn = st.lists(st.integers(0, 4), min_size=count, max_size=count)
        return tuple(map(float, draw(drawn)))

    candidates = sorted(graph.kept_plainly)
    movable = draw(st.sets(st.sampled_from(candidates))) if candidates else set()
    num_values = len(graph.value_bytes)
    return MoveProblem(
        graph=graph,
        step_ms=times(len(graph.step_reads)),
        movable=frozenset(movable),
        out_ms=times(num_values),
        back_ms=times(num_values),
        busy_ms=draw(st.sampled_from([(), times(num_values)])),
        host_bytes=draw(st.sampled_from([None, None, 3 * MIB, 6 * MIB])),
    )


def moved_chain(**changes):
    """The chain, whose values 0, 1, 2 of 1, 2, 4 MiB take 1, 2, 4 ms each way."""
    fields = {
        "graph": chain(),
        "step_ms": (3.0, 3.0, 3.0),
        "movable": frozenset({0, 1, 2}),
        "out_ms": (1.0, 2.0, 4.0),
        "back_ms": (1.0, 2.0, 4.0),
    }
    return MoveProblem(**{**fields, **changes})


def test_a_moved_value_is_away_from_its_release_to_its_fetch():
    problem = moved_chain()
    step = MovedStep(problem, Choice(frozenset({0, 1, 2}), frozenset({0})))

    # Kept: 1, 1+2+16, 1+2+4; 7, 3, 1. Op 1 reads value 0 last, step 2 first.
    assert step.late == {0: Move(1, 2)}
    late = (step.live_bytes(step.late) // MIB - 100).tolist()
    assert late == [1, 19, 6, 6, 2, 1]
    early = {0: Move(2, 1)}
    assert (step.live_bytes(early) // MIB - 100).tolist() == [1, 19, 7, 6, 3, 1]


def test_a_step_waits_for_what_its_copies_do_not_hide():
    problem = moved_chain()
    step = MovedStep(problem, Choice(frozenset({0, 1, 2}), frozenset({1, 2})))

    # Value 1 leaves from 3 to 5 ms, while op 2 runs until 7; value 2 from 7 to 11: the
    # step waits 4 ms at its release. Back, late: step 0 waits 4 ms for value 2, then
    # step 1 waits 2 ms for value 1; fetched with value 2 that is hidden by step 0.
    assert step.late == {1: Move(2, 1), 2: Move(2, 0)}
    assert step.exposed_ms(step.late) == 4.0 + 4.0 + 2.0
    assert step.exposed_ms({1: Move(2, 0), 2: Move(2, 0)}) == 4.0 + 4.0


@examples(150)
@given(problem=move_problems(), data=st.data())
def test_memory_and_time_are_those_of_the_step_event_by_event(problem, data):
    choice = data.draw(st.sampled_from([*moving_oracles.every_choice(problem)]))
    step = MovedStep(problem, choice)
    num_ops = len(problem.graph.reads)
    moves = {
        v: Move(
            data.draw(st.integers(late.released_after, num_ops - 1)),
            data.draw(st.integers(0, late.fetched_before)),
        )
        for v, late in step.late.items()
    }
    for places in (step.late, moves):
        peak = moving_oracles.peak_bytes(problem, choice, places)
        order = step.fetch_order(places)
        assert int(step.live_bytes(places).max()) == peak
        waited_ms = moving_oracles.waited_ms(problem, choice, places, order)
        assert step.exposed_ms(places) == pytest.approx(waited_ms, abs=1e-9)
    assert int(step.live_bytes(step.late).max()) <= peak  # of no other places is less


@examples(80)
@given(problem=move_problems(most=3), data=st.data())
def test_matches_trying_every_choice_and_every_place_of_its_moves(problem, data):
    choices = [*moving_oracles.every_choice(problem)]
    least = min(late_peak_bytes(problem, choice) for choice in choices)
    kept_bytes = peak_bytes(problem.graph, problem.graph.kept_plainly)
    budget = data.draw(st.integers(least // MIB - 1, kept_bytes // MIB)) * MIB
    costs = []
    for choice in choices:
        step = MovedStep(problem, choice)
        recompute = problem.graph.runtime_ms
        again_ms = sum(
            recompute[op] for ops in step.replay.again.values() for op in ops
        )
        costs += [
            again_ms + step.exposed_ms(moves)
            for moves in moving_oracles.every_place(problem, choice, step.late)
            if int(step.live_bytes(moves).max()) <= budget
        ]

    without = solve_without(problem.graph, budget_bytes=budget)
    start = None
    if without.kept is not None:
        start = plan_moves(problem, Choice(without.kept), budget)
    found = move_solver.solve(
        problem, budget_bytes=budget, start=[] if start is None else [start]
    )

    if not costs:
        assert found.plan is None
        return
    plan = found.plan
    assert plan.peak_bytes <= budget
    assert plan.peak_bytes == moving_oracles.peak_bytes(
        problem, plan.choice, plan.moves
    )
    assert problem.holds(plan.choice.moved)
    assert found.bound_ms <= min(costs) + 1e-6
    assert plan.cost_ms == pytest.approx(min(costs), abs=1e-6)
    if start is not None:
        assert plan.cost_ms <= start.cost_ms


@examples(60)
@given(problem=move_problems(most=3))
def test_the_lowest_peak_is_that_of_trying_every_choice(problem):
    choices = moving_oracles.every_choice(problem)
    least = min(late_peak_bytes(problem, choice) for choice in choices)

    found, choice = move_solver.lowest(problem)

    assert found == late_peak_bytes(problem, choice) == least
    assert problem.holds(choice.moved)


def test_a_choice_that_breaks_rows_the_model_has_is_not_the_last_word():
    # An op makes two results: with one of them kept, its rerun makes that one twice.
    graph = GraphProblem(
        value_bytes=(0, MIB, MIB, MIB),
        runtime_ms=(0.0, 0.0, 0.0),
        workspace_bytes=(0, 0, 0),
        reads=((), (), (1,)),
        makes=((0,), (1, 2), (3,)),
        pinned=frozenset(),
        returned=frozenset(),
        step_reads=((1, 2),),
        step_bytes=(0,),
        carried_bytes=(0,),
        other_bytes=0,
    )
    nothing_moves = MoveProblem(
        graph=graph,
        step_ms=(0.0,),
        movable=frozenset(),
        out_ms=(0.0,) * 4,
        back_ms=(0.0,) * 4,
        host_bytes=None,
    )

    assert move_solver.lowest(nothing_moves) == (2 * MIB, Choice(frozenset()))


def test_a_repaired_choice_never_holds_more_than_far_memory_does():
    problem = moved_chain(host_bytes=4 * MIB)
    everything = frozenset({0, 1, 2})

    repaired = repair(problem, Choice(everything, everything), 0)

    assert problem.far_bytes(repaired.moved) <= 4 * MIB


def test_wrong_numbers_are_errors():
    with pytest.raises(ValueError, match="`step_ms` must have an entry"):
        moved_chain(step_ms=(1.0,))
    returned = replace(chain(), returned=frozenset({1}))
    with pytest.raises(ValueError, match="`movable` values must be kept"):
        moved_chain(graph=returned)
