"""What ranks hold beside their step counts: whole batches, and the mesh."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import autosac
from autosac.devices.specs import device_spec
from autosac.parallel import cp_tracing
from autosac.parallel.clusters import cluster_spec
from autosac.parallel.context_parallel import ContextParallel
from autosac.parallel.formulating import Setting
from autosac.parallel.sequence_parts import held_beside, part_of
from benchmarks import allocator_shim
from benchmarks.rank_server import run_ranks

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration"),  # oneDNN is switched off
]
ROWS, LENGTH, FEATURES, WIDTH, HEADS, NUM_RANKS = 4, 32, 512, 16, 4, 2
CPUS = replace(cluster_spec("pcie-l40s", num_gpus=2), device=device_spec("cpu"))
needs_compiler = pytest.mark.skipif(
    allocator_shim.library() is None, reason="needs a C compiler"
)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        heads = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(x.shape)


class Model(nn.Module):
    """Works on wide features, of which a batch takes more than all the rest."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(FEATURES, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x, scale=1.0, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])[None]
        x = scale * (self.into(x) + self.places(position_ids))
        for layer in self.layers:
            x = x + layer(x)
        return x


def batch():
    return {"x": torch.ones(ROWS, LENGTH, FEATURES), "scale": torch.tensor(1.0)}


def loss_fn(output):
    return output.square().mean()


def planned(memory_budget, **options):
    return autosac.plan_parallel(
        Model(),
        batch(),
        loss_fn=loss_fn,
        optimizer=torch.optim.AdamW,
        cluster=CPUS,
        memory_budget=memory_budget,
        **options,
    )


def least(**options):
    """The plan of the least peak."""
    with pytest.raises(autosac.InfeasibleBudgetError) as caught:
        planned(1000, **options)
    composition = caught.value.composition
    assert sum(composition.values()) == caught.value.lowest_peak_bytes
    assert composition["mesh"] == 4 * NUM_RANKS
    return planned(caught.value.lowest_peak_bytes, **options)


def _peaks(rank, plan):
    """The loop of docs/parallel.md."""
    torch.backends.mkldnn.set_flags(False)
    gc.collect()
    dist.barrier()  # which leaves something behind
    before_bytes = allocator_shim.live_bytes()
    mesh = plan.make_mesh("cpu")
    model = Model()
    plan.apply(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    peaks = []
    for _ in range(4):
        inputs = batch()
        args, kwargs = plan.part_of(inputs, mesh)
        gc.collect()
        dist.barrier()
        allocator_shim.reset()
        output = model(*args, **kwargs)
        loss = loss_fn(output)
        loss.backward()
        del output
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(allocator_shim.peak_bytes() - before_bytes)
        del inputs, args, kwargs, loss
    return peaks[1:]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "options",
    [{"mesh": {"cp": 2}}, {"degrees": [1]}, {"degrees": [2]}],
    ids=["parts of a sequence", "replicas", "shards"],
)
def test_a_loop_that_holds_the_whole_batch_has_the_predicted_peak(options):
    plan = least(**options)
    for peaks in run_ranks(_peaks, NUM_RANKS, plan):
        assert min(peaks) == plan.peak_bytes
        assert max(peaks) <= plan.highest_peak_bytes <= plan.budget_bytes


# --- what is beside a part ----------------------------------------------------


def sizes(*args, **kwargs):
    return [storage.nbytes() for storage in held_beside((args, kwargs))]


def test_what_is_cut_is_held_whole_beside_the_part_and_counts_once():
    x, scale = torch.ones(2, 8), torch.ones(8)
    assert sizes(x, scale, None, 3) == [64]
    assert sizes(x, twice=[x, x[:, :4]]) == [64]
    assert sizes(torch.ones(4, 8)[:2]) == [128]  # views hold what they are of
    assert sizes(x, flat=x.view(-1)) == []  # the rank is given it as it is
    assert sizes(scale) == []


def of_parts(inputs):
    """The step of the first of two ranks, and what of the batch it is given."""
    profile = autosac.profile(Model(), inputs, loss_fn=loss_fn)
    context = cp_tracing.context_of(profile, 2, "ulysses")
    return profile, context, cp_tracing.traced_at(profile, context, 0, Setting())


def input_bytes(tape):
    return sum(own.nbytes for own in tape.storages if own.category == "input")


def test_positions_that_a_part_comes_with_count_of_the_part_alone():
    inputs = batch()
    _, context, rank = of_parts(inputs)
    _, own = part_of(((), inputs), context, 0)
    whole_bytes = inputs["x"].nbytes
    assert own["position_ids"].nbytes == 8 * LENGTH // 2
    of_part = sum(tensor.nbytes for tensor in own.values())
    assert input_bytes(rank.tape) == of_part + whole_bytes
    given = {**inputs, "position_ids": torch.arange(LENGTH)[None]}
    more_bytes = input_bytes(of_parts(given)[2].tape) - input_bytes(rank.tape)
    assert more_bytes == 8 * LENGTH


def test_variants_of_a_step_have_the_whole_batch_as_well():
    _, context, rank = of_parts(batch())
    assert isinstance(context, ContextParallel)
    twins = replace(rank, redrawn=(rank.traced(),))
    held = cp_tracing._holding([1024], twins)
    for one in (held, *held.redrawn):
        assert input_bytes(one.tape) == input_bytes(rank.tape) + 1024
        assert one.tape.storages[:-1] == rank.tape.storages


# --- the mesh -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(1, {}), (2, {"degrees": [1]}), (4, {"degrees": [2]})],
)
def test_the_mesh_of_all_ranks_is_on_each(num_ranks, options):
    plan = planned("1GiB", num_gpus=num_ranks, **options)
    assert plan.composition["mesh"] == 4 * num_ranks
    assert sum(plan.composition.values()) == plan.peak_bytes


def test_the_mesh_of_ranks_that_share_slices_counts_them_too():
    styles = {"into": "colwise_gather_output"}
    options = {"mesh": {"tp": 2}, "tp_plan": styles, "num_gpus": 4}
    plan = planned("1GiB", **options)
    assert plan.tensor.degree == 2
    assert plan.composition["mesh"] == 16


def test_on_gpus_the_mesh_takes_nothing():
    plan = autosac.plan_parallel(
        Model(), batch(), loss_fn=loss_fn, cluster="pcie-l40s", memory_budget="1GiB"
    )
    assert "mesh" not in plan.composition
