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
from tests.models import CASES, each_case, random_choice, shared_profile

NUM_PLANS = 4


@pytest.mark.slow_but_first
@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW], ids=["none", "adamw"])
@each_case
def test_a_simulated_peak_is_the_dry_runs_byte_for_byte(case, optimizer):
    traced = shared_profile(case, optimizer)
    shares = {0: 0.0, 1: 1.0}  # the extremes, then anything between
    num_plans = NUM_PLANS if optimizer is None else len(shares)  # it comes after all
    for seed in range(num_plans):
        chosen = random_choice(traced, seed, save_share=shares.get(seed))
        policies = spell_out(traced, chosen)

        dry = dry_run(
            traced.step, lambda model, p=policies: installing.install(model, p)
        )

        expected = Simulator(dry).baseline.peak_bytes
        assert traced.simulator.peak_bytes(chosen, workspaces=False) == expected, chosen


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

    traced = calibrate(profile(make_model(), make_inputs()))
    chosen = {unit: Policy(SAVE * len(unit.groups)) for unit in traced.candidates[:1]}
    simulated = traced.simulator.peak_bytes(chosen)
    plan = Installed(spell_out(traced, chosen), simulated)

    verification = verify(plan, make_model, make_inputs, timing_rounds=0)

    assert (
        verification.measured_peak_bytes == simulated > traced.simulator.peak_bytes({})
    )


def test_what_libraries_keep_is_alive_all_the_time():
    traced = CASES["gpt"].profile()
    tape = replace(traced.tape, library_bytes=(1024, 512))
    plain, chosen = traced.simulator, random_choice(traced, 0)

    simulator = Simulator(tape)

    assert simulator.peak_bytes(chosen) == plain.peak_bytes(chosen) + 1536
    assert simulator.peak_bytes(chosen, workspaces=False) == plain.peak_bytes(
        chosen, workspaces=False
    )
    assert sum(simulator.composition(chosen).values()) == simulator.peak_bytes(chosen)
    for cap in ("allocated", "reserved"):
        least = plain.allocator_peak_bytes(chosen, cap)
        assert simulator.allocator_peak_bytes(chosen, cap) >= least


@pytest.mark.slow_but_fifth
@each_case
def test_random_plans_hold_units(case):
    traced = shared_profile(case)

    assert any(random_choice(traced, seed) for seed in range(NUM_PLANS))
