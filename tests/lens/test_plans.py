import importlib
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import autosac
from autosac import _compat_fakes, _compat_gpu
from autosac.cli.demo import GPT, next_token_loss
from autosac.devices.specs import DeviceSpec, device_spec
from autosac.errors import InfeasibleBudgetError
from autosac.lens.mode import lens
from autosac.planning.dry_running import difference_in_dry_run
from autosac.planning.make_plan import floor, make_plan
from autosac.profiles.profile import profile
from tests.fake_gpu import Attention, Language
from tests.models import CASES, random_choice

A100, H100 = map(device_spec, ("a100", "h100"))
BFLOAT16 = torch.bfloat16
IDS = torch.zeros(4, 16, dtype=torch.long)


pytestmark = pytest.mark.usefixtures("one_thread")


def names(traced, phase):
    """Names of the ops of a phase of a profile that do some work."""
    ops = traced.tape.ops
    return [op.name for op in ops if op.phase == phase and not op.is_view]


# --- optimizers -------------------------------------------------------------------


def small(**options):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return model, torch.optim.AdamW(model.parameters(), **options)


def optimizer_bytes(traced):
    storages = traced.tape.storages
    return sum(s.nbytes for s in storages if s.category == "optimizer")


@pytest.mark.parametrize("warm", [False, True])
def test_optimizers_step_with_foreach_kernels(warm):
    model, optimizer = small()
    if warm:
        model(torch.zeros(2, 64)).sum().backward()
        optimizer.step()
    before = [dict(group) for group in optimizer.param_groups]

    traced = profile(model, torch.zeros(2, 64), optimizer=optimizer, device=A100)

    assert "aten._foreach_addcdiv_.ScalarList" in names(traced, "optimizer")
    assert [dict(group) for group in optimizer.param_groups] == before
    # Two moments of 64 x 64 and 64 float32 numbers; the steps lie on the CPU.
    assert optimizer_bytes(traced) == 2 * 2 * 4 * (64 * 64 + 128)


def test_options_of_an_optimizer_are_honoured():
    model, optimizer = small(foreach=False)
    looped = profile(model, torch.zeros(2, 64), optimizer=optimizer, device=A100)
    model, optimizer = small(fused=True)
    fused = profile(model, torch.zeros(2, 64), optimizer=optimizer, device=A100)

    assert not any("_foreach" in name for name in names(looped, "optimizer"))
    assert "aten._fused_adamw_.default" in names(fused, "optimizer")
    # A block of 512 bytes for each of four steps, as these lie on the GPU.
    assert optimizer_bytes(fused) == optimizer_bytes(looped) + 4 * 512


def test_gradients_are_clipped_with_foreach_kernels():
    model, _ = small()

    traced = profile(model, torch.zeros(2, 64), clip_grad_norm=1.0, device=A100)

    norms = [op for op in traced.tape.ops if op.name == "aten._foreach_norm.Scalar"]
    # One float32 number for each chunk of each of four gradients, in one block.
    assert [op.workspace_bytes for op in norms] == [512]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", ["SGD", "NAdam", "RAdam", "Adagrad", "RMSprop"])
def test_other_optimizers_step_too(kind):
    make = getattr(torch.optim, kind)
    model = CASES["mlp"].model()

    traced = profile(model, CASES["mlp"].inputs(), optimizer=make, device=A100)
    chosen = random_choice(traced, 0)

    assert any("_foreach" in name for name in names(traced, "optimizer"))
    assert not difference_in_dry_run(traced, chosen)


def test_optimizers_in_backward_keep_their_steps_on_the_cpu():
    model, _ = small()
    optimizer = autosac.OptimizerInBackward(model.parameters(), torch.optim.AdamW)

    traced = profile(model, torch.zeros(2, 64), optimizer=optimizer, device=A100)

    assert optimizer_bytes(traced) == 2 * 2 * 4 * (64 * 64 + 128)


# --- the account ------------------------------------------------------------------


def test_blocks_are_multiples_of_512_bytes():
    traced = CASES["gpt"].profile()
    on_gpu = profile(CASES["gpt"].model(), CASES["gpt"].inputs(), device=A100)

    assert all(s.nbytes % 512 == 0 for s in on_gpu.tape.storages)
    assert any(s.nbytes % 512 for s in traced.tape.storages)


