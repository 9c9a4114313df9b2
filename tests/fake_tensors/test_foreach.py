"""Ops on lists run on one item of each kind and return what the whole call would."""

import pytest
import torch

from autosac import _compat_fakes
from autosac.fake_tensors.foreach import run_distinct

aten = torch.ops.aten


def many(mode, *sizes, dtype=torch.float32):
    with mode:
        return [torch.empty(size, dtype=dtype) for size in sizes]


def layouts(results):
    return [
        (r.shape, r.stride(), r.dtype, r.device, r.untyped_storage().nbytes())
        for r in results
    ]


@pytest.mark.parametrize(
    ("func", "rest"),
    [
        (aten._foreach_sqrt.default, ()),
        (aten._foreach_norm.Scalar, (2,)),
        (aten._foreach_add.Scalar, (1.0,)),
        (aten._foreach_mul.ScalarList, ([2.0, 2.0, 3.0, 2.0, 2.0],)),
    ],
    ids=str,
)
def test_results_are_those_of_the_whole_call_each_with_its_own_memory(func, rest):
    mode = _compat_fakes.FakeTensorMode(allow_non_fake_inputs=True)
    items = many(mode, (4, 8), (8,), (4, 8), (4, 8), (8,))
    with mode:
        items[3] = items[3].t()
        expected = func(items, *rest)
    lengths = []

    def run(args):
        lengths.append(len(args[0]))
        with mode:
            return func(*args)

    results = run_distinct(mode, func, (items, *rest), {}, run)

    assert lengths[0] < len(items)
    assert layouts(results) == layouts(expected)
    assert len({r.untyped_storage()._cdata for r in results}) == len(items)


def test_items_that_go_together_are_told_apart_by_every_list():
    mode = _compat_fakes.FakeTensorMode(allow_non_fake_inputs=True)
    left, right = many(mode, (4,), (4,), (4,)), many(mode, (4,), (1,), (4,))
    with mode:
        left[2] = left[2].double()

    def run(args):
        assert len(args[0]) == len(args[1]) == 3
        with mode:
            return aten._foreach_add.List(*args)

    results = run_distinct(mode, aten._foreach_add.List, (left, right), {}, run)

    assert [r.dtype for r in results] == [torch.float32, torch.float32, torch.float64]


def test_other_ops_on_lists_run_as_they_are():
    mode = _compat_fakes.FakeTensorMode(allow_non_fake_inputs=True)
    items = many(mode, (4,), (4,))
    seen = []

    run_distinct(mode, aten.cat.default, (items,), {}, seen.append)

    assert seen == [(items,)]
