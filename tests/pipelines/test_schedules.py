import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from autosac._compat_distributed import fake_group
from autosac.errors import ArgumentError
from autosac.pipelines.schedules import Schedule


def schedule(name, num_ranks, num_micro_batches, stages_per_rank=1):
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        stages_per_rank=stages_per_rank,
    )


CASES = (
    *(schedule("GPipe", s, m) for s, m in ((1, 1), (2, 3), (4, 8))),
    *(schedule("1F1B", s, m) for s, m in ((2, 2), (2, 5), (4, 4), (4, 9))),
    *(schedule("Interleaved1F1B", s, m, 2) for s, m in ((2, 4), (4, 8), (4, 10))),
    schedule("Interleaved1F1B", 2, 6, 3),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_micro_batch_goes_forward_and_then_backward_through_each_stage(case):
    done, orders = set(), [list(case.actions(rank)) for rank in range(case.num_ranks)]
    while any(orders):  # every rank waits for what others compute
        before = len(done)
        for order in orders:
            while order and needs(case, order[0]) <= done:
                done.add(order.pop(0))
        assert len(done) > before, "the ranks wait for each other"
    assert len(done) == 2 * case.num_stages * case.num_micro_batches


def needs(case, action):
    """What must be done before an action can be."""
    forward, stage, _ = action
    if forward:
        return {action._replace(stage=stage - 1)} if stage else set()
    needed = {action._replace(is_forward=True)}
    if stage < case.num_stages - 1:
        needed.add(action._replace(stage=stage + 1))
    return needed


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_micro_batches", [4, 7])
def test_stages_near_the_first_have_more_micro_batches_in_flight(
    num_stages, num_micro_batches
):
    of_1f1b = schedule("1F1B", num_stages, num_micro_batches)
    of_gpipe = schedule("GPipe", num_stages, num_micro_batches)
    for stage in range(num_stages):
        most = min(num_micro_batches, num_stages - stage)
        assert of_1f1b.most_in_flight(stage) == most
        assert of_gpipe.most_in_flight(stage) == num_micro_batches


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("stages_per_rank", [2, 3])
def test_interleaved_ranks_hold_what_megatron_holds(num_ranks, stages_per_rank):
    # Narayanan et al., SC'21: warm-up of 2 (p - r - 1) + (v - 1) p, and one more.
    case = schedule("Interleaved1F1B", num_ranks, 4 * num_ranks, stages_per_rank)
    for rank in range(num_ranks):
        in_flight, most = 0, 0
        for action in case.actions(rank):
            in_flight += 1 if action.is_forward else -1
            most = max(most, in_flight)
        warm_up = 2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * num_ranks
        assert most == warm_up + 1


@pytest.mark.parametrize("case", [c for c in CASES if c.is_looped], ids=str)
def test_actions_are_those_of_pytorchs_schedules(case):
    with fake_group(case.num_ranks):
        device = torch.device("cpu")
        stages = [
            PipelineStage(nn.Identity(), stage, case.num_stages, device)
            for stage in case.stages_of(0)
        ]
        orders = ScheduleInterleaved1F1B(
            stages, case.num_micro_batches, loss_fn=nn.MSELoss()
        ).pipeline_order_with_comms
    for rank in range(case.num_ranks):
        expected = [
            (kind.name == "FORWARD", stage, micro_batch)
            for stage, kind, micro_batch, *_ in orders[rank]
            if kind.name in ("FORWARD", "FULL_BACKWARD")
        ]
        assert list(case.actions(rank)) == expected


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (("ZBVZeroBubble", 2, 4), "use one of GPipe, 1F1B, Interleaved1F1B"),
        (("1F1B", 4, 3), "a micro-batch for each of 4 ranks"),
        (("GPipe", 0, 3), "`num_ranks` must be a whole number of at least 1, got 0"),
        (("GPipe", 2, 3, 2), "1 stage per rank, not 2"),
        (("Interleaved1F1B", 2, 4, 1), "several stages per rank, not 1"),
        (("Interleaved1F1B", 2, 5, 2), "in 2 rounds, which does not divide them"),
    ],
)
def test_what_pytorch_cannot_run_is_refused(numbers, message):
    with pytest.raises(ArgumentError, match=message):
        schedule(*numbers)
