"""What each setting of the allocator changes, on sequences counted by hand."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autosac
from autosac.devices.allocator_settings import AllocatorSettings, program_settings
from autosac.errors import ArgumentError, UnsupportedError
from autosac.profiles.profile import allocator_of
from autosac.simulation.caching_allocator import CachingAllocator

KIB, MIB = 2**10, 2**20


def allocator_with(capacity_mib=None, **settings):
    capacity = None if capacity_mib is None else capacity_mib * MIB
    return CachingAllocator(capacity, AllocatorSettings(**settings))


# --- expandable segments ------------------------------------------------------------


def test_expandable_segments_grow_by_pages_behind_what_is_free():
    allocator = allocator_with(expandable_segments=True)

    first = allocator.allocate(12 * MIB)  # a page of 20 MiB: 8 MiB are left
    assert allocator.reserved_bytes == 20 * MIB
    second = allocator.allocate(12 * MIB)  # these and 4 MiB of a second page

    assert (first, second) == (0, 12 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(16 * MIB)  # all that is left of it
    assert allocator.reserved_bytes == 40 * MIB == allocator.allocated_bytes


def test_expandable_segments_are_used_across_what_were_several_requests():
    sizes = (15, 15, 15)
    reserved = {}
    for expands in (False, True):
        allocator = allocator_with(expandable_segments=expands)
        for address in [allocator.allocate(size * MIB) for size in sizes]:
            allocator.free(address)
        allocator.allocate(50 * MIB)
        reserved[expands] = allocator.reserved_bytes // MIB

    assert reserved == {False: 3 * 16 + 50, True: 3 * 20}


def test_expandable_segments_split_off_what_is_left_of_large_blocks():
    allocator = allocator_with(expandable_segments=True)

    allocator.allocate(20 * MIB - 512)

    assert allocator.allocated_bytes == 20 * MIB - 512
    assert allocator.reserved_bytes == 20 * MIB


def test_small_requests_have_pages_of_2_mib():
    allocator = allocator_with(expandable_segments=True)

    for _ in range(3):
        allocator.allocate(MIB)

    assert allocator.reserved_bytes == 4 * MIB


def test_pages_that_are_wholly_free_are_given_back_and_taken_again():
    allocator = allocator_with(expandable_segments=True)
    first, second, third = (allocator.allocate(15 * MIB) for _ in range(3))
    allocator.free(first)  # 0 to 15: its page holds a part of the second
    allocator.free(third)  # 30 to 60 are free now: the page from 40 on

    allocator.release()
    assert allocator.reserved_bytes == 40 * MIB
    # 30 to 40 is free, and 20 MiB follow: the only place for 30 MiB in a row.
    assert allocator.allocate(30 * MIB) == 30 * MIB
    assert allocator.reserved_bytes == 60 * MIB
    assert allocator.blocks_in_use() == [(second, 15 * MIB), (30 * MIB, 30 * MIB)]


def test_pages_given_back_in_the_middle_are_filled_first():
    allocator = allocator_with(expandable_segments=True)
    _, middle, last = (allocator.allocate(20 * MIB) for _ in range(3))
    allocator.free(middle)
    allocator.release()
    assert allocator.reserved_bytes == 40 * MIB

    assert allocator.allocate(12 * MIB) == middle
    assert allocator.reserved_bytes == 60 * MIB
    assert allocator.allocate(30 * MIB) == last + 20 * MIB  # 8 MiB are too few


def test_the_best_fit_counts_what_a_block_can_become():
    allocator = allocator_with(expandable_segments=True)
    hole = allocator.allocate(30 * MIB)
    allocator.allocate(10 * MIB)
    allocator.allocate(8 * MIB)  # 12 MiB behind it are free, with pages to come
    allocator.free(hole)

    assert allocator.allocate(10 * MIB) == hole


# --- blocks that are not split ------------------------------------------------------


def test_a_block_of_the_split_size_serves_no_smaller_request():
    allocator = allocator_with(max_split_size_mb=64)
    allocator.free(allocator.allocate(100 * MIB))

    allocator.allocate(30 * MIB)

    assert allocator.reserved_bytes == 130 * MIB


@pytest.mark.parametrize(
    ("mib", "reserved", "allocated"),
    [
        (90, 100, 100),  # nearly as large: it gets all of it
        (81, 100, 100),
        (80, 180, 80),  # 20 MiB too large
        (70, 170, 70),
    ],
)
def test_a_block_of_the_split_size_serves_nearly_its_size(mib, reserved, allocated):
    allocator = allocator_with(max_split_size_mb=64)
    allocator.free(allocator.allocate(100 * MIB))

    allocator.allocate(mib * MIB)

    assert allocator.reserved_bytes == reserved * MIB
    assert allocator.allocated_bytes == allocated * MIB


def test_blocks_below_the_split_size_are_split():
    allocator = allocator_with(max_split_size_mb=64)
    allocator.free(allocator.allocate(40 * MIB))

    allocator.allocate(30 * MIB)
    allocator.allocate(10 * MIB)

    assert allocator.reserved_bytes == 40 * MIB == allocator.allocated_bytes


def test_only_blocks_that_are_never_split_go_first_when_memory_runs_out():
    allocator = allocator_with(230, max_split_size_mb=64)
    for address in [allocator.allocate(size * MIB) for size in (40, 100, 80)]:
        allocator.free(address)

    allocator.allocate(110 * MIB)  # 100 alone would not do, so that 80 goes as well

    assert allocator.reserved_bytes == (40 + 110) * MIB


def test_one_block_that_is_large_enough_goes_alone():
    allocator = allocator_with(330, max_split_size_mb=64)
    for address in [allocator.allocate(size * MIB) for size in (150, 120)]:
        allocator.free(address)

    allocator.allocate(70 * MIB)  # neither serves it: both are 20 MiB too large

    assert allocator.reserved_bytes == (150 + 70) * MIB


# --- garbage ------------------------------------------------------------------------


def test_segments_that_were_free_for_long_go_above_the_threshold():
    allocator = allocator_with(
        garbage_collection_threshold=0.9, memory_limit_bytes=200 * MIB
    )
    first, second, _ = (allocator.allocate(size * MIB) for size in (60, 50, 40))
    allocator.free(first)
    allocator.allocate(66 * MIB)  # 150 MiB are below 180: nothing goes
    assert allocator.reserved_bytes == 216 * MIB
    allocator.free(second)

    # Of 216 MiB 36 are too much. Free are 60 MiB for two requests, 50 MiB for one.
    allocator.allocate(70 * MIB)

    assert allocator.reserved_bytes == (216 - 60 + 70) * MIB


def test_garbage_is_collected_until_what_is_too_much_is_gone():
    allocator = allocator_with(
        garbage_collection_threshold=0.5, memory_limit_bytes=200 * MIB
    )
    for address in [allocator.allocate(size * MIB) for size in (60, 90, 40)]:
        allocator.free(address)
    allocator.allocate(80 * MIB)  # of the 90, which are no whole segment any more

    # Of 190 MiB 90 are too much, and only 100 are free; ages are equal.
    allocator.allocate(70 * MIB)

    assert allocator.reserved_bytes == (90 + 70) * MIB


@pytest.mark.parametrize(
    "settings",
    [
        {"max_split_size_mb": 20},
        {"garbage_collection_threshold": 1.0, "memory_limit_bytes": MIB},
        {"garbage_collection_threshold": 0.8},
        {"garbage_collection_threshold": "0.8", "memory_limit_bytes": MIB},
        {"max_split_size_mb": "128"},
        {"memory_limit_bytes": "10GiB"},
        {"memory_limit_bytes": -1},
        {"expandable_segments": "True"},
    ],
)
def test_what_pytorch_refuses_or_ignores_is_refused(settings):
    with pytest.raises(ArgumentError, match=str(next(iter(settings.values())))):
        AllocatorSettings(**settings)


# --- any sequence -------------------------------------------------------------------

sizes = st.one_of(
    st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(1, 90 * MIB)
)
sequences = st.lists(st.tuples(sizes, st.integers(0, 9)), max_size=60)
any_settings = st.sampled_from(
    [
        AllocatorSettings(expandable_segments=True),
        AllocatorSettings(max_split_size_mb=32),
        AllocatorSettings(
            garbage_collection_threshold=0.3, memory_limit_bytes=100 * MIB
        ),
    ]
)


@given(sequences, any_settings)
def test_blocks_never_overlap_whatever_the_settings(sequence, settings):
    allocator, live = CachingAllocator(None, settings), {}
    for num_bytes, place in sequence:
        live[allocator.allocate(num_bytes)] = num_bytes
        if place == 9:
            allocator.release()
        elif place < len(live):
            address = list(live)[place]
            allocator.free(address)
            del live[address]
        blocks = allocator.blocks_in_use()
        assert [address for address, _ in blocks] == sorted(live)
        assert all(size >= live[address] for address, size in blocks)
        ends = [address + size for address, size in blocks]
        assert all(a <= b for a, (b, _) in zip(ends, blocks[1:], strict=False))
        assert sum(size for _, size in blocks) == allocator.allocated_bytes
        assert allocator.reserved_bytes >= allocator.allocated_bytes
    for address in live:
        allocator.free(address)
    allocator.release()
    assert allocator.reserved_bytes == 0 == allocator.allocated_bytes


# --- what a program's environment says -----------------------------------------------


@pytest.fixture
def variables(monkeypatch):
    """Set those of the allocator, and none else."""

    def those(**values):
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return those


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("expandable_segments:True", {"expandable_segments": True}),
        ("expandable_segments:False", {}),
        (
            "backend:native, max_split_size_mb : 64,expandable_segments: True",
            {"expandable_segments": True, "max_split_size_mb": 64},
        ),
        ("pinned_use_cuda_host_register:True,garbage_collection_threshold:0.8", {}),
        ("", {}),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_programs_settings_are_those_of_its_environment(
    variables, name, text, settings
):
    variables(**{name: text})

    assert program_settings() == AllocatorSettings(**settings)


def test_the_variable_that_pytorch_reads_first_counts(variables):
    variables(
        PYTORCH_ALLOC_CONF="expandable_segments:True",
        PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64",
    )

    assert program_settings() == AllocatorSettings(max_split_size_mb=64)


@pytest.mark.parametrize(
    "text",
    ["backend:cudaMallocAsync", "roundup_power2_divisions:[256:1,512:2,>:8]"],
)
def test_settings_that_are_not_simulated_are_refused(variables, text):
    variables(PYTORCH_ALLOC_CONF=f"expandable_segments:True,{text}")

    with pytest.raises(UnsupportedError) as caught:
        program_settings()

    assert f"PYTORCH_ALLOC_CONF has {text}, " in str(caught.value)


def test_the_environment_says_nothing_of_a_gpu_that_is_not_here(variables):
    variables(PYTORCH_ALLOC_CONF="expandable_segments:True")
    with torch.device("meta"):
        model, batch = torch.nn.Linear(4, 4), torch.empty(2, 4)

    profile = autosac.profile(model, batch, loss_fn=torch.sum, device="h100")

    assert profile.allocator == AllocatorSettings()


def test_the_environment_counts_where_the_model_is_on_a_gpu(variables):
    variables(PYTORCH_ALLOC_CONF="expandable_segments:True")
    here = SimpleNamespace(device_type="cuda", lens=None)
    own = AllocatorSettings(max_split_size_mb=64)

    assert allocator_of(here, None) == AllocatorSettings(expandable_segments=True)
    assert allocator_of(here, own) == own
