"""Copies of modules that refer to themselves, as Accelerate's by ``forward``."""

import gc
import types

import pytest
import torch

import autosac
from tests.alive import tensors_alive, tensors_since

pytestmark = pytest.mark.usefixtures("one_thread")


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x).tanh()


def wrapped_forward(self, x):
    return type(self).forward(self, x)


@pytest.mark.parametrize("writes", [False, True], ids=["reads", "writes-parameters"])
def test_planning_leaves_no_copy_for_the_collector(writes):
    class Model(Layer):
        def forward(self, x):
            if writes:
                with torch.no_grad():
                    self.layer.weight.mul_(0.5)
            return super().forward(x)

    model = torch.nn.Sequential(Model(), torch.nn.Linear(64, 64))
    model[0].forward = types.MethodType(wrapped_forward, model[0])
    inputs = torch.randn(8, 64)
    gc.collect()
    before = tensors_alive()
    gc.disable()
    try:
        plan = autosac.plan(
            model, inputs, loss_fn=torch.sum, memory_budget="1GiB", optimizer="adamw"
        )
        left = [t for t in tensors_since(before) if t.numel() >= 64 * 64]
    finally:
        gc.enable()

    assert plan.policy == {}
    assert left == []
