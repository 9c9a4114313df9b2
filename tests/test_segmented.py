"""Units and ratios on fitted curves, and the curves by themselves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import autosac
from autosac.cli.demo import GPT, next_token_loss
from autosac.solvers import sac
from autosac.solvers.curves import fitting
from autosac.solving import segmented
from autosac.solving.solve_options import SolveOptions


@pytest.fixture(scope="module")
def profile():
    tokens = torch.zeros(2, 64, dtype=torch.long)
    with torch.device("meta"):
        model = GPT(num_layers=4, width=64, num_heads=4, length=64)
    return autosac.profile(
        model, tokens, loss_fn=next_token_loss(tokens), device="h100"
    )


def fresh(profile):
    """The same step, without the choices that plans of it have left."""
    return replace(profile)


def budgets(profile, num=4):
    lowest, highest = autosac.floor(profile), profile.baseline_peak_bytes
    return [lowest + (highest - lowest) * (i + 1) // (num + 1) for i in range(num)]


@pytest.mark.slow
@pytest.mark.parametrize("place", range(3))
def test_more_segments_never_cost_more(profile, place):
    budget = budgets(profile, 3)[place]
    times = [
        autosac.plan(fresh(profile), memory_budget=budget, segments=k).recompute_ms
        for k in (1, 2, 3, 5)
    ]
    assert times == sorted(times, reverse=True)


@pytest.mark.slow
def test_plans_on_segments_are_near_those_on_exact_points(profile):
    for budget in budgets(profile):
        exact = autosac.plan(fresh(profile), memory_budget=budget)
        fitted = autosac.plan(fresh(profile), memory_budget=budget, segments=3)

        assert fitted.peak_bytes <= budget
        assert fitted.recompute_ms >= exact.bound_ms
        assert fitted.recompute_ms <= 1.25 * exact.recompute_ms
        assert fitted.bound_ms <= exact.recompute_ms


@pytest.mark.slow
def test_ratios_lie_on_segments_and_are_rounded_to_points(profile, monkeypatch):
    form, budget = profile.formulation, budgets(profile)[1]
    solutions, mixtures, solve = [], [], sac.solve

    def solved(problem, **options):
        solutions.append((problem, solve(problem, **options)))
        return solutions[-1][1]

    monkeypatch.setattr(segmented.sac, "solve", solved)
    segmented.search_segments(
        form, budget, SolveOptions(segments=2), lambda shares: mixtures.append(shares)
    )

    between = 0
    for (problem, solution), mixture in zip(
        [s for s in solutions if s[1].weights], mixtures, strict=True
    ):
        for u, (unit, shares) in enumerate(
            zip(problem.units, solution.weights, strict=True)
        ):
            used = [k for k, share in enumerate(shares) if share > 0.0]
            assert (u in mixture) == bool(used)
            if not used:
                continue
            assert used[-1] - used[0] <= 1  # on one segment
            assert sum(shares) == pytest.approx(1.0)
            freed = sum(
                s * p.freed_bytes for s, p in zip(shares, unit.points, strict=True)
            )
            exact = form.solver_units[u].points
            spread = sum(
                s * p.freed_bytes for s, p in zip(mixture[u], exact, strict=True)
            )
            assert spread == pytest.approx(freed)
            between += len(used) > 1
            policy = form.curves[u].between(mixture[u].tolist())
            kept = sum(
                group.saved_bytes
                for group, choice in zip(
                    form.units[u].groups, policy.choices, strict=True
                )
                if choice == "S"
            )
            curve = form.curves[u].points
            wanted = sum(
                s * f for s, f in zip(mixture[u], curve.freed_bytes, strict=True)
            )
            if form.curves[u].front is not None:
                assert form.curves[u].most_bytes - kept >= wanted - 1.0
    assert between


@pytest.mark.slow
def test_a_curve_is_fitted_once_for_all_plans(profile):
    step = fresh(profile)
    _ = step.formulation
    fitting.fit.cache_clear()
    autosac.plan(step, memory_budget=budgets(profile)[1], segments=3)
    first = fitting.fit.cache_info()
    distinct = len({id(curve) for curve in step.formulation.curves})

    autosac.plan(step, memory_budget=budgets(profile)[2], segments=3)

    assert 0 < first.misses <= 3 * distinct
    assert fitting.fit.cache_info().misses == first.misses


@pytest.mark.parametrize(
    ("segments", "match"),
    [
        (1.5, "whole number of segments, 1 or more, got 1.5"),
        ("x", "whole number of segments, 1 or more, got 'x'"),
        (True, "whole number"),
        (0, "`segments` must be at least 1, got 0"),
    ],
)
def test_numbers_of_segments_that_mean_nothing_are_refused(profile, segments, match):
    with pytest.raises(autosac.ArgumentError, match=match):
        autosac.plan(profile, memory_budget="1GiB", segments=segments)
    with pytest.raises(autosac.ArgumentError, match=match):
        autosac.sweep(profile, n=2, plan_options={"segments": segments})
    with pytest.raises(autosac.ArgumentError, match=match):
        autosac.plan_parallel(
            profile, cluster="hgx-h100", memory_budget="1GiB", segments=segments
        )
    with pytest.raises(autosac.ArgumentError, match=match):
        profile.curve("blocks.0", segments=segments)


# --- the curve of one module ---------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 2, 3, 6])
def test_the_fit_of_a_module_never_understates_a_known_point(profile, segments):
    curve = profile.curve("blocks.3.attention", segments=segments)

    assert curve.n_segments == len(curve.slopes) <= segments
    lines = list(zip(curve.slopes, curve.intercepts, curve.breakpoints, strict=False))
    for ratio, ms in zip(curve.ratios, curve.points.recompute_ms, strict=True):
        own = [line for line in lines if line[2] <= ratio + 1e-12][-1]
        assert own[0] * ratio + own[1] >= ms - 1e-9
    assert curve.max_error_ms >= 0.0
    breakpoints = set(curve.fit.freed_bytes)
    assert breakpoints <= set(curve.points.freed_bytes)


def test_the_points_of_a_module_are_those_that_plans_choose_from(profile):
    fqn = "blocks.1.mlp"
    curve = profile.curve(fqn)
    unit = next(u for u in profile.units.candidates if u.fqn == fqn)
    front = profile.fronts[unit.key]
    freed = {curve.activation_bytes - n for n in front.saved_bytes.tolist()}
    assert set(curve.points.freed_bytes) <= freed
    assert curve.ratios[-1] == pytest.approx(1.0)


def test_a_curve_is_a_table_and_a_picture(profile):
    curve = profile.curve("blocks.0", segments=2)
    table = curve.to_dataframe()

    assert len(table) == len(curve.points.freed_bytes)
    assert (table["fitted_ms"] >= table["recompute_ms"]).all()
    assert table["is_breakpoint"].sum() == len(curve.breakpoints)
    axes = curve.plot()
    drawn = axes.get_lines()
    np.testing.assert_allclose(drawn[0].get_ydata(), curve.points.recompute_ms)
    np.testing.assert_allclose(drawn[1].get_ydata(), curve.fit.recompute_ms)


@pytest.mark.parametrize(
    ("fqn", "match"),
    [
        ("nothing", r"`fqn`='nothing' is no name in .* have a trade-off curve are `bl"),
        ("", "The model itself has no trade-off curve: only modules inside it are AC"),
        ("blocks", "`blocks` has no trade-off curve: it is never called in the step"),
        ("head", "`head` has no trade-off curve: .* Modules that have one are `bl"),
    ],
)
def test_a_module_without_a_curve_is_refused_with_the_reason(profile, fqn, match):
    with pytest.raises(autosac.ArgumentError, match=match):
        profile.curve(fqn)


def test_a_module_that_frees_nothing_says_so():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1))
    profile = autosac.profile(model, torch.zeros(4, 8), loss_fn=torch.sum)

    with pytest.raises(autosac.ArgumentError, match="`1` has no trade-off curve"):
        profile.curve("1")
