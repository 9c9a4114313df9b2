"""Exceptions in backward that a training loop catches, and the steps after them."""

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd

import autosac
from autosac.verification.measuring import capture_state, differences
from tests.training import peaks_of_training

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, WIDTH = 256, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(5)))


def rows():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def mean_square(output):
    return output.square().mean()


def step(model):
    model.zero_grad()
    x = rows()  # which stays until the step ends, as the output does
    output = model(x)
    loss = mean_square(output)
    loss.backward()
    return loss.detach()


class Failure(Exception):
    pass


def fail(model):
    """A step whose backward pass fails in its middle."""

    def hook(gradient):
        raise Failure

    handle = model[2].down.weight.register_hook(hook)
    with pytest.raises(Failure):
        step(model)
    handle.remove()
    model.zero_grad()


def fail_in_the_loss(model):
    """A step whose backward pass fails in one of the terms of its loss."""

    def hook(gradient):
        raise Failure

    model.zero_grad()
    output = model(rows())
    term = output.tanh()
    term.register_hook(hook)
    with pytest.raises(Failure):
        (mean_square(output) + term.sum()).backward()
    model.zero_grad()


@pytest.mark.parametrize("fail", [fail, fail_in_the_loss])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_step_after_a_backward_pass_that_failed_has_the_planned_peak(share, fail):
    profile = autosac.profile(make_model(), rows(), loss_fn=mean_square)
    profile = autosac.calibrate(profile, progress=False)
    floor_bytes, most_bytes = autosac.floor(profile), profile.baseline_peak_bytes
    budget_bytes = floor_bytes + int(share * (most_bytes - floor_bytes))
    plan = autosac.plan(profile, memory_budget=budget_bytes)

    def make_step():
        model = plan.apply(make_model())
        steps = iter([step, fail, step])
        return lambda: next(steps)(model)

    *_, peak_bytes = peaks_of_training(make_step, 3)

    assert peak_bytes == plan.peak_bytes
    model, plain = plan.apply(make_model()), make_model()
    states = []
    for one in (model, plain):
        torch.manual_seed(2)
        fail(one)
        states.append(capture_state(one, None, step(one)))
    assert differences(*states) == ()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Dynamo itself
def test_a_planned_model_trains_under_compiled_autograd():
    profile = autosac.profile(make_model(), rows(), loss_fn=mean_square)
    budget_bytes = profile.baseline_peak_bytes  # it compiles no reruns
    model = autosac.plan(profile, memory_budget=budget_bytes).apply(make_model())
    plain = make_model()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        for one in (plain, model):
            torch.manual_seed(2)
            step(one)
    for expected, own in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)
