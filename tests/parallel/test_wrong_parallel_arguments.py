"""What plans for many ranks do not take: each is refused by one sentence."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn.parallel import DistributedDataParallel

import autosac
from autosac._compat_distributed import fake_group
from autosac.integrations.replicas import replica_of

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {"cluster": "hgx-h100", "num_gpus": 4, "memory_budget": "1GiB"}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    """Blocks of norm, activation and products; nothing is a block's own."""

    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.LayerNorm(8), Mlp()) for _ in range(3))
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.blocks(x))


def plan_of(model=None, inputs=None, **options):
    with torch.device("meta"):
        model = Net() if model is None else model
        inputs = torch.ones(4, 8) if inputs is None else inputs
    options = {"loss_fn": torch.mean, "optimizer": torch.optim.AdamW, **options}
    return autosac.plan_parallel(model, inputs, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def plan():
    return plan_of(degrees=[2])


# --- norms over several processes ---------------------------------------------------


def synced():
    return nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8), nn.Linear(8, 8))


def of_replicas():
    with fake_group(2):
        replicated = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.GELU()))
        replicated.module[1] = nn.SyncBatchNorm(8)  # DDP itself takes it on GPUs only
        replica_of(replicated)


WITH_SYNCED_NORMS = {
    "plan_parallel": lambda: plan_of(synced()),
    "plan_parallel of a profile": lambda: autosac.plan_parallel(
        autosac.profile(synced(), torch.ones(4, 8), loss_fn=torch.mean, device="h100"),
        **OPTIONS,
    ),
    "min_gpus": lambda: autosac.min_gpus(
        *(synced(), torch.ones(4, 8)),
        loss_fn=torch.mean,
        cluster="hgx-h100",
        memory_budget="1GiB",
    ),
    "plan_pipeline": lambda: autosac.plan_pipeline(
        *(synced(), torch.ones(4, 8)),
        target=torch.ones(4, 8),
        loss_fn=nn.functional.mse_loss,
        num_ranks=2,
        num_micro_batches=2,
        memory_budget="1GiB",
    ),
    "plan_replicas": of_replicas,
}


@pytest.mark.parametrize("way", WITH_SYNCED_NORMS)
def test_no_plan_for_several_processes_takes_norms_that_are_synced(way):
    with pytest.raises(autosac.UnsupportedError, match=r"`SyncBatchNorm` \(`1`\)"):
        WITH_SYNCED_NORMS[way]()


# --- FSDP units ---------------------------------------------------------------------


@pytest.mark.parametrize("units", ["blocks.*", ["blocks.*", nn.GELU], ["*"]])
def test_patterns_and_classes_mean_modules_with_parameters_of_their_own(units):
    plan = plan_of(fsdp_units=units)
    names = {unit.fqn for unit in plan.sharding.units} - {"head"}
    inside = ("0", "1.up", "1.down")
    assert names == {"", *(f"blocks.{i}.{n}" for i in range(3) for n in inside)}
    with fake_group(4):
        plan.apply(Net(), plan.make_mesh("cpu"))


@pytest.mark.parametrize(
    ("units", "why"),
    [
        (["blocks.*", "blocks.0.1.act"], "'blocks.0.1.act' is a unit without param"),
        (["blocks.*", "blocks.0", "blocks.1"], "'blocks.0' is a unit without param"),
        (nn.GELU, "modules without parameters alone"),
    ],
)
def test_a_named_module_without_parameters_is_an_error_of_one_sentence(units, why):
    with pytest.raises(autosac.ArgumentError, match=why) as caught:
        plan_of(fsdp_units=units)
    assert str(caught.value).count(". ") == 0


# --- meshes -------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [None, (2, 2), "cuda"])
def test_what_is_no_mesh_is_refused_by_all_that_take_one(plan, mesh):
    pipeline = autosac.plan_pipeline(
        *(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(4, 8)),
        target=torch.ones(4, 8),
        loss_fn=nn.functional.mse_loss,
        num_ranks=2,
        num_micro_batches=2,
        memory_budget="1GiB",
    )
    takers = (
        partial(plan.apply, Net()),
        partial(plan.part_of, torch.ones(4, 8)),
        partial(pipeline.stages, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))),
        partial(pipeline.part_of, torch.ones(4, 8)),
        pipeline.batch_index,
    )
    for take in takers:
        with pytest.raises(autosac.ArgumentError, match="must be a DeviceMesh, as"):
            take(mesh)


