"""Interleaved 1F1B: stages that share a rank, planned together, on real ranks."""

import itertools
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autosac
from autosac._compat_distributed import fake_group
from autosac._compat_pipelining import HOLDS_LESS
from autosac.errors import ArgumentError
from autosac.pipelines import mesh_choosing
from autosac.pipelines.interleaved_racing import InterleavedRace
from autosac.pipelines.micro_batches import MicroBatch
from autosac.pipelines.rank_memory import RankReplay
from autosac.pipelines.schedules import Schedule
from autosac.pipelines.shared_ranks import of_windows
from autosac.pipelines.stage_choosing import SharedRankChooser
from benchmarks import stage_mesh_ranks
from benchmarks.stage_ranks import can_count
from tests.pipelines.stages import LANGUAGE, SHORT, language_loss, tokens, traced
from tests.pipelines.test_planning import CLUSTER, Model, least_peak, plan
from tests.pipelines.test_stage_choosing import all_choices, assert_counted

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration"),  # oneDNN is switched off
]
LOOPED = {"schedules": ["Interleaved1F1B"]}


def interleaved(num_micro_batches=4):
    return Schedule(
        name="Interleaved1F1B",
        num_ranks=2,
        num_micro_batches=num_micro_batches,
        stages_per_rank=2,
    )


def chooser_of(starts, rank, num_micro_batches=4, recipe=LANGUAGE, far=None):
    steps = traced(recipe, starts, measured=False)
    schedule = interleaved(num_micro_batches)
    own = {stage: steps[stage] for stage in schedule.stages_of(rank)}
    plain = SharedRankChooser(schedule, rank, own)
    if far is None:
        return plain
    return SharedRankChooser(schedule, rank, own, far=far, without=plain)


@pytest.fixture(scope="module", params=[(SHORT, (0, 1, 2, 4), 0)], ids=["short"])
def shared(request):
    recipe, starts, rank = request.param
    return chooser_of(starts, rank, recipe=recipe)


@given(data=st.data())
def test_the_milp_counts_what_other_stages_hold_as_it_is(shared, data):
    rank = shared._views[0]._rank
    formulation = of_windows(rank)
    u = data.draw(st.sampled_from(range(len(formulation.units))))
    k = data.draw(st.sampled_from(range(len(formulation.curves[u].policies))))
    assert_counted(formulation, rank, u, k)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_no_choice_of_all_stages_of_a_rank_takes_less_and_fits(shared, share):
    lowest, plain = shared.lowest().peak_bytes, shared.plain.peak_bytes
    cap_bytes = lowest + int(share * (plain - lowest))

    found = shared.choose(cap_bytes)

    replay = RankReplay(interleaved(), 0, shared.steps)
    choices = itertools.product(*(all_choices(s) for s in shared.steps.values()))
    best_ms = min(
        sum(time_ms for _, time_ms in combined)
        for combined in choices
        if replay.peak_bytes(
            dict(zip(shared.steps, (own for own, _ in combined), strict=True))
        )
        <= cap_bytes
    )
    assert found.peak_bytes <= cap_bytes
    assert found.recompute_ms <= 1.005 * best_ms
    peaks = [
        replay.stage_peaks(shared.by_stage(found.choice), adding=a) for a in (0, 1)
    ]
    assert found.peak_bytes == max(max(own.values()) for own in peaks)


