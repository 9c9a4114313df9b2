import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.solvers.graph.recomputation import (
    GraphProblem,
    peak_bytes,
    recompute_ms,
    reruns,
    timeline,
)
from tests.solvers.oracles import replayed_timeline
from tests.solvers.strategies import MIB, graph_problems


def chain() -> GraphProblem:
    """x -> 0 -> 1 -> 2, all needed in reverse order; sizes 1, 2, 4 MiB."""
    return GraphProblem(
        value_bytes=(MIB, 2 * MIB, 4 * MIB),
        runtime_ms=(1.0, 2.0, 4.0),
        workspace_bytes=(0, 16 * MIB, 0),
        reads=((), (0,), (1,)),
        makes=((0,), (1,), (2,)),
        step_reads=((2,), (1,), (0,)),
        step_bytes=(100 * MIB,) * 3,
        carried_bytes=(100 * MIB,) * 3,
        other_bytes=100 * MIB,
    )


def test_memory_of_a_chain_is_as_counted_by_hand():
    # Forward 1; 1+2+16; 1+2+4. Backward frees 4, then 2, then 1.
    plain = [moment.live_bytes // MIB - 100 for moment in timeline(chain(), {0, 1, 2})]
    assert plain == [1, 19, 7, 7, 3, 1]

    # Only 0 is kept: 2 is freed at the end of forward, and 0 and 1 stay for backward.
    # Before step 0 ops 1 (1+2+16) and 2 (1+2+4) run again; 1 is used again by step 1.
    again = [moment.live_bytes // MIB - 100 for moment in timeline(chain(), {0})]
    assert again == [1, 19, 7, 19, 7, 7, 3, 1]
    assert reruns(chain(), {0}) == {0: (1, 2)}


def test_what_needs_a_pinned_op_again_is_refused():
    problem = GraphProblem(
        value_bytes=(1,),
        runtime_ms=(1.0,),
        workspace_bytes=(0,),
        reads=((),),
        makes=((0,),),
        pinned=frozenset({0}),
        step_reads=((0,),),
        step_bytes=(0,),
        carried_bytes=(0,),
        other_bytes=0,
    )

    with pytest.raises(ValueError, match="Op 0 is pinned"):
        timeline(problem, frozenset())


@given(problem=graph_problems(), data=st.data())
def test_memory_equals_that_of_a_replay_with_reference_counts(problem, data):
    values = range(len(problem.value_bytes))
    kept = data.draw(st.sets(st.sampled_from(values)))
    try:
        found = timeline(problem, kept)
    except ValueError:
        return

    assert [(m.position, m.live_bytes) for m in found] == replayed_timeline(
        problem, kept
    )
    assert peak_bytes(problem, kept) == max(m.live_bytes for m in found)


@given(problem=graph_problems(), data=st.data())
def test_recompute_time_is_that_of_all_ops_that_run_again(problem, data):
    values = st.sets(st.sampled_from(range(len(problem.value_bytes))))
    kept = data.draw(values)
    try:
        again = reruns(problem, kept)
    except ValueError:
        with pytest.raises(ValueError, match="pinned"):
            recompute_ms(problem, kept)
        return

    times = [problem.runtime_ms[op] for ops in again.values() for op in ops]

    assert recompute_ms(problem, kept) == math.fsum(times)
