"""What comes into a model, or changes in it, after a plan was applied."""

import copy
import warnings
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.nn.utils import parametrize

import autosac
from autosac._compat_distributed import fake_group
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import cluster_spec
from tests.checkpointing.test_replaced_modules import WIDTH, Residual


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Residual() for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class MakesParts(Blocks):
    """Makes a module and a buffer in its first forward pass, another in each."""

    def forward(self, x):
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.ones(WIDTH))
            self.first = torch.nn.GELU()
        self.latest = torch.nn.GELU()
        return super().forward(self.first(self.latest(x * self.table)))


class MakesPartLater(Blocks):
    """Makes a buffer in its 20th step."""

    def __init__(self):
        super().__init__()
        self.num_steps = 0

    def forward(self, x):
        self.num_steps += 1
        if self.num_steps == 20:
            self.register_buffer("late", torch.ones(WIDTH))
        return super().forward(x)


def adds_block(model):
    model.layers.append(Residual())


def adds_parts_to_head(model):
    model.head = torch.nn.Sequential(model.head, torch.nn.Linear(8, 8))


def makes_head_larger(model):
    model.head = torch.nn.Linear(WIDTH, 800)


def makes_weight_larger(model):
    model.head.weight.data = torch.ones(800, WIDTH)
    model.head.bias.data = torch.ones(800)


def adds_buffer(model):
    model.head.register_buffer("large", torch.ones(10_000))


def hooks(model):
    kept = []
    model.layers[1].up.register_forward_hook(lambda *call: kept.append(call[-1]))


def replaces_like_by_like(model):
    model.head = torch.nn.Linear(WIDTH, 8)


def shares_weight(model):
    model.layers[0].up.weight = model.layers[1].up.weight


def doubles(model):
    model.double()
    return model.float


def changes_class(model):
    parametrize.register_parametrization(model.head, "weight", torch.nn.Identity())
    return lambda: parametrize.remove_parametrizations(model.head, "weight")


def adds_hook(model):
    return model.head.register_forward_hook(lambda *call: None).remove


def swaps_head(model):
    head, model.head = model.head, torch.nn.Linear(WIDTH, 800)
    return lambda: setattr(model, "head", head)


def swaps_unit(model):
    unit, model.layers[0] = model.layers[0], Residual()
    return lambda: model.layers.__setitem__(0, unit)


def overwrites_forward(model):
    stand_in = model.layers[0].forward
    model.layers[0].forward = Residual().forward
    return lambda: setattr(model.layers[0], "forward", stand_in)


CHANGES = [
    doubles,
    changes_class,
    adds_hook,
    swaps_head,
    swaps_unit,
    overwrites_forward,
]


def gradients(model):
    model.zero_grad()
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    x = x.to(model.layers[1].up.weight.dtype)
    model(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def planned(kind=Blocks):
    torch.manual_seed(0)
    model = kind()
    profile = autosac.profile(
        model, torch.randn(64, WIDTH), loss_fn=lambda x: x.square().sum()
    )
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    assert plan.policy
    return plan, model


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (adds_block, r"`layers\.3` was added"),
        (adds_parts_to_head, "`head` was replaced"),
        (makes_head_larger, "`head` was replaced"),
        (makes_weight_larger, "`head` got other parameters or buffers"),
        (hooks, r"`layers\.1\.up` got a forward hook"),
        (adds_buffer, "`head` got other parameters or buffers"),
    ],
)
def test_what_a_plan_does_not_know_is_said_once_and_is_trained_as_without(change, what):
    plan, model = planned()
    other = copy.deepcopy(model)
    plan.apply(model)
    gradients(model)
    for one in (model, other):
        torch.manual_seed(2)
        change(one)
    with torch.no_grad():
        model(torch.randn(64, WIDTH))  # not in a step that nobody plans
    with pytest.warns(UserWarning, match=f"{what} after a plan"):
        observed = gradients(model)

    assert all(map(torch.equal, observed, gradients(other)))
    gradients(model)  # warnings fail tests


