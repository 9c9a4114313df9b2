"""MILPs whose optimum, as a backend says it, breaks a row."""

import pytest
import torch

import autosac
from autosac.solvers.sac import rows


def profiled():
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(
            torch.nn.Linear(16, 16 + 8 * number),
            torch.nn.GELU(),
            torch.nn.Linear(16 + 8 * number, 16),
            torch.nn.Tanh(),
        )
        for number in range(8)
    ]
    inputs = torch.ones(64, 16)
    return autosac.profile(torch.nn.Sequential(*blocks), inputs, loss_fn=torch.sum)


@pytest.mark.parametrize("relaxed", [False, True], ids=["MILPs", "relaxations"])
def test_a_plan_is_made_nevertheless(relaxed, monkeypatch):
    profile = profiled()
    floor = autosac.floor(profile)
    budget = (floor + profile.baseline_peak_bytes) // 2
    run = rows.pulp_runner.run
    broken = []

    def breaks(model, **options):
        if options["relaxed"] is relaxed:
            broken.append(model.name)
            raise ArithmeticError("breaks a row")
        return run(model, **options)

    monkeypatch.setattr(rows.pulp_runner, "run", breaks)
    plan = autosac.plan(profiled(), memory_budget=budget)

    assert plan.peak_bytes <= budget
    assert plan.op_policies
    assert broken
