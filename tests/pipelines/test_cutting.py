"""Cuts against all there are, and the time of a schedule against sums by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.pipelines.cutting import Cutting
from autosac.pipelines.playing import StageTimes, play, step_ms
from autosac.pipelines.schedules import Schedule

TIMES = st.integers(1, 20).map(float)


@given(
    blocks=st.lists(st.tuples(TIMES, TIMES, st.integers(0, 9)), min_size=3, max_size=7),
    name=st.sampled_from(["1F1B", "GPipe"]),
    num_ranks=st.integers(2, 3),
    cap=st.integers(5, 40),
)
def test_no_other_cuts_give_a_faster_step(blocks, name, num_ranks, cap):
    schedule = Schedule(name=name, num_ranks=num_ranks, num_micro_batches=4)

    def times_of(stage, first, end):
        """Recompute what does not fit, as real stages do."""
        kept = sum(size for *_, size in blocks[first:end])
        over = schedule.most_in_flight(stage) * kept - cap
        if over > cap:
            return None
        forward, backward = (sum(b[i] for b in blocks[first:end]) for i in (0, 1))
        return StageTimes(
            forward_ms=forward, backward_ms=backward + max(0, over) / 2, send_ms=0.5
        )

    cutting = Cutting(
        schedule=schedule,
        block_ms=[forward + backward for forward, backward, _ in blocks],
        forward_ms=[forward for forward, *_ in blocks],
        cuts=range(1, len(blocks)),
        times_of=times_of,
        relative_gap=0.0,
    )
    cutting.run()

    all_ms = {}
    for cuts in itertools.combinations(range(1, len(blocks)), num_ranks - 1):
        starts, ends = (0, *cuts), (*cuts, len(blocks))
        times = [
            times_of(i, *pair) for i, pair in enumerate(zip(starts, ends, strict=True))
        ]
        if None not in times:
            all_ms[starts] = step_ms(schedule, times)
    if all_ms:
        assert cutting.best_ms == min(all_ms.values()) == all_ms[cutting.starts]
    else:
        assert cutting.starts == ()


BLOCKS = st.lists(st.tuples(TIMES, TIMES), min_size=4, max_size=8)


@given(
    blocks=BLOCKS,
    reruns=st.lists(st.integers(0, 30), min_size=4, max_size=4),
    sharding=st.lists(st.tuples(TIMES, TIMES), min_size=8, max_size=8),
    name=st.sampled_from(["1F1B", "GPipe"]),
    num_ranks=st.integers(1, 4),
    more=st.integers(0, 3),
    data=st.data(),
)
def test_no_step_is_faster_than_any_bound_on_it(
    blocks, reruns, sharding, name, num_ranks, more, data
):
    sharding = sharding[: len(blocks)]
    schedule = Schedule(
        name=name, num_ranks=num_ranks, num_micro_batches=num_ranks + more
    )

    def times_of(stage, first, end):
        forward, backward = (sum(b[i] for b in blocks[first:end]) for i in (0, 1))
        gather, reduce = (sum(b[i] for b in sharding[first:end]) for i in (0, 1))
        return StageTimes(
            forward_ms=forward,
            backward_ms=backward + reruns[stage],
            optimizer_ms=reduce + 1.0,
            gather_ms=gather,
            send_ms=0.5,
        )

    cutting = Cutting(
        schedule=schedule,
        block_ms=[sum(block) for block in blocks],
        forward_ms=[forward for forward, _ in blocks],
        sharding_ms=sharding,
        cuts=range(1, len(blocks)),
        times_of=times_of,
        relative_gap=0.0,
    )
    sizes = st.sampled_from(range(1, len(blocks)))
    cuts = st.sets(sizes, min_size=num_ranks - 1, max_size=num_ranks - 1)
    starts = (0, *sorted(data.draw(cuts)))
    ends = (*starts[1:], len(blocks))
    times = [times_of(i, starts[i], ends[i]) for i in range(num_ranks)]
    time_ms = step_ms(schedule, times)
    assert cutting.bound_ms <= time_ms
    for index, (first, end) in enumerate(zip(starts, ends, strict=True)):
        assert cutting._bounds(times[:index], index, first)[end] <= time_ms


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
def test_the_bound_on_even_stages_is_their_step(name):
    # No better one is possible: a step of even stages takes just that, gathers of the
    # first micro-batch in each of them and the reductions of one.
    schedule = Schedule(name=name, num_ranks=4, num_micro_batches=8)
    times = StageTimes(forward_ms=1.0, backward_ms=2.0, gather_ms=5.0, optimizer_ms=7.0)
    cutting = Cutting(
        schedule=schedule,
        block_ms=[3.0] * 4,
        forward_ms=[1.0] * 4,
        sharding_ms=[(5.0, 7.0)] * 4,
        cuts=range(1, 4),
        times_of=lambda *_: times,
        relative_gap=0.0,
    )
    assert cutting.bound_ms == step_ms(schedule, [times] * 4)
    assert cutting.bound_ms == 3 * (8 + 3) + 4 * 5 + 7


def test_cuts_that_are_known_are_beaten_by_more_than_the_gap_or_kept():
    schedule = Schedule(name="1F1B", num_ranks=2, num_micro_batches=4)
    for relative_gap, best in ((0.0, (0, 2)), (0.5, (0, 1))):
        cutting = Cutting(
            schedule=schedule,
            block_ms=[3.0] * 4,
            forward_ms=[1.0] * 4,
            cuts=range(1, 4),
            times_of=lambda _, first, end: StageTimes(
                forward_ms=end - first, backward_ms=2.0 * (end - first)
            ),
            relative_gap=relative_gap,
        )
        known = [cutting.times_of(0, 0, 1), cutting.times_of(1, 1, 4)]
        cutting.best_ms, cutting.starts = step_ms(schedule, known), (0, 1)
        cutting.run()
        assert cutting.starts == best


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
def test_equal_stages_wait_for_each_other_as_long_as_in_the_literature(name):
    # (p - 1) / m of the ideal time is bubble: Narayanan et al., SC'21.
    schedule = Schedule(name=name, num_ranks=4, num_micro_batches=8)
    times = [StageTimes(forward_ms=1.0, backward_ms=2.0)] * 4
    assert step_ms(schedule, times) == 3 * 8 * (1 + 3 / 8)


def test_interleaving_divides_the_bubble():
    schedule = Schedule(
        name="Interleaved1F1B", num_ranks=4, num_micro_batches=8, stages_per_rank=2
    )
    times = [StageTimes(forward_ms=0.5, backward_ms=1.0)] * 8
    assert step_ms(schedule, times) == 3 * 8 * (1 + 3 / (2 * 8))


@given(
    times=st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=2, max_size=4),
    name=st.sampled_from(["1F1B", "GPipe"]),
    more=st.integers(0, 5),
)
def test_a_played_step_keeps_every_order(times, name, more):
    number = len(times) + more
    schedule = Schedule(name=name, num_ranks=len(times), num_micro_batches=number)
    stages = [
        StageTimes(forward_ms=f, backward_ms=b, send_ms=send) for f, b, send in times
    ]
    played = play(schedule, stages)
    ends = {one.action: one.end_ms for actions in played for one in actions}
    for actions in played:
        for before, after in itertools.pairwise(actions):
            assert before.end_ms <= after.start_ms
        for action, start_ms, _ in actions:
            if action.is_forward and action.stage:
                sent_ms = ends[action._replace(stage=action.stage - 1)]
                assert start_ms >= sent_ms + stages[action.stage - 1].send_ms
