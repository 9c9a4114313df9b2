import itertools
import sys
from dataclasses import replace

import pytest
import torch

import autosac
from autosac.planning.make_plan import make_plan
from autosac.quantities import format_bytes
from autosac.results.rows import FIGURES
from tests.models import CASES

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ["gpt", "convolutions", "list inputs"]


@pytest.fixture(scope="module", params=NAMES)
def traced(request):
    return CASES[request.param].profile(torch.optim.SGD)


@pytest.fixture(scope="module")
def swept(traced):
    return autosac.sweep(traced, n=9)


def test_budgets_are_evenly_spaced_from_the_floor_to_the_baseline(traced, swept):
    budgets = [row.budget_bytes for row in swept.rows]
    steps = {b - a for a, b in itertools.pairwise(budgets)}

    assert budgets[0] == swept.floor_bytes == autosac.floor(traced)
    assert budgets[-1] == swept.baseline_peak_bytes == traced.baseline_peak_bytes
    assert len(budgets) == 9
    assert max(steps) - min(steps) <= 1


def test_more_budget_never_costs_more_and_the_baselines_is_free(traced, swept):
    times = [row.recompute_ms for row in swept.rows]
    bounds = [row.bound_ms for row in swept.rows]

    assert all(row.feasible and row.reason is None for row in swept.rows)
    assert times == sorted(times, reverse=True)
    assert bounds == sorted(bounds, reverse=True)
    assert times[0] > times[-1] == 0.0
    for row in swept.rows:
        assert row.peak_bytes == row.plan.peak_bytes <= row.budget_bytes
        assert row.plan.budget_bytes == row.budget_bytes
        assert 0.0 <= row.bound_ms <= row.recompute_ms
        assert row.optimality_gap == row.plan.optimality_gap
        assert row.step_ms == pytest.approx(traced.baseline_ms + row.recompute_ms)


@pytest.mark.slow_but_fifth
def test_a_sweep_is_nowhere_worse_than_single_plans(traced, swept):
    for row in swept.rows[::3]:
        assert row.recompute_ms <= make_plan(traced, row.budget_bytes).recompute_ms


@pytest.mark.slow_but_fifth
def test_budgets_that_nothing_fits_are_rows_with_their_reason(traced):
    lowest = autosac.floor(traced)
    budgets = [traced.baseline_peak_bytes, lowest - 1, "1B", lowest]

    swept = autosac.sweep(traced, memory_budgets=budgets)

    assert [row.feasible for row in swept.rows] == [True, False, False, True]
    assert [row.budget_bytes for row in swept.rows] == [
        traced.baseline_peak_bytes, lowest - 1, 1, lowest,
    ]  # fmt: skip
    for row in swept.rows[1:3]:
        assert f"{lowest} bytes" in row.reason
        assert row.plan is row.peak_bytes is row.recompute_ms is row.bound_ms is None


def test_a_plan_of_a_sweep_can_be_applied():
    case = CASES["gpt"]
    step_profile = case.profile(torch.optim.SGD)

    plan = (
        autosac.sweep(step_profile, memory_budgets=[autosac.floor(step_profile)])
        .rows[0]
        .plan
    )

    model = plan.apply(case.model())
    assert plan.policy
    plan.unapply(model)


def test_the_table_has_a_row_for_each_budget(swept):
    pytest.importorskip("pandas")

    table = swept.to_dataframe()

    assert tuple(table.columns) == FIGURES
    assert table["floor_bytes"].tolist() == [swept.floor_bytes] * len(swept)
    assert table["recompute_ms"].tolist() == [row.recompute_ms for row in swept.rows]


def test_the_plot_shows_plans_bound_floor_and_baseline(swept):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")

    axes = swept.plot()

    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["plan", "bound", "least feasible budget", "peak without a plan"]
    assert "iB]" in axes.get_xlabel() and "ms" in axes.get_ylabel()
    assert axes.get_title(loc="left")
    assert len({line.get_linestyle() for line in axes.get_lines()}) == 4
    drawn = axes.get_lines()[0].get_ydata().tolist()
    assert drawn == [row.recompute_ms for row in swept.rows]


def test_a_sweep_prints_as_a_table_with_a_line_for_each_budget(swept):
    heads, *lines = repr(swept).splitlines()

    assert heads.split() == [
        "budget",
        "peak",
        "recompute",
        "at",
        "least",
        "step",
        "floor",
    ]
    assert len(lines) == len(swept) == 9
    assert lines[0].split()[:2] == format_bytes(swept[0].budget_bytes).split()


def test_long_tables_are_cut_in_the_middle_when_printed(swept):
    many = replace(swept, rows=swept.rows * 10)

    assert len(repr(many).splitlines()) == 42 and "... 50 more ..." in repr(many)


@pytest.mark.slow_but_fifth
def test_a_sweep_is_a_picture_that_can_be_saved(swept, tmp_path):
    path = tmp_path / "sweep.png"

    swept.picture().save(path)

    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("method", "module", "name"),
    [("to_dataframe", "pandas", "pandas"), ("plot", "matplotlib", "Matplotlib")],
)
def test_what_is_not_installed_is_named(method, module, name, swept, monkeypatch):
    for loaded in [m for m in sys.modules if m.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed

    with pytest.raises(ImportError, match=f"needs {name}: pip install"):
        getattr(swept, method)()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, TypeError, "either"),
        ({"n": 3, "memory_budgets": [1]}, TypeError, "either"),
        ({"n": 1}, ValueError, "at least 2"),
        ({"memory_budgets": []}, ValueError, "empty"),
        ({"memory_budgets": ["much"]}, ValueError, "much"),
        ({"n": 2, "optimizer": torch.optim.SGD}, TypeError, "profile"),
    ],
)
def test_wrong_arguments_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        autosac.sweep(CASES["gpt"].profile(), **options)
