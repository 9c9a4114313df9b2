from dataclasses import replace

import pytest
import torch

from autosac.applying import applying
from autosac.planning.planning import spell_out
from autosac.simulation.simulating import Simulator
from autosac.tracing.tracing import dry_run
from tests.models import CASES, each_case, random_choice

NUM_PLANS = 5


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW], ids=["none", "adamw"])
@each_case
def test_a_simulated_peak_is_the_dry_runs_byte_for_byte(case, optimizer):
    made = case.profile(optimizer)
    shares = {0: 0.0, 1: 1.0}  # the extremes, then anything between
    for seed in range(NUM_PLANS):
        chosen = random_choice(made, seed, save_share=shares.get(seed))
        policies = spell_out(made, chosen)

        dry = dry_run(made.step, lambda model, p=policies: applying.install(model, p))

        expected = Simulator(dry).baseline.peak_bytes
        assert made.simulator.peak_bytes(chosen, workspaces=False) == expected, chosen


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
