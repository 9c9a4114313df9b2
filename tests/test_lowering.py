import pytest
import torch

import autosac
from autosac.solving.incumbents import recompute_ms
from autosac.solving.lowering import lower_peak
from tests.models import GPT


@pytest.mark.usefixtures("kept_workspaces")
def test_what_an_allocator_adds_is_lowered_in_no_more_than_a_time_and_always_alike():
    with torch.device("meta"):
        model = GPT(num_layers=2, width=256, num_heads=4, vocabulary=500, length=300)
    profile = autosac.profile(
        model,
        torch.zeros(3, 300, dtype=torch.long),
        loss_fn=lambda logits: logits.square().mean(),
        device="h100",
        autocast=torch.bfloat16,
    )
    simulator, formulation = profile.simulator, profile.formulation
    choice = profile.rules.every_kth_block(2)
    most_ms = 1.5 * recompute_ms(choice)

    lower = lower_peak(simulator, formulation, choice, most_ms)

    assert profile.peak_bytes(lower) < profile.peak_bytes(choice)
    assert recompute_ms(lower) <= most_ms * (1.0 + 1e-9)
    assert lower_peak(simulator, formulation, choice, most_ms) == lower
