"""Interleaved 1F1B on meshes: real ranks hold what the replay says, to 0.1 %."""

import math
from dataclasses import replace

import pytest
import torch

from autosac._compat_pipelining import HOLDS_LESS
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import cluster_spec
from autosac.parallel.tp_tracing import fake_ranks
from autosac.pipelines.micro_batches import MicroBatch, rows_of
from autosac.pipelines.rank_memory import RankReplay
from autosac.pipelines.schedules import Schedule
from autosac.planning.make_plan import policy_ratios
from autosac.planning.spelling import spell_out
from benchmarks import stage_mesh_ranks
from benchmarks.parallel_rules import ALL_RECOMPUTED, policy
from benchmarks.stage_mesh_ranks import RECIPES
from benchmarks.stage_ranks import SEED, Job, can_count, reference, run_ranks

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration"),  # oneDNN is switched off
    pytest.mark.skipif(not can_count(), reason="counting takes a C compiler"),
]

SCHEDULE = Schedule(
    name="Interleaved1F1B", num_ranks=2, num_micro_batches=4, stages_per_rank=2
)


def micro_batch(name, plan):
    """What the first rank of each group has of the model of a plan."""
    recipe = RECIPES[name]
    torch.manual_seed(SEED)
    inputs, target = map(rows_of, recipe.make_batch(1), (2, 2))
    spec = cluster_spec(stage_mesh_ranks.LINKS, num_gpus=plan.num_ranks)
    device = device_spec("cpu")
    whole = MicroBatch(
        model=recipe.make_model(),
        inputs=inputs,
        target=target,
        loss_fn=recipe.loss_fn,
        options={"optimizer": recipe.make_optimizer, "device": device},
        cluster=replace(spec, device=device),
        parallel=plan.parallel,
    )
    return whole.on_rank(plan.tensor, whole) if plan.tensor.degree > 1 else whole


def interleaved(name, mesh, kind):
    """A plan whose ranks have two stages each, every second one recomputed; peaks."""
    plan = stage_mesh_ranks._plan(name, "1F1B", mesh, kind, 2**40)
    with torch.backends.mkldnn.flags(enabled=False):
        own = micro_batch(name, plan)
        if plan.tensor.degree == 1:
            return _replayed(own, plan)
        with fake_ranks(plan.tensor.degree, divides_loss=plan.tensor.divides_loss):
            return _replayed(own, plan)


def _replayed(own, plan):
    steps, chosen, stages, first = {}, {}, [], 0
    for i, stage in enumerate(plan.stage_plans):
        step = steps[i] = own.step(first, first + len(stage.fqns))
        first += len(stage.fqns)
        blocks = [u for u in step.later.candidates if u.fqn in stage.fqns] * (i % 2)
        chosen[i] = {u: policy(step.later.tape, u, ALL_RECOMPUTED) for u in blocks}
        ops = spell_out(step.later, chosen[i])
        ratios = policy_ratios(step.later, chosen[i])
        stages.append(replace(stage, op_policies=ops, policy=ratios))
    assert any(stage.policy for stage in stages)
    peaks = [
        RankReplay(
            SCHEDULE,
            rank,
            {i: steps[i] for i in SCHEDULE.stages_of(rank)},
            besides_bytes=own.mesh_bytes(SCHEDULE.num_ranks),
        ).peak_bytes(chosen)
        for rank in range(SCHEDULE.num_ranks)
    ]
    return replace(plan, pipeline=SCHEDULE, stage_plans=tuple(stages)), peaks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "kind"),
    [
        ("GPT", {"fsdp": 2}, "bfloat16"),
        ("LLAMA", {"fsdp": 2, "tp": 2}, "sequence"),
    ],
)
def test_ranks_peak_as_replayed_and_train_alike(name, mesh, kind, monkeypatch):
    monkeypatch.setattr(stage_mesh_ranks, "NUM_STAGES", SCHEDULE.num_stages)
    plan, peaks = interleaved(name, mesh, kind)
    job = Job(recipe=RECIPES[name], schedule=SCHEDULE, starts=(), plan=plan)

    results = run_ranks(job)

    each = math.prod(mesh.values())
    for i, result in enumerate(results):
        expected = peaks[i // each]
        assert result.peak_bytes <= expected
        assert HOLDS_LESS or result.peak_bytes >= 0.999 * expected
    losses, gradients = reference(job)
    for result in results:
        begin = result.share * SCHEDULE.num_micro_batches
        for i, loss in enumerate(result.losses):
            assert loss == pytest.approx(losses[begin + i], rel=1e-5)
    own = {key: g for result in results for key, g in result.gradients.items()}
    assert own.keys() == gradients.keys()
    tolerance = 1e-2 if kind == "bfloat16" else 1e-5
    for key, gradient in gradients.items():
        largest = gradient.abs().max()
        assert (own[key] - gradient).abs().max() <= tolerance * largest, key
