"""Whole plans: run on real ranks as users run them, and held against all cuts."""

import copy
import random
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import autosac
from autosac._compat_distributed import fake_group
from autosac.devices.specs import device_spec
from autosac.errors import (
    ArgumentError,
    InfeasibleBudgetError,
    TraceError,
    UnsupportedError,
)
from autosac.parallel.clusters import cluster_spec
from autosac.pipelines import micro_batches
from autosac.pipelines.blocks import Stage, chain_of
from autosac.pipelines.micro_batches import MicroBatch
from autosac.pipelines.playing import step_ms
from autosac.pipelines.schedule_racing import Race
from autosac.pipelines.schedules import Schedule
from autosac.step.random_streams import stream_states
from autosac.verification.measuring import differences
from benchmarks.stage_ranks import SEED, Job, can_count, run_ranks
from tests.pipelines.stages import (
    NUM_TOKENS,
    SHORT,
    WIDTH,
    Mlp,
    language_loss,
    tokens,
)
from tests.pipelines.test_rank_memory import assert_alike

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration"),  # oneDNN is switched off
]

# CPUs with links that take time.
CLUSTER = replace(cluster_spec("pcie-l40s", num_gpus=2), device=device_spec("cpu"))


class Model(nn.Module):
    """A language model as people write them."""

    def __init__(self, num_blocks=3, *, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Mlp(2) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plan(model, memory_budget, num_micro_batches=4, *, target=None, **options):
    inputs, own_target = tokens(4)
    target = own_target if target is None else target
    options = {"optimizer": torch.optim.AdamW, "num_ranks": 2, **options}
    return autosac.plan_pipeline(
        model,
        inputs,
        target=target,
        loss_fn=language_loss,
        num_micro_batches=num_micro_batches,
        memory_budget=memory_budget,
        **options,
    )


def least_peak(model, **options):
    with pytest.raises(InfeasibleBudgetError, match="the lowest peak is") as caught:
        plan(model, 1000, **options)
    return caught.value.lowest_peak_bytes


@pytest.mark.slow
@pytest.mark.skipif(not can_count(), reason="counting takes a C compiler")
def test_planned_ranks_keep_the_cap_and_train_as_one_process(tmp_path):
    torch.manual_seed(SEED)
    model = SHORT.make_model()
    with torch.backends.mkldnn.flags(enabled=False):
        lowest_bytes = least_peak(model, schedules=["1F1B"])
        tight = plan(model, lowest_bytes, schedules=["1F1B"])
    tight.save(tmp_path / "plan.json")
    loaded = autosac.PipelinePlan.load(tmp_path / "plan.json")
    starts = (0, len(tight.stage_plans[0].fqns))
    job = Job(recipe=SHORT, schedule=tight.pipeline, starts=starts, plan=loaded)

    results = run_ranks(job)

    assert loaded == tight
    assert any(stage.policy for stage in tight.stage_plans)
    for result, predicted in zip(results, tight.rank_peaks, strict=True):
        assert result.peak_bytes <= predicted <= lowest_bytes
    assert_alike(job, results)


@pytest.mark.slow
def test_no_cuts_micro_batches_or_schedules_give_a_faster_step():
    model = Model(2).to("meta")
    inputs, target = tokens(4)
    races = []
    for number in (2, 4):
        micro_batch = MicroBatch(
            model=model,
            inputs=inputs[: len(inputs) // number],
            target=target[: len(inputs) // number],
            loss_fn=language_loss,
            options={"optimizer": torch.optim.AdamW, "device": CLUSTER.device},
            cluster=CLUSTER,
        )
        for name in ("1F1B", "GPipe"):
            schedule = Schedule(name=name, num_ranks=2, num_micro_batches=number)
            races.append(Race(micro_batch, schedule, 0, 0.0))
    budget_bytes = int(1.2 * min(race.lowest()[0] for race in races))

    own = plan(model, budget_bytes, num_micro_batches=(2, 4), cluster=CLUSTER)

    times = []
    for race in races:
        race.budget_bytes = budget_bytes
        for cut in range(1, 4):
            stages = [race.times_of(0, 0, cut), race.times_of(1, cut, 4)]
            if None not in stages:
                times.append(step_ms(race.schedule, stages))
    assert times
    assert own.step_ms <= 1.005 * min(times)
    assert own.peak_bytes <= budget_bytes


def test_stages_are_the_model_under_its_own_names():
    model = Model()
    inputs, _ = tokens(1)
    chain = list(chain_of(model, inputs))
    assert chain == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    stages = [Stage(model, chain[:2]), Stage(model, chain[2:])]
    names = [name for stage in stages for name in stage.state_dict()]
    assert names == list(model.state_dict())
    assert torch.equal(stages[1](stages[0](inputs)), model(inputs))


@pytest.fixture(scope="module")
def for_gpus():
    return plan(Model(), "1GiB", cluster="hgx-h100")


def test_a_plan_says_what_each_rank_does(for_gpus):
    text = for_gpus.report()
    assert "4 micro-batches of 4 on 2 h100" in text
    assert "of it waiting" in text
    rows = [line.split() for line in text.splitlines()]
    assert any(row[:3] == ["0", "embedding", "to"] for row in rows)
    why = r"(nothing faster fits|about [\d.]+ ms a step)$"
    assert re.search(rf"^not +GPipe, 4 micro-batches: {why}", text, re.MULTILINE)


class Skips(Model):
    def forward(self, x):
        first = self.blocks[0](self.embedding(x))
        return self.head(self.blocks[2](first + self.blocks[1](first)))


class Adds(Model):
    def forward(self, x):
        return super().forward(x) + 1


class Hides(Model):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Repeats(Model):
    def forward(self, x):
        x = self.embedding(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


class Turns(nn.Linear):
    """Returns columns that lie one after the other, as recurrent layers may."""

    def forward(self, x):
        return super().forward(x).t().contiguous().t()


def _cut(*blocks):
    return autosac.plan_pipeline(
        nn.Sequential(*blocks),
        torch.ones(4, 4),
        target=torch.ones(4, 4),
        loss_fn=functional.mse_loss,
        num_ranks=2,
        num_micro_batches=2,
        memory_budget="1MiB",
    )


@pytest.mark.parametrize(
    ("blocks", "first_stage"),
    [
        ((nn.Linear(4, 4), Turns(4, 4), nn.Linear(4, 4)), ("0",)),
        ((nn.Linear(4, 4).requires_grad_(False), *[nn.Linear(4, 4)] * 2), ("0", "1")),
    ],
    ids=["sent", "trained"],
)
def test_a_cut_is_where_a_contiguous_tensor_with_a_gradient_is_sent(
    blocks, first_stage
):
    blocks = [copy.deepcopy(block) for block in blocks]

    assert _cut(*blocks).stage_plans[0].fqns == first_stage


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((Turns(4, 4), nn.Linear(4, 4)), r"`0` hands on.*not contiguous.*only 1 stage"),
        ((nn.Linear(4, 4), nn.Tanh()), "Each stage needs parameters.*only 1 stage"),
    ],
    ids=["sent", "trained"],
)
def test_a_chain_without_such_a_cut_is_refused_for_that(blocks, message):
    with pytest.raises(UnsupportedError, match=message):
        _cut(*blocks)


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (Skips, "`blocks.2` gets something else than just what comes out of"),
        (Adds, "returns something else than what its last block does"),
        (Hides, "`` is in no block"),
        (Repeats, "`blocks.0` is called several times"),
        (lambda: Model(tied=True), "`embedding` and `head` share a parameter"),
    ],
)
def test_models_that_are_no_chain_are_refused(make_model, message):
    with pytest.raises(UnsupportedError, match=message):
        plan(make_model(), "1GiB")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 6, "num_micro_batches": 8}, "5 blocks, too few for 6 stages"),
        ({"num_ranks": 6}, "5 blocks, too few for 6 stages"),  # and micro-batches
        ({"num_ranks": 5}, "1F1B needs a micro-batch for each of 5 ranks"),
        ({"num_ranks": True}, "`num_ranks` must be a whole number"),
        ({"mesh": {"tp": True}, "cluster": CLUSTER}, "has tp=True, which must be"),
        ({"num_micro_batches": 3}, "not shared evenly by 3 micro-batches"),
        ({"num_micro_batches": 0}, "whole number of at least 1"),
        ({"num_micro_batches": None}, "pass `global_batch`"),
        ({"global_batch": 0}, "`global_batch` must be a whole number"),
        ({"global_batch": 6}, "6 rows is not shared evenly by 4"),
        (
            {"num_micro_batches": None, "global_batch": 1, "schedules": ["1F1B"]},
            "No schedule has so few micro-batches as 1 rows",
        ),
        ({"schedules": ["ZBVZeroBubble"]}, "use one of GPipe"),
        ({"cluster": CLUSTER, "device": "h100"}, "`device` is that of `cluster`"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(options, message):
    with pytest.raises(ArgumentError, match=message):
        plan(Model(), "1GiB", **options)


def test_steps_that_pipelines_run_otherwise_are_refused():
    with pytest.raises(UnsupportedError, match="`clip_grad_norm` is not planned"):
        plan(Model(), "1GiB", clip_grad_norm=1.0)
    in_backward = partial(autosac.OptimizerInBackward, make_optimizer=torch.optim.AdamW)
    with pytest.raises(UnsupportedError, match="that step in backward"):
        plan(Model(), "1GiB", optimizer=in_backward)


class Draws(nn.Module):
    """A block that draws from PyTorch, Python and NumPy."""

    def __init__(self):
        super().__init__()
        self.inner, self.dropout = nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.inner(x)) * random.random() * float(np.random.rand())


