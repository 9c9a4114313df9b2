"""A forward that makes more than in the planned step is said, and nothing else is."""

import copy
import types
import warnings

import pytest
import torch
from torch import nn

import autosac
from autosac import _compat_dispatch

WIDTH = 16


class Model(nn.Module):
    """Layers, and ops outside of them that settings turn on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.use_extra = self.is_verbose = False
        self.num_extra = self.num_calls = self.epoch = 0
        self.settings = types.SimpleNamespace(num_extra=0)
        self.table = {"num_extra": 0}
        self.num_modes = []

    def forward(self, x):
        self.num_calls += 1
        self.num_modes.append(_compat_dispatch.num_modes())
        for layer in self.layers:
            x = layer(x).relu()
        num_extra = self.num_extra + self.settings.num_extra + self.table["num_extra"]
        for _ in range(self.use_extra + num_extra + getattr(self, "late", 0)):
            x = x + x.sin().cos()
        return x


def loss_fn(output):
    return output.square().sum()


def planned(model, share=1.0, *, is_applied=True):
    profile = autosac.profile(model, torch.randn(64, WIDTH), loss_fn=loss_fn)
    floor_bytes, peak_bytes = autosac.floor(profile), profile.baseline_peak_bytes
    budget_bytes = floor_bytes + int(share * (peak_bytes - floor_bytes))
    plan = autosac.plan(profile, memory_budget=budget_bytes)
    return plan.apply(model) if is_applied else plan


def train(model, num_steps=3, before_step=lambda number: None):
    for number in range(num_steps):
        before_step(number)
        loss_fn(model(torch.randn(64, WIDTH))).backward()
        model.zero_grad()


def only_warning(model, **options):
    with pytest.warns(UserWarning) as caught:
        train(model, **options)
    (one,) = caught
    return str(one.message)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize(
    "name", ["use_extra", "late", "settings.num_extra", "table.num_extra"]
)
def test_an_attribute_that_makes_forward_larger_is_named(name, share):
    model = planned(Model(), share)
    train(model)

    owner, _, last = name.rpartition(".")
    own = {"": vars(model), "settings": vars(model.settings), "table": model.table}
    own[owner][last] = 1

    assert f"change with `{name}`, set before this step" in only_warning(model)


@pytest.mark.parametrize("name", ["use_extra", "table.num_extra"])
def test_an_attribute_that_is_set_late_is_named_within_seven_steps(name):
    # Forward changes another attribute of the model in each step, and none of the dict.
    model = planned(Model())
    train(model, 17)  # before step 32, whose results are looked at for its number
    owner, _, last = name.rpartition(".")
    {"": vars(model), "table": model.table}[owner][last] = 1

    assert f"change with `{name}`" in only_warning(model, num_steps=7)


@pytest.mark.parametrize("kind", ["attribute", "settings"])
def test_what_changed_before_a_plan_was_applied_is_said_in_the_first_steps(
    kind, tmp_path
):
    model = Model()
    planned(model, is_applied=False).save(tmp_path / "plan.json")
    of_model = model if kind == "attribute" else model.settings
    of_model.num_extra = 1
    autosac.Plan.load(tmp_path / "plan.json").apply(model)

    assert "Does it run under other settings" in only_warning(model)


def test_a_step_after_the_first_ones_that_does_more_is_said_if_a_number_tells_it():
    # As in progressive growing; the first changes of the number do nothing.
    model = planned(Model())

    def grow(number):
        model.num_extra = max(0, number - 4)

    assert "`num_extra`" in only_warning(model, num_steps=8, before_step=grow)


def test_attributes_that_change_no_op_are_not_said():
    model = planned(Model(), 0.0)

    def note(number):
        model.epoch = number
        model.is_verbose = number % 2 == 1
        model.last_loss = 0.1 * number

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, 20, note)
        model.layers[0].eval()
        train(model)


def test_forward_that_makes_less_is_not_said():
    model = Model()
    model.num_extra = 3
    planned(model)
    model.num_extra = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model)


def test_steps_are_looked_at_as_they_begin_and_no_longer():
    model = planned(Model())
    model.num_modes.clear()
    train(model, 9)
    assert model.num_modes == [0, 1, 0, 1, 0, 0, 0, 1, 0]

    def count(number):
        model.epoch += 1

    model.num_modes.clear()
    train(model, 22, count)  # up to step 31
    assert sum(model.num_modes) == 4 + 1  # of a number that changed nothing so far


class SetsUp(Model):
    """Computes something in its first step."""

    def forward(self, x):
        self.settings.num_extra = 8 if self.num_calls == 0 else 0
        return super().forward(x)


def test_a_first_step_that_sets_the_model_up_is_not_said():
    model = SetsUp()
    model.num_calls = 1
    planned(model)
    model.num_calls = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, 5)


def test_bits_are_those_of_steps_without_a_plan():
    torch.manual_seed(0)
    model = Model()
    twin = Model()
    twin.load_state_dict(model.state_dict())
    planned(model)
    for _ in range(3):
        rows = torch.randn(64, WIDTH)
        for one in (model, twin):
            one.zero_grad()
            loss_fn(one(rows)).backward()
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(own.grad, other.grad)


def test_a_copy_of_a_planned_model_is_looked_at_too():
    model = planned(Model())
    train(model)
    twin = copy.deepcopy(model)
    train(twin)

    twin.num_extra = 1

    assert "`num_extra`" in only_warning(twin)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model)


def test_a_plan_for_another_kind_of_device_knows_nothing_of_this_one():
    model = Model()
    profile = autosac.profile(
        model, torch.randn(64, WIDTH), loss_fn=loss_fn, device="h100"
    )
    autosac.plan(profile, memory_budget="1GiB").apply(model)
    model.num_extra = 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model)


class DropsLayers(nn.Module):
    """Layers that a step runs by chance, at a rate from elsewhere."""

    rates = types.SimpleNamespace(kept=0.2)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            if torch.rand(()) < self.rates.kept:
                x = layer(x).sin().cos().tanh().relu()
        return x + self.layers[0].weight[0]


@pytest.mark.slow
def test_a_step_whose_draws_make_more_than_all_planned_ones_is_said_once(monkeypatch):
    model = planned(DropsLayers(), 0.0)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, 4)
    monkeypatch.setattr(DropsLayers.rates, "kept", 1.0)
    assert "below the budget where draws decide" in only_warning(model, num_steps=16)
