import pytest

from autosac.solving.annealing import anneal
from autosac.solving.incumbents import recompute_ms
from tests.models import gpt_on_a_gpu


@pytest.mark.slow
def test_a_dear_choice_leads_to_a_cheaper_one_that_fits_and_always_to_the_same(
    monkeypatch, kept_workspaces
):
    profile = gpt_on_a_gpu()
    monkeypatch.setattr("autosac.solving.annealing._MOST_PIECES", 200_000)
    dear = profile.rules.every_kth_block(1)
    budget_bytes = profile.peak_bytes(dear)

    cheaper = anneal(profile.simulator, profile.formulation, dear, dear, budget_bytes)

    assert profile.peak_bytes(cheaper) <= budget_bytes
    assert recompute_ms(cheaper) < 0.9 * recompute_ms(dear)
    again = anneal(profile.simulator, profile.formulation, dear, dear, budget_bytes)
    assert again == cheaper

    # From one that breaks the budget it comes back to what keeps it.
    breaking = profile.rules.every_kth_block(2)
    assert profile.peak_bytes(breaking) > budget_bytes
    mended = anneal(
        profile.simulator, profile.formulation, dear, breaking, budget_bytes
    )
    assert profile.peak_bytes(mended) <= budget_bytes
    assert recompute_ms(mended) < recompute_ms(dear)
