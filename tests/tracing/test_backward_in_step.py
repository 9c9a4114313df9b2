"""Steps whose own forward or loss goes backward, too: their peaks are predicted."""

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import autosac
from autosac.checkpointing import installing
from autosac.planning.spelling import spell_out
from autosac.simulation.simulator import Simulator
from autosac.tracing.trace import dry_run
from tests.models import random_choice

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS = 16, 64


def body():
    return nn.Sequential(
        *(
            nn.Sequential(
                *(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1)),
                *(nn.Linear(4 * WIDTH, WIDTH), nn.Tanh()),
            )
            for _ in range(3)
        )
    )


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = body()

    def forward(self, x, y):
        return self.body(x)


class GoesBackward(Body):
    """Two losses, one after the other."""

    def forward(self, x, y):
        self.body(x).square().mean().backward()
        return self.body(y).sin().mean()


class GradientPenalty(Body):
    def forward(self, x, y):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.body(x).sum(), x, create_graph=True)
        return self.body(y).mean() + (slope.norm(2, 1) - 1).square().mean()


class Gan(Body):
    """A step of both networks: the judge's backward pass comes first."""

    def __init__(self):
        super().__init__()
        self.judge = body()

    def forward(self, x, y):
        fake = self.body(x)
        (self.judge(fake.detach()).mean() - self.judge(y).mean()).backward()
        self.judge.requires_grad_(False)
        loss = -self.judge(fake).mean()
        self.judge.requires_grad_()
        return loss


def itself(loss):
    return loss


def twice(output):
    loss = output.square().mean()
    loss.backward(retain_graph=True)
    return loss


def two_losses(output):
    output.square().mean().backward(retain_graph=True)
    return output.sin().mean()


@dataclass(frozen=True)
class Steps:
    """A kind of step; whether modules in it can be AC units."""

    model: type
    loss_fn: object = itself
    has_units: bool = True


STEPS = {
    "two losses in forward": Steps(GoesBackward),
    "a gradient penalty": Steps(GradientPenalty),
    "a GAN": Steps(Gan),
    "twice through one graph": Steps(Body, twice, has_units=False),
    "two losses of one graph": Steps(Body, two_losses, has_units=False),
}
each_step = pytest.mark.parametrize("name", STEPS)


def make_model(name):
    torch.manual_seed(0)
    return STEPS[name].model()


def make_inputs():
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


@functools.cache
def profile_of(name):
    return autosac.calibrate(
        autosac.profile(
            make_model(name),
            make_inputs(),
            loss_fn=STEPS[name].loss_fn,
            optimizer="adamw",
        )
    )


@pytest.mark.filterwarnings("ignore:The floor is the peak without a plan")
@pytest.mark.slow_but_first
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@each_step
def test_the_peak_of_all_backward_passes_is_predicted(name, share):
    traced = profile_of(name)
    floor, highest = autosac.floor(traced), traced.baseline_peak_bytes
    plan = autosac.plan(traced, memory_budget=int(floor + share * (highest - floor)))

    verification = autosac.verify(
        plan,
        functools.partial(make_model, name),
        make_inputs,
        loss_fn=STEPS[name].loss_fn,
        make_optimizer="adamw",
        timing_rounds=0,
    )

    assert (floor < highest) == STEPS[name].has_units
    assert not verification.differences
    # Numbers such as that of `slope.norm(2, 1) - 1` may be kept or not: 8 bytes each.
    scalars_bytes = 2 * 8 if name == "a gradient penalty" else 0
    assert 0 <= plan.peak_bytes - verification.measured_peak_bytes <= scalars_bytes


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", [name for name in STEPS if STEPS[name].has_units])
def test_a_dry_run_of_any_policies_peaks_where_the_simulation_does(name):
    traced = profile_of(name)
    for seed in range(4):
        choice = random_choice(traced, seed)
        policies = spell_out(traced, choice)
        dry = dry_run(
            traced.step, lambda model, p=policies: installing.install(model, p)
        )

        assert Simulator(dry).peak_bytes({}) == traced.simulator.peak_bytes(
            choice, workspaces=False
        )


@pytest.mark.slow_but_fifth
@each_step
def test_what_goes_backward_twice_is_no_unit_and_that_is_said(name):
    refused = profile_of(name).units.refused
    goes_twice = {"a gradient penalty", "twice through one graph"}
    goes_twice |= {"two losses of one graph"}

    assert ("more than once" in refused.get("body.0", "")) == (name in goes_twice)
