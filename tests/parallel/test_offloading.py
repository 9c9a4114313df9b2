"""Ranks of FSDP2 whose AC units have in far memory what they keep."""

from dataclasses import replace

import pytest
import torch

import autosac
from autosac._compat_distributed import fake_group
from autosac.devices.links import Link
from autosac.devices.specs import device_spec
from autosac.errors import ArgumentError, InfeasibleBudgetError
from autosac.parallel.formulating import Setting
from autosac.parallel.fsdp_memory import RankSimulator
from autosac.parallel.preparing import chooser_of
from autosac.solving.solve_options import SolveOptions
from benchmarks.fsdp_ranks import LARGEST_ERROR, largest_difference
from benchmarks.ranks import Recipe, reference, run_gloo_ranks, run_rank
from tests.parallel.test_planning import on_cpu
from tests.test_offloading import Stack, rows

pytestmark = pytest.mark.usefixtures("one_thread")
STACK = Recipe(make_model=Stack, make_inputs=rows, make_optimizer=torch.optim.SGD)
FAST = Link(out_bytes_per_s=1e10, back_bytes_per_s=1e10)
TWO = replace(on_cpu(2), device=replace(device_spec("cpu"), link=FAST))


@pytest.fixture(scope="module")
def step():
    return STACK.profile()


def planned(step, budget, **options):
    """Of two ranks that share all parameters."""
    return autosac.plan_parallel(
        step, cluster=TWO, degrees=[2], memory_budget=budget, **options
    )


def floor(step, **options):
    with pytest.raises(InfeasibleBudgetError) as error:
        planned(step, 1, **options)
    return error.value.lowest_peak_bytes


@pytest.fixture(scope="module")
def budgets(step):
    """Floors with offload and without, and what nothing need be rerun for."""
    free = planned(step, 2**40).highest_peak_bytes
    return floor(step, offload=True), floor(step), free


def test_a_cap_on_far_memory_that_nothing_uses_is_refused(step):
    with pytest.raises(ArgumentError, match="caps what is offloaded, and nothing is"):
        planned(step, 2**40, host_budget=5)


@pytest.mark.slow
def test_offload_lowers_the_floor_and_costs_no_more_above_it(step, budgets):
    low, plain_low, free = budgets
    assert low < plain_low

    caps = [low, (low + plain_low) // 2, plain_low, (plain_low + free) // 2, free]
    plans = [planned(step, cap, offload=True) for cap in caps]

    for cap, plan in zip(caps, plans, strict=True):
        assert plan.highest_peak_bytes <= cap
        assert plan.bound_ms <= plan.milp_ms
    assert plans[0].offloaded_bytes and not plans[-1].offloaded_bytes
    times = [plan.step_ms for plan in plans]
    assert times == sorted(times, reverse=True)
    for cap, ms in zip(caps[2:], times[2:], strict=True):
        assert ms <= planned(step, cap).step_ms


def test_no_allocator_sees_more_than_the_peak_of_a_rank(step, budgets):
    low, plain_low, _ = budgets
    chooser = chooser_of(step, Setting(link=TWO.link))
    ranks = RankSimulator(step, copies=False)  # as the collectives of a fake group
    for cap in (low, plain_low):
        best = chooser.at(TWO, 2).search(cap, SolveOptions()).best
        plan = planned(step, cap, offload=True)
        with fake_group(2):
            result = run_rank(STACK, plan.sharding, plan=plan)

        assert plan.offloaded_bytes
        peak_bytes = ranks.peak_bytes(best.sharding, best.chosen)
        assert 0 <= peak_bytes / result.peak_bytes - 1 <= LARGEST_ERROR


@pytest.mark.slow
def test_far_memory_has_its_cap_its_place_and_its_share_of_the_link(
    step, budgets, tmp_path
):
    low, plain_low, _ = budgets
    plan = planned(step, low, offload="auto", offload_dir=tmp_path)
    free = planned(step, plain_low, offload=True)
    most = free.offloaded_bytes - 1
    capped = planned(step, plain_low, offload=True, host_budget=most)
    plain = planned(step, plain_low, offload="auto")
    shared = autosac.plan_parallel(
        step,
        cluster=replace(TWO, gpus_per_link=4),
        degrees=[2],
        memory_budget=low,
        offload=True,
    )

    assert 0 == plain.offloaded_bytes < capped.offloaded_bytes <= most
    assert free.step_ms < capped.step_ms < plain.step_ms
    assert shared.exposed_copies_ms > plan.exposed_copies_ms > 0
    plan.save(tmp_path / "plan.json")
    assert autosac.ParallelPlan.load(tmp_path / "plan.json") == plan
    assert plan.offload_dir == str(tmp_path) and "to a file" in str(plan)
    with pytest.raises(InfeasibleBudgetError):
        planned(step, low, offload=True, host_budget=1)
    with pytest.raises(ArgumentError, match="`offload` must be"):
        planned(step, low, offload="sometimes")


@pytest.mark.slowest
def test_real_ranks_keep_caps_below_the_floor_and_train_as_one_process(step, budgets):
    low, plain_low, _ = budgets
    plans = [
        planned(autosac.calibrate(step), cap, offload=True)
        for cap in (low, (low + plain_low) // 2, plain_low)
    ]
    settings = {"want_gradients": True, "num_measured": 3}
    jobs = [(STACK, p.sharding, (), {"plan": p, **settings}) for p in plans]

    losses, gradients = reference(STACK, 2)
    for plan, results in zip(plans, run_gloo_ranks(2, jobs), strict=True):
        assert plan.offloaded_bytes
        for result in results:
            assert result.peak_bytes <= plan.peak_bytes
            assert result.highest_peak_bytes <= plan.highest_peak_bytes
        worst = max(result.peak_bytes for result in results)
        assert plan.peak_bytes <= (1 + LARGEST_ERROR) * worst
        assert [result.loss for result in results] == losses
        assert largest_difference(results, gradients) == 0.0
