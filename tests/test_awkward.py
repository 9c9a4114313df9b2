"""Every awkward habit: simulation equals dry run, three steps are bit-identical."""

import dataclasses
import functools
import itertools
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import autosac
from autosac.checkpointing import installing
from autosac.planning.spelling import spell_out
from autosac.simulation.simulator import Simulator
from autosac.step.training_step import normalize_inputs, training_step
from autosac.tracing import trace
from autosac.tracing.trace import dry_run
from autosac.verification.measuring import capture_state, differences
from tests import awkward
from tests.awkward import AWKWARD
from tests.models import random_choice

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(frozen_objects):
    """What `gc.freeze` hides is not looked through for caches."""
    cache = functools.lru_cache(maxsize=2)(awkward.angles.__wrapped__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(awkward, "angles", cache)
        yield


each_habit = pytest.mark.parametrize("name", AWKWARD)
SHARES = (0.0, 1.0, None)  # of groups that are saved


@functools.cache
def profile_of(name):
    return AWKWARD[name].profile(torch.optim.AdamW)


def choices(traced):
    return [
        random_choice(traced, seed, save_share=share)
        for seed, share in enumerate(SHARES)
    ]


def attributes(model):
    """Plain attributes of all modules, and what their containers hold."""
    plain = (int, float, str, list, dict)
    return [
        {k: repr(v) for k, v in vars(m).items() if isinstance(v, plain) and k[0] != "_"}
        for m in model.modules()
    ]


def train(case, policies):
    model = case.model()
    installing.install(model, policies)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    args, kwargs = normalize_inputs(case.inputs())
    states = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        for _ in range(3):
            model.zero_grad()
            loss = training_step(
                model, args, kwargs, loss_fn=case.loss_fn, optimizer=optimizer
            )
            states.append(capture_state(model, optimizer, loss))
    installing.remove(model)
    return states, attributes(model)


@pytest.mark.filterwarnings("ignore:The first step takes")
@pytest.mark.slow_but_first
@each_habit
def test_the_simulated_peak_is_the_dry_runs_byte_for_byte(name):
    traced = profile_of(name)
    for chosen in choices(traced):
        policies = spell_out(traced, chosen)

        dry = dry_run(
            traced.step, lambda model, p=policies: installing.install(model, p)
        )

        expected = Simulator(dry).baseline.peak_bytes
        assert traced.simulator.peak_bytes(chosen, workspaces=False) == expected


@pytest.mark.slow_but_first
@each_habit
def test_three_steps_are_bit_identical(name):
    case, traced = AWKWARD[name], profile_of(name)
    plain, plain_attributes = train(case, ())
    for chosen in choices(traced):
        planned, planned_attributes = train(case, spell_out(traced, chosen))

        for before, after in zip(plain, planned, strict=True):
            assert differences(before, after) == ()
        assert planned_attributes == plain_attributes


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", sorted(set(AWKWARD) - {"draws in Python"}))
def test_a_habit_does_not_keep_modules_from_being_units(name):
    assert profile_of(name).units.candidates


def test_numbers_that_other_threads_draw_are_not_taken_for_a_module_s():
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    runs = itertools.count()  # which planning does not put back

    class Beside(nn.Sequential):
        def forward(self, x):
            if next(runs) == 0:  # while the first trace is in this module
                drawing = threading.Thread(target=random.random)
                drawing.start()
                drawing.join()
            return super().forward(x)

    other.start()
    try:
        model = Beside(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        traced = autosac.profile(
            nn.Sequential(model, nn.Linear(4, 4)), torch.rand(2, 4)
        )
    finally:
        stop.set()
        other.join()

    assert next(runs) > 1
    assert "0" in {unit.fqn for unit in traced.units.candidates}


@pytest.mark.slow
def test_a_module_that_draws_in_python_is_refused():
    traced = AWKWARD["draws in Python"].profile()

    refused = traced.units.refused
    assert refused["0"] == "it draws from Python's or NumPy's random numbers"
    assert {unit.fqn for unit in traced.units.candidates} >= {"0.inner", "1.inner"}


def test_traces_agree_whatever_order_autocast_drops_its_weights_in(monkeypatch):
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(8)])
    monkeypatch.setattr(trace, "is_watched", lambda: True)

    traced = autosac.profile(model, torch.ones(2, 8), autocast=torch.bfloat16)

    assert any(op.name == "aten._to_copy.default" for op in traced.tape.ops)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("disturbed", [[1, 0, 0], [0, 2, 1, 1], range(20)])
def test_traces_that_other_threads_may_disturb_must_agree(disturbed, monkeypatch):
    case, run = AWKWARD["own checkpointing"], trace.run
    missing = iter(disturbed)

    def run_disturbed(*args, **options):
        tape = run(*args, **options)
        return dataclasses.replace(tape, ops=tape.ops[next(missing) :])

    alone = autosac.profile(case.model(), case.inputs()).tape
    monkeypatch.setattr(trace, "is_watched", lambda: True)
    monkeypatch.setattr(trace, "run", run_disturbed)

    if len(disturbed) == 20:
        with pytest.raises(autosac.TraceError, match="No two of 9 traces agree"):
            autosac.profile(case.model(), case.inputs())
    else:
        agreed = autosac.profile(case.model(), case.inputs()).tape
        assert agreed.ops == alone.ops[disturbed[-1] :]


@pytest.mark.filterwarnings("ignore:The first step takes")
def test_what_functions_remember_is_no_fake_and_no_op_of_later_steps():
    awkward.angles.cache_clear()
    case = AWKWARD["remembers"]

    ops = [op.name for op in case.profile().tape.ops]
    turns, _ = awkward.angles(*case.inputs().shape)

    assert "aten.exp.default" in ops and "aten.sin.default" not in ops
    assert not isinstance(turns, FakeTensor)
    assert torch.equal(turns[0], torch.zeros(case.inputs().shape[1]))
