import inspect

import pytest
import torch
from torch.distributed._tools.sac_estimator import SACEstimator

import autosac
from autosac.cli.demo import GPT, Block, next_token_loss
from autosac.planning import dry_running
from autosac.units.curves import recompute_ms
from autosac.units.policies import RERUN, SAVE
from autosac.verification.recipes import Recipe
from autosac.verification.verifying import verify_each
from benchmarks import rivals
from benchmarks.comparing import zoo
from benchmarks.rivals import sac_milp
from benchmarks.rivals.blocks import find_blocks, unit_curves
from benchmarks.rivals.greedy import greedy_path
from benchmarks.rivals.settings import as_plan, priced
from tests.models import ConvNet

NUM_LAYERS = 5
needs_datasheets = pytest.mark.skipif(
    "gpu_type" not in inspect.signature(SACEstimator).parameters,
    reason="PyTorch's estimators need a GPU before they know datasheets (torch 2.15)",
)


def make_model():
    torch.manual_seed(0)
    return GPT(num_layers=NUM_LAYERS, width=32, num_heads=2, vocabulary=64, length=32)


def make_tokens():
    return torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def step_profile():
    return autosac.profile(
        make_model(), make_tokens(), loss_fn=next_token_loss(make_tokens())
    )


@pytest.fixture(scope="module")
def every_rival(step_profile):
    return {rival.name: rival for rival in rivals.rivals(step_profile)}


def total_ms(choice):
    return sum(recompute_ms(unit, policy) for unit, policy in choice.items())


def test_blocks_are_found_without_being_named(step_profile):
    fqns = [unit.fqn for unit in find_blocks(step_profile)]

    assert fqns == [f"blocks.{i}" for i in range(NUM_LAYERS)]


def test_stages_of_blocks_are_no_blocks():
    traced = autosac.profile(ConvNet(), torch.randn(2, 3, 12, 12))

    fqns = [unit.fqn for unit in find_blocks(traced)]

    assert fqns == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "name",
    [
        "no checkpointing",
        "every block",
        "every k-th block",
        "Megatron selective",
        "save matmuls",
        "greedy",
        "uniform ratio",
    ],
)
def test_the_simulated_peak_of_a_rival_is_that_of_its_dry_run(
    step_profile, every_rival, name
):
    settings = every_rival[name].settings
    lowest = min(settings, key=lambda setting: setting.peak_bytes)

    for setting in {settings[-1], lowest}:
        # Raises if they differ by a byte.
        assert not dry_running.difference_in_dry_run(step_profile, setting.choice)


def test_every_rival_has_settings_for_a_transformer(every_rival):
    assert [r.name for r in every_rival.values() if not r.settings] == []


def test_without_attention_megatron_does_not_apply():
    traced = autosac.profile(ConvNet(), torch.randn(2, 3, 12, 12))

    observed = {rival.name: rival for rival in rivals.rivals(traced)}

    assert observed["Megatron selective"].at(2**60) is None
    assert "does not apply" in observed["Megatron selective"].note


def test_every_kth_block_recomputes_less_and_needs_more_as_k_grows(step_profile):
    choices = [rivals.every_kth_block(step_profile, k) for k in (1, 2, 3, 5)]

    assert [len(choice) for choice in choices] == [5, 3, 2, 1]
    times = [total_ms(choice) for choice in choices]
    peaks = [step_profile.peak_bytes(choice) for choice in choices]
    assert times == sorted(times, reverse=True) and times[0] > times[-1] > 0
    assert (
        peaks == sorted(peaks)
        and peaks[0] < peaks[-1] < step_profile.baseline_peak_bytes
    )


def test_every_block_keeps_nothing_of_its_own(step_profile):
    for policy in rivals.every_block(step_profile).values():
        assert SAVE not in policy.choices and RERUN in policy.choices


def rerun_names(step_profile, choice):
    return {
        step_profile.tape.ops[unit.ops[position]].name.split(".")[1]
        for unit, policy in choice.items()
        for group, made_again in zip(unit.groups, policy.choices, strict=True)
        if made_again == RERUN
        for position in group.ops
    }


def test_megatron_reruns_attention_and_nothing_else(step_profile):
    choice = rivals.megatron_selective(step_profile)

    assert [unit.fqn for unit in choice] == [
        f"blocks.{i}.attention" for i in range(NUM_LAYERS)
    ]
    (name,) = rerun_names(step_profile, choice)
    assert name.startswith("_scaled_dot_product_")


