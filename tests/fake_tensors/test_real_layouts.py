"""Results of fake kernels on the CPU beside those of real ones."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autosac import _compat
from autosac.fake_tensors import real_layouts
from autosac.pytrees import tensors_in

aten = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def batch_norm(func, dtype, parameters, *, affine=True, running=True):
    def arguments():
        weights = [torch.ones(6, dtype=parameters) for _ in range(2)]
        given = weights if affine else [None, None]
        if running:
            given += [torch.ones(6, dtype=parameters) for _ in range(2)]
        return torch.ones(4, 6, dtype=dtype), *given, True, 0.1, 1e-5

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
    "smooth l1": loss_backward(aten.smooth_l1_loss_backward.default, BF16, FP32, 1.0),
    "soft margin": loss_backward(aten.soft_margin_loss_backward.default, BF16, FP32),
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
        fake = real_layouts.on_cpu(func, args, func(*args))

    assert layouts(fake) == layouts(real)
