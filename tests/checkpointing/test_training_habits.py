"""What a training loop does otherwise than the planned step is said once."""

import gc
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import autosac

WIDTH, ROWS = 16, 64


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def loss_fn(output):
    return output.square().mean()


def rows(*, trained=False):
    return torch.randn(ROWS, WIDTH, requires_grad=trained)


def retains(model):
    output = model(rows())
    output.mean().backward(retain_graph=True)
    loss_fn(output).backward()


def takes_gradients_of_gradients(model):
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(loss_fn(model(rows())), parameters, create_graph=True)
    sum(slope.square().sum() for slope in slopes).backward()


def calls_twice(model):
    (loss_fn(model(rows())) + loss_fn(model(rows()))).backward()


def trains_input(model):
    loss_fn(model(rows(trained=True))).backward()


def transforms(model):
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(parameters, row):
        return loss_fn(torch.func.functional_call(model, parameters, (row,)))

    gradients = torch.func.vmap(torch.func.grad(loss_of), (None, 0))(parameters, rows())
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].mean(0)


SAID = {
    retains: "Backward keeps its graph",
    takes_gradients_of_gradients: "Backward keeps its graph",
    calls_twice: "is called again before backward",
    trains_input: "Inputs of the model .* require gradients",
    transforms: "under a transform of `torch.func`",
}


def planned(model, inputs=None, *, share=1.0, **options):
    profile = autosac.profile(
        model, rows() if inputs is None else inputs, loss_fn=loss_fn, **options
    )
    floor_bytes, peak_bytes = autosac.floor(profile), profile.baseline_peak_bytes
    budget_bytes = floor_bytes + int(share * (peak_bytes - floor_bytes))
    return autosac.plan(profile, memory_budget=budget_bytes)


def train(model, step, num_steps=3):
    for _ in range(num_steps):
        step(model)
        model.zero_grad()


@pytest.mark.parametrize("step", SAID)
def test_a_habit_that_is_not_planned_is_said_once(step, tmp_path):
    # The budget is ample: no unit is there that could notice.
    planned(Model()).save(tmp_path / "plan.json")
    model = autosac.Plan.load(tmp_path / "plan.json").apply(Model())
    with pytest.warns(UserWarning, match=SAID[step]) as caught:
        train(model, step)

    assert len(caught) == 1


def test_a_habit_that_begins_later_is_said_in_a_later_step():
    # As where the second network of a GAN is trained after some steps.
    model = planned(Model()).apply(Model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, evaluates, 6)

    with pytest.warns(UserWarning, match="is called again before") as caught:
        train(model, calls_twice, 8)
    assert len(caught) == 1


def test_backward_inside_of_autocast_is_said_where_units_rerun():
    def step(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss_fn(model(rows())).backward()

    plan = planned(Model(), share=0.0, autocast=torch.bfloat16)
    assert plan.policy

    with pytest.warns(UserWarning, match="inside of `torch.autocast`") as caught:
        train(plan.apply(Model()), step)
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_another_backend_than_the_planned_one_is_said_once():
    model = planned(Model()).apply(Model())
    train(model, evaluates)  # of which nothing is said
    # Set so because PyTorch's own tests, once imported, forbid to set it for good.
    other = torch.backends.mkldnn.flags(enabled=not torch.backends.mkldnn.enabled)
    with (
        other,
        pytest.warns(UserWarning, match="`torch.backends.mkldnn.enabled`") as said,
    ):
        train(model, evaluates)
    assert len(said) == 1


class Twice(Model):
    """Goes backward in forward, twice through one graph, and calls itself twice."""

    def forward(self, x):
        output = super().forward(x) - super().forward(-x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output + slope


def test_nothing_is_said_of_what_the_planned_step_does_too():
    def step(model):
        loss_fn(model(rows(trained=True))).backward()

    model = planned(Twice(), rows(trained=True)).apply(Twice())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, step)


def evaluates(model):
    model(rows())  # its graph ends at once
    loss_fn(model(rows())).backward()


def keeps_the_loss(model):
    losses = [loss_fn(model(rows())) for _ in range(1)]
    losses[0].backward()
    loss_fn(model(rows())).backward()
    losses.clear()


def looks_without_gradients(model):
    with torch.no_grad():
        output = model(rows(trained=True))
    loss_fn(model(rows())).backward()
    assert not output.requires_grad


@pytest.mark.parametrize("step", [evaluates, keeps_the_loss, looks_without_gradients])
def test_nothing_is_said_of_graphs_that_end_before_the_next_call(step):
    plan = replace(planned(Model()), finds_gradients=True)
    model = plan.apply(Model())
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, step)


def test_frozen_layers_make_a_trained_input_dear_however_small_it_is():
    def frozen():
        model = Model()
        for layer in list(model)[:3]:
            layer.requires_grad_(False)
        return model

    plan = planned(frozen())
    plan = replace(plan, peak_bytes=100 * ROWS * WIDTH * 4 + plan.peak_bytes)
    with pytest.warns(UserWarning, match="what frozen layers save"):
        train(plan.apply(frozen()), trains_input)