def test_planning_leaves_random_streams_where_they_were():
    model = nn.Sequential(Draws(), Draws())
    before = stream_states()

    chain_of(model, torch.ones(4, 8))

    assert not differences(before, stream_states())


def test_a_plan_is_for_its_ranks_and_its_model(for_gpus):
    with pytest.raises(ArgumentError, match="init_process_group first"):
        for_gpus.make_mesh("cpu")
    with fake_group(3), pytest.raises(ArgumentError, match="plan with num_ranks=3"):
        for_gpus.make_mesh("cpu")
    with fake_group(2):
        mesh = for_gpus.make_mesh("cpu")
        with pytest.raises(autosac.PlanMismatchError):
            for_gpus.stages(Model(4), mesh)
        (stage,) = for_gpus.stages(Model(), mesh)
        assert stage.is_first
        schedule = for_gpus.schedule([stage], functional.mse_loss)
        assert type(schedule).__name__ == f"Schedule{for_gpus.pipeline.name}"


@pytest.mark.slow
def test_a_unit_that_is_replaced_in_a_stage_is_said_once():
    made = plan(Model(), least_peak(Model()))
    fqn = [fqn for fqn in made.stage_plans[0].policy if "." in fqn][-1]
    inputs, _ = tokens(1)
    with fake_group(2):
        (stage,) = made.stages(Model(), made.make_mesh("cpu"))
        stage.submod(inputs)  # warnings are errors
        stage.submod.set_submodule(fqn, Model().get_submodule(fqn))
        with pytest.warns(UserWarning, match=f"`{fqn}` was replaced after"):
            stage.submod(inputs)
        stage.submod(inputs)


