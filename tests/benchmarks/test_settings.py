import json
import subprocess
from dataclasses import replace

import pytest

from autosac.errors import TraceError, UnsupportedError
from benchmarks import compare
from benchmarks.comparing import settings, settings_job, settings_page
from benchmarks.models.drawn import NotBuiltError


def record(*cells, **more):
    """A job: budget, recompute time, gap, CPU seconds, the best rival's time."""
    rows = [
        [at / 10, at, at, ms, gap, cpu_s, cpu_s, rival and "greedy", rival, 1]
        for at, ms, gap, cpu_s, rival in cells
    ]
    return {
        "model": "zoo/toy",
        "setting": "cpu fp32",
        "status": "done",
        "num_ops": 3,
        "baseline_bytes": 10,
        "floor_bytes": 0,
        "floor_s": {"cpu": 0.1, "wall": 0.1},
        "cells": rows,
        **more,
    }


GOOD = ((0, 9.0, 0.001, 1.0, None), (5, 4.0, 0.0, 0.5, 4.0), (10, 0.0, 0.0, 0.0, 0.0))


def verdicts(*records):
    return [kept for *_, kept in settings_page.summary(list(records))]


def test_a_row_without_violation_passes():
    assert all(verdicts(record(*GOOD)))


@pytest.mark.parametrize(
    ("cell", "asked"),
    [
        ((7, 4.1, 0.0, 0.5, 5.0), "recompute time non-increasing"),
        ((7, 3.0, 0.06, 0.5, 5.0), "gap: worst"),
        ((7, 3.0, 0.0, 3.1, 5.0), "no solve"),
        ((7, 3.0, 0.0, 0.5, 2.9), "never above any rival"),
    ],
)
def test_a_violation_fails_what_it_violates_and_is_named(cell, asked):
    of_row = record(*GOOD, cell)

    failed = [a for a, _, kept in settings_page.summary([of_row]) if not kept]
    whole = {
        "records": [of_row],
        "num_budgets": 4,
        "calibrated": False,
        "command": "",
        "minutes": 0,
        "where": {},
    }
    page = "\n".join(settings_page.page(whole))

    assert any(text.startswith(asked) for text in failed)
    assert "- zoo/toy, cpu fp32: 0.70 (" in page


def test_steps_with_expandable_segments_are_judged_apart():
    wide = record((0, 9.0, 0.06, 1.0, None))
    whole = record(*GOOD) | {"setting": "h100 bf16 expandable"}

    failed = [a for a, _, kept in settings_page.summary([wide, whole]) if not kept]

    assert any(text.startswith("gap: worst") for text in failed)
    assert not any(text.startswith("expandable segments") for text in failed)


def test_the_plain_step_s_budget_has_no_gap_to_count():
    # Of four cells the one at the baseline does not count: gaps of 0.1 and 0 % remain.
    assert settings_page.gaps(record(*GOOD)) == [0.001, 0.0]


def test_failures_of_cells_and_jobs_are_violations():
    failed = record(*GOOD, errors=[[0.0, "SolverError: none"]])
    late = record(*GOOD, status="timeout")

    assert not all(verdicts(failed)) and not all(verdicts(late))
    assert all(verdicts(record(*GOOD), record(status="refused", reason="No.")))


def test_a_quantile_is_a_value_that_enough_do_not_exceed():
    values = [4.0, 1.0, 3.0, 2.0]

    observed = [
        settings_page.quantile(values, share) for share in (0.25, 0.5, 0.95, 1.0)
    ]

    assert observed == [1.0, 2.0, 4.0, 4.0]


def last(records):
    return [json.loads(json.dumps(record)) for record in records][-1]


@pytest.mark.slow
def test_a_job_plans_every_budget_and_prices_every_rival(one_thread):
    last_call = last(settings_job.run("zoo/dit", "h100 bf16", 3, calibrate=False))

    assert last_call["status"] == "done" and last_call["where"] == "meta"
    assert [cell["fraction"] for cell in last_call["cells"]] == [0.0, 0.5, 1.0]
    floor, middle, plain = last_call["cells"]
    assert floor["budget_bytes"] == last_call["floor_bytes"]
    assert plain["budget_bytes"] == last_call["baseline_bytes"]
    assert plain["recompute_ms"] == 0 < middle["recompute_ms"] <= floor["recompute_ms"]
    assert middle["peak_bytes"] <= middle["budget_bytes"]
    assert plain["rivals"]["no checkpointing"]["recompute_ms"] == 0
    row = settings.compact(last_call)["cells"][1]
    best = min(r["recompute_ms"] for r in middle["rivals"].values())
    kept = row[settings.COLUMNS.index("best_rival_ms")]
    assert kept == pytest.approx(best, rel=5e-6)  # six digits


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotBuiltError("no batch"), "not built"),
        (UnsupportedError("needs a GPU"), "refused"),
        (KeyError("weight"), "raw error"),
        (TraceError("no data at lib/models.py:3"), "refused"),
    ],
)
def test_what_a_model_raises_becomes_its_job_s_status(monkeypatch, error, status):
    def fail(name):
        raise error

    monkeypatch.setattr(settings_job, "workload", fail)

    last_call = last(settings_job.run("zoo/dit", "cpu fp32", 3, calibrate=False))

    assert last_call["status"] == status and str(error) in last_call["reason"]


