"""Pipelines x context parallelism: plans, what they refuse, and real ranks."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import inf

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autosac
from autosac._compat_distributed import fake_group
from autosac.errors import ArgumentError, InfeasibleBudgetError, UnsupportedError
from autosac.parallel.clusters import cluster_spec
from autosac.parallel.cp_tracing import rank_copy
from autosac.parallel.tp_styles import WHOLE
from autosac.pipelines.blocks import Stage, Tokens
from autosac.pipelines.mesh_choosing import MeshSearch
from autosac.pipelines.micro_batches import MicroBatch
from autosac.pipelines.shared_sequences import context_of
from autosac.pipelines.stage_steps import stage_step
from benchmarks import stage_mesh_ranks
from benchmarks.stage_models import GPT, TiedGPT
from benchmarks.stage_ranks import can_count
from tests.pipelines.test_divided_stages import CLUSTER

pytestmark = [
    pytest.mark.usefixtures("one_thread", "traced_once"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration"),  # oneDNN is switched off
]

NUM_ROWS, LENGTH, WIDTH = 8, 64, 96
NODES = replace(cluster_spec("hgx-h100"), gpus_per_node=4)
EXAMPLE = stage_mesh_ranks.RECIPES["GPT"]


def plan(memory_budget="1GiB", model=None, length=LENGTH, **options):
    inputs, target = (t[:, :length] for t in EXAMPLE.make_batch(NUM_ROWS // 2))
    return autosac.plan_pipeline(
        model or GPT(num_blocks=1),
        inputs,
        target=target,
        loss_fn=EXAMPLE.loss_fn,
        memory_budget=memory_budget,
        **{
            "optimizer": torch.optim.AdamW,
            "num_ranks": 2,
            "num_micro_batches": 4,
            "schedules": ["1F1B"],
            "cluster": CLUSTER,
            "mesh": {"cp": 2},
            **options,
        },
    )


@pytest.fixture(scope="module")
def of_parts():
    return plan()


@pytest.mark.slow
def test_stages_hand_on_parts_of_sequences(of_parts):
    first, last = of_parts.stage_plans
    assert first.received.shape == (2, LENGTH // 2)
    assert first.sent == last.received
    assert first.sent.shape == (2, LENGTH // 2, WIDTH)
    assert of_parts.global_batch == NUM_ROWS  # rows are whole sequences
    assert of_parts.mesh_dim_names == ("pp", "cp")
    assert of_parts.mesh_shape == (2, 2)
    assert max(stage.exchange_ms for stage in of_parts.stage_plans) > 0
    assert "parts for 2 ranks" in str(of_parts)


@pytest.mark.slow
def test_a_rank_gets_its_part_and_shards_of_its_own_blocks(of_parts, tmp_path):
    path = tmp_path / "plan.json"
    of_parts.save(path)
    loaded = autosac.PipelinePlan.load(path)
    assert loaded == of_parts
    inputs, _ = EXAMPLE.make_batch(NUM_ROWS // 2)
    with fake_group(4, rank=1):
        mesh = loaded.make_mesh("cpu")
        (stage,) = loaded.stages(GPT(num_blocks=1), mesh)
        assert stage.is_first
        assert stage.submod._tokens_given == Tokens(LENGTH // 2, LENGTH // 2)
        weight = stage.submod.get_parameter("embedding.wte.weight")
        assert isinstance(weight, DTensor)
        assert weight.to_local().shape[0] == weight.shape[0] // 2
        assert loaded.batch_index(mesh) == 0
        part = loaded.part_of(inputs, mesh)
    assert torch.equal(part, inputs[:, LENGTH // 2 :])
    assert part.untyped_storage().nbytes() == part.nbytes


@pytest.mark.slow
def test_replicas_of_parts_are_made_on_the_mesh_of_the_plan(of_parts):
    parallel = replace(of_parts.parallel, replicate_degree=2)
    planned = replace(of_parts, parallel=parallel)
    with fake_group(8, rank=2):
        mesh = planned.make_mesh("cpu")
        assert mesh.mesh_dim_names == ("pp", "replicate", "fsdp", "cp")
        (stage,) = planned.stages(GPT(num_blocks=1), mesh)
        weight = stage.submod.get_parameter("embedding.wte.weight")
        assert weight.device_mesh.shape == (2, 2)
        assert weight.to_local().shape[0] == weight.shape[0] // 2


@pytest.mark.slow
def test_blocks_that_ask_for_positions_get_those_of_the_part():
    model, (inputs, _) = GPT(num_blocks=1), EXAMPLE.make_batch(1)
    whole = Stage(model, ["embedding", "ln_f"])
    part = Stage(model, ["embedding", "ln_f"], Tokens(48, 16))
    assert torch.equal(part(inputs[:, 48:]), whole(inputs)[:, 48:])
    assert torch.equal(whole(inputs), model.ln_f(model.embedding(inputs)))


def _micro_batch(method="ulysses"):
    inputs, target = EXAMPLE.make_batch(1)
    base = MicroBatch(
        model=GPT(num_blocks=1),
        inputs=inputs,
        target=target,
        loss_fn=EXAMPLE.loss_fn,
        options={"optimizer": torch.optim.AdamW},
        cluster=CLUSTER,
    )
    return base, base.on_rank(context_of(base, 2, method), base)


def _flops(step):
    return sum(op.flops for op in step.later.tape.ops)


@pytest.mark.slow
def test_ranks_that_share_a_sequence_share_its_flops_evenly():
    base, own = _micro_batch()
    with fake_group(2):
        parts = [own.step(*blocks) for blocks in ((0, 2), (2, 4))]
    wholes = [base.step(*blocks) for blocks in ((0, 2), (2, 4))]
    assert [2 * _flops(part) for part in parts] == [_flops(whole) for whole in wholes]


@pytest.mark.slow
def test_of_a_ring_the_rank_that_is_traced_holds_no_less_than_others():
    base, own = _micro_batch("ring")
    peaks = []
    for place in (0, 1):
        with fake_group(2, place):
            stage = Stage(base.model, ["h.0"], Tokens(32 * place, 32))
            context, device = own.context.within(["h.0"]), CLUSTER.device
            stage = rank_copy(stage, WHOLE, context, device, place)
            received = torch.zeros(2, 32, WIDTH, requires_grad=True)
            step = stage_step(stage, received, loss_fn=None, **base.options)
            peaks.append(step.later.baseline_peak_bytes)
    with fake_group(2):
        assert own.step(1, 2).later.baseline_peak_bytes == peaks[0]
    assert peaks[0] >= peaks[1]


@pytest.mark.slow
def test_rings_of_stages_are_predicted_and_not_run():
    ring = plan(cp_method="ring")
    assert "cannot be applied" in str(ring)
    with fake_group(4), pytest.raises(UnsupportedError, match="'ulysses'"):
        ring.stages(GPT(num_blocks=1), ring.make_mesh("cpu"))


class Unplaced(nn.Module):
    """Takes no positions."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def forward(self, x):
        return self.embedding(x)


