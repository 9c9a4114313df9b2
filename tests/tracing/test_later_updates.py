"""Optimizers that keep more, or take more, in later steps than in their second."""

import collections
from functools import partial

import pytest
import torch
from torch import nn

import autosac
from autosac.errors import UnsupportedError
from autosac.step.training_step import training_step
from tests.training import peaks_of_training

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS, STEPS = 32, 256, 13
RATE = 1e-3


class EveryParameter(torch.optim.Optimizer):
    def __init__(self, parameters, every=5):
        super().__init__(parameters, {"every": every})
        self.num_steps = 0

    @torch.no_grad()
    def step(self):
        self.num_steps += 1
        for group in self.param_groups:
            is_due = self.num_steps % group["every"] == 0
            made = [
                self.update(p, self.state[p], group["every"], is_due)
                for p in group["params"]
                if p.grad is not None
            ]
            del made  # what updates return lives until all are done


class KeepsLast(EveryParameter):
    """Copies of the last few gradients, as AdaShift does."""

    def update(self, parameter, state, every, is_due):
        last = state.setdefault("last", collections.deque(maxlen=every))
        last.append(parameter.grad.clone())
        parameter.add_(last[0], alpha=-RATE)


class KeepsGradients(EveryParameter):
    """The last few gradients themselves."""

    def update(self, parameter, state, every, is_due):
        last = state.setdefault("last", [])
        last.append(parameter.grad)
        del last[:-every]
        parameter.add_(sum(last), alpha=-RATE)


class CopiesLate(EveryParameter):
    """Copies the weights for the first time after a few steps."""

    def update(self, parameter, state, every, is_due):
        parameter.add_(parameter.grad, alpha=-RATE)
        if is_due:
            slow = state.setdefault("slow", parameter.clone())
            parameter.copy_(slow.lerp_(parameter, 0.5))


class TakesMoreSometimes(EveryParameter):
    """Takes more in some steps, as those that make preconditioners anew."""

    def update(self, parameter, state, every, is_due):
        parameter.add_(parameter.grad, alpha=-RATE)
        shape = (6, *[1] * (parameter.dim() - 1))
        return parameter.grad.repeat(shape) if is_due else None


class ReplacesMemory(EveryParameter):
    def update(self, parameter, state, every, is_due):
        parameter.data = parameter.data - RATE * parameter.grad


class StepsBack(EveryParameter):
    """Keeps the weights, steps aside, and takes what it kept as weights: SAM."""

    def update(self, parameter, state, every, is_due):
        state["old"] = parameter.data.clone()
        parameter.add_(parameter.grad)
        parameter.data = state["old"]
        parameter.sub_(parameter.grad, alpha=RATE)


class DropsGradients(EveryParameter):
    """Takes most in its own step, with gradients that it drops."""

    def update(self, parameter, state, every, is_due):
        copies = parameter.grad.repeat(6, *[1] * (parameter.dim() - 1))
        parameter.grad = None
        return copies


def averaged(parameters):
    """A hook makes an average of the weights, later than in the first step."""
    parameters, average, calls = list(parameters), {}, []
    optimizer = torch.optim.SGD(parameters, lr=RATE)

    def update(*_):
        calls.append(len(calls))
        for parameter in parameters if len(calls) % 5 == 0 else ():
            mean = average.setdefault(parameter, parameter.detach().clone())
            mean.lerp_(parameter.detach(), 0.1)

    optimizer.register_step_post_hook(update)
    return optimizer


def in_backward(parameters):
    return autosac.OptimizerInBackward(parameters, KeepsLast)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def make_model():
    return nn.Sequential(*(Block() for _ in range(3)))


def loss_fn(output):
    return output.square().mean()


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(
    "make_optimizer",
    [
        *(KeepsLast, KeepsGradients, CopiesLate, TakesMoreSometimes),
        *(ReplacesMemory, StepsBack, DropsGradients, averaged, in_backward),
    ],
)
def test_the_highest_of_the_first_steps_peaks_as_planned(make_optimizer):
    model, x = make_model(), torch.randn(ROWS, WIDTH)
    optimizer = make_optimizer(model.parameters())
    profile = autosac.profile(model, x, optimizer=optimizer, loss_fn=loss_fn)
    profile = autosac.calibrate(profile, progress=False)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))

    def make_step():
        model, x = make_model(), torch.randn(ROWS, WIDTH)
        optimizer = make_optimizer(model.parameters())
        plan.apply(model)

        def step():
            training_step(model, (x,), {}, loss_fn=loss_fn, optimizer=optimizer)
            model.zero_grad()

        return step

    assert plan.peak_bytes < plan.baseline_peak_bytes
    peaks = peaks_of_training(make_step, STEPS)
    assert 0 <= plan.peak_bytes - max(peaks) <= 64  # numbers in the code count twice


def test_an_optimizer_that_keeps_more_and_more_is_refused():
    model = nn.Linear(4, 4)
    optimizer = KeepsLast(model.parameters(), every=10**6)

    with pytest.raises(UnsupportedError, match=r"more with every step,.* 401"):
        autosac.profile(model, torch.randn(2, 4), optimizer=optimizer, loss_fn=loss_fn)


