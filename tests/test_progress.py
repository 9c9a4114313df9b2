"""Bars on terminals, silence elsewhere, and Ctrl-C that leaves what is done."""

import importlib
import random
import sys

import pytest
import torch
from torch import nn

import autosac
from autosac import progress
from autosac.costs import calibrating, timing
from autosac.planning import batch_sizes, budget_sweep
from autosac.progress import progress_bar
from tests.models import SMALL_GPT

pytestmark = pytest.mark.usefixtures("one_thread")


def layers():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))


def rows(size):
    return torch.ones(size, 8)


def interrupted_after(function, calls):
    """The function, which Ctrl-C interrupts in its next call after so many."""
    left = iter(range(calls))

    def run(*args, **kwargs):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return run


def shown(show, capsys, **options):
    with progress_bar("Counting", 4, done=1, show=show, **options) as advance:
        advance()
    return capsys.readouterr()


def test_a_bar_is_shown_only_when_asked_for_or_on_a_terminal(capsys, monkeypatch):
    assert shown(None, capsys, at_once=True) == shown(False, capsys) == ("", "")
    asked = shown(True, capsys)
    assert asked.out == "" and "Counting" in asked.err and "2/4" in asked.err

    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    assert "2/4" in shown(None, capsys, at_once=True).err
    assert shown(None, capsys) == ("", "")  # too short
    monkeypatch.setattr(progress, "_SHOW_AFTER_S", -1.0)
    assert "2/4" in shown(None, capsys).err
    assert shown(False, capsys) == ("", "")


def test_a_bar_inside_another_is_not_shown(capsys):
    with progress_bar("Outer", 2, show=True) as advance:
        with progress_bar("Inner", 2, show=True) as inner:
            inner()
        advance()

    error = capsys.readouterr().err
    assert "1/2" in error and "Inner" not in error


def test_all_that_takes_seconds_has_a_bar(capsys):
    profile = autosac.profile(layers(), rows(4), loss_fn=torch.sum)
    profile = autosac.calibrate(profile, cache=False, progress=True)
    autosac.sweep(profile, n=2, progress=True)
    plan = autosac.plan(profile, memory_budget=profile.baseline_peak_bytes)
    make_inputs = lambda: rows(4)  # noqa: E731
    autosac.verify(plan, layers, make_inputs, loss_fn=torch.sum, progress=True)
    autosac.best_batch_size(
        layers(), rows, memory_budget="1GiB", sizes=[1, 2], loss_fn=torch.sum,
        device="h100", progress=True,
    )  # fmt: skip

    error = capsys.readouterr().err
    for what in ("Measuring", "Planning budgets", "Training to compare", "batch sizes"):
        assert what in error


@pytest.mark.parametrize("phase", ["_first_run_on_cpu", "_without_recording"])
def test_what_was_measured_before_ctrl_c_is_not_measured_again(
    phase, monkeypatch, tmp_path
):
    monkeypatch.setenv("AUTOSAC_CACHE_DIR", str(tmp_path))
    profile = SMALL_GPT.profile()
    # Every op is long: its time counts as it is. Or every one is short.
    monkeypatch.setattr(timing, "_SHORT_MS", 0.0 if "first" in phase else 1e9)
    monkeypatch.setattr(timing, phase, interrupted_after(getattr(timing, phase), 5))

    with pytest.raises(KeyboardInterrupt):
        autosac.calibrate(profile, real_step=False)
    monkeypatch.undo()
    monkeypatch.setenv("AUTOSAC_CACHE_DIR", str(tmp_path))
    asked = []
    measure = calibrating.measure_ops

    def counted(sizes, **options):
        asked.append(len(sizes))
        return measure(sizes, **options)

    monkeypatch.setattr(calibrating, "measure_ops", counted)
    autosac.calibrate(profile, real_step=False)

    num_ops = len(calibrating._sizes(profile.tape))
    assert num_ops - 5 <= asked[0] < num_ops


@pytest.mark.slow
def test_an_interrupted_sweep_has_the_rows_that_are_done(monkeypatch):
    profile = SMALL_GPT.profile()
    whole = autosac.sweep(SMALL_GPT.profile(), n=5)
    answer = interrupted_after(budget_sweep._answer, 3)
    monkeypatch.setattr(budget_sweep, "_answer", answer)

    with pytest.raises(KeyboardInterrupt, match="3 of 5 budgets") as stopped:
        autosac.sweep(profile, n=5)

    done = stopped.value.done
    assert [row.budget_bytes for row in done] == [r.budget_bytes for r in whole[:3]]
    assert all(row.peak_bytes <= row.budget_bytes for row in done)


def test_an_interrupted_search_has_its_trials(monkeypatch):
    plan = interrupted_after(batch_sizes.make_plan, 2)
    monkeypatch.setattr(batch_sizes, "make_plan", plan)

    with pytest.raises(autosac.Interrupted) as stopped:
        autosac.best_batch_size(
            layers(), rows, memory_budget="1GiB", sizes=[1, 2, 4], loss_fn=torch.sum,
            device="h100",
        )  # fmt: skip

    done = stopped.value.done
    assert [row.cell["batch_size"] for row in done if row.step_ms] == [1, 2]


def test_the_first_import_of_rich_leaves_pythons_random_numbers_alone(monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] == "rich" or name == "autosac.rich_parts":
            monkeypatch.delitem(sys.modules, name)
    before = random.getstate()

    importlib.import_module("autosac.rich_parts")

    assert random.getstate() == before
