"""Which batches of a loader are planned for, and which others by them."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import autosac
from autosac.planning.batch_kinds import Kind, assign, buckets
from autosac.step.batch_signatures import BatchSignature
from tests.planning.readers import (
    ROWS,
    batch_of,
    budget_of,
    is_for,
    make_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def collated(lengths):
    return batch_of(max(lengths), rows=len(lengths))


@pytest.mark.slow
def test_a_loader_is_planned_for_all_its_lengths_and_not_disturbed():
    lengths = [6] * 24 + [12] * 12 + [24] * 4

    def loader():
        generator = torch.Generator().manual_seed(5)
        return DataLoader(
            lengths,
            batch_size=4,
            shuffle=True,
            generator=generator,
            collate_fn=collated,
        )

    used, fresh = loader(), loader()
    planned = autosac.plan(
        make_model(), used, memory_budget=budget_of(0.2), optimizer="adamw"
    )

    assert planned.num_batches == 10
    assert any(is_for(one, batch_of(24)) for one in planned.each)
    for one, other in zip(used, fresh, strict=True):
        assert torch.equal(one["tokens"], other["tokens"])


def test_the_largest_batch_of_sorted_texts_is_found():
    loader = DataLoader(
        [length for length in range(1, 200) for _ in range(ROWS)],
        batch_size=ROWS,
        collate_fn=collated,
    )
    kinds = buckets(make_model(), loader)

    assert len(kinds) == 16
    assert kinds[0].batch["tokens"].shape == (ROWS, 199)
    assert sum(one.num_batches for one in kinds) == 199
    assert sum(len(one.signatures) for one in kinds) == 199


def kind(*sizes):
    return Kind(BatchSignature((("x", "torch.float32", sizes),)), ())


def covers(one, other):
    return one.signature.covers(other.signature)


KINDS = st.dictionaries(
    st.builds(kind, st.integers(1, 9), st.integers(1, 9)),
    st.integers(1, 20),
    min_size=1,
)


@given(counts=KINDS, most=st.integers(1, 6))
def test_every_kind_follows_one_that_covers_it(counts, most):
    served = assign(counts, most)
    followed = {one: head for head, kinds in served.items() for one in kinds}

    assert len(served) <= max(most, 1)
    assert all(kinds[0] is head for head, kinds in served.items())
    assert all(covers(head, one) for one, head in followed.items())
    left = counts.keys() - followed.keys()
    assert not any(covers(head, one) for one in left for head in served)
    if len(counts) <= most:
        assert served.keys() == counts.keys()


@given(counts=KINDS)
def test_more_kinds_never_make_a_batch_follow_a_larger_one(counts):
    def wasted(most):
        return sum(
            counts[one] * (head.signature.num_elements - one.signature.num_elements)
            for head, kinds in assign(counts, most).items()
            for one in kinds
        )

    tops = sum(not any(a is not b and covers(a, b) for a in counts) for b in counts)
    costs = [wasted(most) for most in range(tops, len(counts) + 1)]
    assert all(more <= less for less, more in itertools.pairwise(costs))
    assert costs[-1] == 0


def test_frequent_lengths_get_plans_of_their_own():
    counts = {kind(4, n): 1 for n in range(1, 101)} | {kind(4, 60): 1000}
    assert {kind(4, 100), kind(4, 60)} == set(assign(counts, 2))
