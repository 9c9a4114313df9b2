"""Whole batches that the loop of a rank holds beside its part count on its stage."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import autosac
from autosac._compat_pipelining import HOLDS_LESS
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import cluster_spec
from autosac.pipelines.constant_memory import besides_bytes
from autosac.pipelines.schedules import Schedule
from benchmarks.rank_models import LENGTH, WIDTH, Block
from benchmarks.stage_ranks import Job, Recipe, can_count, run_ranks

pytestmark = [
    pytest.mark.usefixtures("one_thread", "traced_once"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration"),  # oneDNN is switched off
]
ROWS, FEATURES, NUM_MICRO_BATCHES = 2, 512, 4
CPUS = replace(cluster_spec("pcie-l40s", num_gpus=4), device=device_spec("cpu"))


class Into(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(FEATURES, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])[None]
        return self.into(x) + self.places(position_ids)


class Model(nn.Sequential):
    """Works on wide features, of which a batch takes more than all the rest."""

    def __init__(self):
        blocks = Block(), Block(), Block(), Block()
        super().__init__(Into(), *blocks, nn.Linear(WIDTH, FEATURES))


def make_batch(num_micro_batches):
    size = num_micro_batches * ROWS, LENGTH, FEATURES
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(size, generator=generator) for _ in range(2))


RECIPE = Recipe(make_model=Model, make_batch=make_batch, loss_fn=functional.mse_loss)


def held(schedule, target, degree=2):
    """What each rank of a schedule with such parts holds besides."""
    cpu = SimpleNamespace(type="cpu", allocation_granularity_bytes=1)
    own = SimpleNamespace(
        inputs=torch.ones(ROWS, 8),
        target=target,
        context=SimpleNamespace(degree=degree),
        ranks_per_stage=degree,
        whole=SimpleNamespace(device=cpu),
    )
    ranks = range(schedule.num_ranks)
    return [besides_bytes(own, schedule, rank) for rank in ranks]


def test_the_first_stage_holds_whole_inputs_and_the_last_one_whole_targets():
    three = Schedule(name="1F1B", num_ranks=3, num_micro_batches=4)
    part, mesh_bytes = torch.ones(ROWS, 16), 4 * 3 * 2
    whole_bytes = 4 * 2 * 4 * ROWS * 8  # micro-batches, parts of each, bytes of one
    assert held(three, part) == [
        mesh_bytes + whole_bytes,
        mesh_bytes,
        mesh_bytes + 2 * whole_bytes,
    ]
    classes = torch.ones(ROWS)  # which all parts have in common, and nobody cuts
    assert held(three, classes)[-1] == mesh_bytes
    assert held(three, part, degree=1) == [4 * 3] * 3


def planned(memory_budget, schedule, mesh):
    inputs, target = make_batch(NUM_MICRO_BATCHES)
    more = {"stages_per_rank": 2} if schedule == "Interleaved1F1B" else {}
    with torch.backends.mkldnn.flags(enabled=False):
        return autosac.plan_pipeline(
            RECIPE.make_model(),
            inputs,
            target=target,
            loss_fn=RECIPE.loss_fn,
            optimizer=RECIPE.make_optimizer,
            num_ranks=2,
            num_micro_batches=NUM_MICRO_BATCHES,
            schedules=[schedule],
            cluster=CPUS,
            mesh=mesh,
            memory_budget=memory_budget,
            **more,
        )


def least(*options):
    """The plan of the least peak."""
    with pytest.raises(autosac.InfeasibleBudgetError) as caught:
        planned(1000, *options)
    return planned(caught.value.lowest_peak_bytes, *options)


@pytest.mark.slowest_but_first
@pytest.mark.skipif(not can_count(), reason="counting takes a C compiler")
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_loops_that_hold_whole_inputs_and_targets_have_the_predicted_peak(schedule):
    plan = least(schedule, {"cp": 2})
    job = Job(recipe=RECIPE, schedule=plan.pipeline, starts=(), plan=plan)
    results = run_ranks(job)
    for rank, result in enumerate(results):
        predicted_bytes = plan.rank_peaks[rank // 2]
        assert max(result.peaks) <= plan.budget_bytes
        assert result.peak_bytes == predicted_bytes or (
            HOLDS_LESS and result.peak_bytes < predicted_bytes
        )
