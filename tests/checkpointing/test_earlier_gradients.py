"""Gradients that the plan of a step has none of are said when they are there."""

import warnings

import pytest
import torch
from torch import nn

import autosac

WIDTH = 16


def make_model():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def train(model, habit):
    """Three steps in which `zero_grad` comes where many loops have it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(8, WIDTH)
    for number in range(3):
        if habit == "before forward":
            optimizer.zero_grad()
        loss = model(rows).square().sum()
        if habit == "before backward":
            optimizer.zero_grad()
        loss.backward()
        if habit != "of two batches" or number % 2:
            optimizer.step()
        if habit == "of two batches" and number % 2:
            optimizer.zero_grad()
        if habit == "in place":
            optimizer.zero_grad(set_to_none=False)


def planned(**options):
    model = make_model()
    plan = autosac.plan(
        model,
        torch.randn(8, WIDTH),
        loss_fn=lambda y: y.square().sum(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        memory_budget="1MiB",
        **options,
    )
    plan.apply(model)
    return model


@pytest.mark.parametrize("habit", ["before backward", "of two batches", "in place"])
def test_gradients_that_are_there_in_forward_unplanned_are_said_once(habit):
    model = planned()
    with pytest.warns(UserWarning, match="Gradients of an earlier step") as caught:
        train(model, habit)

    assert len(caught) == 1


@pytest.mark.parametrize(
    ("habit", "option"),
    [
        ("before forward", {}),
        ("before backward", {"gradients_in_forward": True}),
        ("of two batches", {"accumulate": 2}),
        ("in place", {"keeps_gradients": True}),
    ],
)
def test_nothing_is_said_of_gradients_that_are_planned(habit, option):
    model = planned(**option)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, habit)


def test_a_plan_file_knows_whether_gradients_are_planned(tmp_path):
    for accumulate in (1, 2):
        plan = autosac.plan(
            make_model(),
            torch.randn(8, WIDTH),
            loss_fn=lambda y: y.square().sum(),
            memory_budget="1MiB",
            accumulate=accumulate,
        )
        plan.save(tmp_path / "plan.json")

        assert autosac.Plan.load(tmp_path / "plan.json").finds_gradients == (
            accumulate > 1
        )


def test_gradients_that_the_optimizer_s_zero_grad_leaves_are_said_to_be_of_others():
    model = planned()
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)

    with pytest.warns(UserWarning, match="6 of 8 parameters, such as `0.weight`"):
        for _ in range(2):
            model(torch.randn(8, WIDTH)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
