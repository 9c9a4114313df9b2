"""The same step has the same trace, wherever its tensors lie."""

import random

import pytest
import torch
from torch import nn

import autosac
from autosac.tracing.account import Account
from tests.models import CASES

pytestmark = pytest.mark.usefixtures("one_thread")


def traced(name, in_the_way=0):
    """A step under autocast, whose tensors lie in between others and holes."""
    rng = random.Random(in_the_way)
    others = [nn.Linear(rng.randint(1, 9), 4) for _ in range(in_the_way)]
    rng.shuffle(others)
    del others[::2]
    case = CASES[name]
    return autosac.profile(
        case.model(), case.inputs(), loss_fn=torch.sum, optimizer="sgd", autocast="bf16"
    )


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["gpt", "convolutions", "mlp"])
def test_a_step_under_autocast_has_one_trace_wherever_its_tensors_lie(name):
    # Autocast drops its copies of the weights in the order of their addresses.
    tapes = [traced(name, in_the_way).tape for in_the_way in (0, 10, 100, 200)]

    assert tapes[0] == tapes[1] == tapes[2] == tapes[3]


@pytest.mark.slow
def test_it_has_one_plan():
    plans = []
    for in_the_way in (0, 100):
        step_profile = traced("gpt", in_the_way)
        floor, highest = autosac.floor(step_profile), step_profile.baseline_peak_bytes
        plans.append(autosac.plan(step_profile, memory_budget=(floor + highest) // 2))

    assert plans[0] == plans[1]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_its_predicted_peak_is_the_real_one(share):
    case, built = CASES["gpt"], autosac.calibrate(traced("gpt"))
    floor, highest = autosac.floor(built), built.baseline_peak_bytes
    plan = autosac.plan(built, memory_budget=int(floor + share * (highest - floor)))

    verification = autosac.verify(
        plan,
        case.model,
        case.inputs,
        loss_fn=torch.sum,
        make_optimizer="sgd",
        autocast="bf16",
    )

    assert verification.measured_peak_bytes == plan.peak_bytes


def deaths(events):
    """Ticks at which five tensors die in an order; None is an event in between."""
    account = Account("cpu", 1)
    tensors = [torch.empty(n + 1) for n in range(5)]
    account.register(iter(tensors), "activation")
    account.tick()  # 1
    for number in events:
        if number is None:
            account.tick()
        else:
            tensors[number] = None
    account.tick()
    return account.deaths()


def test_deaths_with_nothing_in_between_come_in_the_order_of_births():
    # Tick 2, 3: first 3, then 1 died. Tick 5 to 7: 4, 0, 2. Nothing moves over tick 4.
    assert deaths([3, 1, None, 4, 0, 2]) == [5, 2, 6, 3, 7]


def test_what_does_not_die_has_the_last_tick():
    assert deaths([4, None, 2]) == [5, 5, 4, 5, 2]


def fused(x, bias):
    x = x + bias
    return x * 0.5 * (1.0 + torch.tanh(0.8 * x * (1.0 + 0.04 * x * x)))


class CallsScript(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16)
        self.bias = nn.Parameter(torch.zeros(64))
        self.function = function

    def forward(self, x):
        return self.down(self.function(self.up(x), self.bias))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_functions_of_torchscript_are_traced_as_they_run_once_they_are_compiled():
    call = torch._C.ScriptFunction.__call__
    function = torch.jit.script(fused)
    model = nn.Sequential(*(CallsScript(function) for _ in range(3)))
    step = {"loss_fn": lambda output: output.square().mean(), "optimizer": "sgd"}
    first = autosac.profile(model, torch.ones(32, 16), **step)
    later = autosac.profile(model, torch.ones(32, 16), **step)

    assert first.tape.storages == later.tape.storages
    first = autosac.calibrate(first, progress=False)
    budget = autosac.floor(first)
    plan = autosac.plan(first, memory_budget=budget)
    done = autosac.verify(
        plan,
        lambda: nn.Sequential(*(CallsScript(function) for _ in range(3))),
        lambda: torch.ones(32, 16),
        loss_fn=step["loss_fn"],
        make_optimizer=lambda model: torch.optim.SGD(model.parameters()),
        timing_rounds=0,
    )
    assert done.identical
    assert done.measured_peak_bytes <= budget
    assert torch._C.ScriptFunction.__call__ is call
