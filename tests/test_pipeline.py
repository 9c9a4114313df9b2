import pytest
import torch
import torch.distributed as dist
from torch.profiler import record_function

from benchmarks import pipeline
from benchmarks.pipeline import CHECKPOINT, PLAIN, PRECEDING, Overlap
from benchmarks.rank_server import run_ranks
from examples import pipeline_two_stages
from examples.pipeline_two_stages import Setting, Stage, compare

TINY = Setting(num_layers=1, width=16, length=8, batch=2, micro_batches=3)


def withhold_gradients(stage, mode):
    """The last stage's step, which sends a gradient when stage 0 has recomputed."""

    def wait_before_sending(name):
        if name == pipeline_two_stages.SEND:
            dist.barrier()
        return record_function(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_two_stages, "record_function", wait_before_sending)
        pipeline_two_stages.last_stage(stage, mode)


def tell_when_recomputed(stage, mode):
    """The first stage's step, which lets stage 1 know of each recomputation."""

    def forward(module, tokens, mode):
        output, recompute = own(module, tokens, mode)
        return output, lambda: (recompute(), dist.barrier())

    own = pipeline_two_stages.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_two_stages, "forward", forward)
        pipeline_two_stages.first_stage(stage, mode)


def run(rank):
    compare(rank, TINY)  # raises where gradients differ
    stage = Stage(rank, TINY)
    stage.step = (tell_when_recomputed, withhold_gradients)[rank]
    traces = [None, None]
    dist.all_gather_object(traces, pipeline.trace(stage))
    overlapping = pipeline.overlaps(*traces)
    assert len(overlapping) == TINY.micro_batches
    for one in overlapping:
        assert one.hidden_ms == one.recompute_ms > 0


@pytest.mark.slow
def test_two_processes_recompute_before_the_gradient_is_sent_with_equal_gradients():
    # With gradients withheld until then it would hang if backward had to recompute.
    run_ranks(run, 2)


MS = 1_000_000


def test_overlap_counts_from_the_wait_to_the_sending():
    first = {
        pipeline.RECOMPUTATION: [(0, 10 * MS), (20 * MS, 30 * MS)],
        pipeline.RECEIVE: [(1 * MS, 15 * MS), (20 * MS, 50 * MS)],
    }
    last = {
        pipeline.LAST_STAGE: [(5 * MS, 12 * MS), (16 * MS, 40 * MS)],
        pipeline.SEND: [(8 * MS, 9 * MS), (40 * MS, 41 * MS)],
    }

    assert pipeline.overlaps(first, last) == [
        Overlap(recompute_ms=10, hidden_ms=7, busy_ms=5),
        Overlap(recompute_ms=10, hidden_ms=10, busy_ms=10),
    ]


def case(*, hidden_ms=10.0, preceding_ms=90.0, unequal=()):
    overlap = {"recompute_ms": 10.0, "hidden_ms": hidden_ms, "busy_ms": hidden_ms}
    times = {PLAIN: [88.0], CHECKPOINT: [100.0], PRECEDING: [preceding_ms]}
    return {"times_ms": times, "unequal": list(unequal), "overlaps": [overlap]}


def test_the_benchmark_fails_where_a_promise_is_broken():
    assert pipeline.broken(case()) == []
    assert pipeline.broken(case(unequal=["weight"])) == ["weight"]
    assert len(pipeline.broken(case(hidden_ms=5.0))) == 1
    assert len(pipeline.broken(case(preceding_ms=101.0))) == 1
    page = pipeline.page(TINY, 1, [pipeline.row(3, case())])
    assert "| 3 | 88 (88-88) | 100 (100-100) | 90 (90-90) | 10 | 10 |" in page


def test_stages_are_the_two_halves_of_one_model():
    first, last = (Stage(rank, TINY) for rank in (0, 1))
    tokens = torch.zeros(TINY.batch, TINY.length, dtype=torch.long)

    logits = last.module(first.module(tokens))

    assert logits.shape == (TINY.batch, TINY.length, 512)
    assert all(map(torch.equal, first.tokens, last.tokens))
