"""Units that compute in vain: autograd drops what it has saved for that at once."""

import functools

import pytest
import torch
from torch import nn

import autosac
from autosac.checkpointing import installing
from autosac.planning.spelling import spell_out
from autosac.step.training_step import training_step
from autosac.storages import storage_bytes
from autosac.units.policies import SAVE, SKIP, Policy
from autosac.verification.measuring import measure_peak
from tests.awkward import ComputesInVain
from tests.models import WIDTH

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCKS = ("0", "1", "2")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(ComputesInVain() for _ in BLOCKS))


def make_inputs():
    return torch.ones(32, WIDTH)


@functools.cache
def profile_of_step():
    traced = autosac.profile(
        make_model(), make_inputs(), loss_fn=torch.sum, optimizer="sgd"
    )
    return autosac.calibrate(traced)


def test_no_group_is_needed_for_it():
    tape = profile_of_step().tape
    for unit in profile_of_step().units.candidates:
        if unit.fqn in BLOCKS:
            saved = [tape.saved[i] for i in unit.saved]
            read = {one.storage for one in saved if one.unpacked is not None}
            dropped = {one.storage for one in saved} - read
            of_groups = {s for g in unit.groups if g.needed for s in g.storages}

            assert len(dropped) >= 3
            assert of_groups <= read


def test_later_steps_take_what_the_first_one_takes_and_the_simulation_says():
    # From its second call on a unit leaves to autograd what it would have saved itself.
    chosen = {
        unit: Policy("".join(SAVE if g.needed else SKIP for g in unit.groups))
        for unit in profile_of_step().units.candidates
        if unit.fqn in BLOCKS
    }
    model, inputs = make_model(), make_inputs()
    installing.install(model, spell_out(profile_of_step(), chosen))
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        options = {"loss_fn": torch.sum, "optimizer": optimizer}
        training_step(model, (inputs,), {}, **options)

    peaks = []
    for _ in range(3):
        model.zero_grad()
        persistent_bytes = storage_bytes([*model.parameters(), inputs])
        run = {"device": "cpu", "persistent_bytes": persistent_bytes}
        peaks.append(measure_peak(step, **run)[1])

    predicted = profile_of_step().simulator.peak_bytes(chosen)
    assert peaks[0] == peaks[1] == peaks[2]
    assert 0 <= predicted - peaks[0] <= profile_of_step().simulator.number_bytes


@pytest.mark.slow_but_first
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_plans_keep_their_budget_and_all_bits(share):
    floor, highest = (
        autosac.floor(profile_of_step()),
        profile_of_step().baseline_peak_bytes,
    )
    plan = autosac.plan(
        profile_of_step(), memory_budget=int(floor + share * (highest - floor))
    )

    verification = autosac.verify(
        plan,
        make_model,
        make_inputs,
        loss_fn=torch.sum,
        make_optimizer="sgd",
        timing_rounds=0,
    )

    assert plan.policy
    assert not verification.differences
    excess = plan.peak_bytes - verification.measured_peak_bytes
    assert 0 <= excess <= profile_of_step().simulator.number_bytes
