"""Stages whose units have activations in far memory."""

import random
from dataclasses import replace
from math import inf

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autosac
from autosac.devices.links import Link
from autosac.devices.programs import ProgramCosts
from autosac.devices.specs import device_spec
from autosac.errors import ArgumentError, InfeasibleBudgetError, UnsupportedError
from autosac.pipelines import cutting, playing
from autosac.pipelines.in_flight import InFlightSimulator, with_others
from autosac.pipelines.micro_batches import MicroBatch
from autosac.pipelines.schedule_racing import Race
from autosac.pipelines.schedules import Schedule
from autosac.pipelines.stage_choosing import FarBytes, StageChooser
from autosac.solving.incumbents import far_bytes
from autosac.units.far_units import FarUnit
from benchmarks import stage_mesh_ranks
from benchmarks.stage_ranks import can_count
from tests.pipelines.stages import LANGUAGE, language_loss, tokens, traced
from tests.pipelines.test_interleaved import chooser_of
from tests.pipelines.test_planning import CLUSTER, Model
from tests.pipelines.test_stage_choosing import assert_counted

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration"),  # oneDNN is switched off
]


@pytest.fixture(scope="module")
def step():
    """The first of two stages: its blocks get what others in it have made."""
    return traced(LANGUAGE, (0, 4))[0]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("host_bytes", [None, 50_000])
@given(data=st.data())
def test_the_milp_counts_others_in_flight_as_they_are(step, count, host_bytes, data):
    own = step.offloading(host_bytes)
    simulator = InFlightSimulator(own.later, count, is_last=False)
    formulation = with_others(simulator)
    far = [u for u, unit in enumerate(formulation.units) if unit in own.later.far_units]
    u = data.draw(st.sampled_from(far))
    k = data.draw(st.sampled_from(range(len(formulation.curves[u].policies))))
    assert_counted(formulation, simulator, u, k)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
def test_far_memory_lowers_floors_and_is_never_dearer(step, name):
    schedule = Schedule(name=name, num_ranks=2, num_micro_batches=4)
    plain = StageChooser(schedule, 0, step)
    far = StageChooser(schedule, 0, step, far=FarBytes())
    lowest = plain.lowest().peak_bytes
    assert far.lowest().peak_bytes < lowest
    caps = np.linspace(far.lowest().peak_bytes, plain.plain.peak_bytes, 7).astype(int)
    times = [far.choose(int(cap)).recompute_ms for cap in caps]
    assert times == sorted(times, reverse=True)
    for cap, own_ms in zip(caps, times, strict=True):
        without = plain.choose(int(cap))
        assert (without is None) == (cap < lowest)
        assert without is None or own_ms <= without.recompute_ms


@pytest.fixture(scope="module", params=[None, 50_000], ids=["", "capped"])
def looped(request):
    """A rank with two stages, both of which may offload."""
    return chooser_of((0, 1, 3, 4), 1, far=FarBytes(request.param))


@pytest.mark.slow_but_first
@given(data=st.data())
def test_the_milp_counts_what_stages_of_a_rank_move_as_it_is(looped, data):
    formulation = looped.view.chooser._formulation
    is_far = [isinstance(unit, FarUnit) for unit in formulation.units]
    u = data.draw(st.sampled_from(np.flatnonzero(is_far).tolist()))
    k = data.draw(st.sampled_from(range(len(formulation.curves[u].policies))))
    assert_counted(formulation, looped.view._rank, u, k)


@pytest.mark.slow
def test_all_stages_of_a_rank_share_the_hosts_cap_and_are_never_dearer(looped):
    plain, most = looped._without, looped.view._host_bytes
    in_flight = dict(zip(looped.steps, looped.view._in_flight, strict=True))
    lowest, high = looped.lowest().peak_bytes, plain.plain.peak_bytes
    assert lowest <= plain.lowest().peak_bytes
    moved, gained, before_ms = [], [], inf
    for cap_bytes in map(int, np.linspace(lowest, high, 9)):
        own, without = looped.choose(cap_bytes), plain.choose(cap_bytes)
        assert own.peak_bytes <= cap_bytes
        assert own.recompute_ms <= before_ms
        before_ms = own.recompute_ms
        if without is not None:
            assert own.recompute_ms <= without.recompute_ms
            gained.append(own.recompute_ms < without.recompute_ms)
        by_stage = looped.by_stage(own.choice)
        there = (n * far_bytes(by_stage[s]) for s, n in in_flight.items())
        moved.append(sum(there))
    assert any(moved) and any(gained)
    assert most is None or max(moved) <= most


