"""What the records of ops say, against the allocator's own events."""

import pytest
import torch

import autosac
from autosac.fake_tensors.op_facts import costs
from autosac.pytrees import tensors_in
from autosac.verification.measuring import measure_peak

aten = torch.ops.aten
OPS = [
    (aten.add.Tensor, 1.5),
    (aten.add_.Tensor, 1),
    (aten.mul.Tensor, 2),
    (aten.div.Tensor, 0.5),
    (aten.rsub.Scalar, 1),
    (aten.gt.Scalar, 0.5),
    (aten.pow.Tensor_Scalar, 3.0),
    (aten.clamp_min.default, 1.0),
]
COMPLEX = {"gt.Scalar", "clamp_min.default"}  # which complex numbers do not have
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "number"), OPS, ids=lambda value: str(value))
def test_numbers_take_the_memory_that_the_allocator_hands_out(op, number, dtype):
    if dtype.is_complex and any(name in str(op) for name in COMPLEX):
        pytest.skip("complex numbers have no order")
    if dtype == torch.int64 and isinstance(number, float):
        pytest.skip("the tensor is cast, too, which `calibrate` measures")
    tensor = torch.ones(64, 64, dtype=dtype)
    args = (tensor, number)

    result, peak_bytes = measure_peak(
        lambda: op(*args), device="cpu", warm_up=lambda: op(*args)
    )

    made_bytes = 0 if result is tensor else result.nbytes
    tensors = tensors_in((args, result))
    facts = costs(op, args, {}, tensors, result, device_type="cpu", target=None)
    assert peak_bytes - made_bytes == facts.workspace_bytes


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adadelta])
def test_a_peak_in_an_optimizer_that_is_not_calibrated_is_exact(optimizer):
    def make():
        return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU())

    def mean_square(output):
        return output.square().mean()

    inputs = torch.ones(4, 256)
    step = autosac.profile(make(), inputs, loss_fn=mean_square, optimizer=optimizer)
    budget = step.baseline_peak_bytes
    found = autosac.verify(
        autosac.plan(step, memory_budget=budget),
        make,
        lambda: inputs,
        loss_fn=mean_square,
        make_optimizer=optimizer,
        timing_rounds=1,
    )

    assert found.measured_peak_bytes == found.baseline_peak_bytes == budget