class Counting(Unplaced):
    """Takes positions, and counts them itself."""

    def forward(self, x, position_ids=None):
        return self.embedding(x)


class Pooling(Unplaced):
    """Mixes tokens outside of attention."""

    def forward(self, x):
        return self.embedding(x) + x.cumsum(1)


class Adding(nn.Module):
    """Adds learnt positions."""

    def __init__(self):
        super().__init__()
        self.wpe = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        return x + self.wpe(position_ids)


class CountingToo(Adding):
    """Does the same, but for parts."""

    def forward(self, x):
        return super().forward(x)


def mixed():
    model = GPT(num_blocks=1)
    model.h.extend([Adding(), CountingToo()])
    return model


def _with(block, name="embedding"):
    model = GPT(num_blocks=1)
    setattr(model, name, block(getattr(model, name)))
    return model


CONTEXT = {"tp_plan": "tensor", "mesh": {"cp": 2, "tp": 2}}


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": _with(Unplaced)}, UnsupportedError, "No block's forward"),
        ({"model": _with(Counting)}, UnsupportedError, "counts tokens"),
        ({"model": mixed()}, UnsupportedError, "`h.2.* counts tokens"),
        ({"model": _with(Pooling, "ln_f")}, UnsupportedError, "`ln_f` mixes tokens"),
        ({"model": TiedGPT()}, UnsupportedError, "cannot be on two ranks"),
        ({"mesh": {"cp": 4}}, ArgumentError, "6 heads, which cp=4 does not divide"),
        (CONTEXT, ArgumentError, "3 heads, which cp=2 does not divide"),
        ({"mesh": {"cp": 3}}, ArgumentError, "must be one of 1, 2, 4"),
        ({"length": 63}, ArgumentError, "63 cannot be divided"),
        ({"mesh": {"tp": 2}, "cp_method": "ring"}, ArgumentError, "'cp': 2"),
        ({"cp_method": "rings"}, ArgumentError, "'rings'"),
        ({"offload": True}, UnsupportedError, "with context parallelism"),
        ({"cluster": None}, ArgumentError, "`cluster` is missing"),
    ],
)
def test_what_cannot_be_done_in_parts_is_said_in_a_sentence(options, error, message):
    with pytest.raises(error, match=message):
        plan(**options)


