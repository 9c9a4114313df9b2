import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autosac.solvers.curves.curve import (
    TradeoffCurve,
    is_convex,
    pareto,
)
from autosac.solvers.curves.fitting import fit
from tests.examples import examples
from tests.solvers.strategies import tradeoff_curves


def curve(*points):
    return TradeoffCurve(
        freed_bytes=tuple(freed for freed, _ in points),
        recompute_ms=tuple(time for _, time in points),
    )


def test_ratios_and_times_lie_between_the_points():
    # Half way from 10 to 20 bytes is half way from 1 to 3 ms.
    line = curve((0, 0.0), (10, 1.0), (20, 3.0))

    assert line.max_freed_bytes == 20
    assert line.ratios == (0.0, 0.5, 1.0)
    assert line.time_at(15) == 2.0
    assert line.time_at(20) == 3.0
    with pytest.raises(ValueError, match="from 0 to 20 bytes, got 21"):
        line.time_at(21)


def test_a_curve_is_convex_if_its_slopes_never_fall():
    assert curve((0, 0.0), (10, 1.0), (20, 2.0), (30, 5.0)).is_convex
    assert not curve((0, 0.0), (10, 2.0), (20, 3.0)).is_convex
    assert curve((7, 1.0)).is_convex
    # Equal slopes of 0.1 / 3 that floats compute differently.
    assert is_convex([0, 3, 6, 9], [0.0, 0.1, 0.2, 0.1 + 0.1 + 0.1])


@pytest.mark.parametrize(
    ("points", "match"),
    [
        ([], "at least one point"),
        ([(0, 0.0), (0, 1.0)], "increase strictly, got 0 before 0"),
        ([(0, 1.0), (1, 0.5)], "not decrease, got 1.0 before 0.5"),
        ([(0, float("nan"))], "finite"),
        ([(0, -1.0)], "not negative"),
    ],
)
def test_wrong_points_are_refused(points, match):
    with pytest.raises(ValueError, match=match):
        curve(*points)


def test_pareto_drops_what_another_point_beats():
    # 5 bytes take 3 ms, as long as 8 bytes do; 2 bytes take longer than 8.
    assert pareto([(8, 3.0), (5, 3.0), (0, 0.0), (2, 4.0), (9, 7.0)]) == curve(
        (0, 0.0), (8, 3.0), (9, 7.0)
    )


@given(points=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_pareto_keeps_exactly_the_points_that_no_other_beats(points):
    kept = pareto((freed, float(time)) for freed, time in points)

    beaten = {
        p
        for p in points
        if any(q != p and q[0] >= p[0] and q[1] <= p[1] for q in points)
    }
    observed = zip(kept.freed_bytes, kept.recompute_ms, strict=True)
    assert {(freed, int(time)) for freed, time in observed} == set(points) - beaten


@examples(25)
@given(curve=tradeoff_curves(), num_segments=st.integers(1, 5))
def test_a_fitted_curve_never_understates_a_point(curve, num_segments):
    fitted = fit(curve, num_segments=num_segments)

    errors = [
        fitted.time_at(freed) - time
        for freed, time in zip(curve.freed_bytes, curve.recompute_ms, strict=True)
    ]
    assert min(errors) >= 0.0
    assert max(errors) == fitted.max_error_ms
    assert len(fitted.freed_bytes) <= num_segments + 1
    assert fitted.freed_bytes[0] == curve.freed_bytes[0]
    assert fitted.freed_bytes[-1] == curve.freed_bytes[-1]
    assert fitted.recompute_ms[0] == curve.recompute_ms[0]


def test_a_curve_of_few_points_is_its_own_fit():
    line = curve((0, 0.0), (10, 2.0), (20, 3.0))

    fitted = fit(line, num_segments=2)

    assert (fitted.freed_bytes, fitted.recompute_ms) == ((0, 10, 20), (0.0, 2.0, 3.0))
    assert fitted.max_error_ms == 0.0


def test_a_flat_curve_is_one_segment():
    fitted = fit(curve(*((k, 4.0) for k in range(9))), num_segments=2)

    assert (fitted.freed_bytes, fitted.recompute_ms) == ((0, 8), (4.0, 4.0))


def test_a_fit_of_straight_pieces_finds_them():
    # Two straight pieces that meet at 50 bytes, 5 ms.
    points = [(10 * k, 1.0 * k) for k in range(6)]
    points += [(50 + 10 * k, 5.0 + 4.0 * k) for k in range(1, 6)]

    fitted = fit(curve(*points), num_segments=2)

    assert fitted.freed_bytes == (0, 50, 100)
    assert fitted.max_error_ms == pytest.approx(0.0, abs=1e-6)  # the LP's tolerance


def test_a_fit_is_repeatable_and_leaves_numpys_generator_alone():
    line = curve(*((k * k, float(k**3 % 50 + 50 * k)) for k in range(20)))
    np.random.seed(7)
    expected = np.random.random()
    np.random.seed(7)

    first = fit(line)

    assert np.random.random() == expected
    assert fit(line) == first


def test_a_fit_needs_a_whole_number_of_segments():
    with pytest.raises(ValueError, match="`num_segments` must be at least 1, got 0"):
        fit(curve((0, 0.0)), num_segments=0)
    for wrong in (1.5, "x", True):
        with pytest.raises(TypeError, match="whole number of segments"):
            fit(curve((0, 0.0)), num_segments=wrong)


def highest_line(fitted, freed):
    lines = zip(fitted.slopes, fitted.intercepts, strict=True)
    return max(slope * freed + intercept for slope, intercept in lines)


@example(  # its lowest convex line is flat: all slopes are rounding
    curve=curve((0, 0.0), (63, 0.0), (64, 1.0), (192, 1.0)), num_segments=3
)
@examples(25)
@given(curve=tradeoff_curves(), num_segments=st.integers(1, 5))
def test_the_highest_line_of_a_convex_fit_is_the_fit(curve, num_segments):
    fitted = fit(curve, num_segments=num_segments, convex=True)

    assert is_convex(fitted.freed_bytes, fitted.recompute_ms)
    assert fitted.num_segments <= num_segments
    for freed, time in zip(curve.freed_bytes, curve.recompute_ms, strict=True):
        assert fitted.time_at(freed) >= time
        if fitted.num_segments:
            line = highest_line(fitted, freed)
            assert line == pytest.approx(fitted.time_at(freed), rel=1e-6, abs=1e-6)


@examples(25)
@given(curve=tradeoff_curves(), num_segments=st.integers(1, 5), convex=st.booleans())
def test_a_fit_never_understates_further_points(curve, num_segments, convex):
    steps = range(len(curve.freed_bytes) - 1)
    middle = [(curve.freed_bytes[k] + curve.freed_bytes[k + 1]) // 2 for k in steps]
    above = [
        (freed, 1.5 * curve.recompute_ms[k + 1])
        for k, freed in zip(steps, middle, strict=True)
        if freed > curve.freed_bytes[k]
    ]
    further = pareto(above) if above else None

    fitted = fit(curve, num_segments=num_segments, convex=convex, above=further)

    for points in (curve, further):
        for freed, time in zip(
            points.freed_bytes if points else (),
            points.recompute_ms if points else (),
            strict=True,
        ):
            assert fitted.time_at(freed) >= time


def test_equal_curves_are_fitted_once():
    line = [(k * k, float(k**3 % 50 + 50 * k)) for k in range(20)]

    assert fit(curve(*line)) is fit(curve(*line))
