"""Modules that are replaced after a plan was applied."""

import functools
import types
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


@pytest.mark.slow_but_fifth
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


class Residual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def planned_blocks():
    model = torch.nn.Sequential(*[Residual() for _ in range(3)])
    profile = autosac.profile(
        model, torch.randn(128, WIDTH), loss_fn=lambda x: x.square().sum()
    )
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    assert "1" in plan.policy
    return plan.apply(model), "1"


def test_a_forward_that_is_replaced_is_said_once():
    model, unit = planned_blocks()
    module = model.get_submodule(unit)
    module.forward = types.MethodType(type(module).forward, module)
    with pytest.warns(UserWarning, match=f"`forward` of `{unit}` was replaced after"):
        gradients(model)

    gradients(model)  # warnings fail tests


class Calls:
    def __init__(self, function):
        self.functions = [function]

    def __call__(self, *args):
        return self.functions[0](*args)


def _renamed(module):
    module._old_forward = module.forward
    return types.MethodType(lambda self, x: self._old_forward(x), module)


WRAPPERS = {
    "closure": lambda module: functools.wraps(module.forward)(
        lambda x, own=module.forward: own(x)
    ),
    "partial": lambda module: functools.partial(lambda own, x: own(x), module.forward),
    "object": lambda module: Calls(module.forward),
    "attribute": _renamed,
}


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_forward_that_is_wrapped_is_still_a_unit(name):
    model, unit = planned_blocks()
    module = model.get_submodule(unit)
    expected = gradients(model)
    module.forward = WRAPPERS[name](module)

    assert all(map(torch.equal, gradients(model), expected))
    gradients(model)  # warnings fail tests


def mean_square(output):
    return output.square().mean()


def plan_of(model, x, budget):
    units = ["0", "1"]
    return autosac.plan(
        model, x, loss_fn=mean_square, memory_budget=budget, ac_units=units
    )


@pytest.mark.slow_but_first
@pytest.mark.parametrize("what", ["module", "forward"])
def test_each_of_several_that_are_replaced_is_said(what):
    model = torch.nn.Sequential(*blocks(), *blocks())
    x = torch.randn(2048, WIDTH)
    with pytest.raises(autosac.InfeasibleBudgetError) as error:
        plan_of(model, x, 1)
    plan = plan_of(model, x, error.value.lowest_peak_bytes)
    assert plan.policy.keys() == {"0", "1"}  # two of four blocks
    plan.apply(model)
    for name in ("0", "1"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if what == "module":
                model[int(name)] = torch.nn.Linear(WIDTH, WIDTH)
            else:
                model[int(name)].forward = torch.nn.Linear(WIDTH, WIDTH)
            mean_square(model(x)).backward()
        texts = [str(one.message) for one in said]
        assert [f"`{name}` was replaced" in text for text in texts].count(True) == 1
