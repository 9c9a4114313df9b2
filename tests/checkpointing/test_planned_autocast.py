"""Autocast that a plan is not for is said in the first step that runs under it."""

import contextlib
import functools
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import autosac

WIDTH = 16


def make_model():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def planned(autocast, **options):
    return autosac.plan(
        make_model(),
        torch.randn(8, WIDTH),
        loss_fn=lambda y: y.float().square().sum(),
        memory_budget="1MiB",
        autocast=autocast,
        **options,
    )


def train(model, autocast, num_steps=2):
    context = contextlib.nullcontext()
    if autocast is not None:
        context = torch.autocast("cpu", dtype=autocast)
    for _ in range(num_steps):
        with context:
            loss = model(torch.randn(8, WIDTH)).float().square().sum()
        loss.backward()
        model.zero_grad()


@pytest.mark.parametrize(
    ("of_plan", "of_step", "fix"),
    [
        (torch.bfloat16, None, "Run forward and loss under `torch.autocast"),
        (None, torch.bfloat16, "Plan again with `autocast`='bfloat16'"),
        (torch.bfloat16, torch.float16, "Plan again with `autocast`='float16'"),
    ],
)
def test_a_step_under_other_autocast_than_planned_is_said_once(of_plan, of_step, fix):
    # The budget is ample: no unit is there that could notice.
    plan = planned(of_plan)
    assert not plan.policy

    model = plan.apply(make_model())
    train(model, of_plan)  # of which nothing is said
    with pytest.warns(UserWarning, match="autocast") as caught:
        train(model, of_step)

    (one,) = caught
    assert fix in str(one.message)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_nothing_is_said_of_the_autocast_that_is_planned(autocast):
    model = planned(autocast).apply(make_model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, autocast)
        with torch.no_grad(), torch.autocast("cpu"):  # is no step
            model(torch.randn(8, WIDTH))


def test_autocast_that_a_replaced_forward_opens_is_that_of_the_step():
    # As Accelerate prepares a model, before the plan is applied.
    model = make_model()
    opened = torch.autocast("cpu", dtype=torch.bfloat16)
    model.forward = opened(functools.partial(nn.Sequential.forward, model))

    plan = planned(torch.bfloat16)
    plan.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, None)

    plan.unapply(model)
    planned(torch.float16).apply(model)
    with pytest.warns(UserWarning, match="`autocast`='bfloat16'") as caught:
        train(model, None)
    assert len(caught) == 1


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_loop_is_looked_at_again_once_autocast_is_as_planned(is_wrapped):
    model = make_model()
    if is_wrapped:
        model.forward = functools.partial(nn.Sequential.forward, model)
    planned(None).apply(model)
    kept = []

    def keep_outputs(autocast, num_steps):
        for _ in range(num_steps):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                output = model(torch.randn(8, WIDTH))
            kept.append(output.detach())
            output.float().square().sum().backward()
            del output
            model.zero_grad()

    with pytest.warns(UserWarning, match="autocast") as caught:
        keep_outputs(True, 3)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="Outputs of earlier calls") as caught:
        keep_outputs(False, 6)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keep_outputs(True, 1)


def test_a_plan_file_knows_the_planned_autocast(tmp_path):
    planned(torch.bfloat16).save(tmp_path / "plan.json")
    model = autosac.Plan.load(tmp_path / "plan.json").apply(make_model())

    with pytest.warns(UserWarning, match="its plan is for a step under autocast"):
        train(model, None)


def test_a_plan_that_does_not_know_its_autocast_says_nothing(tmp_path):
    # A file of an autosac that did not write it.
    plan = replace(planned(None), autocast=None, forward_bytes=None)
    plan.save(tmp_path / "plan.json")
    assert '"autocast"' not in (tmp_path / "plan.json").read_text()

    model = autosac.Plan.load(tmp_path / "plan.json").apply(make_model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, torch.bfloat16)
