"""Planned models that are dropped: their memory is there for the next one."""

import gc
import weakref

import pytest
import torch
from torch import nn

import autosac
from tests.models import WIDTH

pytestmark = pytest.mark.usefixtures("one_thread")


def make_model(width=WIDTH):
    layers = ((nn.Linear(width, width), nn.GELU(), nn.Dropout()) for _ in range(4))
    return nn.Sequential(*(nn.Sequential(*layer) for layer in layers))


def tight_plan(width=WIDTH):
    inputs = torch.ones(64, width)
    traced = autosac.profile(
        make_model(width), inputs, loss_fn=torch.sum, optimizer="sgd"
    )
    return autosac.plan(traced, memory_budget=autosac.floor(traced))


def train(model, width=WIDTH):
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model(torch.ones(64, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def no_collections():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("trains", [False, True])
def test_a_model_is_freed_as_soon_as_it_is_dropped_once_its_plan_is_off(trains):
    plan = tight_plan()
    assert plan.op_policies
    model = plan.apply(make_model())
    if trains:
        train(model)

    plan.unapply(model)
    weight = weakref.ref(model[0][0].weight)
    del model

    assert weight() is None


@pytest.mark.usefixtures("no_collections")
def test_the_next_plan_frees_large_models_that_nobody_holds():
    width = 1024  # of which four layers take 16 MiB
    plan = tight_plan(width)
    weights = []
    kept = plan.apply(make_model(width))
    for _ in range(3):  # as in a search of hyperparameters
        model = plan.apply(make_model(width))
        weights.append(weakref.ref(model[0][0].weight))
        train(model, width)
        del model
    plan.apply(make_model(width))

    assert [weight() for weight in weights] == [None] * 3
    train(kept, width)


@pytest.mark.usefixtures("no_collections")
def test_a_forward_that_was_kept_is_the_models_own_once_the_plan_is_off():
    plan, inputs = tight_plan(), torch.ones(64, WIDTH)
    model = plan.apply(make_model()).eval()
    forward = model.forward

    plan.unapply(model)

    assert torch.equal(forward(inputs), model(inputs))
    model.train()
    forward(inputs).sum().backward()
