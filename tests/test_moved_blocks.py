"""Choices with offload that are found without the MILP, and the hints made of them."""

import pytest
import torch
from torch import nn

import autosac
from autosac.errors import InfeasibleBudgetError
from autosac.planning import choices, offload_advice
from autosac.profiles.restricting import restricted
from autosac.quantities import format_ms
from autosac.solving.incumbents import recompute_ms
from autosac.units.far_units import FarUnit

WIDTH, ROWS, DEPTH = 2048, 16384, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()
        )
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.layers(x))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def step():
    with torch.device("meta"):
        return autosac.profile(Stack(), torch.randn(ROWS, WIDTH), device="h100")


@pytest.fixture(scope="module")
def budgets(step):
    low, floor = autosac.floor(step, offload=True), autosac.floor(step)
    assert low < floor
    above = [floor + (step.baseline_peak_bytes - floor) * i // 8 for i in range(8)]
    return [low, (low + floor) // 2, *above]


@pytest.mark.slow
def test_choices_fit_are_never_dearer_with_more_memory_and_no_plan_is_dearer(
    step, budgets
):
    blocks = restricted(step, offload=True).moved_blocks
    low = step.peak_bytes(blocks.lowest(step.chooser.lowest()))
    budgets = [low, *(budget for budget in budgets if budget > low)]
    assert len(budgets) > 2
    times = []
    for budget in budgets:
        choice = blocks.cheapest(budget)
        assert step.peak_bytes(choice) <= budget
        times.append(recompute_ms(choice))
        plan = autosac.plan(step, memory_budget=budget, offload=True)
        assert plan.recompute_ms <= times[-1]

    assert times == sorted(times, reverse=True)
    assert any(isinstance(unit, FarUnit) for unit in blocks.cheapest(budgets[0]))
    assert recompute_ms(blocks.cheapest(step.baseline_peak_bytes)) == 0.0
    assert blocks.cheapest(budgets[0] // 2) is None


@pytest.mark.slow
def test_a_plan_for_a_gpu_says_what_offload_would_take(step, budgets):
    floor = budgets[2]
    plan = autosac.plan(step, memory_budget=floor)
    choice = restricted(step, offload=True).moved_blocks.cheapest(floor)

    told = f"`offload`=True takes {format_ms(recompute_ms(choice))} of recomputation"
    assert told in str(plan)
    assert recompute_ms(choice) < plan.recompute_ms
    offloading = autosac.plan(step, memory_budget=floor, offload=True)
    assert "`offload`=True" not in str(offloading)
    ample = autosac.plan(step, memory_budget=step.baseline_peak_bytes)
    assert "`offload`=True" not in str(ample)


def test_an_infeasible_budget_says_whether_offload_makes_it_feasible(step, budgets):
    low = budgets[0]
    with pytest.raises(InfeasibleBudgetError, match="`offload`=True fits"):
        autosac.plan(step, memory_budget=low)
    assert autosac.plan(step, memory_budget=low, offload=True).offloaded_bytes
    with pytest.raises(InfeasibleBudgetError, match=f"=True lowers that to {low} "):
        autosac.plan(step, memory_budget=low - 1)
    with pytest.raises(InfeasibleBudgetError) as error:
        autosac.plan(step, memory_budget=low - 1, offload=True)
    assert "`offload`=True" not in str(error.value)


def test_nothing_is_said_where_offload_lowers_nothing(step):
    lowest = choices.lowest(restricted(step, offload=True))

    assert offload_advice.of_infeasible(step, lowest, step.peak_bytes(lowest) - 1) == ""