class _Normed(nn.Module):
    """A block whose batch norm takes no single row."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def plan_normed(numbers):
    model = nn.Sequential(*(_Normed() for _ in range(3)))
    inputs = torch.ones(4, WIDTH)
    return autosac.plan_pipeline(
        model,
        inputs,
        target=inputs,
        loss_fn=functional.mse_loss,
        num_ranks=2,
        num_micro_batches=numbers,
        memory_budget="1GiB",
    )


def test_micro_batches_that_a_model_cannot_run_are_left_out_and_said():
    own = plan_normed((2, 4))

    assert own.pipeline.num_micro_batches == 2
    assert re.search(r"4 micro-batches: .* block `0`.* of 1 rows", str(own))
    with pytest.raises(TraceError, match="block `0`, on a micro-batch of 1 rows"):
        plan_normed(4)


@pytest.mark.slow
def test_a_global_batch_is_cut_in_the_best_of_all_ways():
    model = Model(1).to("meta")
    inputs, target = (tensor[:1] for tensor in tokens(1))
    options = {
        "target": target,
        "loss_fn": language_loss,
        "num_ranks": 2,
        "memory_budget": "1GiB",
        "cluster": "hgx-h100",
        "global_batch": 4,
        "relative_gap": 0.0,
    }
    both = ["1F1B", "GPipe"]
    plans = [
        autosac.plan_pipeline(
            model, inputs, num_micro_batches=number, schedules=names, **options
        )
        for number, names in ((1, ["GPipe"]), (2, both), (4, both))
    ]

    own = autosac.plan_pipeline(model, inputs, **options)

    assert own.global_batch == 4
    assert own.step_ms == min(other.step_ms for other in plans)
    whole = autosac.plan_pipeline(
        model,
        inputs.repeat(4, 1),
        num_micro_batches=own.pipeline.num_micro_batches,
        schedules=[own.pipeline.name],
        **{**options, "global_batch": None, "target": target.repeat(4, 1)},
    )
    assert own.stage_plans == whole.stage_plans


def test_a_target_on_the_meta_device_is_one_of_its_shape():
    model, target = Model(2).to("meta"), tokens(4)[1]
    asked = {"memory_budget": "1GiB", "cluster": CLUSTER, "schedules": ["1F1B"]}
    of_shape = plan(model, target=target.to("meta"), **asked)

    assert of_shape.rank_peaks == plan(model, **asked).rank_peaks


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match="Plan again"):
        autosac.PipelinePlan.load(tmp_path / "plan.json")


@pytest.mark.slow
def test_stages_of_like_blocks_need_one_trace_and_the_plan_stays_the_same(monkeypatch):
    with torch.device("meta"):
        model = Model(4)
    size = 4 << 20
    stages = []
    stage_step = micro_batches.stage_step

    def counted(stage, *args, **kwargs):
        stages.append(stage)
        return stage_step(stage, *args, **kwargs)

    monkeypatch.setattr(micro_batches, "stage_step", counted)
    shared = plan(model, size, cluster=CLUSTER, schedules=["1F1B"])
    num_shared = len(stages)
    monkeypatch.setattr(MicroBatch, "like", lambda _, *stage: stage)
    alone = plan(model, size, cluster=CLUSTER, schedules=["1F1B"])

    assert num_shared <= len(stages) - num_shared
    assert shared.stage_plans == alone.stage_plans
    assert (shared.step_ms, shared.rank_peaks) == (alone.step_ms, alone.rank_peaks)
