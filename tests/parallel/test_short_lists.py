"""Ops on lists of divided tensors, worked out from their distinct items."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from autosac import _compat_distributed
from autosac._compat_distributed import fake_group


@pytest.mark.parametrize("op", ["add", "mul", "lerp"])
def test_lists_are_divided_as_pytorch_divides_them(op, monkeypatch):
    seen = []
    of_distinct = _compat_distributed._of_distinct

    def compared(of_torch, schema):
        own, whole = of_distinct(of_torch, schema), of_torch(schema)
        seen.append((own, whole))
        return own

    monkeypatch.setattr(_compat_distributed, "_of_distinct", compared)
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))

        def divided(size, placement):
            return DTensor.from_local(torch.zeros(size, 4), mesh, [placement])

        # Gradients of norms are parts of sums; so are some of these, several times.
        weights = [
            divided(2 + i % 3, Replicate() if i % 2 else Shard(0)) for i in range(14)
        ]
        gradients = [
            divided(2 + i % 3, Partial() if i % 2 else Shard(0)) for i in range(14)
        ]
        with torch.no_grad(), _compat_distributed.short_lists():
            if op == "add":
                torch._foreach_add_(weights, gradients, alpha=-0.1)
            elif op == "mul":
                torch._foreach_mul(gradients, weights)
            else:
                torch._foreach_lerp_(weights, gradients, 0.1)
    assert seen
    for own, whole in seen:
        assert own.needs_redistribute == whole.needs_redistribute
        assert own.output_spec == whole.output_spec
        if whole.redistribute_schema is not None:
            moved = own.redistribute_schema.args_schema
            assert moved == whole.redistribute_schema.args_schema
