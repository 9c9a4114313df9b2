import functools
import inspect
import random
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autosac.cli.demo import GPT
from autosac.errors import TraceError
from autosac.profiles.profile import calibrate, profile
from autosac.step.optimizer_state import optimizer_tensors
from autosac.step.training_step import normalize_inputs, training_step
from autosac.verification.measuring import (
    capture_state,
    differences,
    measure_peak,
)
from tests.models import CASES, WIDTH, ResidualBlock, each_case, shared_profile

pytestmark = pytest.mark.usefixtures("one_thread")

each_optimizer = pytest.mark.parametrize(
    "optimizer", [None, torch.optim.AdamW], ids=["none", "adamw"]
)


# --- nothing is changed ---------------------------------------------------------


def _outside(model):
    """What a state dict does not show of a model."""
    return [
        (name, module.training, list(module.__dict__), *_hooks(module))
        for name, module in model.named_modules()
    ]


def _hooks(module):
    entries = module.__dict__.items()
    return [(key, list(value)) for key, value in entries if key.endswith("_hooks")]


def _addresses(model):
    observed = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        observed[name] = tensor.data_ptr()
        if tensor.grad is not None:
            observed[f"gradient of {name}"] = tensor.grad.data_ptr()
    return observed


@pytest.mark.slow_but_fifth
@each_case
def test_tracing_changes_nothing(case):
    model, inputs = case.model(), case.inputs()
    args, kwargs = normalize_inputs(inputs)
    optimizer = torch.optim.AdamW(model.parameters())
    training_step(model, args, kwargs, loss_fn=case.loss_fn, optimizer=optimizer)
    next(model.children()).eval()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    zero = torch.zeros(())
    before = capture_state(model, optimizer, zero)
    outside, addresses = _outside(model), _addresses(model)
    given = [t.clone() for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    versions = [p._version for p in model.parameters()]
    python_state, numpy_state = random.getstate(), numpy.random.get_state()

    profile(model, inputs, optimizer=optimizer, loss_fn=case.loss_fn)

    assert differences(before, capture_state(model, optimizer, zero)) == ()
    assert _outside(model) == outside
    assert _addresses(model) == addresses
    assert [p._version for p in model.parameters()] == versions
    assert random.getstate() == python_state
    assert all(
        numpy.array_equal(a, b)
        for a, b in zip(numpy_state, numpy.random.get_state(), strict=True)
    )
    left = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(given, left, strict=True))


@pytest.mark.slow_but_fifth
@each_case
def test_a_meta_model_gives_the_same_tape(case):
    on_cpu = shared_profile(case, torch.optim.AdamW).tape
    with torch.device("meta"):
        model = case.model()

    on_meta = profile(
        model, case.inputs(), optimizer=torch.optim.AdamW, loss_fn=case.loss_fn
    ).tape

    assert all(tensor.is_meta for tensor in model.parameters())
    assert [op.name for op in on_meta.ops] == [op.name for op in on_cpu.ops]
    assert on_meta.storages == on_cpu.storages


# --- peaks ------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the storages of a real step: the peak as an onlooker sees it."""

    def __init__(self, tensors):
        super().__init__()
        self.known = set()
        self.live = self.peak = 0
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor):
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.forget, key, nbytes)

    def forget(self, key, nbytes):
        self.known.discard(key)
        self.live -= nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out


def _persistent(model, args, kwargs, optimizer):
    tensors = [*model.parameters(), *model.buffers(), *optimizer_tensors(optimizer)]
    return tensors + [
        leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
    ]


