"""What a GPU's allocator reaches above the budget is said of the steps that did it."""

import gc
import warnings

import pytest
import torch
from torch import nn

import autosac
from autosac import _compat_gpu
from autosac.checkpointing.reached_memory import ReachedMemory

MIB = 2**20
GPU = torch.device("cuda", 0)
SAID = "A step has reached .* and its budget is 100.0 MiB"


class Allocator:
    """Stands in for a GPU's: what is there now, and the most so far, in MiB."""

    def __init__(self):
        self.now = self.most = 0

    def __call__(self, device):
        assert device == GPU
        return self.now * MIB, self.most * MIB


@pytest.fixture
def allocator(monkeypatch):
    allocator = Allocator()
    monkeypatch.setattr(_compat_gpu, "allocated_bytes", allocator)
    yield allocator
    for one in list(ReachedMemory._all):
        one.close()


class Forward:
    """Stands in for the forward of a model whose plan has a budget of 100 MiB."""

    budget_bytes = 100 * MIB

    def __init__(self):
        self.module = nn.Linear(2, 2)
        self.module.forward = self
        self.memory = ReachedMemory(self, GPU)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)

    def step(self, allocator, most):
        self.memory.begin()
        allocator.most = max(allocator.most, most)
        self.optimizer.step()


def said(forward, allocator, peaks):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for most in peaks:
            forward.step(allocator, most)
    return [str(warning.message) for warning in caught]


def test_a_step_above_the_budget_is_said_once(allocator):
    (message,) = said(Forward(), allocator, [90, 110, 120])
    assert message.startswith("A step has reached 110.0 MiB of memory on `cuda:0`, and")
    assert "its budget is 100.0 MiB" in message


@pytest.mark.parametrize("peaks", [[90, 100], [90, 101], [90] * 4 + [120]])
def test_steps_within_the_budget_and_later_ones_are_not_said(allocator, peaks):
    assert said(Forward(), allocator, peaks) == []


def test_an_earlier_peak_is_not_the_plans(allocator):
    allocator.most = 500  # as of steps without a plan
    assert said(Forward(), allocator, [120, 130]) == []


def test_a_peak_between_steps_is_not_the_steps(allocator):
    forward = Forward()
    assert said(forward, allocator, [90]) == []
    allocator.most = 500  # as of an evaluation
    assert said(forward, allocator, [130]) == []


def test_what_was_there_before_the_plan_is_not_held_against_it(allocator):
    allocator.now = 30  # as of a teacher
    forward = Forward()
    assert said(forward, allocator, [130]) == []
    (message,) = said(forward, allocator, [140])
    assert "30.0 MiB of it from before the plan" in message


def test_several_planned_models_are_not_told_apart(allocator):
    forward, other = Forward(), Forward()
    assert said(forward, allocator, [110]) == []
    del other
    gc.collect()
    assert len(said(forward, allocator, [120])) == 1


def test_steps_of_optimizers_of_other_models_tell_nothing(allocator):
    forward, other = Forward(), nn.Linear(2, 2)
    forward.optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    assert said(forward, allocator, [110]) == []


def test_a_batch_that_no_plan_is_for_tells_nothing(allocator):
    forward = Forward()
    forward.budget_bytes = None
    assert said(forward, allocator, [110]) == []


def test_no_gpu_is_asked_where_the_model_is_on_the_cpu(allocator):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    plan = autosac.plan(model, torch.randn(2, 4), memory_budget="1GiB")
    plan.apply(model)
    assert not isinstance(model.forward.memory, ReachedMemory)
    assert ReachedMemory._all == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_copies", [0, 1])
def test_a_copy_of_the_weights_on_a_gpu_is_said(num_copies):
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.randn(64, 2048, device="cuda")
    profile = autosac.profile(
        model, rows, optimizer=optimizer, loss_fn=torch.sum, device="cuda"
    )
    plan = autosac.plan(profile, memory_budget=profile.baseline_peak_bytes)
    torch.cuda.reset_peak_memory_stats()
    plan.apply(model)
    copies = [[p.detach().clone() for p in model.parameters()]] * num_copies
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(rows).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    said = [str(w.message) for w in caught if "A step has reached" in str(w.message)]
    assert len(said) == len(copies)
