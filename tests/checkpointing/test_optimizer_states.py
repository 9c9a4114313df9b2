"""Optimizers that keep more than a plan counts."""

import copy
import gc
from functools import partial

import pytest
import torch
from torch.optim import optimizer as of_all

import autosac

WIDTH = 32


def planned(optimizer):
    torch.manual_seed(0)
    layers = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
    model = torch.nn.Sequential(*layers)
    profile = autosac.profile(
        model, torch.ones(8, WIDTH), loss_fn=torch.sum, optimizer=optimizer
    )
    plan = autosac.plan(profile, memory_budget=profile.baseline_peak_bytes)
    return plan, plan.apply(model)


def train(model, optimizer, num_steps=4):
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.ones(8, WIDTH)).sum().backward()
        optimizer.step()


def adamw(model):
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, torch.optim.Adafactor])
def test_state_that_a_plan_does_not_count_is_said_once(optimizer):
    _, model = planned(optimizer)
    used = adamw(model)
    with pytest.warns(UserWarning, match=r"AdamW keeps 33\.0 KiB of state, and the"):
        train(model, used, 1)

    train(model, used)  # warnings fail tests


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam])
def test_state_that_a_plan_counts_is_not_said(optimizer):
    plan, model = planned(optimizer)
    train(model, adamw(model))
    plan.unapply(model)

    train(model, adamw(model))  # warnings fail tests


class Around(torch.optim.Optimizer):
    """Copies parameters before a second backward pass, as SAM; never steps itself."""

    def __init__(self, parameters, base):
        super().__init__(parameters, {})
        self.base = base
        self.param_groups = base.param_groups

    def first_step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.data.add_(parameter.grad)
        self.zero_grad()

    def second_step(self):
        for parameter in self.param_groups[0]["params"]:
            self.hand_back(parameter)
        self.base.step()
        self.zero_grad()

    def hand_back(self, parameter):
        parameter.data = self.state[parameter]["old"]

    def step(self):
        pass


class AroundInPlace(Around):
    def hand_back(self, parameter):
        parameter.data.copy_(self.state[parameter]["old"])


@pytest.mark.parametrize("kind", [Around, AroundInPlace])
@pytest.mark.parametrize("is_base_planned", [True, False])
def test_state_of_an_optimizer_around_another_one_is_said(kind, is_base_planned):
    sgd = partial(torch.optim.SGD, momentum=0.9)
    _, model = planned(sgd if is_base_planned else None)
    outer = kind(model.parameters(), sgd(model.parameters()))
    # Four layers of 32 x 32 weights and 32 biases: 16.5 KiB of copies and of momentum.
    counted = "16.5 KiB" if is_base_planned else "0 B"
    said = rf"SGD and {kind.__name__} keep 33\.0 KiB of state, .* counts {counted}:"
    with pytest.warns(UserWarning, match=said):
        for step in (outer.first_step, outer.second_step):
            model(torch.ones(8, WIDTH)).sum().backward()
            step()


def test_optimizers_of_other_models_and_of_models_without_a_plan_are_left_alone():
    plan, model = planned(None)
    other = torch.nn.Linear(WIDTH, WIDTH)
    train(other, adamw(other))
    plan.unapply(model)

    train(model, adamw(model))  # warnings fail tests


def num_looking():
    return len(of_all._global_optimizer_post_hooks)


def test_nothing_looks_at_later_steps_nor_for_models_that_are_gone():
    _, model = planned(torch.optim.AdamW)
    train(model, adamw(model))
    before = num_looking()
    for _ in range(3):
        planned(None)
        gc.collect()

    assert num_looking() <= before + 1


def test_a_copy_is_trained_and_not_looked_at():
    _, model = planned(None)
    model = copy.deepcopy(model)
    train(model, adamw(model))  # warnings fail tests
