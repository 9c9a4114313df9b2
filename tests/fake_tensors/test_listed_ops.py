"""Every op of PyTorch's own list: its fake results have the memory of the real ones."""

import contextlib
from itertools import islice

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autosac.fake_tensors.values import run_op

NUM_SAMPLES, FEWEST_OPS = 4, 300
# Values decide how many there are, which real small tensors tell in a trace.
BY_VALUES = {"aten._unique.default", "aten._unique2.default"}


class Compares(TorchDispatchMode):
    """Runs each op on fakes first, and notes which results are of another size."""

    def __init__(self):
        super().__init__()
        self.ops, self.differences = set(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        fake = self.on_fakes(func, args, kwargs)
        real = func(*args, **kwargs)
        if fake is not None and str(func) not in BY_VALUES:
            self.ops.add(str(func))
            given = {storage(t) for t in tensors((args, kwargs))}
            pairs = zip(tensors(real), tensors(fake), strict=True)
            made = [pair for pair in pairs if storage(pair[0]) not in given]
            found = [tuple(map(layout, pair)) for pair in made]
            if any(own != expected for expected, own in found):
                self.differences.setdefault(str(func), found)
        return real

    def on_fakes(self, func, args, kwargs):
        fakes, known = FakeTensorMode(), {}

        def convert(tensor):
            return known.setdefault(id(tensor), fakes.from_tensor(tensor.detach()))

        with contextlib.suppress(Exception):  # then a step is traced for real
            args, kwargs = tree_map_only(torch.Tensor, convert, (args, kwargs))
            if inputs := tensors((args, kwargs)):
                with fakes:
                    return run_op(func, args, kwargs, inputs)
        return None


def tensors(nested):
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def storage(tensor):
    return tensor.untyped_storage()._cdata


def layout(tensor):
    return tensor.dtype, tensor.shape, tensor.untyped_storage().nbytes()


def run(op, sample):
    """Forward and backward."""
    out = op(sample.input, *sample.args, **sample.kwargs)
    made = [tensor for tensor in tensors(out) if tensor.requires_grad]
    torch.autograd.backward(made, [torch.ones_like(tensor) for tensor in made])


@pytest.fixture
def listed():
    """PyTorch's list, whose import forbids all to set flags of backends."""
    with torch.backends.__allow_nonbracketed_mutation():
        from torch.testing._internal import common_methods_invocations
    return common_methods_invocations.op_db


@pytest.mark.slowest
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fake_results_have_the_types_and_bytes_of_real_ones(listed, dtype):
    compares = Compares()
    for op in listed:
        if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"):
            torch.manual_seed(0)
            samples = op.sample_inputs("cpu", dtype, requires_grad=True)
            for sample in islice(samples, NUM_SAMPLES):
                with contextlib.suppress(RuntimeError), compares:  # some have none
                    run(op, sample)

    assert len(compares.ops) > FEWEST_OPS
    assert compares.differences == {}
