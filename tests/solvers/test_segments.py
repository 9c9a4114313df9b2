from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.solvers import sac
from autosac.solvers.milp import highs_runner, pulp_runner
from autosac.solvers.sac import rows
from autosac.solvers.sac.classes import classify
from autosac.solvers.sac.counts import CountModel
from autosac.solvers.sac.search import Search
from autosac.solvers.sac.segments import segments
from autosac.solvers.sac.table import Table

STEPS = st.lists(
    st.tuples(st.integers(1, 50), st.floats(0.01, 5.0)), min_size=1, max_size=60
)


def unit(steps):
    """A unit whose points each free and take more than the one before."""
    freed = np.cumsum([nbytes for nbytes, _ in steps]).tolist()
    times = np.cumsum([ms for _, ms in steps]).tolist()
    points = [
        sac.Breakpoint(ratio=nbytes / freed[-1], freed_bytes=nbytes, recompute_ms=ms)
        for nbytes, ms in zip(freed, times, strict=True)
    ]
    return sac.Unit(
        fqn="unit",
        parent=None,
        points=tuple(points),
        freed_from=0,
        freed_until=1,
        working=(),
    )


def cut(steps, tolerance_ms, kept=None, cuts=()):
    """Vertices of the segments of all points of a unit, or of some."""
    kept = range(len(steps)) if kept is None else kept
    return segments(unit(steps), np.inf).vertices(np.array(kept), tolerance_ms, cuts)


@given(steps=STEPS, tolerance_ms=st.floats(0.0, 4.0))
def test_mixtures_of_a_segment_are_below_its_points_by_the_tolerance(
    steps, tolerance_ms
):
    points = unit(steps).points
    found = cut(steps, tolerance_ms)

    assert found[0][0] == 0 and found[-1][-1] == len(points) - 1
    assert all(one[-1] + 1 == next_one[0] for one, next_one in pairwise(found))
    for vertices in found:
        start, stop = vertices[0], vertices[-1] + 1
        assert set(vertices) <= set(range(start, stop))
        freed = [points[v].freed_bytes for v in vertices]
        times = [points[v].recompute_ms for v in vertices]
        for k in range(start, stop):
            mixed_ms = np.interp(points[k].freed_bytes, freed, times)
            assert mixed_ms <= points[k].recompute_ms + 1e-9
            if k + 1 < stop:
                assert points[k + 1].recompute_ms <= mixed_ms + tolerance_ms + 1e-9


@given(steps=STEPS)
def test_without_tolerance_every_point_is_a_segment(steps):
    assert cut(steps, 0.0) == [[k] for k in range(len(steps))]


def test_segments_end_where_they_are_cut():
    steps = [(1, 1.0)] * 6  # on a line: one segment without cuts

    assert cut(steps, 1.0) == [[0, 5]]
    assert cut(steps, 1.0, cuts={0, 3}) == [[0], [1, 3], [4, 5]]
    assert cut(steps, 1.0, kept=[0, 4, 5], cuts={2}) == [[0], [4, 5]]
    assert cut(steps, 1.0, kept=[4, 5], cuts={2, 5}) == [[4, 5]]


def test_slow_points_are_left_out():
    four = unit([(1, 1.0)] * 4)

    assert len(segments(four, 2.5).times) == 2
    assert segments(four, 0.5) is None


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_values_at_a_known_point_lie_between_those_of_its_neighbours(share):
    two = unit([(10, 1.0), (10, 1.0)])
    known = sac.Between(point=0, share=share, recompute_ms=1.5)
    found = segments(replace(two, between=(known,)), np.inf)

    values = found.between(np.array([4.0, 8.0]))
    assert values.tolist() == [4.0, 4.0 + 4.0 * share, 8.0]


def search_of(problem, **options):
    limits = {"backend": "highs", "time_limit_s": None, "relative_gap": 0.0}
    return Search(Table(problem), units=[0], **limits, **options)


def test_points_are_mixed_at_will_where_no_time_is_proven_yet():
    # One unit that frees enough for nothing: the relaxation takes no time.
    free = replace(
        unit([(10, 1.0)]),
        points=(sac.Breakpoint(ratio=1.0, freed_bytes=10, recompute_ms=0.0),),
    )
    problem = sac.SacProblem(units=(free,), base_bytes=(20, 0), budget_bytes=10)
    search = search_of(problem)

    assert search._tolerance_ms(np.inf) == np.inf
    assert search._tolerance_ms(1.0) == 0.0


def test_no_mixture_stands_for_missing_points_where_none_is_missing():
    # Nor before a first choice is known, when no column can be ruled out as too dear.
    problem = sac.SacProblem(
        units=(unit([(10, 1.0), (10, 1.0)]),), base_bytes=(20, 0), budget_bytes=5
    )
    table = Table(problem)
    counts = CountModel(
        table,
        classify(table, [0], [0]),
        [0],
        units=[0],
        budget_bytes=5,
        mixed=[],
        room_ms=np.inf,
        tolerance_ms=0.0,
    )

    outcome = pulp_runner.run(counts.model)

    assert outcome.bound / counts.scale == pytest.approx(2.0)


def test_reduced_costs_count_from_the_relaxation_whatever_was_known_before():
    two = replace(
        unit([(10, 6.0)]),
        points=(sac.Breakpoint(ratio=1.0, freed_bytes=10, recompute_ms=6.0),),
    )
    problem = sac.SacProblem(units=(two,), base_bytes=(20, 0), budget_bytes=15)
    search = search_of(problem, least_ms=6.0)
    search.relax(15)

    assert search._relaxed == pytest.approx(3.0)  # half of the unit
    assert search.bound == pytest.approx(6.0)


def test_segments_are_made_coarser_until_a_unit_is_one_and_no_further(monkeypatch):
    monkeypatch.setattr(rows, "_MANY_INTEGERS", -1)  # any MILP has too many
    monkeypatch.setattr(highs_runner, "WIDE_GAP", -1.0)
    built = []

    def counted(*arguments, **options):
        built.append(options["tolerance_ms"])
        return CountModel(*arguments, **options)

    monkeypatch.setattr(rows, "CountModel", counted)
    steps = [(10, 2.0**-k) for k in range(8)]
    problem = sac.SacProblem(units=(unit(steps),), base_bytes=(100, 0), budget_bytes=35)
    search = search_of(problem)
    search._offer([len(steps) - 1])  # there is a best choice

    search._solve(35, tolerance_ms=0.25)

    longest_ms = sum(ms for _, ms in steps)
    assert built[-1] == np.inf
    assert built[:-1] == [0.25 * 4**k for k in range(len(built) - 1)]
    assert built[-2] >= longest_ms > built[-3]