class PlainAttention(torch.nn.Module):
    """Attention spelled out, a mask added, and a softmax that is no attention."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.router = (
            torch.nn.Linear(8, 8) for _ in range(4)
        )

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1]).tril().log()
        scores = torch.bmm(self.query(x), self.key(x).mT) / 3.0 + mask
        mixed = torch.bmm(scores.softmax(-1).tanh(), self.value(x))
        return mixed * self.router(x).softmax(-1)


def test_megatron_finds_attention_that_is_spelled_out():
    model = torch.nn.Sequential(*(PlainAttention() for _ in range(2)))
    traced = autosac.profile(model, torch.randn(2, 6, 8))

    choice = rivals.megatron_selective(traced)

    # Everything from product to product, and not the router's softmax and matmul.
    assert len(choice) == 2
    for unit, policy in choice.items():
        names = rerun_names(traced, {unit: policy})
        assert {"bmm", "_softmax"} <= names
        assert not names & {"addmm", "linear", "mm"}
        (position,) = (
            g
            for g, group in enumerate(unit.groups)
            if traced.tape.ops[unit.ops[group.ops[0]]].name.startswith("aten._softmax")
            and g > max(i for i, c in enumerate(policy.choices) if c == RERUN)
        )
        assert policy.choices[position] == SAVE


def test_saving_matmuls_reruns_none_of_them(step_profile):
    every = rivals.save_matmuls(step_profile)
    half = rivals.save_matmuls(step_profile, every_second=True)

    assert not rerun_names(step_profile, every) & {"addmm", "mm"}
    assert "addmm" in rerun_names(step_profile, half)
    assert total_ms(half) > total_ms(every) > 0
    assert step_profile.peak_bytes(half) < step_profile.peak_bytes(every)


def test_greedy_fits_its_budget_or_says_that_it_does_not(step_profile, every_rival):
    least = every_rival["greedy"].least_bytes
    for share in (0.0, 0.5, 0.9):
        budget_bytes = int(least + share * (step_profile.baseline_peak_bytes - least))
        assert (
            step_profile.peak_bytes(rivals.greedy(step_profile, budget_bytes))
            <= budget_bytes
        )
    assert rivals.greedy(step_profile, least - 1) is None


def test_greedy_takes_the_most_bytes_per_millisecond_first(step_profile):
    path = iter(greedy_path(step_profile))
    assert next(path) == {}
    (first,) = next(path).items()

    rates = [
        freed / max(ms, 1e-9)
        for curve in unit_curves(step_profile).values()
        for freed, ms in zip(
            curve.points.freed_bytes, curve.points.recompute_ms, strict=True
        )
    ]
    unit, policy = first
    curve = unit_curves(step_profile)[unit]
    point = curve.policies.index(policy)
    rate = curve.points.freed_bytes[point] / max(curve.points.recompute_ms[point], 1e-9)
    assert rate == max(rates)


def test_a_uniform_ratio_is_reached_by_every_block(step_profile):
    for ratio in (0.1, 0.5, 1.0):
        choice = rivals.uniform_ratio(step_profile, ratio)
        assert len(choice) == NUM_LAYERS
        for unit, policy in choice.items():
            curve = unit_curves(step_profile)[unit]
            observed = curve.ratios[curve.policies.index(policy)]
            assert observed >= min(ratio, curve.ratios[-1])


def test_of_a_rival_with_settings_the_cheapest_that_fits_counts(every_rival):
    rival = every_rival["every k-th block"]
    by_peak = sorted(rival.settings, key=lambda setting: setting.peak_bytes)

    assert rival.at(by_peak[0].peak_bytes - 1) is None
    for place, setting in enumerate(by_peak):
        fitting = [s.recompute_ms for s in by_peak[: place + 1]]
        assert rival.at(setting.peak_bytes).recompute_ms == min(fitting)


@pytest.mark.slow
def test_our_plan_at_a_rivals_peak_is_never_dearer(step_profile, every_rival):
    compared = 0
    for rival in every_rival.values():
        lowest = min(rival.settings, key=lambda setting: setting.peak_bytes)
        for setting in {lowest, rival.settings[len(rival.settings) // 2]}:
            plan = autosac.plan(step_profile, memory_budget=setting.peak_bytes)
            assert not zoo.is_slower(plan.recompute_ms, setting.recompute_ms), rival
            compared += 1
    assert compared >= 10


@pytest.mark.slowest
@needs_datasheets
def test_pytorchs_chain_becomes_a_policy_that_does_what_it_chose(step_profile):
    chain = sac_milp.chain_of_step(
        make_model(), make_tokens(), next_token_loss(make_tokens())
    )
    plain = sac_milp.milp_choice(step_profile, chain, 2 * chain.baseline_bytes)
    tight = sac_milp.milp_choice(step_profile, chain, int(0.7 * chain.baseline_bytes))

    assert plain == {}
    assert tight
    assert sac_milp.milp_choice(step_profile, chain, 1) is None
    assert not dry_running.difference_in_dry_run(step_profile, tight)
    ratios, _ = chain.ratios(int(0.7 * chain.baseline_bytes))
    assert {f"model.{unit.fqn}" for unit in tight} == set(ratios)
    # What the chain saves is saved, op by op.
    for unit, policy in tight.items():
        fqn = f"model.{unit.fqn}"
        names, flags = chain.saved_ops(fqn, ratios[fqn])
        kept = {n for n, flag in zip(names, flags, strict=True) if flag}
        for group, choice in zip(unit.groups, policy.choices, strict=True):
            its = {
                step_profile.tape.ops[unit.ops[i]].name.split(".")[1] for i in group.ops
            }
            assert choice != SAVE or its & kept or group.unsavable


@pytest.mark.slow
@needs_datasheets
def test_pytorchs_chain_does_not_fail_on_modules_without_backward_and_second_calls():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = torch.nn.Flatten(0)  # of what needs no gradient
            self.blocks = torch.nn.ModuleList(Block(32, 2, 0.0) for _ in range(2))

        def forward(self, x):
            x = x + self.positions(torch.arange(32)).float()
            for block in (*self.blocks, self.blocks[0]):
                x = block(x)
            return x

    x = torch.randn(2, 32, 32)

    rival = sac_milp.rival_of_step(autosac.profile(Net(), x), Net(), x, torch.sum)

    assert rival.note == ""
    assert rival.settings


def test_a_chain_that_fails_is_a_rival_that_says_so():
    class Net(torch.nn.Linear):
        def forward(self, x):
            act = torch.nn.Tanh()  # gone before backward: PyTorch's trackers raise
            return act(super().forward(x))

    x = torch.randn(2, 4)

    rival = sac_milp.rival_of_step(
        autosac.profile(Net(4, 4), x), Net(4, 4), x, torch.sum
    )

    assert rival.settings == ()
    assert rival.note.startswith("fails: ")


def test_rivals_train_as_simulated_and_bit_identically(
    step_profile, every_rival, one_thread
):
    chosen = [every_rival[n].settings[0] for n in ("every block", "Megatron selective")]
    plans = [as_plan(step_profile, setting, setting.peak_bytes) for setting in chosen]
    recipe = Recipe(
        make_model=make_model,
        make_inputs=make_tokens,
        loss_fn=next_token_loss(make_tokens()),
        timing_rounds=0,
    )

    for observed in verify_each(plans, recipe):
        assert observed.identical
        assert observed.measured_peak_bytes < observed.baseline_peak_bytes
        assert abs(observed.prediction_error) < 0.02  # uncalibrated: no workspaces


def test_a_loss_in_the_comparison_is_told_in_words(step_profile):
    setting = priced(step_profile, "all", rivals.every_block(step_profile))
    shown = {
        "setting": "all",
        "peak_bytes": setting.peak_bytes,
        "recompute_ms": setting.recompute_ms,
    }
    cell = {
        "budget_bytes": setting.peak_bytes,
        "recompute_ms": 2 * setting.recompute_ms,
        "gap": 0.0,
        "rivals": {"every block": shown, "greedy": None},
    }
    model = {"model": "tiny", "cells": [cell], "equal": []}

    (text,) = zoo.losses(model)

    assert "tiny" in text and "every block" in text
    assert zoo.savings([cell]) == [pytest.approx(-1.0)]
    assert not zoo.ties(model)


def test_ties_of_the_comparison_are_counted_by_rival():
    def cell(ours, **rivals):
        shown = {
            name: None if ms is None else {"recompute_ms": ms}
            for name, ms in rivals.items()
        }
        return {"recompute_ms": ours, "rivals": shown}

    cells = [
        cell(1.0, greedy=1.0, uniform=2.0),
        cell(3.0, greedy=3.0 * (1 + 1e-12), uniform=3.0),
        cell(4.0, greedy=4.1, uniform=None),
        cell(0.0, greedy=0.0),  # nothing is recomputed: no tie
    ]

    assert zoo.ties({"cells": cells}) == {"greedy": 2, "uniform": 1}
