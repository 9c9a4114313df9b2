import itertools
import sys

import matplotlib
import pytest
import torch
from torch import nn

import autosac
from autosac import plotting
from autosac.pictures.panels import Grid, Layer, Line, Note, Panel
from autosac.pictures.pictures import Picture
from autosac.planning import plotting as plan_pictures
from autosac.planning.checking import chosen
from autosac.profiles.memory_history import history
from autosac.step.tape import CATEGORIES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def swept(traced):
    return autosac.sweep(traced, n=4)


@pytest.fixture
def pictures(plan, swept):
    return {
        "memory": plotting.memory(plan),
        "trade-offs": plotting.trade_offs(plan),
        "budgets": plotting.budgets(swept, rivals={"full": [(10**6, 1.0)]}),
        "ratios": plotting.ratios(plan),
    }


def panel_of(picture, index=0):
    panels = picture.panels[index]
    assert isinstance(panels, Panel)
    return panels


# --- every picture ----------------------------------------------------------------


def test_every_picture_has_units_and_says_what_it_shows(pictures):
    for picture in pictures.values():
        for panel in picture.panels:
            assert panel.title
            if isinstance(panel, Grid):
                assert "[%]" in panel.legend
            else:
                assert panel.x_label.endswith(("[ms]", "iB]"))
                assert panel.y_label.endswith(("[ms]", "iB]"))


def test_what_is_in_a_picture_can_be_told_apart_in_grey(pictures):
    for panel in (p for picture in pictures.values() for p in picture.panels):
        if isinstance(panel, Panel):
            styles = [(line.dash, line.marker) for line in panel.lines]
            assert len(set(styles)) == len(styles)
            fills = [layer.style for layer in panel.stack]
            assert len(set(fills)) == len(fills)


def test_neighbouring_layers_differ_in_hatch_or_in_lightness():
    from autosac.pictures.matplotlib_figure import _HATCHES
    from autosac.pictures.panels import FILLS

    assert len(FILLS) == len(_HATCHES) == len(CATEGORIES)
    greys = [
        0.2126 * r + 0.7152 * g + 0.0722 * b
        for r, g, b in map(matplotlib.colors.to_rgb, FILLS)
    ]
    for i, j in itertools.combinations(range(len(FILLS)), 2):
        assert _HATCHES[i] != _HATCHES[j] or abs(greys[i] - greys[j]) > 0.2


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["memory", "trade-offs", "budgets", "ratios"])
def test_matplotlib_and_plotly_draw_the_same_panels(name, pictures):
    pytest.importorskip("plotly")
    picture = pictures[name]

    figure, interactive = picture.matplotlib(), picture.plotly()

    titles = [title for a in figure.axes if (title := a.get_title(loc="left"))]
    assert titles == [panel.title for panel in picture.panels]
    shown = [note.text for note in interactive.layout.annotations]
    assert all(p.title.replace("\n", "<br>") in shown for p in picture.panels)
    legend: set[str] = set()  # what one panel explains, others need not
    for panel, axes in zip(picture.panels, figure.axes, strict=False):
        if isinstance(panel, Panel):
            assert axes.get_xlabel() == panel.x_label
            if axes.get_legend() is not None:
                legend |= {text.get_text() for text in axes.get_legend().get_texts()}
            wanted = {drawn.label for drawn in (*panel.lines, *panel.stack)} - {""}
            named = {trace.name for trace in interactive.data if trace.showlegend}
            assert wanted <= legend and wanted <= named


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("suffix", "begin"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<svg")]
)
def test_a_picture_is_saved_as_its_suffix_says(suffix, begin, pictures, tmp_path):
    path = tmp_path / f"picture{suffix}"

    pictures["ratios"].save(path)

    assert path.read_bytes().startswith(begin)


def test_an_interactive_file_needs_no_network(pictures, tmp_path):
    pytest.importorskip("plotly")
    path = tmp_path / "picture.html"

    pictures["ratios"].save(path)

    assert '<script src="http' not in path.read_text()
    assert "Plotly.newPlot" in path.read_text()


