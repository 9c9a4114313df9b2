"""Modules that are replaced after a plan was applied."""

import warnings

import pytest
import torch

import autosac

WIDTH = 64


def layers():
    torch.manual_seed(0)
    parts = (
        layer
        for _ in range(3)
        for layer in (
            torch.nn.Linear(WIDTH, 4 * WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(4 * WIDTH, WIDTH),
        )
    )
    return torch.nn.Sequential(*parts)


def blocks():
    return torch.nn.Sequential(*[torch.nn.Sequential(layers()) for _ in range(2)])


def gradients(model):
    model.zero_grad()
    x = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("make", "name"),
    [(layers, "4"), (blocks, "0.0"), (blocks, "1")],
    ids=["layer-of-unit-of-several", "unit", "around-units"],
)
def test_the_new_module_is_trained_and_a_warning_says_so_once(make, name):
    def replaced(model):
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._modules[last] = torch.nn.Tanh()
        return model

    expected = gradients(replaced(make()))
    model = make()
    inputs = torch.randn(128, WIDTH)
    profile = autosac.profile(model, inputs, loss_fn=lambda x: x.square().sum())
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    plan.apply(model)
    gradients(model)
    with pytest.warns(UserWarning, match="was replaced after"):
        observed = gradients(replaced(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = gradients(model)

    assert len(observed) == len(expected)
    assert all(map(torch.equal, observed, expected))
    assert all(map(torch.equal, again, expected))
