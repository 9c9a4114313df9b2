"""Budgets that cap what PyTorch's allocator reserves."""

import pytest
import torch

import autosac
from autosac.devices.allocator_settings import AllocatorSettings
from autosac.errors import ArgumentError, InfeasibleBudgetError, UnsupportedError
from autosac.planning import allocator_advice
from tests.models import CASES


@pytest.fixture(scope="module")
def traced():
    return _language()


def _language(**options):
    """A language model whose parts are larger than what the allocator rounds."""
    torch.manual_seed(0)
    with torch.device("meta"):
        layer = torch.nn.TransformerEncoderLayer(
            512, 8, 2048, batch_first=True, dropout=0.1
        )
        blocks = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        head = torch.nn.Linear(512, 8000)
        model = torch.nn.Sequential(blocks, head)
    batch = torch.empty(8, 256, 512, device="meta")
    return autosac.profile(
        model,
        batch,
        loss_fn=lambda out: out.float().logsumexp(-1).mean(),
        optimizer="adamw",
        device="h100",
        **options,
    )


@pytest.mark.slowest_but_first
@pytest.mark.parametrize("share", [0.5, 0.0])
def test_a_reserved_cap_is_kept_by_what_is_reserved(traced, share):
    least = autosac.floor(traced, cap="reserved")
    most = traced.simulator.allocator_peak_bytes({}, "reserved")
    assert least < most
    budget = int(least + share * (most - least))

    plan = autosac.plan(traced, memory_budget=budget, cap="reserved")

    assert plan.cap == "reserved"
    assert plan.peak_bytes == plan.reserved_bytes <= budget
    assert sum(plan.composition.values()) == plan.peak_bytes
    fresh = _language()  # nothing is known of it from before
    assert autosac.check(plan, fresh) == plan.peak_bytes


def test_the_same_budget_of_what_is_handed_out_may_reserve_more(traced):
    most = traced.simulator.allocator_peak_bytes({}, "reserved")
    budget = traced.baseline_peak_bytes - 1

    plan = autosac.plan(traced, memory_budget=budget)

    assert plan.cap == "allocated"
    assert plan.peak_bytes <= budget < plan.reserved_bytes <= most


@pytest.mark.slowest
def test_what_no_plan_can_reserve_is_refused_with_the_least_that_one_can(traced):
    least = autosac.floor(traced, cap="reserved")
    assert least > autosac.floor(traced)

    with pytest.raises(InfeasibleBudgetError) as caught:
        autosac.plan(traced, memory_budget=least - 1, cap="reserved")

    assert caught.value.lowest_peak_bytes == least


@pytest.mark.slowest
def test_more_to_reserve_never_costs_more(traced):
    rows = autosac.sweep(traced, n=4, cap="reserved").rows

    times = [row.recompute_ms for row in rows]
    assert times == sorted(times, reverse=True)
    assert times[-1] == 0.0
    assert all(row.plan.reserved_bytes <= row.budget_bytes for row in rows)


@pytest.mark.slow
def test_what_is_capped_is_printed_and_kept_in_files(traced, tmp_path):
    budget = autosac.floor(traced, cap="reserved")
    plan = autosac.plan(traced, memory_budget=budget, cap="reserved")
    plan.save(tmp_path / "plan.json")

    loaded = autosac.Plan.load(tmp_path / "plan.json")

    assert loaded == plan
    assert "of what PyTorch reserves" in str(plan)
    with pytest.raises(UnsupportedError, match="'allocated'"):
        autosac.verify(plan, torch.nn.Identity, tuple)


def test_both_caps_are_one_on_the_cpu():
    step = CASES["gpt"].profile()

    capped = autosac.plan(step, memory_budget=autosac.floor(step), cap="reserved")

    assert capped == autosac.plan(step, memory_budget=autosac.floor(step))


def test_a_cap_of_another_name_is_refused(traced):
    with pytest.raises(ArgumentError, match="'active' must be"):
        autosac.plan(traced, memory_budget="1GiB", cap="active")
    with pytest.raises(ArgumentError, match="'active' must be"):
        autosac.sweep(traced, n=3, cap="active")


@pytest.mark.slow
def test_advice_says_what_a_simulation_of_it_shows(traced):
    plan = autosac.plan(traced, memory_budget="80GB")

    saved = allocator_advice.savings(plan)

    settings = {
        "state_is_loaded": "optimizer's state before",
        "expandable_segments": "expandable_segments",
    }
    for name, words in settings.items():
        other = _language(allocator=AllocatorSettings(**{name: True}))
        less = plan.reserved_bytes - other.simulator.allocator_peak_bytes(
            {}, "reserved"
        )
        told = [n for way, n in saved.items() if words in way]
        assert told == ([less] if less >= 0.01 * plan.reserved_bytes else [])
    assert saved
    assert "less reserved" in str(plan)