def race_of(model, budget_bytes, num_micro_batches=4):
    inputs, target = tokens(4)
    micro_batch = MicroBatch(
        model=model.to("meta"),
        inputs=inputs[: len(inputs) // num_micro_batches],
        target=target[: len(inputs) // num_micro_batches],
        loss_fn=language_loss,
        options={"optimizer": torch.optim.AdamW, "device": CLUSTER.device},
        cluster=CLUSTER,
    )
    return InterleavedRace(
        micro_batch, interleaved(num_micro_batches), budget_bytes, 0.0
    )


@pytest.mark.slowest
@pytest.mark.usefixtures("traced_in_test")
def test_no_other_cuts_of_stages_that_share_ranks_are_found_to_be_faster():
    lowest_bytes = race_of(Model(5), 1000).lowest().peak_bytes
    budgets = [int(share * lowest_bytes) for share in (1, 1.05, 1.3, 2)]
    times = []
    for budget_bytes in budgets:
        race = race_of(Model(5), budget_bytes)
        found = race.guess(inf)
        cuts = itertools.combinations(race.micro_batch.cuts, 3)
        all_ms = [race._try((0, *own)).step_ms for own in cuts]
        assert found.step_ms <= 1.005 * min(all_ms)
        assert race.bound_ms <= found.step_ms
        times.append(found.step_ms)
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


@pytest.mark.slow
def test_a_looped_plan_says_what_its_ranks_do_and_is_run_by_pytorch(tmp_path):
    model = Model(6)
    own = plan(model, "1GiB", cluster=CLUSTER, schedules=["1F1B", "Interleaved1F1B"])
    assert own.pipeline.is_looped  # less of it is bubble
    assert own.alternatives[0].startswith("1F1B, 4 micro-batches: ")
    own.save(tmp_path / "plan.json")
    loaded = autosac.PipelinePlan.load(tmp_path / "plan.json")
    assert loaded == own
    assert 0 < own.bubble_fraction < 1
    assert own.bound_ms <= own.step_ms
    assert len(own.rank_peaks) == 2 and len(own.stage_plans) == 4
    assert "2 stages a rank" in own.report()
    with fake_group(2):
        mesh = loaded.make_mesh("cpu")
        own = loaded.stages(model, mesh)
        assert [stage.stage_index for stage in own] == [0, 2]
        schedule = loaded.schedule(own, language_loss)
    assert type(schedule).__name__ == "ScheduleInterleaved1F1B"


@pytest.mark.slow
def test_stages_that_are_not_as_alike_as_taken_are_looked_for_again(monkeypatch):
    planned = InterleavedRace.planned

    def planned_if_alone(race, cuts):
        return None if race.micro_batch.shares else planned(race, cuts)

    model = Model(2).to("meta")
    expected = plan(model, "1GiB", cluster=CLUSTER, **LOOPED)
    monkeypatch.setattr(InterleavedRace, "planned", planned_if_alone)
    own = plan(model, "1GiB", cluster=CLUSTER, **LOOPED)
    assert own.stage_plans == expected.stage_plans


@pytest.mark.slow
def test_stages_that_share_a_rank_lie_within_its_budget_together():
    model = Model(2).to("meta")
    lowest_bytes = least_peak(model, cluster=CLUSTER, **LOOPED)
    own = plan(model, lowest_bytes, cluster=CLUSTER, **LOOPED)
    assert own.peak_bytes <= lowest_bytes
    assert any(stage.policy for stage in own.stage_plans)
    assert own.stage_plans[0].peak_bytes == own.stage_plans[2].peak_bytes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stages_per_rank": 1}, ArgumentError, "at least 2, or some, got 1"),
        ({"stages_per_rank": []}, ArgumentError, "at least 2, or some"),
        ({"stages_per_rank": 3}, ArgumentError, "5 blocks, too few for 6 stages"),
        (
            {"stages_per_rank": 2, "schedules": ["1F1B"]},
            ArgumentError,
            "which `schedules` does not name",
        ),
        ({"num_micro_batches": 5}, ArgumentError, "in 2 rounds, which does not divide"),
    ],
)
def test_what_cannot_be_looped_is_said_in_a_sentence(options, error, message):
    with pytest.raises(error, match=message):
        plan(Model(), "1GiB", **{**LOOPED, **options})


@pytest.mark.slowest
@pytest.mark.skipif(not can_count(), reason="counting takes a C compiler")
def test_real_ranks_with_two_stages_keep_cap_prediction_and_gradients(short_models):
    name, mesh, kind = "LLAMA", {"fsdp": 2}, "bfloat16"
    cell = next(stage_mesh_ranks.planned(name, "Interleaved1F1B", mesh, kind))
    assert any(stage.policy for stage in cell.plan.stage_plans)
    row = stage_mesh_ranks.run(cell)
    assert row.is_kept, row
    assert HOLDS_LESS or max(row.errors) < 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("traced_in_test")
def test_open_meshes_have_no_more_stages_than_blocks_and_a_bound_on_all(monkeypatch):
    def planned():
        inputs, target = tokens(1)
        return autosac.plan_pipeline(
            Model(2).to("meta"),
            inputs[:1],
            target=target[:1],
            loss_fn=language_loss,
            optimizer=torch.optim.AdamW,
            cluster="hgx-h100",
            num_gpus=4,
            global_batch=4,
            memory_budget="1GiB",
            mesh={"pp": None, "fsdp": None},
            schedules=["1F1B", "Interleaved1F1B"],
        )

    looked_at = planned()
    monkeypatch.setattr(mesh_choosing, "_MOST_LOOPED", 0)
    own = planned()
    assert looked_at.pipeline.num_stages <= 4
    assert own.bound_ms <= looked_at.step_ms <= own.step_ms


def test_numbers_of_stages_that_no_cuts_have_are_said():
    own = plan(Model(2), "1GiB", cluster=CLUSTER, stages_per_rank=(2, 3), **LOOPED)
    assert own.pipeline.stages_per_rank == 2
    assert any("only 4 stages are possible" in why for why in own.alternatives)
