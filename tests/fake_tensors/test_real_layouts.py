"""Results of fake kernels on the CPU beside those of real ones."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from autosac import _compat
from autosac.fake_tensors import real_layouts
from autosac.fake_tensors.values import run_op
from autosac.pytrees import tensors_in

aten = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def batch_norm(func, dtype, parameters, *, affine=True, running=True, trains=True):
    def arguments():
        weights = [torch.ones(6, dtype=parameters) for _ in range(2)]
        given = weights if affine else [None, None]
        if running:
            given += [torch.ones(6, dtype=parameters) for _ in range(2)]
        return torch.ones(4, 6, dtype=dtype), *given, trains, 0.1, 1e-5

    return func, arguments


def loss_backward(func, dtype, target, *options):
    def arguments():
        size = (4, 6)
        gradient = torch.ones(size, dtype=FP32)
        pair = torch.ones(size, dtype=dtype), torch.ones(size, dtype=target)
        return gradient, *pair, 0, *options

    return func, arguments


def weight_norm(dtype):
    def arguments():
        return torch.ones(4, 6, dtype=dtype), torch.ones(4, 1, dtype=dtype), 0

    return aten._weight_norm_interface.default, arguments


def bags(func, dtype, mode, *, last=False, padding=-1, order="rows", each=None):
    def arguments():
        weight = torch.ones(9, 4, dtype=dtype)
        weight = weight if order == "rows" else weight.t().contiguous().t()
        offsets, per_sample = torch.tensor([0, 2, 5]), None
        if each is not None:
            per_sample = torch.ones(7 * each, dtype=dtype)[::each]
        options = False, mode, False, per_sample, last, padding
        return weight, torch.zeros(7, dtype=torch.long), offsets, *options

    return func, arguments


legit, functional = (
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
)
CASES = {
    **{
        f"{func} {dtype} {parameters}": batch_norm(func, dtype, parameters)
        for func in (aten.native_batch_norm.default, legit.default, functional.default)
        for dtype, parameters in ((BF16, FP32), (BF16, BF16), (FP32, FP32))
    },
    "no weights": batch_norm(functional.default, BF16, FP32, affine=False),
    "no running statistics": batch_norm(legit.no_stats, BF16, FP32, running=False),
    "neither": batch_norm(legit.no_stats, BF16, BF16, affine=False, running=False),
    **{
        f"{func} in evaluation {dtype}": batch_norm(func, dtype, FP32, trains=False)
        for func in (aten.native_batch_norm.default, legit.default, functional.default)
        for dtype in (BF16, FP32)
    },
    "smooth l1": loss_backward(aten.smooth_l1_loss_backward.default, BF16, FP32, 1.0),
    "soft margin": loss_backward(aten.soft_margin_loss_backward.default, BF16, FP32),
    **{
        f"{func} {dtype} {mode} {options}": bags(func, dtype, mode, **options)
        for func in (
            aten._embedding_bag.default,
            aten._embedding_bag_forward_only.default,
        )
        for dtype in (FP32, BF16, FP16, torch.float64)
        for mode, options in (
            *((mode, {}) for mode in range(3)),
            *((mode, {"last": True}) for mode in range(3)),
            *((0, options) for options in ({"padding": 0}, {"order": "columns"})),
            *((0, {"each": each}) for each in (1, 2)),
        )
    },
    "weight norm in bfloat16": weight_norm(BF16),
    "weight norm in float16": weight_norm(FP16),
}
if _compat.TORCH_VERSION >= (2, 14):  # before, the op takes one type
    CASES |= {
        "mse": loss_backward(aten.mse_loss_backward.default, BF16, FP32),
        "mse of float32": loss_backward(aten.mse_loss_backward.default, FP32, BF16),
    }


def layouts(out):
    return [(t.dtype, t.shape, t.untyped_storage().nbytes()) for t in tensors_in(out)]


@pytest.mark.parametrize(("func", "arguments"), CASES.values(), ids=CASES)
def test_a_fake_result_has_the_types_and_bytes_of_a_real_one(func, arguments):
    real = func(*arguments())
    with FakeTensorMode():
        args = arguments()
        fake = run_op(func, args, {}, list(tensors_in(args)))

    assert layouts(fake) == layouts(real)


ROWS, CELLS = torch.tensor([0, 2]), torch.zeros(2, 3, dtype=torch.long)
MASK, PART = torch.ones(4, 3, dtype=torch.bool), torch.ones(2, 3)
WRITES = {
    aten.copy.default: (torch.ones(4, 3),),
    aten.slice_scatter.default: (PART, 0, 0, 2),
    aten.select_scatter.default: (torch.ones(3), 0, 1),
    aten.diagonal_scatter.default: (torch.ones(3),),
    aten.as_strided_scatter.default: (torch.ones(2), (2,), (1,), 12),
    aten.index_put.default: ([ROWS], PART),
    aten._unsafe_index_put.default: ([ROWS], PART),
    aten.index_copy.default: (0, ROWS, PART),
    aten.index_add.default: (0, ROWS, PART),
    aten.index_fill.int_Scalar: (0, ROWS, 1.0),
    aten.scatter.src: (0, CELLS, PART),
    aten.scatter.value: (0, CELLS, 1.0),
    aten.scatter_add.default: (0, CELLS, PART),
    aten.scatter_reduce.two: (0, CELLS, PART, "sum"),
    aten.masked_fill.Scalar: (MASK, 1.0),
    aten.masked_scatter.default: (MASK, torch.ones(12)),
    aten.put.default: (ROWS, torch.ones(2)),
    aten.fill.Scalar: (1.0,),
    aten.zero.default: (),
    aten.uniform.default: (),
    aten.bernoulli.p: (0.5,),
    aten.exponential.default: (),
    aten.random.default: (),
    aten.normal_functional.default: (),
}
TARGETS = {
    "all": lambda: torch.ones(4, 3),
    "rows": lambda: torch.ones(40, 3)[4:8],
    "first rows": lambda: torch.ones(40, 3)[:4],
    "columns": lambda: torch.ones(4, 30)[:, 3:6],
    "every second": lambda: torch.ones(8, 6)[::2, ::2],
    "transposed": lambda: torch.ones(30, 4)[3:6].t(),
    "of a conjugate": lambda: torch.ones(40, 3, dtype=torch.cfloat)[:4].conj().real,
    "conjugate": lambda: torch.ones(40, 3, dtype=torch.cfloat)[4:8].conj(),
    "negative": lambda: torch.ones(40, 3, dtype=torch.cfloat)[4:8].conj().imag,
    "repeated": lambda: torch.ones(1, 3).expand(4, 3),
}


def written(func, to, fakes=None):
    """Layout of what a functional write to a view returns."""
    args = (to(), *WRITES[func])
    if fakes is not None:
        args = tree_map_only(torch.Tensor, fakes.from_tensor, args)
    out = real_layouts.of_own_kernel(func, args, {}) if fakes is not None else None
    if out is None:
        out = func(*args)
    return layouts((out,))


@pytest.mark.parametrize("func", WRITES, ids=str)
def test_a_functional_write_to_a_view_makes_the_memory_that_it_makes_for_real(func):
    with FakeTensorMode() as fakes:  # with its cache, which knows layouts alone
        pass
    for name, to in TARGETS.items():
        try:
            real = written(func, to)
        except RuntimeError:  # no such kernel, or no room for that many elements
            continue
        with fakes:
            assert written(func, to, fakes) == real, name
