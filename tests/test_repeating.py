"""Equal calls get results like those that fake kernels give."""

import pytest
import torch

from autosac import _compat
from autosac.pytrees import tensors_in
from autosac.tracing.repeating import RepeatedCalls
from autosac.tracing.values import run_op
from tests.models import each_case

aten = torch.ops.aten


@pytest.fixture
def mode():
    return _compat.FakeTensorMode(allow_non_fake_inputs=True)


def fake(mode, *size, dtype=torch.float32):
    with mode:
        return torch.empty(size, dtype=dtype)


def layout(tensor):
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.untyped_storage().nbytes(),
        torch._C._dispatch_keys(tensor),
        vars(tensor),
    )


def ask(calls, func, *args, **kwargs):
    """What is known about a call, and its tensors; learns it if nothing is."""
    tensors = []
    key = calls.key(func, args, kwargs, tensors)
    call = calls.find(key)
    if call is None:
        with calls.mode:
            calls.learn(key, func, args, kwargs, func(*args, **kwargs))
    return call, tensors


@pytest.mark.parametrize(
    ("func", "rest"),
    [
        (aten.mul.Tensor, (2.0,)),
        (aten.sum.dim_IntList, ([0], True)),
        (aten.native_layer_norm.default, ([8], None, None, 1e-5)),
        (aten.t.default, ()),
        (aten.slice.Tensor, (1, 2, 5)),
        (aten.split.Tensor, (2, 1)),
        (aten.view.dtype, (torch.int32,)),
        (aten.mul_.Tensor, (2.0,)),
    ],
    ids=lambda value: str(value),
)
def test_a_repeated_call_gives_what_the_fake_kernel_gives(func, rest, mode):
    calls = RepeatedCalls(mode)
    assert ask(calls, func, fake(mode, 4, 8), *rest)[0] is None
    tensor = fake(mode, 4, 8)

    call, tensors = ask(calls, func, tensor, *rest)
    found = calls.repeat(call, func, (tensor, *rest), {}, tensors)
    with mode:
        expected = func(tensor, *rest)

    several = isinstance(found, (list, tuple))
    assert type(found) is type(expected)
    for a, b in zip(
        found if several else [found], expected if several else [expected], strict=True
    ):
        assert layout(a) == layout(b)
        assert (a is tensor) == (b is tensor)
        own = tensor.untyped_storage()._cdata
        shares = [x.untyped_storage()._cdata == own for x in (a, b)]
        assert shares[0] == shares[1]


@pytest.mark.parametrize(
    ("func", "real", "fakes", "rest"),
    [
        (aten.scalar_tensor.default, [], [], (1.0,)),
        (aten.where.self, [torch.ones(4, 8, dtype=torch.bool)], [(4, 8), (8,)], ()),
        (aten.nll_loss_forward.default, [], [(4, 8)], (torch.ones(4).long(), None)),
        (aten.embedding.default, [], [(4, 8)], (torch.ones(2, 3).long(),)),
    ],
    ids=lambda value: str(value),
)
def test_a_repeated_call_on_real_tensors_too_gives_what_the_fake_kernel_gives(
    func, real, fakes, rest, mode
):
    calls = RepeatedCalls(mode)
    rest = (*rest, 1, -100) if func is aten.nll_loss_forward.default else rest

    def args():
        return (*real, *(fake(mode, *size) for size in fakes), *rest)

    assert ask(calls, func, *args())[0] is None
    given = args()
    call, tensors = ask(calls, func, *given)
    found = calls.repeat(call, func, given, {}, tensors)
    with mode:
        expected = func(*given)

    for a, b in zip(tensors_in((found,)), tensors_in((expected,)), strict=True):
        assert layout(a) == layout(b)


