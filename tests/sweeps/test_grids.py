import csv
import functools
import importlib
import json
import os
import random
import subprocess
import sys
import threading
import time
import types
import weakref
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch

import autosac
from autosac.devices.specs import KNOWN_DEVICES
from autosac.step.random_streams import stream_states
from autosac.sweeps.cell_facts import code_of, text_of
from autosac.tracing import trace
from autosac.verification.measuring import differences
from tests.grid_steps import interrupted_step, make_step

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
GRID = {"width": [8, 13, 16], "batch_size": [64, 128]}
BUDGETS = ["1KiB", "1GiB"]


@pytest.fixture(scope="module")
def result():
    """Two widths that can be planned and one that fails."""
    return autosac.sweep_grid(make_step, GRID, n=3)


def _calls(path):
    return path.read_text().splitlines() if path.exists() else []


def _counted(path):
    return functools.partial(make_step, calls=str(path))


# --- rows ---------------------------------------------------------------------


def test_rows_are_those_of_single_sweeps_in_the_order_of_the_grid(result):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = make_step(16, 128)
    traced = autosac.profile(parts.pop("model"), parts.pop("inputs"), **parts)

    alone = autosac.sweep(traced, n=3)

    own = [row for row in result.rows if row.cell == {"width": 16, "batch_size": 128}]
    assert [tuple(row.cell.values()) for row in result.rows] == [
        *[(8, 64)] * 3, *[(8, 128)] * 3, (13, 64), (13, 128), *[(16, 64)] * 3,
        *[(16, 128)] * 3,
    ]  # fmt: skip
    for row, other in zip(own, alone.rows, strict=True):
        assert row.status == "planned" and row.reason is None
        assert row.budget_bytes == other.budget_bytes
        assert row.peak_bytes == other.peak_bytes
        assert row.recompute_ms == other.recompute_ms
        assert row.num_units == len(other.plan.policy)
        assert row.floor_bytes == alone.floor_bytes
        assert row.baseline_peak_bytes == alone.baseline_peak_bytes
    assert own[0].recompute_ms > own[-1].recompute_ms == 0.0


def test_a_cell_that_fails_is_one_row_with_type_and_sentence(result):
    failed = [row for row in result.rows if row.cell["width"] == 13]

    assert result.failures == tuple(failed) and len(failed) == 2
    for row in failed:
        assert row.reason == "RuntimeError: thirteen is refused"
        assert row.budget_bytes is row.floor_bytes is row.peak_bytes is None


def test_what_is_wrong_with_a_step_is_a_row_too():
    wrong = [lambda: 3, lambda: {"model": 1, "inputs": 2}, lambda: (1, 2, 3, 4, 5)]

    reasons = [autosac.sweep_grid(make, {}, n=2).rows[0].reason for make in wrong]

    first = ("TypeError: `make_step`", "ArgumentError: `model`", "TypeError: `make_")
    assert all(map(str.startswith, reasons, first))


def test_a_budget_that_nothing_fits_is_a_row_that_says_the_floor():
    rows = autosac.sweep_grid(
        make_step, {"width": [8], "batch_size": [64]}, memory_budgets=BUDGETS
    ).rows

    assert [row.status for row in rows] == ["infeasible", "planned"]
    assert [row.budget_bytes for row in rows] == [1024, 2**30]
    assert rows[0].reason.startswith("InfeasibleBudgetError: No plan fits")
    assert f"{rows[0].floor_bytes} bytes" in rows[0].reason
    assert rows[0].peak_bytes is rows[0].recompute_ms is None


@pytest.mark.slow
def test_anything_can_be_an_axis():
    def step(device, optimizer, dtype, kind):
        parts = make_step(8, 64, device=device)
        return {**parts, "optimizer": optimizer, "autocast": dtype, **kind}

    rows = autosac.sweep_grid(
        step,
        {
            "device": ["cpu", KNOWN_DEVICES["h100"]],
            "optimizer": [torch.optim.SGD, torch.optim.AdamW],
            "dtype": [None, torch.bfloat16],
            "kind": {"four": {"accumulate": 4}},
        },
        memory_budgets=["1GiB"],
    ).rows

    assert len(rows) == 8 and all(row.status == "planned" for row in rows)
    cells = [dict(row.cell) for row in rows]
    assert cells[0] == {
        "device": "cpu",
        "optimizer": "SGD",
        "dtype": None,
        "kind": "four",
    }
    assert cells[-1] == {
        "device": "h100", "optimizer": "AdamW", "dtype": "bfloat16", "kind": "four",
    }  # fmt: skip
    assert [row.planned_for for row in rows] == ["cpu"] * 4 + ["h100"] * 4
    assert rows[0].peak_bytes < rows[2].peak_bytes  # AdamW has state


