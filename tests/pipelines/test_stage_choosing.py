"""What stages recompute: real ranks keep their caps, and nothing faster fits."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.pipelines.in_flight import InFlightSimulator, with_others
from autosac.pipelines.rank_memory import RankReplay
from autosac.pipelines.schedules import Schedule
from autosac.pipelines.stage_choosing import StageChooser
from autosac.planning.spelling import spell_out
from autosac.solvers import sac
from benchmarks.stage_ranks import can_count, run_ranks
from tests.pipelines.stages import CONVOLUTIONS, LANGUAGE, traced
from tests.pipelines.test_rank_memory import assert_alike, assert_peaks, job

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration"),  # oneDNN is switched off
]
CASES = (
    (job(LANGUAGE, "1F1B", 5, (0, 4)), 0.1),
    (job(LANGUAGE, "GPipe", 3, (0, 7)), 0.5),
    (job(CONVOLUTIONS, "1F1B", 4, (0, 2)), 0.05),
)
MORE = (
    (job(LANGUAGE, "1F1B", 7, (0, 3, 6, 8)), 0.02),
    (job(CONVOLUTIONS, "GPipe", 4, (0, 1, 2, 3)), 0.3),
)


@pytest.mark.slowest_but_first
@pytest.mark.skipif(not can_count(), reason="counting takes a C compiler")
@pytest.mark.parametrize(
    ("case", "share"),
    [*CASES, *MORE],
    ids=lambda v: v if isinstance(v, float) else f"{v.schedule.name}-{v.starts}",
)
def test_planned_ranks_keep_their_caps_and_train_alike(case, share):
    steps = traced(case.recipe, case.starts)
    caps, chosen, policies = [], [], []
    for stage, step in enumerate(steps):
        chooser = StageChooser(case.schedule, stage, step)
        lowest, plain = chooser.lowest().peak_bytes, chooser.plain.peak_bytes
        caps.append(lowest + int(share * (plain - lowest)))
        chosen.append(chooser.choose(caps[-1]))
        policies.append(spell_out(step.later, chosen[-1].choice))
    assert any(policies)

    results = run_ranks(replace(case, policies=tuple(policies)))

    assert_peaks(results, [choice.peak_bytes for choice in chosen])
    for result, cap_bytes in zip(results, caps, strict=True):
        assert result.peak_bytes <= cap_bytes
    assert_alike(case, results)


@pytest.mark.slow
@pytest.mark.slow_but_first
@pytest.mark.parametrize("recipe", [LANGUAGE, CONVOLUTIONS], ids=["gpt", "conv"])
def test_stages_that_share_calls_of_ops_have_the_traces_that_they_have_alone(recipe):
    calls = {}
    alone = traced(recipe, (0, 2), measured=False)
    first = traced(recipe, (0, 2), measured=False, calls=calls)
    num_calls = len(calls)
    again = traced(recipe, (0, 2), measured=False, calls=calls)

    assert len(calls) == num_calls > 0  # nothing is left to learn
    for steps in zip(alone, first, again, strict=True):
        for name in ("first", "later"):
            tapes = [getattr(step, name).tape for step in steps]
            assert tapes[0] == tapes[1] == tapes[2]


@pytest.fixture(scope="module")
def small():
    """The last of two stages: two blocks and the head."""
    return traced(LANGUAGE, (0, 7), measured=False)[1]


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
@pytest.mark.parametrize("share", [0.15, 0.4, 0.7])
def test_nothing_that_takes_less_time_fits(small, name, share):
    schedule = Schedule(name=name, num_ranks=2, num_micro_batches=3)
    chooser = StageChooser(schedule, 1, small)
    lowest, plain = chooser.lowest().peak_bytes, chooser.plain.peak_bytes
    cap_bytes = lowest + int(share * (plain - lowest))

    found = chooser.choose(cap_bytes)

    replay = RankReplay(schedule, 1, {1: small})
    best_ms = min(
        time_ms
        for choice, time_ms in all_choices(small)
        if replay.peak_bytes({1: choice}) <= cap_bytes
    )
    assert found.peak_bytes <= cap_bytes
    assert found.recompute_ms <= 1.005 * best_ms


def all_choices(step):
    """Every choice of points of units that are not in one another, with its time."""
    formulation = step.later.formulation
    problem = formulation.problem(0)
    sizes = [len(unit.points) for unit in problem.units]
    for points in itertools.product(*([None, *range(size)] for size in sizes)):
        chosen = {u: k for u, k in enumerate(points) if k is not None}
        if any(set(problem.ancestry(u)[1:]) & chosen.keys() for u in chosen):
            continue
        choice = {
            formulation.units[u]: formulation.curves[u].policies[k]
            for u, k in chosen.items()
        }
        times = (problem.units[u].points[k].recompute_ms for u, k in chosen.items())
        yield choice, sum(times)


@pytest.mark.parametrize("count", [0, 1, 4])
@given(data=st.data())
def test_the_milp_counts_others_in_flight_as_they_are(small, count, data):
    simulator = InFlightSimulator(small.later, count, is_last=True)
    formulation = with_others(simulator)
    u = data.draw(st.sampled_from(range(len(formulation.units))))
    k = data.draw(st.sampled_from(range(len(formulation.curves[u].policies))))
    assert_counted(formulation, simulator, u, k)


def assert_counted(formulation, simulator, u, k):
    """The MILP's memory of one unit under one point is the simulated memory."""
    weights = [[0] * len(unit.points) for unit in formulation.solver_units]
    weights[u][k] = 1
    predicted = np.array(sac.live_bytes(formulation.problem(0), weights))
    choice = {formulation.units[u]: formulation.curves[u].policies[k]}
    timeline = simulator.true_timeline(choice)
    simulated = timeline.most_from(formulation.edges * simulator.span)
    assert (predicted == formulation.at_positions(simulated, choice)).all()


def test_more_room_is_never_slower(small):
    chooser = StageChooser(
        Schedule(name="1F1B", num_ranks=2, num_micro_batches=4), 1, small
    )
    lowest, plain = chooser.lowest().peak_bytes, chooser.plain.peak_bytes
    caps = np.linspace(lowest, plain, 9).astype(int)
    times = [chooser.choose(int(cap)).recompute_ms for cap in caps]
    assert times == sorted(times, reverse=True)
    assert times[-1] == 0
    assert chooser.choose(lowest - 1) is None
