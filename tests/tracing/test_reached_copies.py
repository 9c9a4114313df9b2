"""Code that reaches modules of the model by another way than `self` runs the copies."""

import functools
import pathlib
import sys
import types
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn

import autosac

# States that are reset between reruns: nothing here can be recomputed.
pytestmark = pytest.mark.filterwarnings("ignore:The floor is the peak without a plan")
WIDTH = 32


class Leaky(nn.Module):
    """Adds up what comes in: the shape of its state is that of a step before."""

    instances: ClassVar = []

    def __init__(self):
        super().__init__()
        self.register_buffer("mem", torch.zeros(0), persistent=False)

    def forward(self, x):
        if self.mem.shape != x.shape:
            self.mem = torch.zeros_like(x)
        self.mem = 0.9 * self.mem + x
        return torch.sigmoid(self.mem)

    def reset(self):
        self.mem = torch.zeros_like(self.mem)


class Counts(nn.Module):
    """Counts in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        return x

    def count(self):
        if self.in_place:
            self.seen.add_(1)
        else:
            self.seen = self.seen + 1


def leaky(model):
    return [module for module in model.modules() if isinstance(module, Leaky)]


def reset_all(modules):
    for module in modules:
        module.reset()


def listed_by_class(model):
    Leaky.instances[:] = leaky(model)
    return lambda: reset_all(Leaky.instances)


def named(model):
    NAMED["model"] = [(str(i), module) for i, module in enumerate(leaky(model))]
    return lambda: reset_all(module for _, module in NAMED["model"])


def keyed(model):
    KEYED.clear()
    KEYED.update({module: index for index, module in enumerate(leaky(model))})
    return lambda: reset_all(KEYED)


def weakly_held(model):
    WEAK.clear()
    WEAK.update(leaky(model))
    return lambda: reset_all(list(WEAK))


def weakly_named(model):
    WEAKLY_NAMED.clear()
    WEAKLY_NAMED.update({str(i): module for i, module in enumerate(leaky(model))})
    return lambda: reset_all(list(WEAKLY_NAMED.values()))


def with_methods(model):
    METHODS[:] = [module.reset for module in leaky(model)]
    METHODS.append(functools.partial(reset_all, leaky(model)[:1]))
    return lambda: [method() for method in METHODS]


def closed_over(model):
    modules = leaky(model)
    return lambda: reset_all(modules)


def weak_attributes(model):
    model.others = [weakref.ref(module) for module in leaky(model)]
    return lambda: reset_all(other() for other in model.others)


def a_global_name(model):
    globals()["MODEL"] = model
    return lambda: reset_all(leaky(MODEL))


NAMED, KEYED, METHODS = {}, {}, []
MODEL = None
WEAK, WEAKLY_NAMED = weakref.WeakSet(), weakref.WeakValueDictionary()
WAYS = [listed_by_class, named, keyed, weakly_held, weakly_named, with_methods]
WAYS += [closed_over, weak_attributes, a_global_name]


def model_that_resets(reach):
    """A model whose ``forward`` resets by a function that it is not the owner of."""
    held = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.net = nn.Sequential(up, Leaky(), down, Leaky())

        def forward(self, x):
            for reset in held:
                reset()
            if not held:
                reset_all(leaky(self))
            return torch.stack([self.net(x) for _ in range(3)])

    model = Model()
    if reach is not None:
        held.append(reach(model))
    return model


def rows():
    return torch.randn(64, WIDTH)


def mean_square(output):
    return output.square().mean()


def planned(model):
    profile = autosac.profile(model, rows(), loss_fn=mean_square)
    profile = autosac.calibrate(profile, progress=False)
    return profile.baseline_peak_bytes, autosac.floor(profile)


@pytest.fixture(scope="module")
def by_self():
    """What is planned where modules are reset by `self`."""
    return planned(model_that_resets(None))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("reach", WAYS)
def test_modules_that_are_reset_by_another_way_than_self_are_planned_so(reach, by_self):
    model = model_that_resets(reach)
    states = [module.mem for module in leaky(model)]
    assert planned(model) == by_self
    for module, state in zip(leaky(model), states, strict=True):
        assert module.mem is state
        assert state.numel() == 0
    x = rows()  # what is reached is the user's again
    assert torch.equal(model(x), model(x))


@pytest.mark.slow
def test_a_list_of_instances_of_a_librarys_class_holds_copies_too(monkeypatch, by_self):
    library = types.ModuleType("some_library")
    library.__file__ = str(pathlib.Path(torch.__file__).parents[1] / "some_library.py")
    monkeypatch.setitem(sys.modules, "some_library", library)
    monkeypatch.setattr(Leaky, "__module__", "some_library")
    assert planned(model_that_resets(listed_by_class)) == by_self


@functools.lru_cache(maxsize=1)
def cached():
    return []


@pytest.mark.parametrize("in_place", [False, True])
def test_a_write_to_the_users_model_behind_a_cache_is_said_and_undone(in_place):
    model = model_that_resets(lambda _: lambda: [m.count() for m in cached()])
    cached()[:] = [Counts()]
    model.net.append(cached()[0])
    model.net[-1].in_place = in_place
    with pytest.warns(UserWarning, match=r"wrote to `seen` of the model itself, in"):
        planned(model)
    assert model.net[-1].seen.tolist() == [0]
    cached().clear()
