from dataclasses import dataclass, replace

import pytest
import torch

from autosac.checkpointing import installing
from autosac.planning.spelling import spell_out
from autosac.profiles.profile import calibrate, profile
from autosac.simulation.simulator import Simulator
from autosac.tracing.trace import dry_run
from autosac.units.policies import SAVE, OpPolicy, Policy
from autosac.verification.verifying import verify
from tests.models import CASES, each_case, random_choice

NUM_PLANS = 5


@pytest.mark.slow_but_first
@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW], ids=["none", "adamw"])
@each_case
def test_a_simulated_peak_is_the_dry_runs_byte_for_byte(case, optimizer):
    made = case.profile(optimizer)
    shares = {0: 0.0, 1: 1.0}  # the extremes, then anything between
    for seed in range(NUM_PLANS):
        chosen = random_choice(made, seed, save_share=shares.get(seed))
        policies = spell_out(made, chosen)

        dry = dry_run(made.step, lambda model, p=policies: installing.install(model, p))

        expected = Simulator(dry).baseline.peak_bytes
        assert made.simulator.peak_bytes(chosen, workspaces=False) == expected, chosen


class LateNoise(torch.nn.Module):
    """Draws numbers after the last op whose result backward reads."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.linear(x)) + torch.rand_like(x)


@dataclass(frozen=True)
class Installed:
    """Op policies as `verify` takes a plan."""

    policies: tuple[OpPolicy, ...]
    peak_bytes: int
    budget_bytes: int = 2**40

    def apply(self, model):
        installing.install(model, self.policies)


def test_random_ops_that_no_rerun_reaches_keep_a_random_state_too():
    def make_model():
        return torch.nn.Sequential(LateNoise(), LateNoise())

    def make_inputs():
        return torch.randn(4, 8)

    made = calibrate(profile(make_model(), make_inputs()))
    chosen = {unit: Policy(SAVE * len(unit.groups)) for unit in made.candidates[:1]}
    simulated = made.simulator.peak_bytes(chosen)
    plan = Installed(spell_out(made, chosen), simulated)

    found = verify(plan, make_model, make_inputs, timing_rounds=1)

    assert found.measured_peak_bytes == simulated > made.simulator.peak_bytes({})


def test_what_libraries_keep_is_alive_all_the_time():
    made = CASES["gpt"].profile()
    tape = replace(made.tape, library_bytes=(1024, 512))
    plain, chosen = made.simulator, random_choice(made, 0)

    found = Simulator(tape)

    assert found.peak_bytes(chosen) == plain.peak_bytes(chosen) + 1536
    assert found.peak_bytes(chosen, workspaces=False) == plain.peak_bytes(
        chosen, workspaces=False
    )
    assert sum(found.composition(chosen).values()) == found.peak_bytes(chosen)
    pairs = zip(
        found.allocator_peaks(chosen), plain.allocator_peaks(chosen), strict=True
    )
    assert all(with_libraries >= without for with_libraries, without in pairs)


@each_case
def test_random_plans_hold_units(case):
    made = case.profile()

    assert any(random_choice(made, seed) for seed in range(NUM_PLANS))