def test_an_svg_is_the_same_each_time_and_has_its_text_as_text(pictures):
    assert pictures["ratios"].svg() == pictures["ratios"].svg()
    assert "AC units" in pictures["ratios"].svg()


def test_notebooks_show_a_picture(pictures):
    assert pictures["ratios"]._repr_png_().startswith(b"\x89PNG")


def test_another_suffix_is_refused(pictures, tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.png"):
        pictures["ratios"].save(tmp_path / "picture.gif")


@pytest.mark.parametrize(
    ("module", "method"), [("matplotlib", "svg"), ("plotly", "plotly")]
)
def test_what_is_not_installed_is_named(module, method, pictures, monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(ImportError, match=r"pip install 'autosac\[explore\]'"):
        getattr(pictures["ratios"], method)()


# --- memory over the step ---------------------------------------------------------


def test_the_areas_add_up_to_the_peak_where_it_is_marked(plan, traced):
    picture = plotting.memory(plan)

    for panel, picked in zip(picture.panels, ({}, chosen(plan, traced)), strict=True):
        step_history = history(traced, picked)
        heights = [sum(ys) for ys in zip(*(row.y for row in panel.stack), strict=True)]
        (mark,) = (line for line in panel.lines if line.label == "peak")
        assert max(heights) == pytest.approx(mark.y[0])
        highest = heights.index(max(heights))
        width = step_history.end_ms / plan_pictures._NUM_TIMES
        assert abs(panel.stack_x[highest] - mark.x[0]) <= 2 * width
        assert str(step_history.place) in panel.title
        assert max(heights) <= panel.y_max
    before, after = picture.panels
    assert before.y_max == after.y_max and before.x_max == after.x_max


def test_the_peak_with_the_plan_is_below_the_budget_line(plan):
    panel = panel_of(plotting.memory(plan), 1)

    lines = {line.label.split(",")[0]: line for line in panel.lines}

    assert lines["peak"].y[0] <= lines["budget"].y[0]


# --- trade-offs -------------------------------------------------------------------


def test_the_fitted_line_is_never_below_a_point_and_the_choice_is_one(plan):
    for panel in plotting.trade_offs(plan, segments=3).panels:
        lines = {line.label.split(",")[0]: line for line in panel.lines}
        points = set(
            zip(lines["Pareto points"].x, lines["Pareto points"].y, strict=True)
        )
        if "fit" in lines:
            fit = lines["fit"]
            for k in range(len(fit.x) - 1):
                slope = (fit.y[k + 1] - fit.y[k]) / (fit.x[k + 1] - fit.x[k])
                for x, y in points:
                    if fit.x[k] <= x <= fit.x[k + 1]:
                        assert fit.y[k] + slope * (x - fit.x[k]) >= y - 1e-9
        if "chosen" in lines:
            assert set(zip(lines["chosen"].x, lines["chosen"].y, strict=True)) <= points


def test_no_fit_is_drawn_that_the_plan_did_not_use(plan):
    for panel in plotting.trade_offs(plan).panels:
        assert {line.label for line in panel.lines} <= {"Pareto points", "chosen"}
        points = next(line for line in panel.lines if line.label == "Pareto points")
        assert len(points.x) > 2 or any(line.label == "chosen" for line in panel.lines)


def test_kinds_with_chosen_units_come_first_and_there_are_no_more_than_asked(plan):
    picture = plotting.trade_offs(plan, most=2)

    assert len(picture.panels) == 2
    assert "chosen" in [line.label for line in panel_of(picture).lines]


# --- budgets ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "points", ["ab", None, [(1, 2, 3)], [("1MiB", "2")], [(2**20, float("nan"))], [7]]
)
def test_points_of_rivals_are_pairs_of_numbers(swept, points):
    with pytest.raises(autosac.ArgumentError, match="'full'"):
        plotting.budgets(swept, rivals={"full": points})


def test_a_slice_of_a_sweep_is_one(swept):
    panel = panel_of(plotting.budgets(swept[1:3]))

    assert list(swept[1:3]) == list(swept)[1:3]
    assert len(panel.lines[0].x) == 2


def test_points_of_rivals_may_be_rows_of_a_tensor_or_an_array(swept):
    points = torch.tensor([[2.0**20, 3.0], [2.0**21, 1.0]])

    for rows in (points, points.numpy()):
        panel = panel_of(plotting.budgets(swept, rivals={"full": rows}))
        (line,) = [line for line in panel.lines if line.label == "full"]
        assert [float(ms) for ms in line.y] == [3.0, 1.0]


def test_rivals_are_points_of_their_own(swept):
    rivals = {"full": [(2**20, 3.0), (2**21, 1.0)], "greedy": [(2**20, 2.0)]}

    panel = panel_of(plotting.budgets(swept, rivals=rivals))

    observed = {line.label: line for line in panel.lines}
    assert list(observed) == ["plan", "bound", "full", "greedy"]
    assert observed["full"].y == (3.0, 1.0) and observed["full"].dash == "none"
    assert observed["full"].x[1] == 2 * observed["full"].x[0]
    assert observed["plan"].y == tuple(row.recompute_ms for row in swept.rows)


def test_a_sweep_in_which_nothing_fits_is_refused(traced):
    nothing = autosac.sweep(traced, memory_budgets=[1])

    with pytest.raises(ValueError, match="nothing to draw"):
        plotting.budgets(nothing)


# --- ratios -----------------------------------------------------------------------


def test_every_unit_has_its_cell_and_other_modules_have_none(plan):
    (grid,) = plotting.ratios(plan).panels

    cells = {
        (row, column): value
        for row, values in zip(grid.rows, grid.values, strict=True)
        for column, value in zip(grid.columns, values, strict=True)
        if value is not None
    }
    assert len(cells) == len(plan.policy)
    for fqn, ratio in plan.policy.items():
        assert cells[plan_pictures._place_in_layers(fqn)] == ratio
    assert grid.columns == ("0", "1", "2", "3")


def test_modules_without_a_number_have_a_column_of_their_own():
    model = nn.Sequential()
    for name in "abc":
        block = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
        model.add_module(name, block)
    step_profile = autosac.profile(model, torch.randn(512, 8))
    plan = autosac.plan(step_profile, memory_budget=autosac.floor(step_profile))

    (grid,) = plotting.ratios(plan).panels

    assert grid.columns[0] == ""
    alone = [row for row in grid.rows if "*" not in row]
    assert alone == [fqn for fqn in plan.policy if "." not in fqn] != []


def test_a_plan_that_recomputes_nothing_has_no_ratios(traced):
    plan = autosac.plan(traced, memory_budget=traced.baseline_peak_bytes)

    with pytest.raises(ValueError, match="recomputes nothing"):
        plotting.ratios(plan)


# --- plans from files -------------------------------------------------------------


def test_a_plan_from_a_file_needs_the_profile(plan, traced, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = autosac.Plan.load(tmp_path / "plan.json")

    with pytest.raises(ValueError, match="pass `profile`"):
        plotting.memory(loaded)
    assert plotting.memory(loaded, traced) == plotting.memory(plan)
    assert plotting.ratios(loaded) == plotting.ratios(plan)


def test_notes_and_verticals_are_drawn_by_both():
    pytest.importorskip("plotly")
    panel = Panel(
        title="t",
        x_label="x [ms]",
        y_label="y [MiB]",
        lines=(Line(label="", x=(0.0, 1.0), y=(1.0, 2.0), marker="o"),),
        stack_x=(0.0, 1.0),
        stack=(Layer(label="a", y=(1.0, 1.0), style=0),),
        verticals=((0.5, "dashdot", "middle"),),
        stretches=((0.2, "part"),),
        notes=(Note(x=0.5, y=1.0, text="here"),),
    )
    picture = Picture(title="all", panels=(panel,))

    texts = [text.get_text().strip() for text in picture.matplotlib().axes[0].texts]

    assert {"here", "part"} <= set(texts)
    shown = [note.text for note in picture.plotly().layout.annotations]
    assert {"here", "part"} <= set(shown)
    assert "middle" in [trace.name for trace in picture.plotly().data]
