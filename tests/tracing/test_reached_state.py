"""What code of a step reaches of the user's own is put back, whatever it is."""

import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

import autosac
from autosac.errors import AutosacError
from autosac.tracing import own_state

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8


def profile(loss_fn, model=None):
    model = model or nn.Linear(WIDTH, WIDTH)
    return autosac.profile(model, torch.ones(4, WIDTH), loss_fn=loss_fn)


def mean_square(output):
    return output.square().mean()


@pytest.mark.filterwarnings("ignore:The given NumPy array:UserWarning")
def test_memory_that_nothing_writes_to_may_be_read_only(tmp_path):
    np.arange(WIDTH).tofile(tmp_path / "data.bin")
    data = torch.from_numpy(np.memmap(tmp_path / "data.bin", np.int64, mode="r"))
    profile(lambda output: mean_square(output * data))


def test_what_another_thread_writes_to_a_tensor_stays():
    count = torch.zeros(1, dtype=torch.int64)

    def loss_fn(output):
        thread = threading.Thread(target=count.numpy().__setitem__, args=(0, 7))
        thread.start()
        thread.join()
        return mean_square(output) + 0 * count.sum()

    profile(loss_fn)
    assert count.item() == 7


class InSlots:
    __slots__ = ("mean",)

    def __call__(self, output):
        if not hasattr(self, "mean"):
            self.mean = output.detach().mean(0)
        return mean_square(output - self.mean)


class InBuffers(nn.Module):
    def forward(self, output):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", output.detach().mean(0))
            self.more = nn.Linear(1, 1)
            self.register_forward_hook(lambda *_: None)
        return mean_square(output - self.mean)


IN_BUFFERS = InBuffers()


class WithBuffers(nn.Linear):
    def forward(self, x):
        return super().forward(x) + IN_BUFFERS(x)


def test_a_slot_that_was_empty_is_empty():
    loss_fn = InSlots()
    profile(loss_fn)
    assert not hasattr(loss_fn, "mean")


def test_a_module_without_buffers_children_and_hooks_has_none():
    criterion = InBuffers()
    profile(lambda output: criterion(output))
    profile(mean_square, WithBuffers(WIDTH, WIDTH))
    for module in (criterion, IN_BUFFERS):
        assert not module._buffers
        assert not module._modules
        assert not module._forward_hooks


class OfNoModule:
    scale = 2.0


class NoDict:
    scale = 2.0

    @property
    def __dict__(self):
        raise RuntimeError("none")


@pytest.mark.parametrize("kind", [OfNoModule, NoDict])
def test_objects_are_asked_nothing_of_where_they_are_from(kind, monkeypatch):
    scaling = kind()
    monkeypatch.setattr(OfNoModule, "__module__", "no_module")
    monkeypatch.setitem(sys.modules, "no_module", scaling)
    profile(lambda output: mean_square(output * scaling.scale))


def test_gradients_are_put_back_if_planning_fails_on_the_way(monkeypatch):
    weight = torch.ones(WIDTH, requires_grad=True)
    weight.grad = grad = torch.ones(WIDTH)

    def fail(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(own_state.copies_on_write, "wait_for", fail)
    with pytest.raises((AutosacError, torch.OutOfMemoryError)):
        profile(lambda output: mean_square(output * weight))
    assert weight.grad is grad


@pytest.mark.slow
def test_a_dict_may_change_as_it_is_looked_at():
    numbers, stop = dict.fromkeys(range(10**5)), threading.Event()

    def change():
        i = len(numbers)
        while not stop.is_set():
            numbers[i] = numbers.pop(i - 10**5, None)
            i += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(3):
            profile(lambda output: mean_square(output) * bool(numbers))
    finally:
        stop.set()
        thread.join()


class Teacher:
    def __init__(self):
        self.weights, self.mean = torch.zeros(5 * 2**20), torch.zeros(())

    def __call__(self, output):
        self.mean.add_(1.0)
        return mean_square(output) + self.weights[0] + self.mean


def test_weights_of_another_model_are_never_copied(monkeypatch):
    def keep_bytes(storage, stack):
        copied.append(storage.nbytes())
        keep(storage, stack)

    def deepcopy(self, memo):
        copied.append(self.nbytes)
        return deep(self, memo)

    copied = []
    keep, deep = own_state._keep_bytes, torch.Tensor.__deepcopy__
    monkeypatch.setattr(own_state, "_keep_bytes", keep_bytes)
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", deepcopy)
    teacher, inputs = Teacher(), torch.ones(4, WIDTH)
    make_model, make_inputs = lambda: nn.Linear(WIDTH, WIDTH), lambda: inputs
    plan = autosac.plan(make_model(), inputs, memory_budget="1GiB", loss_fn=teacher)
    result = autosac.verify(
        plan, make_model=make_model, make_inputs=make_inputs, loss_fn=teacher
    )
    assert copied
    assert max(copied) < teacher.weights.nbytes
    assert not result.differences
    assert teacher.mean == 0


class Meter:
    def __init__(self):
        self.count = 0

    def update(self, output):
        self.count += 1
        return mean_square(output)


class BesideData:
    def __init__(self):
        self.meter = Meter()
        self.data = [[(i, j) for j in range(300)] for i in range(400)]

    def loss(self, output):
        return self.meter.update(output)


@pytest.mark.slow
def test_what_is_near_is_put_back_beside_much_data():
    beside = BesideData()
    with pytest.warns(UserWarning, match="more than 100,000 objects"):
        profile(beside.loss)
    assert beside.meter.count == 0


def test_items_of_large_containers_and_keys_are_put_back():
    meters, by_meter = {i: Meter() for i in range(1500)}, {Meter(): 1}
    (key,) = by_meter

    def loss_fn(output):
        return meters[3].update(output) + next(iter(by_meter)).update(output)

    profile(loss_fn)
    assert meters[3].count == key.count == 0