def test_counts_what_backward_kernels_allocate(kept_workspaces):
    model = nn.Sequential(nn.Embedding(1000, 64), Attention(64, 4)).bfloat16()
    traced = profile(model, torch.zeros(2, 2048, dtype=torch.long), device=A100)
    work = {
        op.name: op.workspace_bytes
        for op in traced.tape.ops
        # Sums: see tests/devices/test_cuda_reductions.py.
        if op.workspace_bytes and not op.name.startswith("aten.sum.")
    }

    # Flash attention, 2 x 4 heads of 2048 rows and 16 columns that become 32: their
    # gradient and the sums of their rows, in float32; the gradient of a sum is expanded
    # from one number, so that it is copied.
    flash = 4 * 2 * 4 * 2048 * 32 + 4 * 2 * 4 * 2048 + 2 * 2 * 4 * 2048 * 16
    # Embedding, 4096 indices: three times the indices, at most 1000 segments twice, and
    # 409 more partial ones, with 64 float32 numbers each. In blocks of 512 bytes.
    rows = 4096 // 10 + 1000
    embedding = 3 * 8 * 4096 + 2 * 8192 + -(-8 * rows // 512) * 512
    embedding += -(-rows * 64 * 4 // 512) * 512
    assert work == {
        "aten._scaled_dot_product_flash_attention_backward.default": flash,
        "aten.embedding_dense_backward.default": embedding,
    }


def test_group_norm_copies_images_that_are_channels_last_where_the_gpu_does():
    images = torch.zeros(2, 8, 16, 16).to(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8))
    model.to(memory_format=torch.channels_last)
    traced = profile(model, images, loss_fn=torch.sum, device=A100)
    first = _compat_gpu.GROUP_NORM_COPIES_FIRST
    takes_any = _compat_gpu.GROUP_NORM_TAKES_CHANNELS_LAST
    storages = traced.tape.storages

    copied = {"forward": 0, "backward": 0}
    for op in traced.tape.ops:
        if op.name == "aten.clone.default":
            copied[op.phase] += sum(storages[s].nbytes for s in op.creates)
        if "group_norm" in op.name:
            copied[op.phase] += op.workspace_bytes

    copy = 2 * 8 * 16 * 16 * 4
    # The gradient of a sum is expanded from one number, so that it is always copied. A
    # kernel that copies images for itself does so again in backward.
    assert copied == {
        "forward": 0 if takes_any else copy,
        "backward": copy if first or takes_any else 2 * copy,
    }


def test_backward_reaches_every_parameter():
    model = CASES["gpt"].model()

    traced = profile(model, CASES["gpt"].inputs(), device=A100, autocast=BFLOAT16)

    gradients = [s for s in traced.tape.storages if s.category == "gradient"]
    assert len(gradients) == len(list(model.parameters()))


# --- plans ------------------------------------------------------------------------

each_model = pytest.mark.parametrize("name", ["gpt", "convolutions", "llama"])


@pytest.mark.slow_but_fifth
@each_model
@pytest.mark.parametrize("autocast", [None, BFLOAT16], ids=str)
@pytest.mark.parametrize("device", [A100, H100], ids=lambda device: device.name)
def test_a_dry_run_confirms_random_plans(name, device, autocast):
    case = CASES[name]
    traced = profile(
        case.model(),
        case.inputs(),
        loss_fn=case.loss_fn,
        optimizer=torch.optim.AdamW,
        device=device,
        autocast=autocast,
    )

    for seed in range(2):
        chosen = random_choice(traced, seed)
        assert not difference_in_dry_run(traced, chosen)


def meta_gpt():
    with torch.device("meta"):
        return GPT(num_layers=2, vocabulary=512, length=128)


@pytest.mark.slow
def test_plans_for_a_gpu_that_is_not_present():
    tokens = torch.zeros(8, 128, dtype=torch.long)
    model = meta_gpt()
    options = {"optimizer": torch.optim.AdamW, "loss_fn": next_token_loss(tokens)}

    ample = autosac.plan(model, tokens, memory_budget="80%", device="h100", **options)
    traced = profile(model, tokens, device="h100", **options)
    tight = make_plan(traced, (floor(traced) + traced.baseline_peak_bytes) // 2)

    assert (ample.budget_bytes, ample.device) == (64 * 10**9, "h100")
    assert not ample.policy
    assert not ample.calibrated
    assert floor(traced) <= tight.peak_bytes <= tight.budget_bytes
    assert any("native_dropout" in name for p in tight.op_policies for name in p.names)
    with pytest.raises(InfeasibleBudgetError):
        make_plan(traced, floor(traced) - 1)


@pytest.mark.slow
def test_budgets_hold_for_the_blocks_that_the_allocator_hands_out():
    tokens = torch.zeros(96, 128, dtype=torch.long)
    traced = profile(meta_gpt(), tokens, device="h100", optimizer=torch.optim.AdamW)
    lowest, baseline = floor(traced), traced.baseline_peak_bytes
    # Blocks of 9.5 MiB stay whole: more is handed out than is asked for.
    assert baseline > traced.simulator.baseline.peak_bytes

    for budget in range(lowest, baseline, (baseline - lowest) // 3):
        plan = make_plan(traced, budget)

        assert plan.peak_bytes <= budget
        assert sum(plan.composition.values()) == plan.peak_bytes
        assert plan.reserved_bytes >= plan.peak_bytes


def test_does_not_calibrate_what_is_not_present():
    model = nn.Linear(8, 8)
    traced = profile(model, torch.zeros(2, 8), device="a100")

    assert not autosac.plan(traced, memory_budget="1GiB").calibrated
    assert not autosac.plan(
        model, torch.zeros(2, 8), memory_budget="1GiB", device="a100"
    ).calibrated
    with pytest.raises(ValueError, match="The profile is for a100"):
        autosac.calibrate(traced)


# --- nothing is changed, some things are refused ----------------------------------


def _outside():
    optimizers = importlib.import_module("torch.optim.optimizer")
    importlib.import_module("torch.distributed.tensor")  # which tells them of its own
    return (
        _compat_fakes.FakeTensor.__new__,
        torch.autocast.__init__,
        torch.autocast.__enter__,
        torch.autocast.__exit__,
        optimizers._get_foreach_kernels_supported_devices(),
        list(optimizers._foreach_supported_types),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch._C._dispatch_dump("aten::dropout"),
        torch._C._dispatch_dump_table("aten::mm"),
    )


@pytest.mark.slow
def test_leaves_nothing_behind():
    before = _outside()

    profile(Language(), IDS, device=A100, autocast=BFLOAT16)
    assert _outside() == before
    with pytest.raises(NotImplementedError):
        profile(nn.LSTM(8, 8), torch.zeros(4, 2, 8), device=A100, autocast=BFLOAT16)
    assert _outside() == before


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell])
def test_refuses_recurrent_layers(kind):
    shape = (2, 8) if "Cell" in kind.__name__ else (4, 2, 8)

    with pytest.raises(NotImplementedError, match="reserves for recurrent layers"):
        profile(kind(8, 8), torch.zeros(shape), device=A100)


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(
    ("dtype", "channels", "align_corners", "by_cudnn"),
    [
        (torch.float32, 1024, True, True),
        (torch.float16, 8, True, True),
        (torch.bfloat16, 8, True, False),
        (torch.float32, 1025, True, False),
        (torch.float32, 8, False, False),
    ],
)
def test_grids_are_sampled_by_cudnn_where_it_takes_them(
    dtype, channels, align_corners, by_cudnn
):
    """`cond_cudnn_grid_sampler` in aten/src/ATen/native/GridSamplerUtils.h."""

    class Sampled(nn.Module):
        def __init__(self):
            super().__init__()
            self.grid = nn.Parameter(torch.zeros(2, 3, 5, 2, dtype=dtype))

        def forward(self, x):
            return functional.grid_sample(x, self.grid, align_corners=align_corners)

    images = torch.zeros(2, channels, 4, 4, dtype=dtype, requires_grad=True)
    traced = profile(Sampled(), images, device=A100, loss_fn=torch.sum)
    sampling = [op for op in traced.tape.ops if "grid_sampler" in op.name]
    kernel = "cudnn_grid_sampler" if by_cudnn else "grid_sampler_2d"
    names = [op.name for op in sampling]
    assert names == [f"aten.{kernel}.default", f"aten.{kernel}_backward.default"]
    assert sampling[0].shapes[-1 if by_cudnn else 0][-2:] == (3, 5)
    assert tuple(images.shape) in sampling[1].shapes


def test_asks_for_the_compute_capability():
    spec = replace(A100, name="mine", compute_capability=None)

    with pytest.raises(ValueError, match="`device`='mine' has no `compute_cap"):
        profile(nn.Linear(8, 8), torch.zeros(2, 8), device=spec)


def test_a_spec_needs_no_capability():
    spec = DeviceSpec(
        name="mine",
        type="cuda",
        memory_bytes=1,
        bandwidth_bytes_per_s=1.0,
        peak_flops={"float32": 1.0},
        launch_overhead_ms=0.0,
        allocation_granularity_bytes=512,
    )

    assert spec.vendor == "nvidia"


def test_a_lens_without_a_device_only_tells_optimizers_what_is_fake():
    before = _outside()

    with lens(_compat_fakes.FakeTensorMode(), None):
        within = _outside()

    assert [a == b for a, b in zip(before, within, strict=True)].count(False) == 1
    assert _outside() == before


# --- on a GPU, the truth ----------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("autocast", [None, BFLOAT16], ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt", "convolutions"])
def test_agrees_with_a_trace_on_the_gpu(monkeypatch, name, autocast):
    monkeypatch.undo()  # the cuDNN that is installed
    case = CASES[name]
    model, inputs = case.model(), case.inputs()
    options = {"optimizer": torch.optim.AdamW, "autocast": autocast, "device": "cuda"}

    absent = profile(model, inputs, **options)
    present = profile(model.cuda(), inputs.cuda(), **options)

    for phase in ("forward", "backward", "optimizer"):
        assert names(absent, phase) == names(present, phase)
    # But for what kernels allocate, which the true trace leaves to calibration.
    held = [
        s
        for s in absent.tape.storages
        if s.category != "workspace" and (s.born or s.category != "temporary")
    ]
    assert [s.nbytes for s in held] == [s.nbytes for s in present.tape.storages]
