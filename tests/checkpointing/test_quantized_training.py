"""Quantization-aware training: observers change in forward what it reads then."""

import pytest
import torch
from torch import nn
from torch.ao import quantization

import autosac
from autosac.pipelines.stage_steps import stage_step

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Please use quant_min", "ignore:torch.ao"),
]
ROWS, WIDTH, NUM_BLOCKS = 128, 16, 3


def loss_fn(output):
    return output.square().mean()


def block():
    layers = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.GELU(), nn.GELU()
    return nn.Sequential(*layers, nn.Linear(4 * WIDTH, WIDTH))


def batch():
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)


def quantized(version, *, num_blocks=NUM_BLOCKS, is_new=False):
    """A model whose fake quantization is many ops in version 0, and one in 1."""
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(num_blocks))).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm", version=version)
    quantization.prepare_qat(model, inplace=True)
    if not is_new:
        loss_fn(model(batch())).backward()
        model.zero_grad()
    return model


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def profiled(model):
    own = optimizer(model)
    profile = autosac.profile(model, batch(), loss_fn=loss_fn, optimizer=own)
    return autosac.calibrate(profile, progress=False)


# What its quantized tensors leave of the peak, of which one op keeps more.
@pytest.mark.slow_but_first
@pytest.mark.parametrize(("version", "share"), [(0, 0.5), (1, 0.7)])
def test_observers_are_updated_once_and_what_they_do_not_make_is_rerun(version, share):
    profile = profiled(quantized(version))
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    done = autosac.verify(
        plan,
        lambda: quantized(version),
        batch,
        loss_fn=loss_fn,
        make_optimizer=optimizer,
        timing_rounds=0,
    )

    assert plan.peak_bytes <= share * plan.baseline_peak_bytes
    assert not done.differences
    assert done.measured_peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("version", [0, 1])
def test_a_stage_saves_what_reads_a_statistic_that_other_micro_batches_change(version):
    stage = stage_step(quantized(version), batch(), loss_fn=None).first
    groups = [(unit, g) for unit in stage.units.candidates for g in unit.groups]
    pinned = [
        group.pinned
        for unit, group in groups
        for i in group.ops
        if "_fq_" in (name := stage.tape.ops[unit.ops[i]].name) or "fake" in name
    ]

    assert pinned
    assert all(pinned)


@pytest.mark.slow
def test_observers_that_have_seen_nothing_ask_for_one_call_of_the_model():
    model = quantized(0, num_blocks=1, is_new=True)
    profile = autosac.profile(model, batch(), loss_fn=loss_fn)
    with pytest.warns(UserWarning, match="run the model once") as warned:
        autosac.floor(profile)

    assert not any("AttributeError" in str(one.message) for one in warned)


class Quantizes(nn.Module):
    """A block whose observers count nothing until they are called."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        rows = {"quant_min": 0, "quant_max": 255, "dtype": torch.quint8}
        observer = quantization.MovingAverageMinMaxObserver
        self.quantize = quantization.FakeQuantize(observer, **rows)
        self.fused = quantization.FusedMovingAvgObsFakeQuantize(observer, **rows)
        self.weights = quantization.FakeQuantize(
            quantization.MovingAveragePerChannelMinMaxObserver,
            *(-128, 127),
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
        )

    def forward(self, x):
        rows, weight = self.quantize(self.norm(x)), self.weights(self.up.weight)
        up = nn.functional.linear(rows, weight, self.up.bias)
        return x + self.down(self.fused(nn.functional.gelu(up)))


def test_a_dry_run_that_departs_says_what_to_do_and_nothing_of_a_planned_peak():
    model = nn.Sequential(*(Quantizes() for _ in range(3)))
    profile = profiled(model)
    with pytest.warns(UserWarning, match="in a dry run AC unit .* ran") as warned:
        autosac.floor(profile)

    said = " ".join(str(one.message) for one in warned)
    assert "run the model once" in said
    assert "no longer holds" not in said
