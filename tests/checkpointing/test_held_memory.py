"""Tensors that a loop on the CPU holds besides the planned step."""

import gc
import re

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import autosac

WIDTH, ROWS = 512, 384
WEIGHTS = 4 * WIDTH * WIDTH * 4  # bytes
SAID = r"that the plan does not count stayed from the model's call to the end of"


@pytest.fixture(autouse=True)
def no_other_models():
    gc.collect()  # those of earlier tests


class Model(torch.nn.Module):
    """Four layers, the last of which looks at a table that its first call makes."""

    def __init__(self):
        super().__init__()
        layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.layers = torch.nn.ModuleList(layers)
        self.tables = {}

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        if x.device not in self.tables:
            self.tables[x.device] = torch.ones(WIDTH, WIDTH, device=x.device)
        return x @ self.tables[x.device]


def mean_square(output):
    return output.square().mean()


def planned(loss_fn=mean_square, *, model=None, optimizer=torch.optim.AdamW, rows=ROWS):
    model = Model() if model is None else model
    profile = autosac.profile(
        model,
        torch.ones(rows, WIDTH),
        loss_fn=loss_fn,
        optimizer=optimizer,
    )
    budget = (autosac.floor(profile) + profile.baseline_peak_bytes) // 2
    plan = autosac.plan(profile, memory_budget=budget)
    return plan, plan.apply(model)


def steps(model, num_steps, after=lambda: None, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        mean_square(model(torch.ones(ROWS, WIDTH))).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def copies(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def said_bytes(caught):
    """Bytes that the only warning speaks of, by its text in MiB."""
    (warning,) = [w for w in caught if re.search(SAID, str(w.message))]
    return float(re.search(r"\((\d+\.\d) MiB", str(warning.message))[1]) * 2**20


@pytest.mark.parametrize(
    "held",
    [
        copies,
        AveragedModel,
        lambda _: Model(),
        lambda model: [model.layers[0](torch.ones(2048, WIDTH)) for _ in range(1)],
        lambda _: torch.ones(4, WIDTH + 1, WIDTH),
    ],
    ids=["copies", "average", "teacher", "graph", "others"],
)
def test_what_a_loop_holds_is_said_once_with_its_size(held):
    _, model = planned()
    kept = held(model)
    with pytest.warns(UserWarning, match=SAID) as caught:
        steps(model, 2)

    assert said_bytes(caught) == pytest.approx(WEIGHTS, rel=0.01)
    steps(model, 5)  # warnings fail tests
    assert kept is not None


def test_weights_that_sharpness_aware_steps_keep_are_said():
    _, model = planned()
    optimizer = torch.optim.AdamW(model.parameters())
    mean_square(model(torch.ones(ROWS, WIDTH))).backward()
    before = copies(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += parameter.grad
    optimizer.zero_grad()
    mean_square(model(torch.ones(ROWS, WIDTH))).backward()
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), before, strict=True):
            parameter.copy_(weight)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match=SAID) as caught:
        model(torch.ones(ROWS, WIDTH))

    assert said_bytes(caught) == pytest.approx(WEIGHTS, rel=0.01)


def test_what_a_loop_gathers_in_every_step_is_said():
    _, model = planned()
    kept = []

    def gather():
        kept.append(torch.ones(ROWS + 1, WIDTH + 1))

    with pytest.warns(UserWarning, match=SAID):
        steps(model, 3, gather)


def test_what_was_there_before_the_plan_is_not_held_against_it():
    average = AveragedModel(Model())
    _, model = planned()
    steps(model, 5)  # warnings fail tests
    assert average.module.layers


def test_batches_targets_states_tables_and_arrays_are_not_said():
    target = torch.ones(ROWS, WIDTH)
    _, model = planned(lambda output: (output - target).square().mean())
    data = [(torch.rand(ROWS, WIDTH), torch.rand(ROWS, WIDTH)) for _ in range(20)]
    everything = torch.rand(10 * ROWS, WIDTH)
    array = torch.from_numpy(torch.ones(2**21).numpy().copy())
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs, target in data[:6]:
        (model(inputs) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(everything) and len(array)  # and no warning, which fails tests


class Joined(torch.optim.Optimizer):
    """Two optimizers that step together."""

    def __init__(self, parameters):
        half = len(parameters) // 2
        self.parts = [
            torch.optim.AdamW(part) for part in (parameters[:half], parameters[half:])
        ]
        super().__init__(parameters, {})

    def step(self, closure=None):
        for part in self.parts:
            part.step()


class InAttributes(torch.optim.Optimizer):
    """Momentum in an attribute of its own, or in attributes of parameters."""

    def __init__(self, parameters, *, on_parameters=False):
        super().__init__(parameters, {})
        self.on_parameters, self.momentum = on_parameters, {}

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            momentum = torch.zeros_like(parameter) + parameter.grad
            if self.on_parameters:
                parameter.momentum = momentum
            else:
                self.momentum[parameter] = momentum


def with_average(parameters):
    optimizer, average = torch.optim.SGD(parameters), {}

    def keep(*_):
        average.update({p: p.detach().clone() for p in parameters})

    optimizer.register_step_post_hook(keep)
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        Joined,
        InAttributes,
        lambda parameters: InAttributes(parameters, on_parameters=True),
        with_average,
    ],
    ids=["joined", "attributes", "attributes of parameters", "hook"],
)
def test_what_a_planned_optimizer_keeps_in_any_place_is_not_said(make):
    model = Model()
    optimizer = make(list(model.parameters()))
    _, model = planned(model=model, optimizer=optimizer)

    steps(model, 5, optimizer=optimizer)  # warnings fail tests


def test_targets_of_other_shapes_that_the_plan_counts_are_not_said():
    def make_target():
        return torch.rand(ROWS * WIDTH // 8, 8)

    target = make_target()
    _, model = planned(lambda output: (output.view(-1, 8) - target).square().mean())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        fresh = make_target()
        output = model(torch.ones(ROWS, WIDTH))
        (output.view(-1, 8) - fresh).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_targets_of_the_shape_of_a_weight_are_not_said():
    target = torch.ones(WIDTH, WIDTH)
    _, model = planned(lambda output: (output - target).square().mean(), rows=WIDTH)
    data = [torch.rand(WIDTH, WIDTH) for _ in range(8)]
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs in data:
        (model(inputs) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class ComparesItself(type):
    """Whose classes have no hash."""

    def __eq__(cls, other):
        return cls is other

    __hash__ = None


class WithoutHash(metaclass=ComparesItself):
    """Only there to be found."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.LazyLinear(3),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        WithoutHash,
    ],
    ids=["lazy", "nested", "no hash"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strange_objects_elsewhere_do_no_harm(make):
    strange = [make()]
    _, model = planned()
    strange.append(make())

    steps(model, 3)
    assert len(strange) == 2


def test_what_is_let_go_before_the_next_step_is_not_said():
    _, model = planned()

    steps(model, 5, lambda: copies(model))  # warnings fail tests


def test_nothing_is_looked_for_once_the_plan_is_off():
    plan, model = planned()
    plan.unapply(model)
    kept = copies(model)

    steps(model, 2)  # warnings fail tests
    assert kept
