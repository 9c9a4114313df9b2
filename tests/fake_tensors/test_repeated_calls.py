"""Equal calls get results like those that fake kernels give."""

import pytest
import torch

from autosac import _compat_fakes
from autosac.fake_tensors import real_layouts, repeated_calls
from autosac.fake_tensors.repeated_calls import RepeatedCalls, Results, kept_results
from autosac.fake_tensors.values import (
    _BY_LAYOUT,
    _BY_LAYOUT_IN_FLOAT32,
    run_op,
)
from autosac.pytrees import tensors_in
from tests.models import each_case, shared_profile

aten = torch.ops.aten


@pytest.fixture
def mode():
    return _compat_fakes.FakeTensorMode(allow_non_fake_inputs=True)


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
    call = calls.find(key, func, args, kwargs, tensors)
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
    repeated = calls.repeat(call, func, (tensor, *rest), {}, tensors)
    with mode:
        expected = func(tensor, *rest)

    several = isinstance(repeated, (list, tuple))
    assert type(repeated) is type(expected)
    for a, b in zip(
        repeated if several else [repeated],
        expected if several else [expected],
        strict=True,
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
    repeated = calls.repeat(call, func, given, {}, tensors)
    with mode:
        expected = func(*given)

    for a, b in zip(tensors_in((repeated,)), tensors_in((expected,)), strict=True):
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
        result = [fake(mode, *size) for size in sizes]
        if func is aten.where.self:
            result[0] = fake(mode, *sizes[0], dtype=torch.bool)
        if transposed:
            with mode:
                result = [
                    torch.empty(t.shape[::-1], dtype=t.dtype).permute(
                        tuple(reversed(range(t.dim())))
                    )
                    for t in result
                ]
        return (*result, *rest)

    given = args()
    result = run_op(func, given, {}, [a for a in given if isinstance(a, torch.Tensor)])
    same = args()
    with mode:
        expected = func(*same)

    pairs = zip(tensors_in((result,)), tensors_in((expected,)), strict=True)
    for a, b in pairs:
        assert layout(a) == layout(b)
    assert (result is given[0]) == (expected is same[0])


LABELS = torch.arange(4)  # a real tensor
BY_LAYOUT = [  # sizes of fakes at the places of the tuples in a list
    (aten._log_softmax.default, [(4, 8)], 1, False),
    (aten._log_softmax_backward_data.default, [(4, 8)], [(4, 8)], 1, "dtype"),
    (aten._safe_softmax.default, [(4, 8)], -1),
    (aten._softmax.default, [(4, 8)], 0, False),
    (aten._softmax_backward_data.default, [(4, 8)], [(4, 8)], 1, "dtype"),
    (aten._to_copy.default, [(4, 8)], {"dtype": torch.float64}),
    (aten.addmm.default, [(3,)], [(4, 8)], [(8, 3)]),
    (aten.baddbmm.default, [(2, 4, 3)], [(2, 4, 8)], [(2, 8, 3)]),
    (aten.bmm.default, [(2, 4, 8)], [(2, 8, 3)]),
    (aten.clone.default, [(4, 8)]),
    (aten.clone.default, [(2, 3, 4, 5)], {"memory_format": torch.channels_last}),
    (aten.embedding.default, [(9, 8)], LABELS),
    (aten.embedding_dense_backward.default, [(4, 8)], LABELS, 9, -1, False),
    (aten.empty_like.default, [(4, 8)], {"pin_memory": False}),
    (aten.mean.default, [(4, 8)]),
    (aten.mean.dim, [(4, 8)], [1], True),
    (aten.mm.default, [(4, 8)], [(8, 3)]),
    (
        aten.native_group_norm_backward.default,
        *([(2, 6, 5)], [(2, 6, 5)], [(2, 3)], [(2, 3)], [(6,)]),
        *(2, 6, 5, 3, [True, True, True]),
    ),
    (
        aten.native_batch_norm.default,
        *([(2, 6, 5, 5)], [(6,)], [(6,)], [(6,)], [(6,)], True, 0.1, 1e-5),
    ),
    (
        aten.native_batch_norm_backward.default,
        *([(2, 6, 5, 5)], [(2, 6, 5, 5)], [(6,)], [(6,)], [(6,)], [(6,)], [(6,)]),
        *(True, 1e-5, [True, True, False]),
    ),
    (aten.native_layer_norm.default, [(2, 4, 8)], [8], [(8,)], [(8,)], 1e-5),
    (
        aten.native_layer_norm_backward.default,
        *([(4, 8)], [(4, 8)], [8], [(4, 1)], [(4, 1)], [(8,)], [(8,)]),
        [True, False, True],
    ),
    (aten.nll_loss_forward.default, [(4, 8)], LABELS, None, 1, -100),
    (
        aten.nll_loss_backward.default,
        *([()], [(4, 8)], LABELS, None, 1, -100, [()]),
    ),
    (aten.ones_like.default, [(4, 8)]),
    (aten.select_backward.default, [(4,)], [4, 8], 1, 3),
    (aten.slice_backward.default, [(4, 2)], [4, 8], 1, 2, 4, 1),
    (aten.sum.default, [(4, 8)], {"dtype": torch.float64}),
    (aten.sum.dim_IntList, [(4, 8)], [0], True),
    (aten.zeros_like.default, [(4, 8)], {"memory_format": torch.preserve_format}),
]


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("call", BY_LAYOUT, ids=lambda call: str(call[0]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_layouts_of_meta_kernels_are_those_of_fake_kernels(
    call, dtype, transposed, mode
):
    def argument(value):
        if value == "dtype":
            return dtype
        if type(value) is not list or type(value[0]) is not tuple:
            return value
        with mode:
            size = value[0][::-1] if transposed else value[0]
            result = torch.empty(size, dtype=dtype)
            order = tuple(reversed(range(result.dim())))
            return result.permute(order) if transposed else result

    func, *rest = call
    kwargs = rest.pop() if isinstance(rest[-1], dict) else {}
    args = tuple(map(argument, rest))
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    with mode:
        result = run_op(func, args, kwargs, tensors)
        expected = real_layouts.on_cpu(func, args, func(*args, **kwargs))

    result, expected = (
        [x] if isinstance(x, torch.Tensor) else x for x in (result, expected)
    )
    assert [t is None for t in result] == [t is None for t in expected]
    pairs = zip(tensors_in(result), tensors_in(expected), strict=True)
    for a, b in pairs:
        assert layout(a) == layout(b)


def test_all_ops_that_run_by_meta_kernels_are_among_the_tested_ones():
    assert {call[0] for call in BY_LAYOUT} == _BY_LAYOUT | _BY_LAYOUT_IN_FLOAT32


def test_a_meta_kernel_refuses_what_the_fake_kernel_refuses(mode):
    args = (fake(mode, 4, 8), fake(mode, 7))

    with pytest.raises(RuntimeError, match=r"match|broadcast"), mode:
        run_op(aten.add.Tensor, args, {}, list(args))


def test_a_repeated_call_on_real_tensors_alone_is_run_for_real(mode):
    calls = RepeatedCalls(mode)
    func, first, second = aten.cumsum.default, torch.ones(4), torch.arange(4.0)
    tensors = []

    calls.learn(calls.key(func, (first, 0), {}, []), func, (first, 0), {}, first)
    key = calls.key(func, (second, 0), {}, tensors)
    call = calls.find(key, func, (second, 0), {}, tensors)

    with mode:
        repeated = calls.repeat(call, func, (second, 0), {}, tensors)
    assert repeated.tolist() == [0, 1, 3, 6]


ELEMENTWISE = [
    (aten.add.Tensor, "ff", (), {}),
    (aten.add.Tensor, "if", (), {"alpha": 2}),
    (aten.add_.Tensor, "ff", (), {"alpha": 2}),
    (aten.addcdiv_.default, "fff", (), {"value": 0.5}),
    (aten.div.Tensor, "ii", (), {}),
    (aten.eq.Scalar, "f", (1,), {}),
    (aten.lerp_.Scalar, "ff", (0.5,), {}),
    (aten.mul.Scalar, "i", (0.5,), {}),
    (aten.pow.Tensor_Scalar, "h", (2,), {}),
    (aten.sqrt.default, "h", (), {}),
    (aten.where.self, "bhf", (), {}),
]
DTYPES = {"f": torch.float32, "h": torch.bfloat16, "i": torch.int64, "b": torch.bool}


@pytest.mark.parametrize(("func", "kinds", "rest", "kwargs"), ELEMENTWISE)
@pytest.mark.parametrize("size", [(7,), (3, 1, 5), (2, 1, 4, 4), (1, 1)])
def test_an_elementwise_call_is_known_for_all_sizes(
    func, kinds, rest, kwargs, size, mode
):
    def tensors(*size):
        return tuple(fake(mode, *size, dtype=DTYPES[kind]) for kind in kinds)

    calls = RepeatedCalls(mode)
    assert ask(calls, func, *tensors(4, 8), *rest, **kwargs)[0] is None
    given = tensors(*size)

    call, inputs = ask(calls, func, *given, *rest, **kwargs)
    repeated = calls.repeat(call, func, (*given, *rest), kwargs, inputs)
    with mode:
        expected = func(*tensors(*size), *rest, **kwargs)

    assert layout(repeated) == layout(expected)
    storages = [tensor.untyped_storage()._cdata for tensor in given]
    is_in_place = func._schema.name.endswith("_")
    assert (repeated.untyped_storage()._cdata in storages) == is_in_place


@pytest.mark.parametrize(
    "change",
    [
        lambda a: (a, a.t()),
        lambda a: (a.t(), a.t()),
        lambda a: (a, a[:1]),
        lambda a: (a[:, :4], a[:, :4]),
        lambda a: (a[0, 0], a[0, 0]),
        lambda a: (a[:0], a[:0]),
        lambda a: (a, a.double()),
    ],
)
def test_elementwise_calls_on_other_layouts_are_worked_out_anew(change, mode):
    calls = RepeatedCalls(mode)
    with mode:
        others = change(fake(mode, 6, 6))

    ask(calls, aten.add.Tensor, fake(mode, 4, 8), fake(mode, 4, 8))

    assert ask(calls, aten.add.Tensor, *others)[0] is None


def test_a_copy_in_another_layout_is_no_elementwise_call_of_any_size(mode):
    calls, wish = RepeatedCalls(mode), {"memory_format": torch.channels_last}

    ask(calls, aten.clone.default, fake(mode, 5, 1, 1, 1), **wish)

    assert ask(calls, aten.clone.default, fake(mode, 2, 3, 4, 4), **wish)[0] is None


def test_real_tensors_of_different_shapes_may_be_compared(mode):
    one, other = torch.arange(3), torch.arange(4)

    with mode:
        assert run_op(aten.equal.default, (one, other), {}, [one, other]) is False


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
    return _compat_fakes.FakeTensorMode(allow_non_fake_inputs=True)


def test_a_result_that_may_be_either_of_two_arguments_is_not_repeated(mode):
    calls = RepeatedCalls(mode)
    tensor = fake(mode, 4)

    assert ask(calls, aten.add_.Tensor, tensor, tensor)[0] is None
    assert ask(calls, aten.add_.Tensor, fake(mode, 4), fake(mode, 4))[0] is None
    assert ask(calls, aten.add_.Tensor, fake(mode, 4), fake(mode, 4))[0] is not None


@pytest.mark.parametrize(
    ("func", "rest"),
    [
        (aten.sum.dim_IntList, ([0], True)),
        (aten.t.default, ()),
        (aten.mul_.Tensor, (2.0,)),
    ],
    ids=lambda value: str(value),
)
def test_a_later_trace_gets_what_the_fake_kernel_gives(func, rest, mode):
    results = Results()
    earlier = RepeatedCalls(mode, results=results)
    assert ask(earlier, func, fake(mode, 4, 8), *rest)[0] is None
    other = _compat_fakes.FakeTensorMode(allow_non_fake_inputs=True)
    later, tensor = RepeatedCalls(other, results=results), fake(other, 4, 8)

    call, tensors = ask(later, func, tensor, *rest)
    repeated = later.repeat(call, func, (tensor, *rest), {}, tensors)
    with other:
        expected = func(tensor, *rest)

    assert call.facts is None  # costs may be others
    assert layout(repeated) == layout(expected)
    assert (repeated is tensor) == (expected is tensor)
    own = tensor.untyped_storage()._cdata
    shares = [x.untyped_storage()._cdata == own for x in (repeated, expected)]
    assert shares[0] == shares[1]


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # oneDNN is switched off
def test_no_result_of_other_settings_or_of_real_tensors_is_kept(mode):
    known = kept_results(on_gpu=False)
    assert kept_results(on_gpu=False) is known
    assert kept_results(on_gpu=True) is not known
    with torch.backends.mkldnn.flags(enabled=not torch.backends.mkldnn.enabled):
        assert kept_results(on_gpu=False) is not known
    results = Results()
    ask(RepeatedCalls(mode, results=results), aten.add.Tensor, torch.ones(2), 1)
    ask(RepeatedCalls(mode, results=results), aten.ones.default, [2])
    assert not results.of_calls


def test_what_is_kept_for_later_traces_is_bounded(mode, monkeypatch):
    monkeypatch.setattr(repeated_calls, "_MOST_KEPT", 2)
    results = Results()
    calls = RepeatedCalls(mode, results=results)
    for size, num_kept in ((2, 1), (3, 2), (4, 1)):
        ask(calls, aten.sum.default, fake(mode, size))
        ask(calls, aten.cat.default, [fake(mode, size)] * 40)  # whose key is long
        assert len(results.of_calls) == num_kept


@pytest.mark.slow_but_fifth
@each_case
def test_a_tape_without_repeated_calls_is_the_same(case, monkeypatch):
    known = shared_profile(case, torch.optim.AdamW).tape
    monkeypatch.setattr(RepeatedCalls, "find", lambda self, *call: None)
    tape = case.profile(torch.optim.AdamW).tape

    assert known.ops == tape.ops
    assert known.storages == tape.storages
    assert known.saved == tape.saved
    assert known.calls == tape.calls
