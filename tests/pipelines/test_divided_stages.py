"""Pipelines x tensor parallelism: plans, what they refuse, and real ranks."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autosac
from autosac._compat_distributed import fake_group
from autosac._compat_pipelining import HOLDS_LESS
from autosac.devices.specs import device_spec
from autosac.errors import (
    ArgumentError,
    InfeasibleBudgetError,
    TraceError,
    UnsupportedError,
)
from autosac.parallel.clusters import cluster_spec
from autosac.parallel.tp_finding import find_styles
from autosac.parallel.tp_styles import TensorParallel
from autosac.pipelines.micro_batches import MicroBatch
from autosac.pipelines.rank_memory import part_of
from benchmarks import stage_mesh_ranks
from benchmarks.kept_promises import LOSS
from benchmarks.stage_ranks import can_count
from tests.pipelines.stages import (
    LENGTH,
    NUM_TOKENS,
    WIDTH,
    language_loss,
    tokens,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread", "traced_once"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration"),  # oneDNN is switched off
]

# CPUs with links that take time.
CLUSTER = replace(cluster_spec("pcie-l40s", num_gpus=4), device=device_spec("cpu"))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = 8
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x):
        query, key, value = (
            part(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.wq, self.wk, self.wv)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.dropout(self.mlp(self.second(x)))


class Model(nn.Module):
    def __init__(self, dropout=0.0, num_blocks=1):
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS + 3, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(num_blocks))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS + 3, bias=False)

    def forward(self, x):
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plan(memory_budget="1GiB", model=None, **options):
    inputs, target = tokens(4)
    options = {
        "optimizer": torch.optim.AdamW,
        "num_ranks": 2,
        "num_micro_batches": 4,
        "schedules": ["1F1B"],
        "cluster": CLUSTER,
        "mesh": {"tp": 2},
        **options,
    }
    return autosac.plan_pipeline(
        model or Model(),
        inputs,
        target=target,
        loss_fn=language_loss,
        memory_budget=memory_budget,
        **options,
    )


def least_peak(**options):
    with pytest.raises(InfeasibleBudgetError, match="the lowest peak is") as caught:
        plan(1000, **options)
    return caught.value.lowest_peak_bytes


@pytest.fixture(scope="module")
def by_sequence():
    return plan(tp_plan="sequence")


@pytest.mark.slow
def test_blocks_hand_on_what_a_rank_has(by_sequence):
    rows, width = 4, WIDTH
    first, last = by_sequence.stage_plans
    assert first.received.shape == (rows, LENGTH)
    assert first.sent == last.received
    whole = first.fqns[-1] in ("tokens", "norm")
    assert first.sent.shape == (rows, LENGTH if whole else LENGTH // 2, width)
    assert last.sent.shape == (rows, LENGTH, NUM_TOKENS + 3)
    assert all(stage.exchange_ms > 0 for stage in by_sequence.stage_plans)
    assert "tensor and sequence parallelism over 2 ranks" in str(by_sequence)


@pytest.mark.slow
def test_a_rank_gets_its_slices_of_its_own_blocks(by_sequence, tmp_path):
    path = tmp_path / "plan.json"
    by_sequence.save(path)
    loaded = autosac.PipelinePlan.load(path)
    assert loaded == by_sequence
    with pytest.raises(
        ArgumentError, match="4 ranks, and this process is in no process group"
    ):
        loaded.make_mesh("cpu")
    model = Model()
    with fake_group(4, rank=3):
        mesh = loaded.make_mesh("cpu")
        assert mesh.mesh_dim_names == ("pp", "tp")
        (stage,) = loaded.stages(model, mesh)
        assert stage.is_last
        own = dict(stage.submod.named_parameters())
        assert {name.partition(".")[0] for name in own} >= {"norm", "head"}
        head = own["head.weight"]
        assert isinstance(head, DTensor)
        assert head.to_local().shape == ((NUM_TOKENS + 3) // 2, WIDTH)
    assert not isinstance(model.tokens.weight, DTensor)  # it is another rank's


@pytest.mark.slow
def test_division_saves_memory():
    lowest_bytes = least_peak(tp_plan="tensor")
    assert lowest_bytes < least_peak(mesh=None)
    own = plan(lowest_bytes, tp_plan="tensor")
    assert any(stage.policy for stage in own.stage_plans)
    assert own.peak_bytes < own.highest_peak_bytes <= lowest_bytes


@pytest.mark.slow
def test_the_cheapest_batch_wins_and_the_plan_says_what_lost():
    own = plan(mesh={"tp": None}, tp_plan="tensor")
    assert own.tensor.degree == 1  # everything fits: nothing is to be exchanged
    lost = [text for text in own.alternatives if text.startswith("tp=")]
    names = [text.partition(":")[0] for text in lost]
    assert names == ["tp=2, tensor", "tp=4, tensor"]
    assert all("a batch takes" in text for text in lost)


class Activated(Model):
    def __init__(self):
        super().__init__()
        self.activation = nn.GELU()

    def forward(self, x):
        return self.activation(super().forward(x))


OUTSIDE = {"blocks": "whole_to_sequence"}
AT_ONCE = partial(torch.optim.AdamW, foreach=True)
MIXED = {"blocks.*": "sequence_to_whole"}
DISTRIBUTED = {"model": Activated(), "tp_plan": {"activation": "whole_input"}}


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mesh": {"pp": 4, "tp": 2}}, ArgumentError, "has pp=4, and `num_ranks` is 2"),
        ({"mesh": {"cp": 2}}, UnsupportedError, "plan without 'cp'"),
        ({"mesh": {"tp": 3}}, ArgumentError, "must divide the 4 GPUs"),
        ({"mesh": None, "tp_plan": "tensor"}, ArgumentError, "no tensor parallelism"),
        ({"cluster": None}, ArgumentError, "`cluster` is missing"),
        ({"tp_plan": OUTSIDE}, ArgumentError, "`blocks` the style .* is in no block"),
        ({"tp_plan": MIXED}, ArgumentError, "divided `blocks.0`.*In `tp_plan`"),
        ({"tp_plan": "tensor", "optimizer": AT_ONCE}, TraceError, "`foreach=False`"),
        (DISTRIBUTED, UnsupportedError, "`activation` hands on a distributed tensor"),
        (
            {"num_ranks": 5, "schedules": ["GPipe"]},
            ArgumentError,
            "4 blocks, too few for 5 stages",
        ),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(options, error, message):
    with pytest.raises(error, match=message):
        plan(**{"num_micro_batches": 4, **options})


def test_a_process_that_is_a_rank_plans_no_mesh():
    with fake_group(2), pytest.raises(ArgumentError, match="before"):
        plan()


@pytest.mark.slow
def test_only_stages_that_draw_ask_for_equal_seeds(by_sequence):
    assert not by_sequence.tensor.draws
    assert plan(model=Model(0.1), tp_plan="tensor").tensor.draws


@pytest.mark.slow
def test_micro_batches_add_to_gradients_as_backward_left_them():
    # A divided embedding's gradient is whole on each rank: it is added to as it is.
    model = Model()
    tensor = TensorParallel(degree=2, styles=find_styles(model))
    inputs, target = tokens(1)
    with fake_group(2):
        micro_batch = MicroBatch(
            model=model,
            inputs=inputs,
            target=target,
            loss_fn=language_loss,
            options={"optimizer": torch.optim.AdamW},
            cluster=CLUSTER,
            tensor=tensor,
        )
        step, block = micro_batch.step(0, 1), micro_batch.step(1, 2)
    (first,), (later,) = (
        [s.nbytes for s in own.tape.storages if s.category == "gradient"]
        for own in (step.first, step.later)
    )
    assert first == later == 4 * (NUM_TOKENS + 3) * WIDTH
    # Each sends a gradient of its own back, also where others are added to.
    for own in (block.first, block.later):
        part = part_of(own, own.simulator.ledger({}), is_last=False)
        (sent_back,) = part.ledger.nbytes[part.sent_back]
        assert sent_back == part.input_bytes == 4 * inputs.numel() * WIDTH


@pytest.mark.slow
@pytest.mark.skipif(not can_count(), reason="counting takes a C compiler")
def test_real_ranks_with_shards_keep_cap_prediction_and_gradients(short_models):
    cell = next(stage_mesh_ranks.planned("ODD", "1F1B", {"fsdp": 2}, ""))  # tight cap
    assert any(stage.policy for stage in cell.plan.stage_plans)
    row = stage_mesh_ranks.run(cell)
    assert row.is_kept, row


@pytest.mark.slowest
@pytest.mark.skipif(not can_count(), reason="counting takes a C compiler")
def test_real_ranks_with_slices_keep_cap_prediction_and_gradients(
    short_models, monkeypatch
):
    # An embedding alone: what it hands on is on its way when forward returns it.
    monkeypatch.setattr(MicroBatch, "cuts", [1])
    cell = next(stage_mesh_ranks.planned("LLAMA", "1F1B", {"tp": 2}, LOSS))
    assert cell.plan.stage_plans[0].fqns == ("embed_tokens",)
    assert cell.plan.stage_plans[1].policy
    row = stage_mesh_ranks.run(cell)
    assert row.is_kept, row
    assert HOLDS_LESS or max(row.errors) < 1e-3


@pytest.mark.slowest
def test_a_mesh_is_chosen_with_a_divided_loss_too():
    open_ = {"mesh": {"pp": 2, "fsdp": None, "tp": 2}, "tp_plan": "tensor"}
    options = {"num_ranks": None, "num_micro_batches": None, "global_batch": 4}
    chosen = plan(**open_, **options, loss_parallel=True)
    assert chosen.tensor.divides_loss
    assert chosen.bound_ms <= chosen.step_ms
