"""A profiler of the user's that is active while something is measured."""

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

import autosac
from autosac._compat_profiler import a_profiler_is_active
from autosac.errors import UnsupportedError
from autosac.step.training_step import training_step
from autosac.verification.measuring import (
    capture_state,
    differences,
    measure_peak,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def session(**options):
    return profile(activities=[ProfilerActivity.CPU], **options)


def always(action):
    return session(schedule=lambda step: action)


@contextlib.contextmanager
def in_another_thread():
    """A profiler that records a thread which does nothing."""
    begun, over = threading.Event(), threading.Event()

    def record():
        with session():
            begun.set()
            over.wait()

    thread = threading.Thread(target=record)
    thread.start()
    begun.wait()
    yield
    over.set()
    thread.join()


ACTIVE = {
    "recording": session,
    "of autograd": autograd_profiler.profile,
    "warming up": lambda: always(ProfilerAction.WARMUP),
    "in another thread": in_another_thread,
}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in "123")
    )


def traced(rows=4):
    return autosac.profile(make_model(), torch.ones(rows, 8), loss_fn=torch.sum)


@pytest.fixture
def empty_table(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSAC_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("kind", ACTIVE)
def test_beside_a_profiler_nothing_is_measured_and_that_is_said_once(kind, empty_table):
    built, warns = traced(), pytest.warns(UserWarning, match="A profiler is active")
    with ACTIVE[kind](), warns as said:
        calibrated = autosac.calibrate(built)

    assert len(said) == 1
    assert not calibrated.calibrated
    assert calibrated.op_ms == built.op_ms
    assert calibrated.baseline_peak_bytes == built.baseline_peak_bytes
    assert {why for _, why in calibrated.calibration.modelled_ops} == {
        "a profiler is active"
    }
    assert autosac.calibrate(calibrated).calibration.measured_fraction == 1.0


@pytest.mark.parametrize("kind", ACTIVE)
def test_a_peak_is_not_measured_beside_a_profiler(kind):
    with ACTIVE[kind](), pytest.raises(UnsupportedError, match="one is active already"):
        measure_peak(lambda: torch.ones(100), device="cpu", persistent_bytes=0)


def test_what_the_user_records_is_not_lost(empty_table):
    step_profile = traced()
    with session() as observed:
        with record_function("before"):
            torch.ones(3)
        with pytest.warns(UserWarning, match="A profiler is active"):
            autosac.calibrate(step_profile)
        with record_function("after"):
            torch.ones(3)

    assert {"before", "after"} <= {event.name for event in observed.events()}


def test_what_is_known_from_before_serves_beside_a_profiler(empty_table):
    measured = autosac.calibrate(traced())
    with session():  # no warning
        calibrated = autosac.calibrate(traced())

    assert calibrated.calibrated
    assert calibrated.op_ms == measured.op_ms
    assert (
        calibrated.calibration.cached.num_ops == measured.calibration.measured.num_ops
    )


def test_a_profiler_that_waits_or_is_over_is_not_active():
    over = session()
    with over, record_function("anything"):
        pass
    stopped = always(ProfilerAction.WARMUP)
    stopped.start()
    stopped.stop()
    with always(ProfilerAction.NONE), autograd_profiler.profile(enabled=False):
        assert not a_profiler_is_active()
        measure_peak(lambda: torch.ones(100), device="cpu", persistent_bytes=0)


def test_a_batch_is_planned_anew_in_a_profiled_training(empty_table):
    ample = autosac.plan(traced(64), memory_budget="1GiB").baseline_peak_bytes
    model = make_model()
    plan = autosac.plan(
        model,
        torch.ones(4, 8),
        memory_budget=ample - 4096,
        loss_fn=torch.sum,
        on_mismatch="replan",
    )
    plan.apply(model)
    states = []
    warns = pytest.warns(UserWarning, match="A profiler is active|planned for anew")
    with session() as planned, warns as said:
        for each in (make_model(), model):
            with record_function("a step"):
                loss = training_step(
                    each, (torch.ones(64, 8),), {}, loss_fn=torch.sum, optimizer=None
                )
            states.append(capture_state(each, None, loss))

    assert len(said) == 2
    assert differences(*states) == ()
    assert sum(event.name == "a step" for event in planned.events()) == 2
    replanned = model.forward.variants.plans[1]
    assert replanned.recompute_ms > 0.0
    assert not replanned.calibrated