@pytest.mark.parametrize(
    ("func", "sizes", "rest"),
    [
        (aten.add.Tensor, [(4, 8), (8,)], ()),
        (aten.add.Tensor, [(4, 8), ()], ()),
        (aten.mul.Tensor, [(4, 1, 8), (3, 1)], ()),
        (aten.gt.Scalar, [(4, 8)], (1,)),
        (aten.where.self, [(4, 8), (4, 8), (8,)], ()),
        (aten.addcmul_.default, [(4, 8), (4, 8), (4, 8)], ()),
        (aten.addmm.default, [(3,), (4, 8), (8, 3)], ()),
        (aten.bmm.default, [(2, 4, 8), (2, 8, 3)], ()),
        (aten.expand.default, [(4, 1)], ([4, 8],)),
        (aten.split.Tensor, [(4, 8)], (3, 1)),
    ],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_meta_kernel_gives_what_the_fake_kernel_gives(
    func, sizes, rest, transposed, mode
):
    def args():
        found = [fake(mode, *size) for size in sizes]
        if func is aten.where.self:
            found[0] = fake(mode, *sizes[0], dtype=torch.bool)
        if transposed:
            with mode:
                found = [
                    torch.empty(t.shape[::-1], dtype=t.dtype).permute(
                        tuple(reversed(range(t.dim())))
                    )
                    for t in found
                ]
        return (*found, *rest)

    given = args()
    found = run_op(func, given, {}, [a for a in given if isinstance(a, torch.Tensor)])
    same = args()
    with mode:
        expected = func(*same)

    pairs = zip(tensors_in((found,)), tensors_in((expected,)), strict=True)
    for a, b in pairs:
        assert layout(a) == layout(b)
    assert (found is given[0]) == (expected is same[0])


def test_a_meta_kernel_refuses_what_the_fake_kernel_refuses(mode):
    args = (fake(mode, 4, 8), fake(mode, 7))

    with pytest.raises(RuntimeError, match=r"match|broadcast"), mode:
        run_op(aten.add.Tensor, args, {}, list(args))


def test_a_repeated_call_on_real_tensors_alone_is_run_for_real(mode):
    calls = RepeatedCalls(mode)
    func, first, second = aten.cumsum.default, torch.ones(4), torch.arange(4.0)
    tensors = []

    calls.learn(calls.key(func, (first, 0), {}, []), func, (first, 0), {}, first)
    call = calls.find(calls.key(func, (second, 0), {}, tensors))

    with mode:
        found = calls.repeat(call, func, (second, 0), {}, tensors)
    assert found.tolist() == [0, 1, 3, 6]


def test_calls_that_differ_in_any_respect_are_not_equal(mode):
    calls = RepeatedCalls(mode)
    one, whole = fake(mode, 4, 4), fake(mode, 4, 4, dtype=torch.int64)

    def key(func, *args):
        return calls.key(func, args, {}, [])

    with mode:
        transposed, shifted = one.t(), fake(mode, 5, 4)[1:]
    keys = [
        key(aten.add.Tensor, one, torch.ones(4, 4)),
        key(aten.add.Tensor, torch.ones(4, 4), one),
        key(aten.add.Tensor, torch.ones(4, 4), torch.ones(4, 4)),
        key(aten.add.Tensor, one, 1),
        key(aten.add.Tensor, one, 1.0),
        key(aten.add.Tensor, one, True),
        key(aten.add.Tensor, whole, 1),
        key(aten.add.Tensor, transposed, 1),
        key(aten.add.Tensor, shifted, 1),
        key(aten.sub.Tensor, one, 1),
        key(aten.add.Tensor, one, one),
        key(aten.cat.default, [one, one], 1),
        key(aten.cat.default, [one], one, 1),
    ]
    torch.set_default_dtype(torch.float64)
    try:
        keys.append(key(aten.add.Tensor, one, 1))
    finally:
        torch.set_default_dtype(torch.float32)

    assert None not in keys
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.nonzero.default, lambda mode: (fake(mode, 4),)),
        (aten.t_.default, lambda mode: (fake(mode, 4, 8),)),
        (aten.add_.Tensor, lambda mode: (torch.ones(4), fake(mode, 4))),
        (aten.cat.default, lambda mode: ([torch.ones(4), fake(mode, 4)],)),
        (aten.lift_fresh.default, lambda mode: (torch.ones(4),)),
        (aten.add.Tensor, lambda mode: (fake(mode, 4), fake(_other_mode(), 4))),
    ],
    ids=[
        "values decide",
        "inplace view",
        "writes to a real one",
        "real and fake",
        "literal",
        "other mode",
    ],
)
def test_calls_that_layouts_do_not_determine_are_always_made(func, args, mode):
    assert RepeatedCalls(mode).key(func, args(mode), {}, []) is None


def _other_mode():
    return _compat.FakeTensorMode(allow_non_fake_inputs=True)


def test_a_result_that_may_be_either_of_two_arguments_is_not_repeated(mode):
    calls = RepeatedCalls(mode)
    tensor = fake(mode, 4)

    assert ask(calls, aten.add_.Tensor, tensor, tensor)[0] is None
    assert ask(calls, aten.add_.Tensor, fake(mode, 4), fake(mode, 4))[0] is None
    assert ask(calls, aten.add_.Tensor, fake(mode, 4), fake(mode, 4))[0] is not None


@each_case
def test_a_tape_without_repeated_calls_is_the_same(case, monkeypatch):
    known = case.profile(torch.optim.AdamW).tape
    monkeypatch.setattr(RepeatedCalls, "find", lambda self, key: None)
    made = case.profile(torch.optim.AdamW).tape

    assert known.ops == made.ops
    assert known.storages == made.storages
    assert known.saved == made.saved
    assert known.calls == made.calls
