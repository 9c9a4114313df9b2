import os
import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.rank_server import run_processes, run_ranks

pytestmark = pytest.mark.slowest  # a server takes seconds to start

seen = []


def remember(rank, value):
    seen.append(value)
    return rank, seen


def add_up(rank, start):
    numbers = torch.tensor([start + rank])
    dist.all_reduce(numbers)
    return int(numbers), torch.get_num_threads()


def num_threads_of_the_server(rank):
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


def fail_on_the_last(rank):
    if rank == 1:
        raise KeyError("no such key")
    dist.barrier()


def die(rank):
    os._exit(3)


def never_end(rank):
    time.sleep(1e6)


def test_each_process_gives_its_result_and_leaves_nothing_to_the_next():
    for value in "ab":
        assert run_processes(remember, 2, value) == [(0, [value]), (1, [value])]
    assert seen == []


def test_ranks_are_connected_and_each_job_has_a_group_of_its_own():
    for num_ranks in (2, 3):
        expected = sum(range(5, 5 + num_ranks)), 1
        assert run_ranks(add_up, num_ranks, 5) == [expected] * num_ranks


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads")
def test_what_is_forked_has_one_thread():
    assert run_processes(num_threads_of_the_server, 1) == [1]


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (fail_on_the_last, {}, "fail_on_the_last.*\n.*no such key"),
        (die, {}, "exit code 3"),
        (never_end, {"timeout_s": 0.5}, "They ran over 0.5 s"),
    ],
)
def test_a_rank_that_fails_or_does_not_end_is_an_error(function, options, message):
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        run_ranks(function, 2, **options)
    assert run_processes(remember, 1, 0) == [(0, [0])]


def test_what_cannot_be_run_is_an_error_and_the_server_goes_on():
    with pytest.raises(RuntimeError, match="takes 2 positional arguments but 4"):
        run_processes(remember, 1, 1, 2, 3)
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        run_processes(lambda rank: rank, 1)
    assert run_processes(remember, 1, 0) == [(0, [0])]
