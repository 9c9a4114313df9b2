"""Steps in which some of a planned model is frozen, and those that come after."""

import warnings
import weakref

import pytest
import torch
from torch import nn

import autosac
from autosac.verification.measuring import capture_state, differences, measure_peak
from tests.models import WIDTH, Case, shared_profile

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def mean_square(output):
    return output.square().mean()


CASE = Case(
    lambda: nn.Sequential(*(Block() for _ in range(4))),
    lambda: torch.randn(64, WIDTH),
    mean_square,
)


def planned_model():
    profile = autosac.calibrate(shared_profile(CASE), progress=False)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    return plan, plan.apply(CASE.model())


def run(model, x, trained):
    """A step in which the first two blocks train or do not."""
    model[:2].requires_grad_(trained)
    model.zero_grad()
    loss = mean_square(model(x))
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    "steps", ["001111", "10101", "010101", "11011001"], ids=lambda steps: steps
)
def test_steps_as_planned_keep_the_peak_whatever_was_frozen_before(steps):
    plan, model = planned_model()
    x = CASE.inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for trained in steps[:-1]:
            run(model, x, trained == "1")
        _, peak_bytes = measure_peak(
            lambda: run(model, x, True),
            device="cpu",
            held=lambda: [*model.parameters(), x],
        )

    assert plan.peak_bytes < plan.baseline_peak_bytes
    assert peak_bytes <= plan.peak_bytes


def test_what_is_frozen_for_a_step_has_the_gradients_of_one_without_a_plan():
    _, model = planned_model()
    plain, x = CASE.model(), CASE.inputs()
    plain.load_state_dict(model.state_dict())
    for trained in (True, False, False, True, False, True, True):
        states = [capture_state(of, None, run(of, x, trained)) for of in (plain, model)]
        assert differences(*states) == ()


@pytest.mark.parametrize("swap_at", [1, 4])
def test_parameters_that_are_replaced_are_let_go_of_and_those_in_place_looked_at(
    swap_at,
):
    plan, model = planned_model()
    x, replaced = CASE.inputs(), []
    for number in range(8):
        run(model, x, trained=True)
        if number == swap_at:
            model.zero_grad()
            replaced = [weakref.ref(p) for p in model.parameters()]
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
            del state
    assert not [ref for ref in replaced if ref() is not None]

    run(model, x, trained=False)
    _, peak_bytes = measure_peak(
        lambda: run(model, x, trained=True),
        device="cpu",
        held=lambda: [*model.parameters(), x],
    )
    assert peak_bytes <= plan.peak_bytes


class Shifted(nn.Module):
    """Reads a tensor that is none of its arguments, parameters or buffers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.requires_grad_(False)
        self.shifts = [torch.zeros(4 * WIDTH, requires_grad=True)]

    def forward(self, x):
        return self.down(torch.tanh(self.up(x) + self.shifts[0]))


def test_a_unit_whose_ops_save_more_than_in_the_steps_before_says_so():
    case = Case(
        lambda: nn.Sequential(Shifted(), Shifted(), nn.Linear(WIDTH, 1)),
        lambda: torch.randn(256, WIDTH),
        mean_square,
    )
    profile = autosac.calibrate(
        autosac.profile(case.model(), case.inputs(), loss_fn=mean_square),
        progress=False,
    )
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    model, x = plan.apply(case.model()), case.inputs()

    def step(trained):
        for layer in model[:2]:
            layer.shifts[0].requires_grad_(trained)
        mean_square(model(x)).backward()

    for _ in range(3):
        step(trained=False)
    with pytest.warns(UserWarning, match=r"autograd saves more"):
        step(trained=True)
