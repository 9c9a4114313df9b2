import json
import re
from pathlib import Path

import pytest
import torch

from autosac.devices.cuda_workspaces import op_bytes
from autosac.devices.specs import device_spec

H100 = device_spec("h100")
SINGLE, HALF = torch.float32, torch.float16
KIB, MIB = 2**10, 2**20


# What the allocator of an H100 counted inside these ops (torch 2.11, CUDA 13); of
# blocks of 1 MiB and more it leaves up to 1 MiB unused.
@pytest.mark.parametrize(
    ("shape", "dtype", "dims", "moved", "counted"),
    [
        ((24576, 768), HALF, [0], False, 132 * MIB + 512),
        ((53248, 3072), HALF, [0], False, 132 * MIB + 512),
        ((24576, 30522), HALF, [0], False, 93_765_632),
        ((200704, 192), SINGLE, [0], False, 99 * MIB + 512),
        ((64, 384, 28, 28), SINGLE, [0, 2, 3], True, 132 * MIB + 512),
        ((64, 192, 56, 56), SINGLE, [0, 2, 3], True, 99 * MIB + 512),
        ((8, 1024, 512), SINGLE, [0, 1], False, 32 * MIB + 512),
        ((56, 1500, 256), HALF, [1], False, 133 * MIB + 512),
        ((80, 1500, 256), HALF, [1], False, 140 * MIB + KIB),
        ((248, 2048, 7, 7), HALF, [2, 3], True, 0),
        ((80, 528, 56, 56), HALF, [2, 3], False, 0),
        ((8, 8, 1024, 1024), SINGLE, [0], False, 0),
    ],
)
def test_sums_allocate_what_an_h100_was_seen_to(shape, dtype, dims, moved, counted):
    numbers = torch.empty(shape, dtype=dtype, device="meta")
    if moved:
        numbers = numbers.to(memory_format=torch.channels_last)

    predicted = op_bytes(torch.ops.aten.sum.dim_IntList, (numbers, dims), {}, H100)

    assert counted - MIB < predicted <= counted
    mean = op_bytes(torch.ops.aten.mean.dim, (numbers, dims), {}, H100)
    assert mean == predicted


def _sums_of_rows():
    """Shape, type and bytes inside of all sums over rows in published steps."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    steps = json.loads((results / "gpu_published.json").read_text())["steps"]
    for step in steps.values():
        for name, argument, _, counted, _ in step["ops"]:
            kind, size = re.fullmatch(
                r"(\w+)\[(.*)\]\*?", argument.split(";")[0]
            ).groups()
            shape = [int(number) for number in size.split(",") if number]
            if name == "aten.sum.dim_IntList" and len(shape) == 2:
                yield shape, getattr(torch, kind), counted


def test_gradients_of_biases_allocate_what_an_h100_counted_in_whole_steps():
    sums = list(_sums_of_rows())

    for shape, dtype, counted in sums:
        numbers = torch.empty(shape, dtype=dtype, device="meta")
        args = (numbers, [0])
        predicted = op_bytes(torch.ops.aten.sum.dim_IntList, args, {}, H100)
        assert predicted <= counted < predicted + 2 * MIB, (shape, dtype)
    assert len(sums) > 40


def test_a_sum_of_all_numbers_leaves_one_number_a_block():
    numbers = torch.empty(2**24, device="meta")

    predicted = op_bytes(torch.ops.aten.sum.default, (numbers,), {}, H100)

    # 512 threads a block, 4 blocks on each of 132 multiprocessors.
    assert predicted == H100.allocated_bytes(4 * 4 * 132) + 512


def test_nothing_is_predicted_of_unknown_multiprocessors():
    numbers = torch.empty(24576, 768, device="meta")
    amd = device_spec("mi300x")

    assert op_bytes(torch.ops.aten.sum.dim_IntList, (numbers, [0]), {}, amd) == 0
