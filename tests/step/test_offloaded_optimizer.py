"""Optimizers whose state lies in far memory: bits, checkpoints, and what is left."""

import copy
import errno
import gc
import os
import pickle
from collections import defaultdict
from functools import partial

import pytest
import torch
from torch import nn

import autosac
from autosac.errors import ArgumentError
from autosac.far_memory import FarMemory
from autosac.step.offloaded_optimizer import OffloadedOptimizer
from autosac.step.optimizer_state import optimizer_tensors
from autosac.verification.measuring import measure_peak

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS = 16, 8
OPTIMIZERS = {
    "plain SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": partial(torch.optim.Adam, amsgrad=True),
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW": partial(torch.optim.AdamW, foreach=False),
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
}
CHUNKS = [1, 5000, None]


class Net(nn.Module):
    """Two groups; a parameter without a gradient, and one of other strides."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.unused = nn.Parameter(torch.ones(3))
        self.turned = nn.Parameter(torch.rand(WIDTH, 3).t())

    def forward(self, x):
        x = x + self.norm(self.down(torch.tanh(self.up(x))))
        return (x @ self.turned.t()).square().mean()

    def groups(self):
        first = [*self.up.parameters(), self.unused]
        return [
            {"params": first, "lr": 0.02},
            {"params": [*self.down.parameters(), *self.norm.parameters(), self.turned]},
        ]


def make_model():
    torch.manual_seed(0)
    return Net()


def offloaded(make, model, **options):
    return OffloadedOptimizer(make(model.groups()), **options)


def train(model, optimizer, steps=3, first=0):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(first, first + steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(ROWS, WIDTH)).backward()
        optimizer.step()
        scheduler.step()


def assert_same(model, other):
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def assert_same_state(optimizer, other):
    one, two = optimizer.state_dict(), other.state_dict()
    assert one["param_groups"] == two["param_groups"]
    assert one["state"].keys() == two["state"].keys()
    for key, state in one["state"].items():
        assert state.keys() == two["state"][key].keys()
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, two["state"][key][name])
                assert value.stride() == two["state"][key][name].stride()
            else:
                assert value == two["state"][key][name]


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_has_the_bits_of_the_plain_optimizer(name, chunk_bytes):
    make = OPTIMIZERS[name]
    plain, model = make_model(), make_model()
    own = make(plain.groups())
    far = offloaded(make, model, chunk_bytes=chunk_bytes)
    train(plain, own)
    train(model, far)

    assert_same(plain, model)
    assert_same_state(own, far)


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_far_between_steps_and_a_chunk_at_a_time_is_there(name):
    model = make_model()
    far = offloaded(OPTIMIZERS[name], model, chunk_bytes=1)
    train(model, far, steps=1)
    moved = list(far.far_tensors())
    trained = [p for p in model.parameters() if p.grad is not None]
    sizes = [sum(t.nbytes for t in far.far[p].values()) for p in trained]
    on_device = []
    update = far._update

    def noted(group, parameters):
        states = [far.state[p] for p in parameters]
        now = [t for s in states for t in s.values() if isinstance(t, torch.Tensor)]
        on_device.append(sum(t.nbytes for t in now if t.dim()))
        update(group, parameters)

    far._update = noted
    train(model, far, steps=1)

    assert far.far_bytes == sum(t.nbytes for t in moved)
    assert sorted(on_device) == sorted(sizes)
    assert all(one is two for one, two in zip(moved, far.far_tensors(), strict=True))
    assert all(t.dim() == 0 for t in optimizer_tensors(far))


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_checkpoints_load_with_and_without(name, tmp_path):
    make = OPTIMIZERS[name]
    plain, model = make_model(), make_model()
    own, far = make(plain.groups()), offloaded(make, model)
    train(plain, own)
    train(model, far)
    path = tmp_path / "checkpoint.pt"
    for saved, saver in ((own, plain), (far, model)):
        torch.save([saver.state_dict(), saved.state_dict()], path)
        for far_again in (False, True):
            weights, state = torch.load(path)
            loaded = make_model()
            loaded.load_state_dict(weights)
            wanted = offloaded(make, loaded) if far_again else make(loaded.groups())
            wanted.load_state_dict(state)
            assert_same_state(own, wanted)
            train(loaded, wanted, first=3)
            if far_again:
                assert wanted.far_bytes == far.far_bytes
                assert all(t.dim() == 0 for t in optimizer_tensors(wanted))
            expected = make_model()
            expected.load_state_dict(weights)
            reference = make(expected.groups())
            reference.load_state_dict(torch.load(path)[1])
            train(expected, reference, first=3)
            assert_same(expected, loaded)


def test_loading_has_one_parameters_state_on_the_device_at_a_time():
    model = make_model()
    far = offloaded(torch.optim.AdamW, model)
    train(model, far)
    # As of a checkpoint in another type: plain loading makes new tensors of all.
    saved = far.state_dict()
    saved = {**saved, "state": copy.deepcopy(saved["state"])}
    for state in saved["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].double()
    _, peak_bytes = measure_peak(
        lambda: far.load_state_dict(saved), device="cpu", warm_up=gc.collect
    )
    largest = max(sum(t.nbytes for t in one.values()) for one in far.far.values())
    assert largest <= peak_bytes < 1.2 * largest < far.far_bytes


def test_hooks_of_loading_see_what_was_saved_and_what_was_loaded():
    model = make_model()
    far = offloaded(torch.optim.AdamW, model)
    train(model, far)
    saved, seen = far.state_dict(), []
    far.register_load_state_dict_pre_hook(lambda _, s: seen.append(len(s["state"])))
    far.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    far.load_state_dict(saved)

    assert seen == [len(saved["state"])] * 2


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))]
)
def test_copies_train_on_by_themselves(copied):
    model = make_model()
    far = offloaded(torch.optim.AdamW, model)
    train(model, far)
    other, its_own = copied((model, far))
    assert its_own.far_bytes == far.far_bytes
    assert {id(t) for t in its_own.far_tensors()}.isdisjoint(
        {id(t) for t in far.far_tensors()}
    )
    train(model, far, first=3)
    train(other, its_own, first=3)

    assert_same(model, other)
    assert_same_state(far, its_own)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scale", [2.0**10, 2.0**130])
def test_scaled_gradients_are_unscaled_as_without(scale, fused):
    # The larger scale overflows: steps are skipped.
    states = []
    for wrap in (lambda optimizer: optimizer, OffloadedOptimizer):
        model = make_model()
        optimizer = wrap(torch.optim.AdamW(model.groups(), fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=min(scale, 2.0**127))
        for step in range(3):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = model(torch.randn(ROWS, WIDTH)) * (scale / scaler.get_scale())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        states.append((model, optimizer, scaler.get_scale()))
    (plain, own, before), (model, far, after) = states

    assert before == after
    assert_same(plain, model)
    assert_same_state(own, far)


def test_a_closure_runs_once_and_hooks_run_once():
    model = make_model()
    far = offloaded(torch.optim.AdamW, model, chunk_bytes=1)
    counts = {"closure": 0, "hook": 0}

    def closure():
        counts["closure"] += 1
        far.zero_grad()
        loss = model(torch.ones(ROWS, WIDTH))
        loss.backward()
        return loss

    def hook(*_):
        counts["hook"] += 1

    far.register_step_post_hook(hook)
    assert far.step(closure) > 0
    assert counts == {"closure": 1, "hook": 1}


def test_groups_that_are_added_later_are_trained():
    plain, model = make_model(), make_model()
    more = {"params": [torch.nn.Parameter(torch.ones(5))], "lr": 0.5}
    more_far = {"params": [torch.nn.Parameter(torch.ones(5))], "lr": 0.5}
    own = torch.optim.AdamW(plain.groups())
    far = offloaded(torch.optim.AdamW, model)
    for optimizer, group in ((own, more), (far, more_far)):
        optimizer.add_param_group(group)
        group["params"][0].grad = torch.ones(5)
        optimizer.step()

    assert torch.equal(more["params"][0], more_far["params"][0])


def test_a_group_that_is_refused_is_not_added():
    far = offloaded(torch.optim.AdamW, make_model())
    elsewhere = torch.nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(ArgumentError, match="on several devices"):
        far.add_param_group({"params": [elsewhere]})

    assert len(far.param_groups) == len(far.base.param_groups) == 2


def test_a_state_that_is_replaced_is_begun_anew():
    plain, model = make_model(), make_model()
    own = torch.optim.AdamW(plain.groups())
    far = offloaded(torch.optim.AdamW, model)
    for optimizer, trained in ((own, plain), (far, model)):
        train(trained, optimizer)
        optimizer.state = defaultdict(dict)
        train(trained, optimizer, first=3)

    assert_same(plain, model)
    assert_same_state(own, far)


class Broken(RuntimeError):
    pass


def assert_far(far):
    """Nothing but numbers is on the device, and the state is whole."""
    gc.collect()
    assert all(t.dim() == 0 for t in optimizer_tensors(far))
    for parameter, of_one in far.far.items():
        assert all(far.state[parameter][name] is t for name, t in of_one.items())
    assert far.base.param_groups is far.param_groups
    assert sum(len(group["params"]) for group in far.param_groups) == 8


FAILURES = {  # what fails -> at which of its calls
    "update": 3,
    "copy back": 2,
    "copy out": 3,
    "memory": 3,
}


@pytest.mark.parametrize("when", FAILURES)
def test_a_step_that_fails_leaves_the_state_whole(when, monkeypatch):
    model, plain = make_model(), make_model()
    far = offloaded(torch.optim.AdamW, model, chunk_bytes=1)
    own = torch.optim.AdamW(plain.groups())
    train(model, far, steps=1)
    train(plain, own, steps=1)
    calls = []

    def failing(function, *args, **kwargs):
        calls.append(1)
        if len(calls) == FAILURES[when]:
            raise Broken
        return function(*args, **kwargs)

    owner, name = {
        "update": (far.base, "step"),
        "memory": (torch, "empty_strided"),
    }.get(when, (far.memory, "begin_copy"))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, partial(failing, getattr(owner, name)))
        model(torch.randn(ROWS, WIDTH)).backward()
        with pytest.raises(Broken):
            far.step()
    if when == "copy out":  # what could not be sent stays: it is nowhere else
        assert sum(t.dim() > 0 for t in optimizer_tensors(far)) == 2
    else:
        assert_far(far)

    far.zero_grad()
    far.load_state_dict(copy.deepcopy(own.state_dict()))
    model.load_state_dict(plain.state_dict())
    assert_far(far)
    train(plain, own, first=1)
    train(model, far, first=1)
    assert_same(plain, model)


def test_a_directory_without_room_is_named_and_loses_no_state(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model, plain = make_model(), make_model()
    far = offloaded(torch.optim.AdamW, model, offload_dir=tmp_path)
    own = torch.optim.AdamW(plain.groups())
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        torch.manual_seed(0)
        model(torch.randn(ROWS, WIDTH)).backward()
        with pytest.raises(OSError, match=f"{tmp_path}.* has no room"):
            far.step()
    train(plain, own, steps=1)
    state, expected = far.state[model.up.weight], own.state[plain.up.weight]
    assert torch.equal(state["exp_avg"], expected["exp_avg"])


def test_slow_copies_give_the_same_peak_and_bits():
    peaks, models = [], []
    for bytes_per_s, at_once_bytes in ((None, 2**19), (None, 0), (2e6, 0)):
        model = make_model()
        far = offloaded(torch.optim.AdamW, model, chunk_bytes=1)
        far.memory = FarMemory(None, bytes_per_s, at_once_bytes)
        train(model, far, steps=1)
        model(torch.ones(ROWS, WIDTH)).backward()
        peaks.append(measure_peak(far.step, device="cpu", warm_up=gc.collect)[1])
        models.append(model)
    assert len(set(peaks)) == 1
    for other in models[1:]:
        assert_same(models[0], other)


def test_files_go_with_the_state():
    made = []
    memory = FarMemory()
    mapped = memory._mapped
    memory._mapped = lambda num_bytes: made.append(num_bytes) or mapped(num_bytes)
    tensors = [memory.new(torch.ones(1000, i), torch.device("cpu")) for i in (1, 2, 99)]

    assert len(made) == 1  # all of them in one file
    assert {t.untyped_storage().nbytes() for t in tensors} == {
        t.nbytes for t in tensors
    }
    large = memory.new(torch.ones(10**6), torch.device("cpu"))
    assert made[1] >= large.nbytes
    assert memory._file() is not None
    del tensors, large
    gc.collect()
    assert memory._file() is None


class Own(torch.optim.AdamW):
    """Nobody knows what it does."""


def hooked(parameters):
    optimizer = torch.optim.AdamW(parameters)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda parameters: "adamw", "must be an optimizer of torch.optim, got str"),
        (torch.optim.LBFGS, "is a LBFGS, and only the classes of torch.optim"),
        (Own, "is a Own, and only the classes of torch.optim"),
        (hooked, "has hooks"),
        (partial(torch.optim.Adam, differentiable=True), "is differentiable"),
        (
            lambda parameters: torch.optim.SGD(
                [*parameters, nn.Parameter(torch.empty(2, device="meta"))], lr=1
            ),
            "on several devices",
        ),
    ],
)
def test_what_cannot_be_moved_is_refused(make, message):
    with pytest.raises(ArgumentError, match=message):
        OffloadedOptimizer(make(list(make_model().parameters())))


def test_options_that_mean_nothing_are_refused():
    optimizer = torch.optim.AdamW(make_model().parameters())
    with pytest.raises(ArgumentError, match="chunk_bytes"):
        autosac.OffloadedOptimizer(optimizer, chunk_bytes="much")
    for directory in ("/no/such", 3):
        with pytest.raises(ArgumentError, match=f"`offload_dir`={directory!r} is no d"):
            autosac.OffloadedOptimizer(optimizer, offload_dir=directory)