@pytest.mark.slow
def test_micro_batches_in_flight_share_the_hosts_cap(step):
    schedule = Schedule(name="GPipe", num_ranks=2, num_micro_batches=4)
    far = StageChooser(schedule, 0, step, far=FarBytes())
    lowest = far.lowest()
    most = 4 * far_bytes(lowest.choice) // 2
    capped = StageChooser(schedule, 0, step, far=FarBytes(most))
    assert lowest.peak_bytes < capped.lowest().peak_bytes
    caps = np.linspace(capped.lowest().peak_bytes, far.plain.peak_bytes, 7)
    for cap_bytes in map(int, caps):
        own = capped.choose(cap_bytes)
        assert 4 * far_bytes(own.choice) <= most
        assert own.peak_bytes <= cap_bytes


def plan(memory_budget, model=None, **options):
    inputs, target = tokens(4)
    options = {
        "num_ranks": 2,
        "num_micro_batches": 4,
        "schedules": ["GPipe"],
        **options,
    }
    return autosac.plan_pipeline(
        model or Model(2),
        inputs,
        target=target,
        loss_fn=language_loss,
        memory_budget=memory_budget,
        optimizer=torch.optim.AdamW,
        **{"num_ranks": 2, "num_micro_batches": 4, "schedules": ["GPipe"], **options},
    )


def least_peak(**options):
    with pytest.raises(InfeasibleBudgetError, match="the lowest peak is") as caught:
        plan(1000, **options)
    return caught.value.lowest_peak_bytes


FAST = Link(out_bytes_per_s=1e11, back_bytes_per_s=1e11)


def step_ms(budget, **options):
    try:
        own = plan(budget, **options)
    except InfeasibleBudgetError:
        return inf
    assert own.highest_peak_bytes <= budget
    assert own.bound_ms <= own.step_ms * (1 + 1e-9)
    return own.step_ms


@pytest.mark.slowest_but_first
@pytest.mark.usefixtures("traced_in_test")
@pytest.mark.parametrize(
    ("num_blocks", "names"),
    [(2, ["1F1B", "GPipe"]), (9, ["1F1B"]), (4, ["Interleaved1F1B"])],
)
def test_neither_more_memory_nor_offload_is_ever_slower(num_blocks, names):
    # Stages of six blocks and more are estimated in the search for cuts.
    draw = random.Random(num_blocks)
    options = {
        "model": Model(num_blocks).to("meta"),
        "schedules": names,
        "device": replace(device_spec("cpu"), link=FAST),
    }
    low = least_peak(offload=True, **options)
    high = plan(2**40, **options).peak_bytes
    budgets = [low, low + int(draw.random() ** 2 * (high - low)), high]
    plain = [step_ms(budget, **options) for budget in budgets]
    far = [step_ms(budget, offload=True, **options) for budget in budgets]
    for own in (plain, far):
        assert own == sorted(own, reverse=True)
    assert all(mine <= others for mine, others in zip(far, plain, strict=True))
    assert any(mine < others for mine, others in zip(far, plain, strict=True))
    assert far[-1] == plain[-1] < inf


@pytest.mark.slow
@pytest.mark.usefixtures("traced_in_test")
def test_stages_that_share_ranks_need_not_gain_a_gap_by_offload():
    # Twelve blocks are estimated; offload gains 0.23 % here, less than the gap, where
    # units take nothing of the program.
    options = {
        "model": Model(12).to("meta"),
        "schedules": ["Interleaved1F1B"],
        "device": replace(device_spec("cpu"), link=FAST, program=ProgramCosts()),
    }
    budget = plan(2**40, **options).peak_bytes * 17 // 18
    assert step_ms(budget, offload=True, **options) < step_ms(budget, **options)


