import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autosac.simulation.allocator_steps import replay
from autosac.simulation.caching_allocator import (
    CachingAllocator,
    OutOfMemory,
    segment_bytes,
)
from autosac.step.ledger import Ledger
from tests.models import CASES, random_choice

KIB, MIB = 2**10, 2**20


# --- sequences counted by hand ------------------------------------------------------


def test_small_requests_share_a_segment_of_2_mib():
    allocator = CachingAllocator()

    first = allocator.allocate(1)
    second = allocator.allocate(513)

    assert (first, second) == (0, 512)
    assert allocator.allocated_bytes == 512 + 1024
    assert allocator.reserved_bytes == 2 * MIB
    # 2 MiB - 1.5 KiB are left: one more MiB fits, two do not.
    allocator.allocate(MIB)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(MIB)
    assert allocator.reserved_bytes == 4 * MIB


@pytest.mark.parametrize(
    ("num_bytes", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # rounded up to 10 MiB, which is not below it
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_the_first_request_reserves_a_segment(num_bytes, reserved):
    allocator = CachingAllocator()

    allocator.allocate(num_bytes)

    assert allocator.reserved_bytes == reserved


def test_a_remainder_of_at_most_1_mib_stays_with_a_large_block():
    allocator = CachingAllocator()

    allocator.allocate(11 * MIB)  # of 12 MiB: 1 MiB is not worth splitting off
    assert allocator.allocated_bytes == 12 * MIB

    allocator.allocate(11 * MIB - 512)  # of 12 MiB: the rest is
    assert allocator.allocated_bytes == 12 * MIB + 11 * MIB - 512
    allocator.allocate(MIB + 512)
    assert allocator.reserved_bytes == 24 * MIB


def test_a_remainder_of_512_bytes_is_split_off_a_small_block():
    allocator = CachingAllocator()
    allocator.allocate(MIB)
    allocator.allocate(MIB - 512)

    allocator.allocate(512)

    assert allocator.reserved_bytes == 2 * MIB == allocator.allocated_bytes


def test_large_requests_do_not_use_small_blocks():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(512))

    allocator.allocate(2 * MIB)

    assert allocator.reserved_bytes == 22 * MIB


def test_the_best_fit_is_taken_and_of_equals_the_first():
    allocator = CachingAllocator()
    sizes = (16, 12, 14, 12)
    addresses = [allocator.allocate(size * MIB) for size in sizes]
    for address in addresses:
        allocator.free(address)

    assert allocator.allocate(12 * MIB) == addresses[1]
    assert allocator.allocate(12 * MIB) == addresses[3]
    assert allocator.allocate(12 * MIB) == addresses[2]
    assert allocator.reserved_bytes == 54 * MIB


def test_freed_neighbours_become_one_block():
    allocator = CachingAllocator()
    left, middle, right = (allocator.allocate(4 * MIB) for _ in range(3))

    allocator.free(left)
    allocator.free(right)  # joins the 8 MiB that were never used
    assert allocator.allocate(9 * MIB) == right
    allocator.free(right)
    allocator.free(middle)

    assert allocator.allocate(20 * MIB) == left
    assert allocator.reserved_bytes == 20 * MIB


def test_holes_that_fit_nothing_stay_reserved():
    allocator = CachingAllocator()
    addresses = [allocator.allocate(4 * MIB) for _ in range(5)]  # one segment
    for address in addresses[::2]:
        allocator.free(address)

    allocator.allocate(6 * MIB)  # 12 MiB are free, in three pieces

    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.peak_allocated_bytes == 20 * MIB


def test_free_segments_go_before_memory_runs_out():
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.free(allocator.allocate(16 * MIB))
    kept = allocator.allocate(18 * MIB)

    allocator.allocate(22 * MIB)  # 16 + 18 + 22 is too much, 18 + 22 is not

    assert allocator.reserved_bytes == 40 * MIB
    with pytest.raises(OutOfMemory, match=str(40 * MIB)):
        allocator.allocate(1)
    allocator.free(kept)
    allocator.allocate(1)
    assert allocator.reserved_bytes == 24 * MIB


def test_a_segment_in_use_is_not_released():
    allocator = CachingAllocator()
    first = allocator.allocate(2 * MIB)
    second = allocator.allocate(2 * MIB)
    allocator.free(second)

    allocator.release()
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(first)
    allocator.release()
    assert allocator.reserved_bytes == 0


def test_only_blocks_in_use_are_freed():
    allocator = CachingAllocator()
    address = allocator.allocate(1)
    allocator.free(address)

    for wrong in (address, 512, 7):
        with pytest.raises(ValueError, match=f"address {wrong}"):
            allocator.free(wrong)


# --- any sequence -------------------------------------------------------------------

sizes = st.one_of(
    st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(1, 40 * MIB)
)
sequences = st.lists(st.tuples(sizes, st.integers(0, 9)), max_size=60)


def run(allocator, sequence, check=lambda live: None):
    """Allocate each size, then free the n-th live block; returns what is left."""
    live = {}
    for num_bytes, place in sequence:
        live[allocator.allocate(num_bytes)] = num_bytes
        if place < len(live):
            address = list(live)[place]
            allocator.free(address)
            del live[address]
        check(live)
    return live


@given(sequences)
def test_blocks_hold_what_was_asked_for_and_never_overlap(sequence):
    allocator = CachingAllocator()

    def check(live):
        blocks = allocator.blocks_in_use()
        assert [address for address, _ in blocks] == sorted(live)
        assert all(size >= live[address] for address, size in blocks)
        assert all(size % 512 == 0 for _, size in blocks)
        ends = [address + size for address, size in blocks]
        assert all(
            end <= start for end, (start, _) in zip(ends, blocks[1:], strict=False)
        )
        assert sum(size for _, size in blocks) == allocator.allocated_bytes
        assert allocator.reserved_bytes >= allocator.allocated_bytes

    run(allocator, sequence, check)


below_10_mib = st.lists(
    st.tuples(st.integers(1, 9 * MIB), st.integers(0, 9)), max_size=60
)


@given(below_10_mib)
def test_the_same_sequence_again_reserves_nothing_more(sequence):
    # Segments of a kind are equally large here, so that a free one is as good as a
    # new one. Not so above 10 MiB: best fit may spend a large one on a smaller request.
    allocator = CachingAllocator()
    for address in run(allocator, sequence):
        allocator.free(address)
    reserved = allocator.reserved_bytes
    assert allocator.allocated_bytes == 0

    for address in run(allocator, sequence):
        allocator.free(address)

    assert allocator.reserved_bytes == reserved
    allocator.release()
    assert allocator.reserved_bytes == 0


@given(sequences, st.integers(1, 60))
def test_a_capacity_is_kept(sequence, mib):
    allocator = CachingAllocator(capacity_bytes=mib * MIB)
    try:
        run(allocator, sequence)
    except OutOfMemory:
        needed = [segment_bytes(-(-size // 512) * 512) for size, _ in sequence]
        assert sum(needed) > mib * MIB
    assert allocator.peak_reserved_bytes <= mib * MIB


# --- steps --------------------------------------------------------------------------


def step_of(*rows, end=100):
    born, died, nbytes = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return Ledger(born=born, died=died, nbytes=nbytes * MIB, end=end)


def test_steps_are_replayed_on_what_is_always_there():
    step = step_of(
        (0, 100, 12),  # a parameter,
        (1, 5, 14),  # an activation,
        (5, 9, 14),  # another one in its place,
        (6, 7, 4),  # a temporary,
        (8, 100, 4),  # a gradient, freed when the next step begins.
    )

    found = replay(step)

    assert found.peak_reserved_bytes == (12 + 14 + 20) * MIB
    assert found.peak_allocated_bytes == (12 + 14 + 4) * MIB
    assert found.allocated_bytes == 12 * MIB


def test_an_input_that_dies_in_a_step_is_there_again_in_the_next():
    # The next batch is made while the gradient lives: 16 MiB three times in all.
    step = step_of((0, 3, 16), (2, 100, 16), (3, 4, 16))

    found = replay(step)

    assert found.allocated_bytes == 16 * MIB
    assert found.peak_reserved_bytes == 32 * MIB


def test_nothing_is_allocated_for_what_is_empty():
    assert replay(step_of((0, 100, 0), (3, 3, 5))).peak_reserved_bytes == 0


def test_a_step_that_does_not_fit_says_so():
    with pytest.raises(OutOfMemory):
        replay(step_of((0, 100, 12), (1, 2, 14)), capacity_bytes=25 * MIB)


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", ["gpt", "convolutions"])
def test_a_plan_reserves_at_least_its_peak(name):
    made = CASES[name].profile(torch.optim.AdamW)
    for seed in range(3):
        chosen = random_choice(made, seed)
        allocated = made.simulator.allocator_peak_bytes(chosen, "allocated")
        reserved = made.simulator.allocator_peak_bytes(chosen, "reserved")

        numbers = made.simulator.number_bytes  # on the CPU only
        assert reserved >= allocated
        assert allocated >= made.simulator.peak_bytes(chosen) - numbers


# --- the real one -------------------------------------------------------------------

_REAL = """
import random, torch
draw, tensors = random.Random(0), {}
for name in range(2000):
    if tensors and draw.random() < 0.48:
        name = draw.choice(list(tensors))
        del tensors[name]
        print("free", name, end=" ")
    else:
        size = draw.randint(1, draw.choice([2**10, 2**20, 2**23, 2**26]))
        tensors[name] = torch.empty(size, dtype=torch.uint8, device="cuda")
        print("allocate", name, size, end=" ")
    print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_does_what_the_real_one_does():
    real = subprocess.run(  # a process of its own has nothing reserved yet
        [sys.executable, "-c", _REAL], capture_output=True, text=True, check=True
    )
    allocator, addresses = CachingAllocator(), {}
    for line in real.stdout.splitlines():
        what, name, *numbers, allocated, reserved = line.split()
        if what == "allocate":
            addresses[name] = allocator.allocate(int(numbers[0]))
        else:
            allocator.free(addresses.pop(name))
        assert allocator.allocated_bytes == int(allocated)
        assert allocator.reserved_bytes == int(reserved)
