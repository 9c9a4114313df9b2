"""Meshes that a plan chooses against all there are; long stages against their likes."""

from dataclasses import replace

import pytest
import torch
import transformers

import autosac
from autosac.devices.specs import device_spec
from autosac.errors import ArgumentError, InfeasibleBudgetError, TraceError
from autosac.parallel.clusters import cluster_spec
from autosac.pipelines import estimating, rank_memory
from autosac.pipelines.rank_memory import RankReplay
from autosac.pipelines.schedule_racing import MARGIN, Race
from autosac.pipelines.schedules import INTERLEAVED, Schedule
from benchmarks.large_meshes import Llama, token_loss
from tests.pipelines.stages import (
    LANGUAGE,
    language_loss,
    tokens,
    traced,
)
from tests.pipelines.test_planning import Model

pytestmark = [
    pytest.mark.usefixtures("one_thread", "traced_once"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration"),  # oneDNN is switched off
]

# CPUs with links that take time.
CLUSTER = replace(cluster_spec("pcie-l40s", num_gpus=4), device=device_spec("cpu"))
OPEN = {"pp": None, "replicate": None, "fsdp": None}


def plan(memory_budget, *, num_layers=2, **options):
    inputs, target = tokens(1)
    with torch.device("meta"):
        model = Model(num_layers)
    return autosac.plan_pipeline(
        model,
        inputs,
        target=target,
        loss_fn=language_loss,
        optimizer=torch.optim.AdamW,
        memory_budget=memory_budget,
        **{"cluster": CLUSTER, "global_batch": 4, **options},
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": OPEN, "global_batch": None}, "pass `cluster` .* and `global_batch`"),
        ({"mesh": {"fsdp": 2}}, "`num_ranks` is missing"),
        ({"mesh": {**OPEN, "pp": 3}}, "No mesh of 4 GPUs"),
        ({"mesh": OPEN, "num_ranks": 2, "global_batch": 0}, "`global_batch` must be"),
        ({"mesh": OPEN, "schedules": ["1F1B", "1f1b"]}, "no schedule '1f1b'"),
        ({"cluster": None, "num_gpus": 4, "num_ranks": 2}, "without the `cluster`"),
    ],
)
def test_what_no_mesh_can_be_is_refused_in_a_sentence(options, message):
    with pytest.raises(ArgumentError, match=message):
        plan("1GiB", **options)


@pytest.mark.slow
def test_no_mesh_that_is_given_is_faster_than_the_one_that_is_chosen():
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(1000, mesh=OPEN)
    budget_bytes = caught.value.lowest_peak_bytes
    times = []
    for stages, mesh in ((4, {}), (2, {"fsdp": 2})):
        try:
            given = plan(budget_bytes, num_ranks=stages, mesh=mesh)
        except InfeasibleBudgetError:
            continue
        times.append(given.step_ms)
    own = plan(budget_bytes, mesh=OPEN)
    assert own.global_batch == 4
    assert any("pp=" in alternative for alternative in own.alternatives)
    assert own.peak_bytes <= budget_bytes
    assert own.bound_ms <= own.step_ms <= 1.005 * min(times)


@pytest.mark.slow
def test_micro_batches_that_repeat_need_not_be_replayed(monkeypatch):
    steps = traced(LANGUAGE, (0, 4))
    schedule = Schedule(name="1F1B", num_ranks=2, num_micro_batches=30)

    def peaks():
        return [RankReplay(schedule, i, {i: steps[i]}).peak_bytes() for i in (0, 1)]

    short = peaks()
    monkeypatch.setattr(rank_memory, "_ROUNDS", 100)
    assert short == peaks()


@pytest.mark.slow
def test_stages_that_are_not_as_alike_as_taken_are_planned_one_by_one(monkeypatch):
    options = {"num_layers": 7, "num_ranks": 2, "num_micro_batches": 2}
    expected = plan(2**40, **options)
    asked, planned = [], Race.planned

    def planned_if_alone(race, cuts):
        asked.append(race.micro_batch.shares)
        return None if race.micro_batch.shares else planned(race, cuts)

    monkeypatch.setattr(Race, "planned", planned_if_alone)
    own = plan(2**40, **options)

    assert asked == [True, False]  # nothing is shared from then on
    assert own.rank_peaks == expected.rank_peaks
    assert own.step_ms <= expected.step_ms * 1.005


@pytest.mark.slowest
@pytest.mark.parametrize(
    ("name", "num_layers", "margin"), [("1F1B", 12, 1.005), (INTERLEAVED, 25, MARGIN)]
)
def test_estimates_of_long_stages_lead_to_plans_as_good_as_without(
    monkeypatch, name, num_layers, margin
):
    options = {"num_layers": num_layers, "num_ranks": 2, "num_micro_batches": 4}
    options["schedules"] = [name]
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(1000, **options)
    lowest_bytes = caught.value.lowest_peak_bytes
    budgets = [int(share * lowest_bytes) for share in (1.1,)]
    guessed = [plan(budget, **options) for budget in budgets]
    monkeypatch.setattr(estimating, "_LONG", 1000)
    for budget, own in zip(budgets, guessed, strict=True):
        assert own.peak_bytes <= budget
        assert own.step_ms <= margin * plan(budget, **options).step_ms


def llama():
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    with torch.device("meta"):
        return Llama(config)


@pytest.mark.slowest
def test_ways_to_divide_that_the_optimizer_cannot_step_on_are_left_out_and_said():
    model = llama()
    rows = torch.zeros(1, 16, dtype=torch.int64)
    own = autosac.plan_pipeline(
        model,
        rows,
        target=rows,
        loss_fn=token_loss,
        optimizer=torch.optim.AdamW,  # on GPUs all at once: no plain norms by slices
        memory_budget="1GiB",
        mesh={"pp": 2, "fsdp": None, "tp": 2},
        num_micro_batches=2,
        cluster="hgx-h100",
        num_gpus=4,
        global_batch=4,
        loss_parallel=True,
    )
    assert own.num_gpus == 4
    refused = [text for text in own.alternatives if text.startswith("tp=2: ")]
    assert "foreach=False" in refused[0]
    assert own.tensor.cuts_sequences


@pytest.mark.slow
def test_no_number_of_gpus_is_enough_only_where_no_plan_fits():
    rows = torch.zeros(1, 16, dtype=torch.int64)
    with pytest.raises(TraceError, match="foreach=False"):
        autosac.min_gpus(
            llama(),
            rows,
            target=rows,
            loss_fn=token_loss,
            optimizer=torch.optim.AdamW,
            memory_budget="1GiB",
            mesh={"pp": 2, "fsdp": None, "tp": 2},
            tp_plan="tensor",
            cluster="hgx-h100",
            most_gpus=8,
            global_batch=4,
        )
