"""Models whose parameters are `DTensor`s: a plan counts what a rank holds.

Bytes are compared in a group of one process, where what is gathered is left as it was
found; bits only where there is another rank.
"""

from dataclasses import replace

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import autosac
from autosac._compat_distributed import fake_group
from autosac.devices.specs import device_spec
from autosac.errors import UnsupportedError
from autosac.parallel.clusters import cluster_spec
from benchmarks.rank_server import run_ranks

NUM_TOKENS, WIDTH, HIDDEN, NUM_BLOCKS = 96, 32, 128, 3
STYLES = ("tensor", "sequence")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(output):
    return functional.softplus(output).mean()


def make_inputs():
    return torch.randint(NUM_TOKENS, (4, 16))


def make_model(style, mesh):
    torch.manual_seed(0)
    model = Model()
    columns, rows = ColwiseParallel(), RowwiseParallel()
    if style == "sequence":
        rows = RowwiseParallel(output_layouts=Shard(1))
        embedding = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1)
        )  # of vocabulary
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh, {"tokens": embedding, "head": head})
    for block in model.blocks:
        plan = {"mlp.0": columns, "mlp.2": rows}
        if style == "sequence":
            whole = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
            plan = {"norm": SequenceParallel(), "mlp": whole, **plan}
        parallelize_module(block, mesh, plan)
    return model


@pytest.mark.slow
@pytest.mark.slow_but_first
@pytest.mark.parametrize("style", STYLES)
def test_peaks_of_a_rank_are_what_its_allocator_sees(style):
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        profile = autosac.profile(
            make_model(style, mesh), make_inputs(), loss_fn=loss_of, optimizer="adamw"
        )
        plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
        verification = autosac.verify(
            plan,
            lambda: make_model(style, mesh),
            make_inputs,
            loss_fn=loss_of,
            make_optimizer="adamw",
            timing_rounds=0,
        )
    assert {op.name.split(".")[0] for op in profile.tape.ops} >= {"_c10d_functional"}
    assert plan.policy
    assert verification.within_budget
    numbers = profile.simulator.number_bytes  # that stay for good on some threads
    assert 0 <= plan.peak_bytes - verification.measured_peak_bytes <= numbers
    baseline_bytes = verification.baseline_peak_bytes
    assert 0 <= profile.baseline_peak_bytes - baseline_bytes <= numbers


class Writes(Model):
    """Autograd follows a write to memory that a view looks at: plain fakes only."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        half = logits[..., : NUM_TOKENS // 2]
        logits.mul_(2)
        return torch.cat([half.exp(), logits], -1)


def test_divided_parameters_are_traced_where_autograd_follows_writes():
    whole = autosac.profile(Writes(), make_inputs(), loss_fn=loss_of)
    assert whole.step.learned.plain
    styles = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}
    plan = autosac.plan_parallel(
        whole,
        cluster=replace(cluster_spec("pcie-l40s"), device=device_spec("cpu")),
        num_gpus=2,
        memory_budget="1GiB",
        mesh={"tp": 2},
        tp_plan=styles,
    )
    assert plan.peak_bytes < whole.baseline_peak_bytes


@pytest.mark.slow
def test_a_rank_is_planned_for_a_gpu_that_is_not_there():
    with fake_group(2), torch.device("meta"):
        mesh = init_device_mesh("cpu", (2,))
        tensor, whole = (
            autosac.profile(model, make_inputs(), loss_fn=loss_of, device="h100")
            for model in (make_model("tensor", mesh), Model())
        )
    sharded = sum(
        parameter.nbytes
        for name, parameter in Model().named_parameters()
        if ".mlp.0" in name or "2.weight" in name
    )
    held = [p.composition({})["parameter"] for p in (whole, tensor)]
    assert abs(held[0] - held[1] - sharded / 2) < 512 * 3 * NUM_BLOCKS  # rounding
    with pytest.raises(UnsupportedError, match="`offload` is not planned for a step"):
        autosac.plan(tensor, memory_budget="1GiB", offload=True)
    assert whole.may_offload and not tensor.may_offload


def gathered_width(degree):
    """Of a layer whose slices lie on so many ranks of the group that is there."""
    mesh = init_device_mesh("cpu", (degree,))
    layer = nn.Linear(WIDTH, HIDDEN)
    style = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(layer, mesh, style, src_data_rank=None)
    return layer(torch.zeros(1, WIDTH)).shape[1]


def test_groups_of_a_world_that_is_gone_are_those_of_no_other_world():
    # PyTorch numbers a world's groups as they come, and meshes of the same ranks are
    # equal: what it has found out of one names the group of another size, or of none.
    widths = []
    for num_ranks, *degrees in ((8, 2, 4), (8, 4, 2), (2, 2)):
        with fake_group(num_ranks):
            widths += map(gathered_width, degrees)
    assert widths == [HIDDEN] * 5


def test_what_is_sharded_already_is_refused():
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(autosac.UnsupportedError, match="distributed tensors"):
            autosac.plan_parallel(
                make_model("tensor", mesh),
                make_inputs(),
                loss_fn=loss_of,
                cluster="hgx-h100",
                num_gpus=8,
                memory_budget="1GiB",
            )
        model = Model()
        fully_shard(model.blocks[0], mesh=mesh)
        with pytest.raises(autosac.ArgumentError, match=r"`blocks.0` of .* sharded by"):
            autosac.profile(model, make_inputs(), loss_fn=loss_of)


def _train(rank, directory, style):
    mesh = init_device_mesh("cpu", (2,))
    model, inputs = make_model(style, mesh), make_inputs()
    path = f"{directory}/plan.json"
    if rank == 0:  # while the other rank does nothing
        profile = autosac.profile(model, inputs, loss_fn=loss_of)
        autosac.plan(profile, memory_budget=autosac.floor(profile)).save(path)
    dist.barrier()
    plan = autosac.Plan.load(path)
    expected = _gradients(model, inputs)
    _depart(model)
    departed = _gradients(model, inputs)
    model = make_model(style, mesh)
    plan.apply(model)
    for _ in range(3):  # at first all ops are looked at, later few of them
        _assert_equal(_gradients(model, inputs), expected)
    _depart(model)
    for _ in range(2):
        with pytest.warns(UserWarning, match="AC unit"):
            _assert_equal(_gradients(model, inputs), departed)


def _depart(model):
    """Let blocks do something else than their plan expects."""
    for block in model.blocks:
        block.mlp[1].forward = functional.silu


def _assert_equal(gradients, expected):
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


def _gradients(model, inputs):
    loss_of(model(inputs)).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    assert any(isinstance(gradient, DTensor) for gradient in gradients.values())
    return {
        name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for name, gradient in gradients.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_gradients_of_real_ranks_are_those_without_a_plan(style, tmp_path):
    run_ranks(_train, 2, str(tmp_path), style)