def test_cells_are_seeded_and_leave_the_process_as_it_was():
    torch.manual_seed(7)
    drawn = []

    def step():
        drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))
        return make_step(8, 64)

    before = stream_states()
    autosac.sweep_grid(step, {}, n=2)
    autosac.sweep_grid(step, {}, n=2)

    assert drawn[0] == drawn[1]
    assert not differences(before, stream_states())


@pytest.mark.parametrize(
    ("grid", "options", "error", "match"),
    [
        ({}, {}, TypeError, "either"),
        ({}, {"n": 2, "memory_budgets": [1]}, TypeError, "either"),
        ({}, {"n": 1}, ValueError, "at least 2"),
        ({}, {"memory_budgets": []}, ValueError, "list of budgets"),
        ({}, {"memory_budgets": ["much"]}, ValueError, "much"),
        ({"x": []}, {"n": 2}, ValueError, "empty"),
        ({"x": "abc"}, {"n": 2}, ValueError, "list of values"),
        ({"x": [1, 1]}, {"n": 2}, ValueError, "equal labels"),
        ({"x": [object()]}, {"n": 2}, ValueError, "without a short name"),
        ({"status": [1]}, {"n": 2}, ValueError, "column"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_built(
    grid, options, error, match
):
    def never(**_):
        raise AssertionError("built")

    with pytest.raises(error, match=match):
        autosac.sweep_grid(never, grid, **options)


# --- going on -----------------------------------------------------------------


def test_finished_cells_are_not_done_again_and_failed_ones_are(tmp_path, result):
    calls, folder = tmp_path / "calls", tmp_path / "cells"

    first = autosac.sweep_grid(_counted(calls), GRID, n=3, directory=folder)
    again = autosac.sweep_grid(_counted(calls), GRID, n=3, directory=folder)

    assert first == again == result
    assert len(_calls(calls)) == 6 + 2
    assert _calls(calls)[6:] == ["13 64", "13 128"]
    assert len(list(folder.iterdir())) == 4


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path):
    calls, folder = tmp_path / "calls", tmp_path / "cells"
    grid = {"width": [8, 16], "batch_size": [64, 128]}
    step = functools.partial(interrupted_step, calls=str(calls))

    with pytest.raises(KeyboardInterrupt):
        autosac.sweep_grid(step, grid, n=2, directory=folder)
    kept = len(list(folder.iterdir()))
    swept = autosac.sweep_grid(step, grid, n=2, directory=folder)

    assert kept == 2
    assert _calls(calls) == ["8 64", "8 128", "16 64", "16 64", "16 128"]
    assert swept == autosac.sweep_grid(make_step, grid, n=2)


@pytest.mark.slow
def test_what_changes_the_result_makes_another_cell(tmp_path):
    calls = tmp_path / "calls"
    grid = {"width": [8], "batch_size": [64]}

    def swept(step=None, **options):
        before = len(_calls(calls))
        given = {"memory_budgets": BUDGETS, **options}
        step = step or _counted(calls)
        autosac.sweep_grid(step, grid, directory=tmp_path / "cells", **given)
        return len(_calls(calls)) - before

    assert swept() == 1 and swept() == 0
    assert swept(memory_budgets=["2GiB"]) == 1
    assert swept(plan_options={"relative_gap": 0.2}) == 1
    assert swept(version="another") == 1
    torch.set_default_dtype(torch.float64)
    try:
        assert swept() == 1
    finally:
        torch.set_default_dtype(torch.float32)
    other = functools.partial(make_step, calls=str(calls), device="h100")
    assert swept(step=other) == 1
    assert swept() == 0


@pytest.mark.slow_but_first
@pytest.mark.parametrize("damage", ["", "[]", '{"format": 1}', '{"format": 1, "facts"'])
def test_a_damaged_file_is_done_again_with_a_warning(tmp_path, damage):
    calls, folder = tmp_path / "calls", tmp_path / "cells"
    grid = {"width": [8], "batch_size": [64]}
    first = autosac.sweep_grid(_counted(calls), grid, n=2, directory=folder)
    (file,) = folder.iterdir()
    good = file.read_text()
    file.write_text(damage)

    with pytest.warns(UserWarning, match="is damaged"):
        again = autosac.sweep_grid(_counted(calls), grid, n=2, directory=folder)

    assert first == again and len(_calls(calls)) == 2
    assert file.read_text() == good


def test_a_file_is_small_readable_json(tmp_path):
    grid = {"width": [8], "batch_size": [64]}
    autosac.sweep_grid(make_step, grid, n=2, directory=tmp_path)

    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text())

    assert file.name.startswith("width=8,batch_size=64-")
    assert {"format", "facts", "rows"} == record.keys()
    assert record["rows"][0]["width"] == 8 and record["rows"][0]["batch_size"] == 64
    assert file.stat().st_size < 50_000


def test_an_edit_of_a_module_that_the_step_imports_makes_another_cell(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "users_step.py").write_text(
        "from torch import ops\nfrom users_helper import step as make\n"
    )
    texts = []
    for factor in (1, 1, 2):
        (tmp_path / "users_helper.py").write_text(f"def step(): return {factor}\n")
        for name in ("users_step", "users_helper"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        texts.append(code_of(importlib.import_module("users_step").make))

    assert texts[0] == texts[1] != texts[2]


def test_code_that_is_in_no_file_needs_a_version(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    step = types.FunctionType(make_step.__code__, {"__name__": "__main__"})
    grid = {"width": [13], "batch_size": [1]}

    with pytest.raises(ValueError, match="'__main__' is no file; pass `version`"):
        autosac.sweep_grid(step, grid, n=2, directory=tmp_path)
    autosac.sweep_grid(step, grid, n=2, directory=tmp_path, version="first")


def test_closures_defaults_and_arguments_count():
    def closing(value):
        return lambda: value

    def defaulting(value):
        def inner(x=value):
            return x

        return inner

    def calling_itself(value):
        def inner(n):
            return inner(n - 1) if n else value

        return inner

    partial = functools.partial(functools.partial, max)
    for make in (closing, defaulting, calling_itself, partial):
        assert text_of(make(1)) == text_of(make(1)) != text_of(make(2))

    def reads(is_there):
        if is_there:
            later = 1
        return lambda: later

    assert text_of(reads(False)) == text_of(reads(False)) != text_of(reads(True))
    first, second = [lambda: 1, lambda: 2]
    assert text_of(first) != text_of(second)
    assert text_of({1: "a"}) != text_of({1: "b"})
    with pytest.raises(ValueError, match="cannot be told from others"):
        text_of(threading.Lock())


# --- tables and pictures ------------------------------------------------------


def test_a_csv_comes_back_as_it_was(result, tmp_path):
    result.to_csv(tmp_path / "x.csv")

    with open(tmp_path / "x.csv", newline="") as file:
        rows = list(csv.DictReader(file))

    assert list(rows[0]) == list(result.records()[0])
    for row, record in zip(rows, result.records(), strict=True):
        for name, value in record.items():
            if isinstance(value, float):
                assert float(row[name]) == value
            else:
                assert row[name] == ("" if value is None else str(value))


def test_parquet_comes_back_as_it_was(result, tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    result.to_parquet(tmp_path / "x.parquet")

    back = pandas.read_parquet(tmp_path / "x.parquet", dtype_backend="numpy_nullable")

    table = result.to_dataframe()
    assert table["budget_bytes"].dtype == "Int64"  # whole, though some are missing
    assert table["width"].dtype == "Int64"
    pandas.testing.assert_frame_equal(back, table)


def test_axes_of_several_types_are_text_in_tables():
    swept = autosac.sweep_grid(lambda x: make_step(8, 64), {"x": [1, "a", None]}, n=2)

    column = pytest.importorskip("pandas") and swept.to_dataframe()["x"]

    assert column.dropna().tolist() == ["1", "1", "a", "a"]
    assert column.isna().sum() == 2


def test_the_picture_has_a_panel_for_each_width_and_a_line_for_each_size(result):
    picture = result.picture()

    assert [panel.title for panel in picture.panels] == ["width=8", "width=16"]
    labels = [[line.label for line in panel.lines] for panel in picture.panels]
    assert labels == [["batch_size=64", "batch_size=128"]] * 2
    drawn = picture.panels[1].lines[1].y
    assert list(drawn) == [row.step_ms for row in result.rows[-3:]]


@pytest.mark.slow
def test_under_one_budget_the_picture_goes_along_the_last_axis():
    swept = autosac.sweep_grid(
        make_step, {"width": [8, 16], "batch_size": [32, 64]}, memory_budgets=["1GiB"]
    )

    (panel,) = swept.picture().panels

    assert panel.x_label == "batch_size" and panel.y_label == "step [ms]"
    assert [line.label for line in panel.lines] == ["width=8", "width=16"]
    assert [line.x for line in panel.lines] == [(32.0, 64.0)] * 2
    assert panel.lines[1].y == tuple(row.step_ms for row in swept[2:])


def test_a_grid_is_plotted_with_axes_for_each_panel(result):
    pytest.importorskip("matplotlib").use("Agg")

    axes = result.plot()

    assert [a.get_title(loc="left") for a in axes] == ["width=8", "width=16"]
    with pytest.raises(ValueError, match="2 panels"):
        result.plot(axes[0])
    with pytest.raises(ValueError, match="of its own"):
        _ = result.floor_bytes


def test_nothing_feasible_cannot_be_drawn():
    swept = autosac.sweep_grid(make_step, {"width": [13], "batch_size": [1]}, n=2)

    with pytest.raises(ValueError, match="nothing to draw"):
        swept.picture()


# --- side by side ---------------------------------------------------------------


def test_threads_of_one_process_give_the_same(result):
    with joblib.parallel_config("threading"):
        assert autosac.sweep_grid(make_step, GRID, n=3, n_jobs=3) == result


@pytest.mark.slowest
def test_processes_give_the_same_rows_and_a_dead_worker_costs_one_cell(
    result, tmp_path
):
    grid = {"width": [8, 13, 16, 666], "batch_size": [64]}  # one cell dies

    both = autosac.sweep_grid(make_step, grid, n=3, n_jobs=2, directory=tmp_path)

    alike = [row for row in result.rows if row.cell["batch_size"] == 64]
    assert both.rows[: len(alike)] == tuple(alike)
    (dead,) = both.rows[len(alike) :]
    assert dead.status == "failed" and "Terminated" in dead.reason
    assert len(list(tmp_path.iterdir())) == 2


SCRIPT = """
import autosac, functools, signal, sys, torch
from tests.grid_steps import make_step
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
if __name__ == "__main__":
    step = functools.partial(make_step, calls=sys.argv[1])
    grid = {"width": list(range(1, 60)), "batch_size": [8]}
    autosac.sweep_grid(step, grid, n=2, n_jobs=2, directory=sys.argv[2])
"""


@pytest.mark.slowest
def test_a_sweep_that_is_killed_goes_on(tmp_path):
    calls, folder = tmp_path / "calls", tmp_path / "cells"
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(calls), str(folder)],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and len(list(folder.glob("*.json"))) < 4:
        time.sleep(0.05)
    assert process.poll() is None
    process.kill()
    process.wait()
    time.sleep(1.0)  # workers that are left end their cells
    kept = len(list(folder.glob("*.json")))
    done = len(_calls(calls))
    grid = {"width": list(range(1, kept + 3)), "batch_size": [8]}

    swept = autosac.sweep_grid(_counted(calls), grid, n=2, directory=folder)

    assert 4 <= kept < 59
    assert len(_calls(calls)) - done <= 4  # those that were under way, and two new ones
    whole = autosac.sweep_grid(make_step, grid, n=2)
    assert swept == whole


def _on_cluster(folder):
    return autosac.sweep_grid(make_step, GRID, n=3, n_jobs=2, directory=folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the cluster's own
def test_a_dask_cluster_gives_the_same_table(result, tmp_path):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.Client(n_workers=1, threads_per_worker=1, dashboard_address=None),
        joblib.parallel_config("dask"),
    ):
        assert _on_cluster(tmp_path) == result
    assert len(list(tmp_path.iterdir())) == 4


def test_steps_are_traced_twice_only_as_long_as_a_worker_of_dask_lives(monkeypatch):
    worker_class = type("Worker", (), {"_instances": weakref.WeakSet()})
    monkeypatch.setitem(
        sys.modules, "distributed.worker", types.SimpleNamespace(Worker=worker_class)
    )
    assert not trace.is_watched()
    worker = worker_class()
    worker_class._instances.add(worker)
    assert trace.is_watched()
    del worker
    assert not trace.is_watched()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_ray_cluster_gives_the_same_table():
    pytest.importorskip("ray")

    out = subprocess.run(
        [sys.executable, "-m", "examples.sweep_on_ray"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip

    assert out.returncode == 0, out.stderr
    assert "the same table" in out.stdout
