import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autosac
from autosac.costs.roofline import call_ms
from autosac.devices.specs import KNOWN_DEVICES, device_spec

H100 = device_spec("h100")


@pytest.mark.parametrize("spec", KNOWN_DEVICES.values(), ids=lambda spec: spec.name)
def test_no_device_reaches_more_than_its_data_sheet_says(spec):
    shares = [*spec.matmul_efficiency.values(), spec.bandwidth_efficiency]

    assert all(0 < share <= 1 for share in shares)
    assert (spec.time_error is not None) == (spec.type == "cuda")
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        assert spec.achieved_flops_per_s(dtype) <= spec.flops_per_s(dtype)


def test_an_op_of_the_cpu_takes_as_long_as_the_slower_of_flops_and_memory():
    device = dataclasses.replace(
        device_spec("cpu"),
        peak_flops={"float32": 1e12},
        matmul_efficiency={"float32": 0.5},
        bandwidth_bytes_per_s=1e12,
        bandwidth_efficiency=0.25,
        launch_overhead_ms=0.005,
    )

    def time_of(flops, dtype, moved_bytes):
        return call_ms("aten.mm.default", None, dtype, flops, moved_bytes, device)

    # 1e9 FLOPs at 5e11 a second are 2 ms; 1e9 bytes at 2.5e11 are 4 ms.
    assert time_of(10**9, "float32", 0) == pytest.approx(2.005)
    assert time_of(10**9, "float32", 10**9) == pytest.approx(4.005)
    # float16 has no rate of its own: float32's, at float32's share.
    assert time_of(10**9, "float16", 0) == pytest.approx(2.005)


@pytest.fixture
def blocks(kept_workspaces):
    """Three equal blocks, traced for an H100."""
    layers = [
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        for _ in range(3)
    ]
    with torch.device("meta"):
        model, images = nn.Sequential(*layers).to("meta"), torch.empty(32, 64)
    return autosac.profile(model, images, loss_fn=torch.sum, device="h100")


def test_the_host_issues_every_op_that_is_no_view(blocks):
    issued = [op.phase for op in blocks.tape.ops if op.creates or op.writes]
    num_backward = issued.count("backward")
    times = 1.15 * (len(issued) - num_backward) + 0.8 * num_backward

    assert blocks.host_ms == pytest.approx(times * H100.host_op_ms)
    assert autosac.estimate(blocks).host_ms == blocks.host_ms


def test_a_plan_costs_the_host_its_units_and_what_they_run_again(blocks):
    plan = autosac.plan(blocks, memory_budget=autosac.floor(blocks))
    actions = "".join(policy.actions for policy in plan.op_policies)
    num_rerun, num_followed = actions.count("R"), len(actions)
    num_units = len(plan.op_policies)

    assert num_followed > num_rerun
    times = 2.8 * num_units + 0.8 * num_followed + 1.5 * num_rerun
    assert plan.host_ms == pytest.approx(blocks.host_ms + times * H100.host_op_ms)
    assert plan.step_ms == pytest.approx(blocks.baseline_ms + plan.recompute_ms)
    assert "which decides how long an eager step takes" in str(plan)
    assert "sure" in str(plan)


def test_a_plan_from_a_file_does_not_know_what_the_host_takes(blocks, tmp_path):
    plan = autosac.plan(blocks, memory_budget=blocks.baseline_peak_bytes)
    plan.save(tmp_path / "plan.json")

    assert autosac.Plan.load(tmp_path / "plan.json").host_ms is None


def test_on_the_cpu_the_host_is_the_device():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    profile = autosac.profile(model, x, loss_fn=torch.sum)

    assert profile.host_ms == 0.0
    assert "host" not in str(autosac.estimate(profile))
    assert "sure" not in str(autosac.estimate(profile))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_grouped_convolution_does_the_work_of_its_groups(groups, transposed):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    x = torch.randn(2, 8, 10, 10, requires_grad=True)
    profile = autosac.profile(
        kind(8, 16, 3, groups=groups, bias=False), x, loss_fn=torch.sum
    )

    def flops(name):
        return sum(op.flops for op in profile.tape.ops if name in op.name)

    one = kind(8 // groups, 16 // groups, 3, bias=False)
    part = torch.randn(2, 8 // groups, 10, 10, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = one(part).sum()
    with FlopCounterMode(display=False) as backward:
        out.backward()
    assert flops("convolution.default") == groups * forward.get_total_flops()
    assert flops("convolution_backward") == groups * backward.get_total_flops()
