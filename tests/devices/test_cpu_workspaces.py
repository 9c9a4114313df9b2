"""Modelled workspaces of CPU kernels against the allocator's own events."""

import itertools
import os
from pathlib import Path

import pytest
import torch

from autosac import _compat
from autosac.costs.timing import OpSizes, measure_ops
from autosac.devices import cpu_workspaces
from autosac.step.op_signatures import signature

aten = torch.ops.aten
CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() != "AVX512",
        reason="the formulas hold for AVX-512 processors",
    ),
]

_CPUINFO = Path("/proc/cpuinfo")
_FLAGS = _CPUINFO.read_text() if _CPUINFO.exists() else "avx512_bf16"
_HAS_TILES = "amx_bf16" in _FLAGS and "ONEDNN_MAX_CPU_ISA" not in os.environ
_HAS_BFLOAT16 = "avx512_bf16" in _FLAGS and not _HAS_TILES
dtypes = pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(
                not _HAS_BFLOAT16,
                reason="the formulas hold for bfloat16 products without AMX",
            ),
        ),
    ],
)

# Shapes of images and weight; stride, padding, transposed, groups.
CASES = {
    "wider": ((4, 32, 16, 16), (64, 32, 3, 3), 1, 1, False, 1),
    "narrower": ((4, 64, 16, 16), (32, 64, 3, 3), 1, 1, False, 1),
    "stem": ((4, 3, 16, 16), (64, 3, 3, 3), 1, 1, False, 1),
    "patches": ((4, 3, 32, 32), (40, 3, 4, 4), 4, 0, False, 1),
    "head": ((4, 64, 16, 16), (3, 64, 3, 3), 1, 1, False, 1),
    "product": ((4, 64, 16, 16), (256, 64, 1, 1), 1, 0, False, 1),
    "product of many": ((16, 64, 8, 8), (256, 64, 1, 1), 1, 0, False, 1),
    "single image": ((1, 16, 16, 16), (32, 16, 3, 3), 1, 1, False, 1),
    "strided": ((4, 64, 16, 16), (128, 64, 3, 3), 2, 1, False, 1),
    "grouped": ((4, 64, 16, 16), (64, 16, 3, 3), 1, 1, False, 4),
    "small groups": ((4, 40, 16, 16), (40, 4, 3, 3), 1, 1, False, 10),
    "odd groups": ((4, 20, 16, 16), (36, 10, 3, 3), 1, 1, False, 2),
    "depthwise": ((4, 64, 16, 16), (64, 1, 3, 3), 1, 1, False, 64),
    "depthwise, large": ((4, 40, 16, 16), (40, 1, 7, 7), 1, 3, False, 40),
    "transposed": ((4, 64, 8, 8), (64, 32, 2, 2), 2, 0, True, 1),
    "one dimension": ((4, 64, 100), (32, 64, 3), 1, 1, False, 1),
    "three dimensions": ((4, 16, 8, 8, 8), (32, 16, 3, 3, 3), 1, 1, False, 1),
}
MASKS = [(True, True, True), (True, False, False), (False, True, False)]
MASKS += [(True, False, True)]


def _calls(name, dtype, last):
    """Signature -> what it makes, and what the formulas say, for a convolution."""
    shape, size, stride, padding, transposed, groups = CASES[name]
    images, weight = torch.randn(shape).to(dtype), torch.randn(size).to(dtype)
    if last and images.dim() > 3:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        images = images.contiguous(memory_format=formats[images.dim()])
    dims = images.dim() - 2
    options = [[stride] * dims, [padding] * dims, [1] * dims]
    options += [transposed, [0] * dims, groups]
    forward = (images, weight, None, *options)
    result = aten.convolution(*forward)
    yield _call(aten.convolution.default, forward, [result])
    for gradient, mask in itertools.product([result, result.contiguous()], MASKS):
        backward = (gradient, images, weight, [result.shape[1]], *options, mask)
        observed = [images, weight, torch.empty(result.shape[1], dtype=dtype)]
        kept = [tensor for tensor, asked in zip(observed, mask, strict=True) if asked]
        yield _call(aten.convolution_backward.default, backward, kept)


def _call(op, args, traced):
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    made_bytes = sum(t.nbytes for t in traced)
    moved_bytes = made_bytes + sum(t.nbytes for t in tensors)
    sizes = OpSizes(moved_bytes=moved_bytes, made_bytes=made_bytes)
    return signature(op, args, {}), sizes, cpu_workspaces.op_bytes(op, args)


@pytest.mark.slow
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@dtypes
def test_workspaces_of_convolutions_are_those_of_the_allocator(dtype, last):
    calls = {}
    for name in CASES:
        for call, sizes, modelled in _calls(name, dtype, last):
            calls[call] = (name, sizes, modelled)

    measurements = measure_ops(
        {call: sizes for call, (_, sizes, _) in calls.items()}, device=CPU
    )

    wrong = {}
    for call, (name, sizes, modelled) in calls.items():
        measured = measurements.costs[call].workspace_bytes
        if abs(modelled - measured) > 0.1 * (sizes.moved_bytes + measured):
            wrong[name, call.args[-1]] = (modelled, measured)
    assert len(calls) > 50 and wrong == {}


PRODUCTS = [(8, 8, 8), (100, 8, 116), (1, 64, 64), (64, 64, 64), (96, 512, 16)]
PRODUCTS += [(384, 512, 96), (2048, 256, 256), (128, 512, 128)]


@pytest.mark.skipif(
    _compat.TORCH_VERSION < (2, 15),
    reason="oneDNN of torch 2.10 keeps no sums: the formula is a bound there",
)
@pytest.mark.parametrize("transposed", [False, True])
@dtypes
def test_workspaces_of_products_are_those_of_the_allocator(dtype, transposed):
    calls = {}
    for size, inner, width in PRODUCTS:
        left = torch.randn((inner, size) if transposed else (size, inner)).to(dtype)
        args = (left.T if transposed else left, torch.randn(inner, width).to(dtype))
        observed = [torch.empty(size, width, dtype=dtype)]
        call, sizes, modelled = _call(aten.mm.default, args, observed)
        calls[call] = (sizes, modelled)

    measurements = measure_ops(
        {call: sizes for call, (sizes, _) in calls.items()}, device=CPU
    )

    for call, (_, modelled) in calls.items():
        assert modelled == pytest.approx(
            measurements.costs[call].workspace_bytes, rel=0.1
        )
