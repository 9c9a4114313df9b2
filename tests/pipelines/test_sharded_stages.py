"""Stages that FSDP2 shards: plans, and what they refuse. Others run them."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

import autosac
from autosac._compat_distributed import fake_group
from autosac.devices.specs import device_spec
from autosac.errors import ArgumentError, UnsupportedError
from autosac.parallel.clusters import cluster_spec
from autosac.pipelines.micro_batches import MicroBatch
from autosac.pipelines.playing import StageTimes, step_ms
from autosac.pipelines.schedules import Schedule
from autosac.pipelines.sharded_stages import DataParallel
from autosac.solvers.fsdp.collectives import Group
from tests.pipelines.stages import NUM_TOKENS, WIDTH, language_loss, tokens
from tests.pipelines.test_planning import Model

pytestmark = pytest.mark.usefixtures("one_thread")

# CPUs with links that take time.
CLUSTER = replace(cluster_spec("pcie-l40s", num_gpus=8), device=device_spec("cpu"))


def plan(mesh, *, model=None, memory_budget="1GiB", **options):
    inputs, target = tokens(2)
    options = {
        "optimizer": torch.optim.AdamW,
        "num_micro_batches": 2,
        "schedules": ["1F1B"],
        "cluster": CLUSTER,
        **options,
    }
    return autosac.plan_pipeline(
        model or Model(2),
        inputs,
        target=target,
        loss_fn=language_loss,
        num_ranks=2,
        memory_budget=memory_budget,
        mesh=mesh,
        **options,
    )


@pytest.fixture(scope="module")
def sharded():
    return plan({"fsdp": 2})


def test_a_rank_has_shards_of_its_blocks(sharded, tmp_path):
    path = tmp_path / "plan.json"
    sharded.save(path)
    loaded = autosac.PipelinePlan.load(path)
    assert loaded == sharded
    assert "fsdp=2" in str(loaded)
    assert loaded.global_batch == 2 * len(tokens(2)[0])
    model = Model(2)
    with fake_group(4, rank=3):
        mesh = loaded.make_mesh("cpu")
        assert mesh.mesh_dim_names == ("pp", "fsdp")
        (stage,) = loaded.stages(model, mesh)
        head = dict(stage.submod.named_parameters())["head.weight"]
        assert isinstance(head, DTensor)
        assert head.to_local().shape == (NUM_TOKENS // 2, WIDTH)  # of an odd number


@pytest.mark.parametrize("mesh", [{"replicate": 2}, {"fsdp": 2, "replicate": 2}])
def test_replicas_of_stages_are_made_on_the_mesh_of_the_plan(sharded, mesh):
    shards, copies = mesh.get("fsdp", 1), mesh["replicate"]
    parallel = DataParallel(shard_degree=shards, replicate_degree=copies)
    planned = replace(sharded, parallel=parallel)
    with fake_group(2 * shards * copies, rank=shards):
        own = planned.make_mesh("cpu")
        assert own.mesh_dim_names == ("pp", "replicate", "fsdp")
        assert planned.batch_index(own) == shards  # first of the second replica's
        (stage,) = planned.stages(Model(2), own)
        weight = stage.submod.get_parameter("embedding.weight")
        assert weight.device_mesh == own["replicate", "fsdp"]
        assert weight.to_local().shape == (-(-NUM_TOKENS // shards), WIDTH)


@pytest.mark.slow
def test_shards_take_less_memory_than_copies_and_are_gathered(sharded):
    copies = plan({"replicate": 2})
    assert copies.mesh_dim_names == ("pp", "replicate", "fsdp")
    assert copies.mesh_shape == (2, 2, 1)
    for shards, copy in zip(sharded.stage_plans, copies.stage_plans, strict=True):
        assert shards.peak_bytes < copy.peak_bytes
        assert shards.gather_ms > copy.gather_ms == 0
        assert min(shards.reduce_ms, copy.reduce_ms) > 0


def test_gathers_delay_first_forwards_and_reductions_the_end():
    schedule = Schedule(name="GPipe", num_ranks=2, num_micro_batches=2)
    times = StageTimes(
        forward_ms=1.0, backward_ms=2.0, gather_ms=10.0, optimizer_ms=100.0
    )
    # Forwards end at 11, 12 and 22, 23; backwards at 25, 27 and 27, 29.
    assert step_ms(schedule, [times] * 2) == 129.0


@pytest.mark.slow
@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(
    "parallel",
    [
        DataParallel(shard_degree=4),
        DataParallel(shard_degree=2, replicate_degree=2),
        DataParallel(shard_degree=2, param_dtype="bfloat16", reduce_dtype="float32"),
    ],
)
def test_no_stage_is_gathered_and_reduced_faster_than_its_blocks_say(parallel):
    # Block 2 shares parameters with block 3, the embedding is frozen.
    model = Model(3)
    model.blocks[2].up = model.blocks[1].up
    model.embedding.weight.requires_grad_(False)
    inputs, target = tokens(1)
    options = {"optimizer": torch.optim.AdamW, "device": CLUSTER.device}
    whole = MicroBatch(
        model=model,
        inputs=inputs,
        target=target,
        loss_fn=language_loss,
        options=options,
        cluster=CLUSTER,
        parallel=parallel,
    )
    shared = whole.least_sharding_ms[2:4]
    assert shared == [(0.0, 0.0)] * 2 and whole.least_sharding_ms[0][1] == 0.0
    for first, end in ((0, 2), (1, 4), (4, 5), (0, 5)):
        taken = whole.sharding_ms(tuple(range(first, end)))
        least = map(sum, zip(*whole.least_sharding_ms[first:end], strict=True))
        for least_ms, own_ms in zip(least, taken, strict=True):
            assert least_ms <= own_ms * (1 + 1e-12)
    # The odd vocabulary is padded, by one row of 101.
    (own_ms, *_), (least_ms, _) = whole.sharding_ms((4,)), whole.least_sharding_ms[4]
    assert own_ms == pytest.approx(least_ms, rel=0.03)


@pytest.mark.parametrize(
    ("parallel", "inside", "shards", "replicas"),
    [
        (DataParallel(shard_degree=4), 2, (4, 1), (1, 1)),
        (DataParallel(shard_degree=16), 1, (8, 2), (1, 1)),
        (DataParallel(shard_degree=2, replicate_degree=8), 2, (2, 1), (2, 4)),
        (DataParallel(shard_degree=8, replicate_degree=3), 1, (8, 1), (1, 3)),
    ],
)
def test_ranks_fill_one_node_after_the_other(parallel, inside, shards, replicas):
    groups = parallel.groups(CLUSTER, inside)
    assert groups == tuple(
        Group(ranks_per_node=ranks, num_nodes=nodes)
        for ranks, nodes in (shards, replicas)
    )


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        ({"fsdp": 0}, {}, "fsdp=0, and it must be a whole number"),
        ({"fsdp": 3}, {}, "divide the 8 GPUs"),
        ({"fsdp": 2}, {"cluster": None}, "`cluster` is missing"),
        ({"fsdp": 4}, {"global_batch": 6}, "`global_batch`=6 is not shared evenly"),
    ],
)
def test_meshes_that_cannot_be_are_refused_in_a_sentence(mesh, options, message):
    with pytest.raises(ArgumentError, match=message):
        plan(mesh, **options)


def test_a_parameter_on_two_ranks_is_refused():
    with pytest.raises(UnsupportedError, match="share a parameter"):
        plan({"fsdp": 2}, model=Model(2, tied=True))
