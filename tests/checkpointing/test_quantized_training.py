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
