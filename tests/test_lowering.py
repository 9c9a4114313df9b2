import pytest
import torch

import autosac
from autosac.simulation.simulator import Simulator
from autosac.solving.incumbents import recompute_ms
from autosac.solving.lowering import lower_peak
from tests.models import gpt, gpt_on_a_gpu


@pytest.mark.usefixtures("kept_workspaces")
def test_what_an_allocator_adds_is_lowered_in_no_more_than_a_time_and_always_alike():
    profile = gpt_on_a_gpu()
    simulator, formulation = profile.simulator, profile.formulation
    choice = profile.rules.every_kth_block(2)
    most_ms = 1.5 * recompute_ms(choice)

    lower = lower_peak(simulator, formulation, choice, most_ms)

    assert profile.peak_bytes(lower) < profile.peak_bytes(choice)
    assert recompute_ms(lower) <= most_ms * (1.0 + 1e-9)
    assert lower_peak(simulator, formulation, choice, most_ms) == lower


@pytest.mark.usefixtures("kept_workspaces")
def test_a_search_for_a_peak_that_is_low_enough_ends_there(monkeypatch):
    profile = gpt_on_a_gpu()
    simulator, formulation = profile.simulator, profile.formulation
    choice = profile.rules.every_kth_block(2)
    most_ms = 1.5 * recompute_ms(choice)
    looked_at = []
    true_peak_bytes = simulator.true_peak_bytes
    monkeypatch.setattr(
        simulator,
        "true_peak_bytes",
        lambda other: looked_at.append(other) or true_peak_bytes(other),
    )
    enough_bytes = profile.peak_bytes(choice) - 1
    looked_at.clear()

    lower = lower_peak(simulator, formulation, choice, most_ms, enough_bytes)

    assert true_peak_bytes(lower) <= enough_bytes
    assert looked_at[-1] == lower  # nothing after it
    assert all(true_peak_bytes(other) > enough_bytes for other in looked_at[:-2])
    assert lower_peak(simulator, formulation, choice, most_ms, 2**60) == choice


@pytest.mark.usefixtures("kept_workspaces")
def test_a_floor_with_few_choices_near_it_is_found_in_few_simulations(monkeypatch):
    # Nearly all of them are known after some replays.
    torch.manual_seed(0)
    tokens = torch.randint(32, (6, 8))
    profile = autosac.profile(gpt(), tokens, loss_fn=torch.mean, device="h100")
    peak_bytes, simulated = Simulator.peak_bytes, []

    def counted(simulator, chosen):
        simulated.append(chosen)
        return peak_bytes(simulator, chosen)

    monkeypatch.setattr(Simulator, "peak_bytes", counted)

    autosac.floor(profile)

    assert len(simulated) < 10_000