@pytest.mark.slow_but_fifth
@each_optimizer
@each_case
def test_the_baseline_peak_is_that_of_the_storages_of_a_real_step(case, optimizer):
    expected = shared_profile(case, optimizer).simulator.peak_bytes(
        {}, workspaces=False
    )
    model = case.model()
    args, kwargs = normalize_inputs(case.inputs())
    built = None if optimizer is None else optimizer(model.parameters())
    options = {"loss_fn": case.loss_fn, "optimizer": built}
    training_step(model, args, kwargs, **options)  # the optimizer state is there now
    model.zero_grad()

    counter = LiveBytes(_persistent(model, args, kwargs, built))
    with counter:
        training_step(model, args, kwargs, **options)

    assert expected == counter.peak


def _gpt():
    return GPT(num_layers=2, width=64, num_heads=4, vocabulary=256, length=64)


def _convolutions():
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 3), *(ResidualBlock() for _ in range(3)), nn.Flatten()
    )


def _biases():
    """oneDNN makes the gradient of a weight for that of its bias."""
    model = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(2)))
    for layer in model:
        layer.weight.requires_grad_(False)
    return model


REAL = {
    "gpt": (_gpt, lambda: torch.randint(256, (8, 64))),
    "convolutions": (_convolutions, lambda: torch.randn(4, 3, 34, 34)),
    "lstm": (CASES["lstm"].make_model, lambda: torch.randint(16, (64, 64))),
    "resnet": (CASES["resnet"].make_model, lambda: torch.randn(4, 3, 32, 32)),
    "biases": (_biases, lambda: torch.randn(2, 64, 8, 8)),
    # Its kernel makes no gradient of images that need none.
    "norm": (lambda: nn.BatchNorm2d(64), lambda: torch.randn(16, 64, 16, 16)),
}


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("gpt", torch.optim.AdamW),
        ("convolutions", None),
        ("convolutions", torch.optim.AdamW),
        ("lstm", torch.optim.AdamW),
        ("biases", torch.optim.AdamW),
        ("norm", torch.optim.AdamW),
        pytest.param("resnet", None, marks=pytest.mark.slow),
    ],
)
def test_the_calibrated_peak_is_the_allocators(name, optimizer):
    make_model, make_inputs = REAL[name]
    model, inputs = make_model(), make_inputs()
    built = None if optimizer is None else optimizer(model.parameters())
    predicted = calibrate(profile(model, inputs, optimizer=built)).baseline_peak_bytes

    def step():
        training_step(model, (inputs,), {}, loss_fn=None, optimizer=built)

    def warm_up():
        step()
        model.zero_grad()

    _, measured = measure_peak(
        step,
        device="cpu",
        warm_up=warm_up,
        held=lambda: _persistent(model, (inputs,), {}, built),
    )

    assert predicted == pytest.approx(measured, rel=1e-3)


# --- steps that depend on values ----------------------------------------------------


class Peeking(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        out = self.linear(x)
        if out.sum().item() > 0:
            out = out * 2
        return out


def test_a_step_that_reads_a_number_names_module_and_line():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Peeking()))
    source, first = inspect.getsourcelines(Peeking.forward)
    line = first + next(i for i, text in enumerate(source) if ".item()" in text)

    with pytest.raises(TraceError) as caught:
        profile(model.to("meta"), torch.randn(2, WIDTH, device="meta"))

    assert "`1.0`" in str(caught.value)
    assert "pass a real model and a real batch" in str(caught.value)
    assert f"{__file__}:{line}" in str(caught.value)


