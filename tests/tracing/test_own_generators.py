"""Random generators of the user's own are where they were, planned or not."""

import contextlib
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import autosac
from autosac.step.random_streams import generators_kept

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 64, 32
NOISE = torch.Generator()
NUMBERS = np.random.default_rng(1)
OLD_NUMBERS = np.random.RandomState(1)
PYTHONS = random.Random(1)


def scale():
    return float(OLD_NUMBERS.rand())


class Draws(nn.Module):
    """Draws from generators that are global names, one in a helper."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        h = torch.tanh(self.up(x))
        h = h * torch.rand(h.shape, generator=NOISE)
        return x + self.down(h) + NUMBERS.random() + PYTHONS.random() + scale()


class OfItsClass(Draws):
    """Draws from an attribute of its class."""

    noise = torch.Generator()

    def forward(self, x):
        h = torch.tanh(self.up(x))
        return x + self.down(h * torch.rand(h.shape, generator=self.noise))


def blocks(block=Draws):
    return nn.Sequential(*[block() for _ in range(3)])


def rows():
    return torch.randn(ROWS, WIDTH)


def mean_square(output):
    return output.square().mean()


def states(*more):
    return [
        *(g.get_state().tolist() for g in (NOISE, OfItsClass.noise, *more)),
        str(NUMBERS.bit_generator.state),
        str(OLD_NUMBERS.get_state()),
        PYTHONS.getstate(),
    ]


@pytest.mark.parametrize("block", [Draws, OfItsClass])
def test_planning_leaves_generators_of_the_users_own_alone(block):
    own = torch.Generator()

    def loss_fn(output):
        return (output * torch.rand(output.shape, generator=own)).square().mean()

    before = states(own)
    profile = autosac.profile(blocks(block), rows(), loss_fn=loss_fn, optimizer="sgd")
    assert states(own) == before
    profile = autosac.calibrate(profile, progress=False)
    assert states(own) == before
    autosac.plan(profile, memory_budget=autosac.floor(profile))
    assert states(own) == before


@pytest.mark.parametrize("block", [Draws, OfItsClass])
def test_each_verified_training_begins_with_the_same_generators(block):
    profile = autosac.profile(blocks(block), rows(), loss_fn=mean_square)
    profile = autosac.calibrate(profile, progress=False)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    before = states()
    done = autosac.verify(
        *(plan, lambda: blocks(block), rows), loss_fn=mean_square, timing_rounds=0
    )

    assert states() == before
    assert plan.policy
    assert not done.differences


def test_generators_without_a_state_are_left_alone():
    with generators_kept([random.SystemRandom(), random.Random(1)]):
        pass


class Listener:
    def heard(self):
        pass


LISTENER = weakref.proxy(Listener())  # which is gone


def tells(output):
    with contextlib.suppress(ReferenceError):
        LISTENER.heard()
    return output.square().mean()


def test_a_loss_may_name_what_is_gone():
    profile = autosac.profile(nn.Linear(4, 4), torch.ones(2, 4), loss_fn=tells)
    assert profile.baseline_peak_bytes > 0
