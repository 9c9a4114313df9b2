"""An optimizer in backward in the loops that people write."""

import copy
import io

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

import autosac
from autosac.verification.measuring import differences

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, STEPS = 8, 6


def far(parameters):
    return autosac.OffloadedOptimizer(optim.AdamW(parameters, lr=0.1))


def momentum(parameters):
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return optim.AdamW(parameters, lr=0.1)


MAKERS = pytest.mark.parametrize("make", [adamw, momentum, far])


class Loop:
    """A model in training, with a scheduler for each optimizer."""

    def __init__(self, make, in_backward=True):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        parameters = list(self.model.parameters())
        if in_backward:
            self.optimizer = autosac.OptimizerInBackward(parameters, make)
            each = list(self.optimizer.optimizers.values())
        else:
            self.optimizer = make(parameters)
            each = [self.optimizer]
        self.schedulers = [
            lr_scheduler.OneCycleLR(one, max_lr=0.2, total_steps=STEPS + 1)
            for one in each
        ]

    def run(self, first, end):
        for step in range(first, end):
            self.optimizer.zero_grad()
            rows = torch.full((4, WIDTH), 1.0 + step)
            self.model(rows).square().mean().backward()
            self.optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step()
        return self

    def saved(self):
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedulers": [one.state_dict() for one in self.schedulers],
        }
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return file

    def load(self, file):
        state = torch.load(file, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        return self

    def parameters(self):
        return copy.deepcopy(dict(self.model.named_parameters()))


@MAKERS
def test_a_loop_with_schedulers_trains_as_with_the_plain_optimizer(make):
    alone = Loop(make, in_backward=False).run(0, STEPS)
    within = Loop(make).run(0, STEPS)

    assert not differences(alone.parameters(), within.parameters())
    rates = {group["lr"] for group in within.optimizer.param_groups}
    assert rates == {alone.optimizer.param_groups[0]["lr"]} != {0.1}


@MAKERS
def test_a_training_that_is_resumed_goes_on_bit_by_bit(make):
    whole = Loop(make).run(0, STEPS)
    file = Loop(make).run(0, 3).saved()

    resumed = Loop(make).load(file).run(3, STEPS)

    assert not differences(whole.parameters(), resumed.parameters())


def test_gradients_that_backward_did_not_give_are_dropped_or_zeroed():
    loop = Loop(adamw)
    weight = loop.model[0].weight
    weight.grad = torch.ones_like(weight)

    loop.optimizer.zero_grad(set_to_none=False)
    assert not weight.grad.any()
    loop.optimizer.zero_grad()
    assert weight.grad is None


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (3, "`state_dict` must be a dict, got 3"),
        (optim.SGD([torch.zeros(2)]).state_dict(), "not of an `OptimizerInBackward`"),
        ({"optimizers": []}, "is of 0 parameters, and this optimizer has 4"),
    ],
)
def test_a_state_of_something_else_is_refused_and_nothing_is_loaded(state, match):
    loop = Loop(adamw).run(0, 1)
    before = copy.deepcopy(loop.optimizer.state_dict())

    with pytest.raises(autosac.ArgumentError, match=match):
        loop.optimizer.load_state_dict(state)

    assert str(loop.optimizer.state_dict()) == str(before)