@pytest.mark.parametrize(
    ("names", "is_taken"),
    [
        (("replicate", "shard"), True),
        (("dp_replicate", "dp_shard"), True),
        (("replicate", "fsdp"), False),
        (("shard", "replicate"), False),
        (("shard", "fsdp"), False),
    ],
)
def test_names_of_the_plan_are_in_its_order_and_others_go_by_place(
    plan, names, is_taken
):
    assert plan.mesh_dim_names == ("replicate", "shard")
    with fake_group(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        if is_taken:
            plan.apply(Net(), mesh)
            return
        with pytest.raises(autosac.ArgumentError, match=f"named .*{names[0]}.* wants"):
            plan.apply(Net(), mesh)


def test_a_mesh_is_made_for_a_device_and_for_no_unknown_type(plan):
    with fake_group(4):
        assert plan.make_mesh(torch.device("cpu")) == plan.make_mesh("cpu")
        with pytest.raises(autosac.ArgumentError, match="='gpu' is no type of device"):
            plan.make_mesh("gpu")


def test_a_mesh_without_a_process_group_says_to_make_one(plan):
    with pytest.raises(autosac.ArgumentError, match=r"init_process_group first\.$"):
        plan.make_mesh("cpu")
    other = pytest.raises(autosac.ArgumentError, match=r"with num_gpus=2\.$")
    with fake_group(2), other:
        plan.make_mesh("cpu")


@pytest.mark.parametrize("name", ["tp", "cp", "pp"])
@pytest.mark.parametrize("degree", [True, 4.0, "2"])
def test_a_degree_of_a_mesh_is_a_whole_number(name, degree):
    why = f"`mesh` has {name}={degree!r}, which must be a whole number"
    with pytest.raises(autosac.ArgumentError, match=why):
        plan_of(mesh={name: degree})


# --- styles -------------------------------------------------------------------------


HALVES = (
    ({"blocks.*.1.up": "colwise"}, r"`blocks.0.1.down` .* no style: give it 'rowwise'"),
    ({"blocks.*.1.down": "rowwise"}, r"or `blocks.0.1.down` 'rowwise_split_input'\.$"),
)


@pytest.mark.parametrize(("styles", "fix"), HALVES)
@pytest.mark.parametrize("types", [{}, {"param_dtype": "bf16", "reduce_dtype": "fp32"}])
def test_a_plan_of_half_a_pair_says_which_module_needs_a_style(styles, fix, types):
    why = r"runs whole, and fails as `tp_plan` divides it among 2 ranks.*" + fix
    with pytest.raises(autosac.ArgumentError, match=why):
        plan_of(mesh={"tp": 2}, tp_plan=styles, **types)


@pytest.mark.parametrize(
    ("style", "word"),
    [
        (ColwiseParallel(), "'colwise'"),
        (ColwiseParallel, "'colwise'"),
        (RowwiseParallel(), "'rowwise'"),
        (SequenceParallel(), "'sequence_parallel'"),
        (PrepareModuleInput(), "'sequence_to_whole', or 'whole_input'"),
        (["colwise"], "table in `autosac.parallel.tp_styles`"),
    ],
)
def test_pytorchs_styles_are_refused_with_the_word_for_them(style, word):
    why = f"'head' a .*write the word for it, .*{word}"
    with pytest.raises(autosac.ArgumentError, match=why):
        plan_of(mesh={"tp": 2}, tp_plan={"head": style})


def test_tp_plan_of_another_library_is_refused_with_what_to_do():
    with pytest.raises(autosac.ArgumentError, match="'auto'; leave it out to try all"):
        plan_of(mesh={"tp": 2}, tp_plan="auto")


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("mp_policy", MixedPrecisionPolicy(), "`param_dtype` and `reduce_dtype`"),
        ("offload_policy", CPUOffloadPolicy(), "is not planned; leave it out"),
        ("output_dtype", torch.float32, "the type that the model gives them"),
        ("reshard_after_forward", True, "the plan chooses it"),
        ("ignored_params", set(), "shards all parameters"),
    ],
)
def test_arguments_of_fully_shard_are_refused_with_a_reason(name, value, advice):
    with pytest.raises(autosac.ArgumentError, match=f"no `{name}`: .*{advice}") as why:
        plan_of(**{name: value})
    assert "do you mean" not in str(why.value)