class Masking(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        out = self.linear(x)
        if mask.all():
            return torch.tanh(out)
        longest = int(mask.sum(1).max())
        return torch.sigmoid(out[:, :longest])


def test_a_branch_on_integers_is_traced_as_it_runs():
    model, x = Masking(), torch.randn(2, 5, WIDTH)
    full = torch.ones(2, 5, dtype=torch.long)
    part = full.clone()
    part[:, 3:] = 0

    def forward_ops(mask):
        ops = profile(model, (x, mask)).tape.ops
        return {op.name: op.shapes for op in ops if op.phase == "forward"}

    observed = forward_ops(full)
    assert "aten.sigmoid.default" not in observed
    assert observed["aten.tanh.default"] == ((2, 5, WIDTH),)
    observed = forward_ops(part)
    assert "aten.tanh.default" not in observed
    assert observed["aten.sigmoid.default"] == ((2, 3, WIDTH),)


class BranchesOnCausalMask(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.length = length

    def forward(self, ids):
        mask = torch.ones(self.length, self.length, dtype=torch.long).tril() > 0
        x = self.linear(torch.ones(len(ids), 4))
        return x if mask.all() or (ids > 0).all() else x.relu()


def test_values_are_known_of_what_is_no_larger_than_the_input_or_small():
    few, many = torch.zeros(8, 8).long(), torch.zeros(1024, 1024).long()

    def is_real(length, ids):
        traced = profile(BranchesOnCausalMask(length), ids, loss_fn=torch.sum)
        return traced.step.learned.real

    assert not is_real(256, few)
    assert not is_real(256, many)
    assert is_real(1024, few)


def test_a_step_without_gradients_is_refused():
    model = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    with pytest.raises((TraceError, TypeError), match="gradient"):
        profile(model, torch.randn(2, WIDTH))


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "binary_cross_entropy"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_reduced_loss_keeps_the_memory_of_what_it_reduced(loss, reduction):
    inputs, targets = torch.rand(64, 8), torch.rand(64, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid())

    def loss_fn(output):
        function = getattr(torch.nn.functional, loss)
        return function(output, targets, reduction=reduction).sum()

    traced = profile(model, inputs, loss_fn=loss_fn)
    real = getattr(torch.nn.functional, loss)(inputs, targets, reduction=reduction)

    (op,) = (op for op in traced.tape.ops if op.name == f"aten.{loss}.default")
    (storage,) = op.creates
    assert (
        traced.tape.storages[storage].nbytes == real.untyped_storage().nbytes() == 2048
    )


# --- the user's own tensors -------------------------------------------------------


def test_a_target_that_is_the_input_counts_once():
    x = torch.ones(64, 64)
    same = profile(nn.Linear(64, 64), x, loss_fn=lambda y: (y - x).square().sum())
    twin = x.clone()
    other = profile(nn.Linear(64, 64), x, loss_fn=lambda y: (y - twin).square().sum())

    difference = other.baseline_peak_bytes - same.baseline_peak_bytes
    assert difference == twin.nbytes


def test_inputs_that_share_memory_count_once():
    both = torch.ones(2, 16, 64)
    model = nn.Bilinear(64, 64, 8)
    views = profile(model, (both[0], both[1]))
    copies = profile(model, (both[0].clone(), both[1].clone()))

    assert views.baseline_peak_bytes == copies.baseline_peak_bytes


def test_a_loss_that_reaches_parameters_in_a_way_of_its_own_is_refused():
    model = nn.Linear(8, 8)
    weight = functools.cache(lambda: model.weight)
    weight()  # what a cache holds is not followed

    def loss_fn(output):
        return output.sum() + weight().square().sum()

    with pytest.raises(TraceError, match="reads a parameter of shape"):
        profile(model, torch.ones(2, 8), loss_fn=loss_fn)

    assert model.weight.grad is None


class OnlyPolicy(nn.Module):
    """Trains a policy beside a frozen reference, and shows what it trains alone."""

    def __init__(self):
        super().__init__()
        self.policy, self.reference = nn.Linear(8, 8), nn.Linear(8, 8)
        self.reference.requires_grad_(False)

    def parameters(self):
        return self.policy.parameters()

    def forward(self, x):
        return self.policy(x) - self.reference(x)


def test_a_model_may_override_parameters():
    x = torch.ones(2, 8)
    plain = OnlyPolicy()
    plain.parameters = nn.Module.parameters.__get__(plain)

    peaks = [profile(model, x).baseline_peak_bytes for model in (OnlyPolicy(), plain)]

    assert peaks[0] == peaks[1]
