"""Plans for a GPU whose host may be slower than its kernels."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import autosac
from autosac.costs.host import measured_host_op_ms
from autosac.planning.choices import choose
from autosac.planning.eager_steps import times_of
from autosac.units.policies import RERUN
from benchmarks.models import language

FAST, SLOW = 1e-4, 0.05  # ms that a host takes for an op


@pytest.fixture(scope="module")
def traced():
    """A small GPT-2, traced for an H100 without one."""
    work = language.gpt2(layers=3, width=256, heads=4, batch=16, length=256)
    with torch.device("meta"):
        model = work.make_model()
    return autosac.profile(
        model, work.make_inputs(), autocast=torch.bfloat16, device="h100"
    )


def with_host(profile, host_op_ms):
    """The profile as if it was measured beside a host of some speed."""
    return replace(
        profile,
        costs=replace(profile.costs, calibrated=True),
        device=replace(profile.device, host_op_ms=host_op_ms),
    )


def budgets(profile, number=4):
    least = autosac.floor(profile)
    room = profile.baseline_peak_bytes - least
    return [least + room * i // number for i in range(1, number)]


def passes_ms(profile, plan):
    """Time of both passes, worked out from the tape and the plan's actions."""
    host = profile.device.host_op_ms
    kernels, issued = [0.0, 0.0], [0.0, 0.0]
    for op, ms in zip(profile.tape.ops, profile.op_ms, strict=True):
        is_backward = op.phase in ("backward", "optimizer")
        kernels[is_backward] += ms
        if not op.is_view:
            issued[is_backward] += host * (0.8 if is_backward else 1.15)
    by_name = {(u.label, u.call_index): u for u in profile.units.candidates}
    for one in plan.op_policies:
        issued[0] += host * (2.8 + 0.8 * len(one.names))
        issued[1] += 1.5 * host * one.actions.count(RERUN)
        unit = by_name[one.label, one.call_index]
        kernels[1] += sum(
            profile.op_ms[op]
            for op, action in zip(unit.ops, one.actions, strict=True)
            if action == RERUN
        )
    return sum(max(pair) for pair in zip(kernels, issued, strict=True))


@pytest.mark.slow
def test_a_fast_host_decides_nothing(traced):
    fast = with_host(traced, FAST)
    for budget in budgets(fast):
        plan = autosac.plan(fast, memory_budget=budget)
        kernels = autosac.plan(traced, memory_budget=fast.within(budget))
        assert plan.policy == kernels.policy
        assert plan.step_ms == pytest.approx(kernels.step_ms)
        assert plan.bound_ms == pytest.approx(kernels.bound_ms)


@pytest.mark.slow
def test_under_a_slow_host_plans_are_of_the_longer_of_host_and_kernels(traced):
    slow, saved = with_host(traced, SLOW), []
    for budget in budgets(slow):
        plan = autosac.plan(slow, memory_budget=budget)
        kernels = autosac.plan(traced, memory_budget=slow.within(budget))
        assert plan.peak_bytes <= slow.within(budget)
        assert plan.step_ms == pytest.approx(passes_ms(slow, plan))
        saved.append(passes_ms(slow, kernels) - plan.step_ms)
    assert min(saved) > -1e-6
    assert max(saved) > 1.0


@pytest.mark.slow
def test_under_a_slow_host_no_choice_that_fits_is_below_the_bound(traced):
    slow = with_host(traced, SLOW)
    for budget in budgets(slow):
        plan = autosac.plan(slow, memory_budget=budget)
        rules = [slow.rules.every_kth_block(k) for k in (1, 2, 3)]
        rules += [slow.rules.uniform_ratio(r) for r in slow.rules.uniform_ratios]
        rules += [choose(slow, budget)[0]]
        for rule in rules:
            if slow.peak_bytes(rule) <= slow.within(budget):
                times = times_of(slow, rule, 0.0)
                assert plan.bound_ms <= times.added_ms + 1e-9
                assert plan.step_ms <= times.step_ms + 1e-9


@pytest.mark.slow
def test_under_a_slow_host_a_larger_budget_is_never_slower(traced):
    slow = with_host(traced, SLOW)
    steps = [autosac.plan(slow, memory_budget=b).step_ms for b in budgets(slow, 8)]
    assert all(after <= before + 1e-9 for before, after in pairwise(steps))


@pytest.mark.slow
def test_a_host_that_is_not_measured_decides_nothing(traced):
    slow = replace(traced, device=replace(traced.device, host_op_ms=SLOW))
    for budget in budgets(slow, 3):
        plan = autosac.plan(slow, memory_budget=budget)
        assert plan.policy == autosac.plan(traced, memory_budget=budget).policy
        assert plan.step_ms == slow.baseline_ms + plan.recompute_ms


@pytest.mark.slow
def test_the_plan_says_that_the_host_decides(traced):
    slow = with_host(traced, SLOW)
    plan = autosac.plan(slow, memory_budget=budgets(slow)[1])
    assert "decides how long an eager step takes" in str(plan)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_measuring_the_host_draws_nothing_in_any_mode(mode):
    before = torch.get_rng_state()
    with mode():
        assert measured_host_op_ms(torch.device("cpu")) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_of_attention_lie_on_the_host():
    """`_efficient_attention_forward` in transformers/cuda/attention.cu makes them."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(64, 192)

        def forward(self, x):
            parts = self.project(x).unflatten(-1, (3, 4, 16)).unbind(-3)
            query, key, value = (part.transpose(1, 2) for part in parts)
            return nn.functional.scaled_dot_product_attention(
                query, key, value, dropout_p=0.1
            )

    with torch.device("meta"):
        model = Attention()
    traced = autosac.profile(
        model, torch.randn(2, 16, 64), loss_fn=torch.sum, device="h100"
    )
    (op,) = (
        op for op in traced.tape.ops if op.name.endswith("efficient_attention.default")
    )
    assert len(op.shapes) == 4
    assert len(op.creates) == 2