@pytest.mark.parametrize("change", [replaces_like_by_like, shares_weight])
def test_what_changes_no_size_is_not_said(change):
    plan, model = planned()
    plan.apply(model)
    change(model)

    gradients(model)  # warnings fail tests


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_as_planned_again_is_not_said(change):
    plan, model = planned()
    plan.apply(model)
    gradients(model)
    change_back = change(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients(model)
    assert any("after a plan was applied" in str(one.message) for one in caught)
    change_back()

    gradients(model)  # warnings fail tests


@pytest.mark.parametrize("change", CHANGES)
def test_a_loop_is_looked_at_again_once_the_model_is_as_planned(change):
    plan, model = planned()
    plan.apply(model)
    change_back = change(model)

    def other_loss(num_steps):
        for _ in range(num_steps):
            x = torch.randn(64, WIDTH, dtype=model.layers[1].up.weight.dtype)
            output = torch.cat([model(x)] * 100, -1)
            output.exp().sin().sum().backward()
            model.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other_loss(3)
    said = [str(one.message) for one in caught]
    assert any("after a plan was applied" in one for one in said)
    assert not any("The loss" in one for one in said)
    change_back()
    with pytest.warns(UserWarning, match="The loss, or what else") as caught:
        other_loss(3)
    assert len(caught) == 1


def test_a_change_in_what_was_added_is_said_too():
    plan, model = planned()
    plan.apply(model)
    adds_parts_to_head(model)
    with pytest.warns(UserWarning, match="`head` was replaced"):
        gradients_of_parts(model)
    model.head[0].register_forward_hook(lambda *call: None)

    with pytest.warns(UserWarning, match=r"`head\.0` got a forward hook"):
        gradients_of_parts(model)


def gradients_of_parts(model):
    model.zero_grad()
    model(torch.randn(64, WIDTH)).square().sum().backward()


def test_copies_and_what_forward_makes_are_not_said():
    plan, model = planned(MakesParts)
    plan.apply(model)
    gradients(model)
    gradients(model)

    gradients(copy.deepcopy(model))  # warnings fail tests


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
def test_what_fsdp_gathers_in_another_type_is_not_said():
    x = torch.randn(64, WIDTH)
    profile = autosac.profile(
        Blocks(), x, loss_fn=lambda y: y.float().square().sum(), device="cpu"
    )
    how = {
        "cluster": replace(cluster_spec("pcie-l40s"), device=device_spec("cpu")),
        "num_gpus": 2,
        "fsdp_units": [Residual],  # and `head` in that of the model
        "param_dtype": "bfloat16",
        "reduce_dtype": "float32",
    }
    with pytest.raises(autosac.InfeasibleBudgetError) as error:
        autosac.plan_parallel(profile, memory_budget=1, **how)
    least_bytes = error.value.lowest_peak_bytes
    plan = autosac.plan_parallel(profile, memory_budget=least_bytes, **how)
    assert plan.policy
    model = Blocks()
    with fake_group(2):
        plan.apply(model, plan.make_mesh("cpu"))
        for _ in range(2):  # warnings fail tests
            model(x).float().square().sum().backward()
            model.zero_grad()
        model.register_buffer("large", torch.ones(1000))
        with pytest.warns(UserWarning, match="model itself got other parameters or b"):
            model(x)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [64, 32])
def test_what_forward_makes_first_in_a_later_step_is_said_if_no_batch_differs(num_rows):
    batches = [torch.randn(rows, WIDTH) for rows in (64, 32)]
    model = MakesPartLater()
    autosac.plan(
        model, batches, loss_fn=lambda x: x.square().sum(), memory_budget="1GiB"
    ).apply(model)
    for rows in (*[64] * 19, num_rows):
        model(torch.randn(rows, WIDTH)).square().sum().backward()
        model.zero_grad()

    is_said = num_rows == 64
    what = "The model itself got other parameters or buffers"
    context = pytest.warns(UserWarning, match=what) if is_said else nullcontext()
    with context:
        gradients(model)
    gradients(model)  # warnings fail tests