@pytest.mark.slow
def test_whole_parameters_that_meet_a_part_of_tensors_are_refused_in_parts_too():
    model = GPT(num_blocks=1, head_dim=12)
    model.h[0].mlp[1] = nn.PReLU()
    styles = {"h.*.mlp.0": "colwise", "h.*.mlp.2": "rowwise"}
    with pytest.raises(ArgumentError, match=r"`h\.0\.mlp\.1\.weight` meets a part"):
        plan(model=model, mesh={"cp": 2, "tp": 2}, tp_plan=styles)


def test_a_process_that_is_a_rank_plans_no_parts():
    with fake_group(2), pytest.raises(ArgumentError, match="before"):
        plan()


@pytest.mark.slow
def test_parts_save_memory_and_cost_collectives(of_parts):
    with pytest.raises(InfeasibleBudgetError, match="x cp=2 ranks") as caught:
        plan(1000)
    lowest_bytes = caught.value.lowest_peak_bytes
    with pytest.raises(InfeasibleBudgetError) as of_whole:
        plan(1000, mesh={"fsdp": 2})
    assert lowest_bytes < of_whole.value.lowest_peak_bytes
    own = plan(lowest_bytes)
    assert own.highest_peak_bytes <= lowest_bytes
    assert own.step_ms >= of_parts.step_ms


@pytest.mark.slow
def test_the_cheapest_batch_wins_and_the_plan_says_what_lost():
    own = plan(mesh={"cp": None})
    lost = [text for text in own.alternatives if text.startswith(("cp=", "tp="))]
    names = {text.partition(":")[0] for text in lost}
    assert own.context.degree == 1  # everything fits: nothing is to be exchanged
    assert names == {"cp=2", "cp=4"}


@pytest.mark.slowest
def test_no_mesh_with_parts_that_is_given_is_faster_than_the_one_that_is_chosen():
    options = {"num_ranks": None, "num_micro_batches": None, "global_batch": 8}
    open_ = {"pp": None, "fsdp": None, "cp": None}
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(1000, mesh={**open_, "cp": 2}, **options)
    budget = caught.value.lowest_peak_bytes
    chosen = plan(budget, mesh=open_, **options)
    assert chosen.peak_bytes <= budget and chosen.bound_ms <= chosen.step_ms
    assert chosen.global_batch == 8
    given = plan(
        budget, mesh={"cp": 2}, num_micro_batches=None, global_batch=8, num_ranks=2
    )
    assert chosen.step_ms <= 1.005 * given.step_ms


def on_gpus(memory_budget, num_gpus=4, **options):
    """A plan whose times no measurement disturbs; degrees are open."""
    with torch.device("meta"):
        model = GPT(num_blocks=2)
    return plan(
        memory_budget,
        model,
        **{
            "num_ranks": None,
            "num_micro_batches": None,
            "global_batch": 4,
            "mesh": {"pp": None, "fsdp": None, "cp": None},
            "cluster": NODES.resized(num_gpus),
            **options,
        },
    )


@cache
def _step_ms(*args):
    try:
        own = on_gpus(*args)
    except InfeasibleBudgetError:
        return inf
    assert own.highest_peak_bytes <= own.budget_bytes
    assert own.bound_ms <= own.step_ms * (1 + 1e-9)
    return own.step_ms


@pytest.mark.slowest
def test_more_memory_or_gpus_is_never_slower():
    with pytest.raises(InfeasibleBudgetError) as caught:
        on_gpus(1000)
    least_bytes = caught.value.lowest_peak_bytes
    more_bytes = int(1.2 * least_bytes)
    cases = (least_bytes, 4), (more_bytes, 4), (more_bytes, 8)
    times = [_step_ms(*case) for case in cases]
    assert all(more <= less for less, more in pairwise(times)), times


@pytest.mark.slowest
def test_no_micro_batch_takes_less_than_its_bound(monkeypatch):
    row_ms, shares = MeshSearch._own_row_ms, []

    def checked(search, cell):
        whole_ms = sum(search._micro_batch(cell.division, cell.rows).block_ms)
        shares.append(cell.rows * row_ms(search, cell) / whole_ms)
        return row_ms(search, cell)

    monkeypatch.setattr(MeshSearch, "_own_row_ms", checked)
    mesh = {"pp": None, "fsdp": None, "cp": None, "tp": None}
    on_gpus(2**40, mesh=mesh, global_batch=16, tp_plan="sequence")
    assert len(shares) > 10
    assert 0 < max(shares) <= 1


@pytest.mark.slowest
@pytest.mark.skipif(not can_count(), reason="counting takes a C compiler")
def test_real_ranks_with_parts_keep_cap_prediction_and_gradients(short_models):
    # `benchmarks.stage_mesh_ranks` has more models, and those with slices besides.
    cell = next(stage_mesh_ranks.planned("VARIED", "1F1B", {"cp": 2}, ""))  # tight cap
    assert any(stage.policy for stage in cell.plan.stage_plans)
    row = stage_mesh_ranks.run(cell)
    assert row.is_kept, row