def test_a_reason_does_not_tell_where_packages_lie(monkeypatch):
    def fail(name):
        raise TraceError("It fails at\n /home/me/env/site-packages/timm/layers.py:3.")

    monkeypatch.setattr(settings_job, "workload", fail)

    last_call = last(settings_job.run("zoo/dit", "cpu fp32", 3, calibrate=False))

    assert last_call["reason"] == "It fails at timm/layers.py:3."


def jobs(folder, **more):
    return settings.Jobs(
        folder=folder, num_budgets=2, num_at_once=1, timeout_s=100.0, **more
    )


def test_a_finished_job_is_not_run_again_and_a_cut_off_one_is(tmp_path, monkeypatch):
    ran = []

    def run(self, model, setting, path):
        ran.append(setting)
        return {"model": model, "setting": setting, "status": "done", "cells": []}

    monkeypatch.setattr(settings.Jobs, "_run", run)
    some = jobs(tmp_path, settings=("cpu fp32", "cpu bf16"))
    some.of_model("zoo/dit")
    some.path("zoo/dit", "cpu bf16").write_text('{"status": "unfinished"}')
    some.of_model("zoo/dit")

    assert ran == ["cpu fp32", "cpu bf16", "cpu bf16"]


def test_a_job_that_dies_is_told_with_what_it_had_done(tmp_path, monkeypatch):
    some = jobs(tmp_path, settings=("cpu fp32",))

    def run(command, **_):
        begun = {"status": "unfinished", "cells": [], "floor_bytes": 7}
        some.path("zoo/dit", "cpu fp32").write_text(json.dumps(begun))
        return subprocess.CompletedProcess(command, -9, "", "line\nno memory\n")

    monkeypatch.setattr(subprocess, "run", run)
    (observed,) = some.of_model("zoo/dit")

    assert (observed["status"], observed["floor_bytes"]) == ("raw error", 7)
    assert observed["reason"] == "exit code -9: no memory"


def test_a_job_that_runs_late_is_ended(tmp_path):
    late = replace(jobs(tmp_path, settings=("cpu fp32",)), timeout_s=0.01)

    settings_of_model = late.of_model("zoo/dit")

    assert [record["status"] for record in settings_of_model] == ["timeout"]


def test_the_next_drawn_model_takes_the_place_of_one_that_is_refused(
    tmp_path, monkeypatch
):
    statuses = {
        "timm/a": ["done", "refused"],
        "timm/b": ["not built"],
        "timm/c": ["done", "timeout"],
        "timm/d": ["done", "done"],
        "timm/e": ["done", "done"],
    }
    monkeypatch.setattr(settings, "drawn", lambda library: list(statuses))
    monkeypatch.setattr(
        settings.Jobs,
        "of_model",
        lambda self, model: [
            {"model": model, "status": status} for status in statuses[model]
        ],
    )
    some = jobs(tmp_path, settings=("cpu fp32", "h100 bf16"))

    ran = [r[0]["model"] for r in settings.run(some, [], {"timm": 2})]

    assert ran == ["timm/a", "timm/b", "timm/c", "timm/d"]  # c and d fill two places


def test_the_part_writes_its_page_and_says_whether_all_is_kept(tmp_path, monkeypatch):
    def of_model(self, model):
        return [{**record(*GOOD), "cells": [], "model": model}]

    monkeypatch.setattr(settings.Jobs, "of_model", of_model)
    arguments = ["--parts", "settings", "--models", "zoo/dit", "--output"]

    code = compare.main([*arguments, str(tmp_path)])

    assert code == 0
    assert "| asked for | found | |" in (tmp_path / "settings.md").read_text()
    assert "## Every setting" in (tmp_path / "compare.md").read_text()


def test_models_that_are_named_leave_other_rows_as_they_are(tmp_path, monkeypatch):
    def of_model(self, model):
        return [record(model=model, setting=s) for s in self.settings]

    monkeypatch.setattr(settings.Jobs, "of_model", of_model)
    monkeypatch.setattr(settings, "fixed_models", lambda: ["zoo/a", "zoo/b"])
    arguments = ["--parts", "settings", "--output", str(tmp_path), "--settings"]
    path = tmp_path / "settings.json"

    compare.main([*arguments, "cpu fp32,cpu bf16", "--draw", "0"])
    before = json.loads(path.read_text())
    for row in before["records"]:
        row["date"] = before["where"]["date"] = "2026-01-01"
    path.write_text(json.dumps(before))
    compare.main([*arguments, "cpu bf16", "--models", "zoo/a"])

    after = json.loads(path.read_text())
    assert [r["date"] == "2026-01-01" for r in after["records"]] == [1, 0, 1, 1]
    assert "1 rows are of" in (tmp_path / "settings.md").read_text()