class Conditional(torch.optim.Optimizer):
    """Takes copies of all gradients if their sum is zero, or only if it is not."""

    def __init__(self, parameters, if_zero):
        super().__init__(parameters, {})
        self.if_zero = if_zero

    @torch.no_grad()
    def step(self):
        parameters = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        total = torch.tensor([0.0])
        for parameter in parameters:
            total.add_(parameter.grad.abs().sum())
        if (total == 0) == self.if_zero:
            copies = [parameter.grad.clone() for parameter in parameters]
            copies = [copy.mul(2) for copy in copies] + copies
            del copies
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=-RATE)


@pytest.mark.parametrize("if_zero", [True, False])
def test_what_values_decide_in_an_optimizer_is_what_they_really_decide(if_zero):
    model, x = nn.Linear(64, 64), torch.randn(2, 64)
    optimizer = Conditional(model.parameters(), if_zero)
    profile = autosac.profile(model, x, optimizer=optimizer, loss_fn=loss_fn)

    def make_step():
        model, x = nn.Linear(64, 64), torch.randn(2, 64)
        optimizer = Conditional(model.parameters(), if_zero)

        def step():
            training_step(model, (x,), {}, loss_fn=loss_fn, optimizer=optimizer)
            model.zero_grad()

        return step

    peak_bytes = profile.baseline_peak_bytes
    assert 0 <= peak_bytes - max(peaks_of_training(make_step, 3)) <= 64


def test_of_what_values_decide_in_an_optimizer_that_cannot_run_the_most_is_planned():
    width, peaks = 4096, []
    for if_zero in (True, False):
        with torch.device("meta"):
            model, x = nn.Linear(width, width), torch.empty(2, width)
        optimizer = Conditional(model.parameters(), if_zero)
        with pytest.warns(UserWarning, match="reads conditions from tensors"):
            profile = autosac.profile(
                model, x, device="h100", optimizer=optimizer, loss_fn=loss_fn
            )
        peaks.append(profile.baseline_peak_bytes)
    plain = autosac.profile(
        model,
        x,
        device="h100",
        optimizer=torch.optim.SGD(model.parameters()),
        loss_fn=loss_fn,
    )

    assert peaks[0] == peaks[1] > plain.baseline_peak_bytes + width * width * 4


class Clipped(torch.optim.SGD):
    """Takes copies of all gradients if their norm, as a number, is high."""

    def __init__(self, parameters, highest):
        super().__init__(parameters, lr=RATE)
        self.highest = highest

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for p in self.param_groups[0]["params"]]
        if sum(gradient.norm() for gradient in gradients).item() > self.highest:
            copies = [gradient.clone() for gradient in gradients]
            copies = [copy.mul(2) for copy in copies] + copies
            del copies
        return super().step(closure)


class CopiesEveryFewSteps(torch.optim.Optimizer):
    """Makes copies in every so many steps, which it counts in tensors."""

    def __init__(self, parameters, every):
        super().__init__(parameters, {"every": every})

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        for p in group["params"]:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros(())
            self.state[p]["step"] += 1
            p.add_(p.grad, alpha=-0.01)
        if self.state[p]["step"].item() % group["every"] == 0:
            copies = [p.repeat(8, *(1 for _ in p.shape)) for p in group["params"]]
            del copies


@pytest.mark.parametrize(
    "make_optimizer",
    [
        torch.optim.ASGD,
        partial(torch.optim.ASGD, t0=2),
        partial(torch.optim.ASGD, foreach=True),
        torch.optim.NAdam,
        torch.optim.RAdam,
        partial(Clipped, highest=0.0),
        partial(Clipped, highest=1e9),
    ],
)
def test_numbers_that_an_optimizer_reads_are_those_of_a_training(make_optimizer):
    def make_model():
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))

    def make_step():
        model, x = make_model(), torch.randn(2, 64)
        optimizer = make_optimizer(model.parameters())

        def step():
            training_step(model, (x,), {}, loss_fn=loss_fn, optimizer=optimizer)
            model.zero_grad()

        return step

    model = make_model()
    optimizer = make_optimizer(model.parameters())
    profile = autosac.profile(
        model, torch.randn(2, 64), optimizer=optimizer, loss_fn=loss_fn
    )
    excess = profile.baseline_peak_bytes - max(peaks_of_training(make_step, 8))
    assert 0 <= excess <= 64


@pytest.mark.parametrize("every", [6, 7])
def test_what_an_optimizer_does_in_every_kth_step_of_a_count_is_planned(every):
    peaks = []
    for k in (every, 1):
        model = nn.Linear(64, 64)
        optimizer = CopiesEveryFewSteps(model.parameters(), every=k)
        profile = autosac.profile(
            model, torch.randn(2, 64), optimizer=optimizer, loss_fn=loss_fn
        )
        peaks.append(profile.baseline_peak_bytes)

    assert peaks[0] == peaks[1] > 8 * 64 * 64 * 4


@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_a_rate_that_is_a_tensor_is_known_without_a_real_step(kind, is_built):
    model, x = nn.Linear(64, 64), torch.randn(2, 64)

    def make(parameters):
        return kind(parameters, lr=torch.tensor(RATE))

    optimizer = make if is_built else make(model.parameters())
    profile = autosac.profile(model, x, optimizer=optimizer, loss_fn=loss_fn)
    assert not profile.step.learned.real
