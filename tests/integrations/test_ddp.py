"""Loops of one's own under DDP on two processes, by the allocator's counts."""

import pytest

from benchmarks import allocator_shim as shim
from benchmarks.rank_server import run_ranks
from tests.integrations import ddp_runs

pytestmark = pytest.mark.slow
_TIMEOUT_S = 150  # gloo would wait for half an hour
_LATE_BYTES = 4096  # of what slow threads of gloo hold longer, or other tensors less

needs_compiler = pytest.mark.skipif(
    shim.library() is None, reason="counting takes a C compiler"
)


def _ranks(function):
    return run_ranks(function, 2, timeout_s=_TIMEOUT_S)


@pytest.mark.slowest
@needs_compiler
def test_tables_of_a_static_graph_are_counted():
    # 8 parameter tensors: 64 bytes.
    for measured_bytes, peak_bytes, _, is_equal in _ranks(ddp_runs.static):
        assert peak_bytes - _LATE_BYTES <= measured_bytes <= peak_bytes
        assert is_equal


@pytest.mark.slowest
@needs_compiler
@pytest.mark.parametrize("kind", ["mean_of_all", "reducing"])
def test_a_loss_or_an_optimizer_that_talks_to_others_is_planned_without_them(kind):
    for measured_bytes, peak_bytes, _, is_equal in _ranks(getattr(ddp_runs, kind)):
        assert abs(measured_bytes - peak_bytes) <= _LATE_BYTES
        assert is_equal


def test_a_collective_that_nobody_answers_is_refused_on_all_ranks():
    first, second = _ranks(ddp_runs.refused)

    assert first == second
    assert "`_c10d_functional.all_reduce.default` in the model's step waits" in first


@needs_compiler
@pytest.mark.parametrize("kind", ["zero_uneven", "zero_one_large"])
def test_a_divided_state_is_planned_for_the_rank_that_takes_most(kind):
    ranks = _ranks(getattr(ddp_runs, kind))

    measured = [rank[0] for rank in ranks]
    assert len({rank[1:3] for rank in ranks}) == 1
    assert ranks[0][1] - _LATE_BYTES <= max(measured) <= ranks[0][1]
    assert min(measured) < max(measured) - 10_000  # the ranks do differ
    assert all(rank[3] for rank in ranks)


def test_a_hook_that_comes_after_the_plan_is_said_once():
    for told in _ranks(ddp_runs.hooked_later):
        ((file, message),) = told
        assert file == ddp_runs.__file__
        assert message.startswith("A communication hook comes to DDP after the step")