@pytest.mark.slow
def test_no_cuts_that_were_planned_are_faster(monkeypatch):
    monkeypatch.setattr(cutting, "_MOST_PLAYED", 1)  # so that none is seen again
    inputs, target = tokens(1)
    micro_batch = MicroBatch(
        model=Model(8).to("meta"),
        inputs=inputs,
        target=target,
        loss_fn=language_loss,
        options={"device": replace(device_spec("cpu"), link=FAST)},
        cluster=None,
    )
    schedule = Schedule(name="1F1B", num_ranks=2, num_micro_batches=4)
    plain = Race(micro_batch, schedule, 0, 0.0)
    plain.budget_bytes = plain.chooser(0, 0, 5).plain.peak_bytes * 3 // 4
    cuts = (0, 4), (0, 5), (0, 7)
    for starts in cuts:
        plain._plan_cuts(starts)
    own_ms = []
    far = plain.offloading(FarBytes())
    for starts in cuts:
        far._plan_cuts(starts)
    for race in (plain, far):
        own_ms.append(race.run(inf).step_ms)
        for starts in cuts:
            times = [race.times_of(*stage) for stage in race.stages_at(starts)]
            assert None in times or own_ms[-1] <= playing.step_ms(schedule, times)
    assert own_ms[1] < own_ms[0] < inf


@pytest.mark.slow
@pytest.mark.usefixtures("traced_in_test")
def test_a_plan_offloads_where_none_fits_without(tmp_path):
    lowest = least_peak(offload="auto")
    with pytest.raises(InfeasibleBudgetError):
        plan(lowest)
    low = plan(lowest, offload="auto")
    assert low.far_bytes > 0
    assert low.peak_bytes <= lowest
    assert not plan("1GiB", offload="auto").far_bytes

    low.save(tmp_path / "plan.json")
    assert autosac.PipelinePlan.load(tmp_path / "plan.json") == low
    assert "in a file" in low.report()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mesh": {"tp": 2}}, UnsupportedError, "not planned in pipelines with tensor"),
        ({"tp_plan": "tensor"}, UnsupportedError, "not planned in pipelines with ten"),
        (
            {"offload": "maybe"},
            ArgumentError,
            "`offload` must be True, False or 'auto'",
        ),
        ({"offload_dir": "/no/such"}, ArgumentError, "is no directory"),
        ({"host_budget": "much"}, ArgumentError, "host_budget"),
        ({"host_budget": 5, "offload": False}, ArgumentError, "and nothing is"),
        (
            {"device": replace(device_spec("h100"), link=None)},
            ArgumentError,
            "takes the rates between",
        ),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(options, error, message):
    options = {"offload": True, "model": Model().to("meta"), **options}
    with pytest.raises(error, match=message):
        plan(1000, **options)


def test_the_fewest_gpus_are_those_without_offload():
    inputs, target = tokens(1)
    options = {"mesh": {"pp": 2}, "target": target, "loss_fn": language_loss}
    with pytest.raises(UnsupportedError, match="`offload` is for single plans"):
        autosac.min_gpus(
            Model(2), inputs, cluster=CLUSTER, memory_budget=1, offload=True, **options
        )


@pytest.mark.slow
@pytest.mark.usefixtures("traced_in_test")
def test_ranks_have_of_a_link_what_they_share():
    options = {"offload": True, "model": Model(2).to("meta"), "cluster": CLUSTER}
    lowest = least_peak(**options)
    sharing = replace(CLUSTER, gpus_per_link=CLUSTER.gpus_per_node)
    alone, shared = (
        plan(lowest, **options),
        plan(lowest, **{**options, "cluster": sharing}),
    )
    assert alone.far_bytes == shared.far_bytes > 0
    waits = [sum(s.waits_ms for s in own.stage_plans) for own in (alone, shared)]
    assert waits[0] < waits[1]


@pytest.mark.slowest_but_first
@pytest.mark.skipif(not can_count(), reason="counting takes a C compiler")
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B"])
def test_real_ranks_that_offload_keep_cap_prediction_and_gradients(short_models, name):
    offload = stage_mesh_ranks.OFFLOAD
    cell = next(stage_mesh_ranks.planned("ODD", name, {"fsdp": 2}, offload))
    assert cell.plan.far_bytes > 0
    row = stage_mesh_ranks.run(cell)
    assert row.is_kept, row
