"""What code of a step reaches of the user's own is as it was, planned or not."""

import contextlib
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn

import autosac
from autosac.step.random_streams import generators_kept
from autosac.tracing import own_state

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 64, 32
NOISE = torch.Generator()
NUMBERS = np.random.default_rng(1)
OLD_NUMBERS = np.random.RandomState(1)
PYTHONS = random.Random(1)


def scale():
    return float(OLD_NUMBERS.rand())


class Draws(nn.Module):
    """Draws from generators that are global names, one in a helper."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        h = torch.tanh(self.up(x))
        h = h * torch.rand(h.shape, generator=NOISE)
        return x + self.down(h) + NUMBERS.random() + PYTHONS.random() + scale()


class OfItsClass(Draws):
    """Draws from an attribute of its class."""

    noise = torch.Generator()

    def forward(self, x):
        h = torch.tanh(self.up(x))
        return x + self.down(h * torch.rand(h.shape, generator=self.noise))


def blocks(block=Draws):
    return nn.Sequential(*[block() for _ in range(3)])


def rows():
    return torch.randn(ROWS, WIDTH)


def mean_square(output):
    return output.square().mean()


def states(*more):
    return [
        *(g.get_state().tolist() for g in (NOISE, OfItsClass.noise, *more)),
        str(NUMBERS.bit_generator.state),
        str(OLD_NUMBERS.get_state()),
        PYTHONS.getstate(),
    ]


@pytest.mark.parametrize("block", [Draws, OfItsClass])
def test_planning_leaves_generators_of_the_users_own_alone(block):
    own = torch.Generator()

    def loss_fn(output):
        return (output * torch.rand(output.shape, generator=own)).square().mean()

    before = states(own)
    profile = autosac.profile(blocks(block), rows(), loss_fn=loss_fn, optimizer="sgd")
    assert states(own) == before
    profile = autosac.calibrate(profile, progress=False)
    assert states(own) == before
    autosac.plan(profile, memory_budget=autosac.floor(profile))
    assert states(own) == before


@pytest.mark.parametrize("block", [Draws, OfItsClass])
def test_each_verified_training_begins_with_the_same_generators(block):
    profile = autosac.profile(blocks(block), rows(), loss_fn=mean_square)
    profile = autosac.calibrate(profile, progress=False)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    before = states()
    done = autosac.verify(
        *(plan, lambda: blocks(block), rows), loss_fn=mean_square, timing_rounds=0
    )

    assert states() == before
    assert plan.policy
    assert not done.differences


def test_generators_without_a_state_are_left_alone():
    with generators_kept([random.SystemRandom(), random.Random(1)]):
        pass


class Listener:
    def heard(self):
        pass


LISTENER = weakref.proxy(Listener())  # which is gone


def tells(output):
    with contextlib.suppress(ReferenceError):
        LISTENER.heard()
    return output.square().mean()


def test_a_loss_may_name_what_is_gone():
    profile = autosac.profile(nn.Linear(4, 4), torch.ones(2, 4), loss_fn=tells)
    assert profile.baseline_peak_bytes > 0


LARGE = 5 * 2**20  # elements: more than are copied unless they are written


class InSlots:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class Kept:
    """What a step may write to, of every kind."""

    steps = 0

    def __init__(self):
        self.calls, self.mean, self.last = 0, 1.0, torch.ones(())
        self.items, self.by_name, self.seen = [], {"n": 0}, {0}
        self.queue, self.counted = deque([1], maxlen=3), Counter(a=1)
        self.ordered, self.lists = OrderedDict(a=1), defaultdict(list)
        self.slots, self.others = InSlots(), [InSlots()]
        self.count, self.sums = torch.zeros((), dtype=torch.int64), torch.zeros(3)
        self.teacher = nn.BatchNorm1d(WIDTH).requires_grad_(False)
        self.weight = nn.Parameter(torch.ones(()))

    def update(self, output):
        value = output.detach().square().mean()
        self.calls, self.last = self.calls + 1, value
        self.mean = 0.9 * self.mean + 0.1
        self.new = value
        self.items.append(value)
        self.by_name["n"] += 1
        self.seen.add(self.calls)
        self.queue.append(value)
        self.counted["a"] += 1
        self.ordered["b"] = value
        self.ordered.move_to_end("a")
        self.lists["a"].append(value)
        self.slots.calls += 1
        self.others[0].calls += 1
        self.others.append(value)
        self.count.add_(1)
        self.sums[1].add_(value)
        with torch.no_grad():
            self.teacher(output)
            self.teacher.weight.mul_(0.5)
            self.teacher.bias.data.add_(1.0)
        type(self).steps += 1
        return output * self.weight

    def is_like_new(self):
        plain, others = vars(self), vars(Kept())
        tensors = [n for n, v in others.items() if isinstance(v, torch.Tensor)]
        modules, slots = ("teacher",), ("slots", "others")
        rest = others.keys() - {*tensors, *modules, *slots}
        states = zip(
            plain["teacher"].state_dict().values(),
            others["teacher"].state_dict().values(),
            strict=True,
        )
        return (
            plain.keys() == others.keys()
            and all(plain[n] == others[n] for n in rest)
            and list(plain["ordered"]) == ["a"]
            and all(type(plain[n]) is type(others[n]) for n in tensors)
            and all(torch.equal(plain[n], others[n]) for n in tensors)
            and all(plain[n]._version == others[n]._version for n in tensors)
            and all(torch.equal(one, other) for one, other in states)
            and [s.calls for s in (self.slots, *self.others)] == [0, 0]
            and self.weight.grad is None
            and Kept.steps == 0
        )


KEPT, NUM_CALLS = Kept(), 0


class Writes(nn.Sequential):
    """Writes to global names in forward."""

    def forward(self, x):
        global NUM_CALLS
        NUM_CALLS += 1
        return KEPT.update(super().forward(x))


def writing_loss(kept):
    def loss_fn(output):
        return kept.update(output).square().mean()

    return loss_fn


WEIGHTS = {"large": torch.zeros(LARGE), "read": torch.zeros(LARGE)}


def with_large(output):
    WEIGHTS["large"].add_(1.0)
    return output.square().mean() + WEIGHTS["large"][0] + WEIGHTS["read"][0]


class WithLarge(nn.Linear):
    def forward(self, x):
        return super().forward(x) + with_large(x)


# Of a write to a tensor as large, which the trace takes for new memory.
@pytest.mark.filterwarnings("ignore:A real step takes:UserWarning")
def test_large_tensors_are_put_back_and_copied_only_if_a_step_writes_to_them(
    monkeypatch,
):
    copied = []

    def keep_bytes(storage, stack):
        copied.append(storage.data_ptr())
        keep(storage, stack)

    keep = own_state._keep_bytes
    monkeypatch.setattr(own_state, "_keep_bytes", keep_bytes)
    profile = autosac.profile(WithLarge(WIDTH, WIDTH), rows(), loss_fn=mean_square)
    assert WEIGHTS["read"].data_ptr() not in copied
    autosac.calibrate(profile, progress=False)

    assert WEIGHTS["large"].data_ptr() in copied
    assert not WEIGHTS["large"].any()


READ = [torch.zeros(8) for _ in range(6)]


class Reads(nn.Linear):
    def forward(self, x):
        READ[0].add_(1.0)
        return super().forward(x) + sum(tensor[0] for tensor in READ)


def test_tensors_are_copied_only_if_a_step_writes_to_them(monkeypatch):
    copied = set()

    def keep_bytes(storage, stack):
        copied.add(storage.data_ptr())
        keep(storage, stack)

    keep = own_state._keep_bytes
    monkeypatch.setattr(own_state, "_keep_bytes", keep_bytes)
    autosac.profile(Reads(WIDTH, WIDTH), rows(), loss_fn=mean_square)

    assert copied == {READ[0].data_ptr()}
    assert not READ[0].any()


class Loop:
    """Computes a loss by a method, and holds what that writes to."""

    def __init__(self):
        self.kept = Kept()

    def loss(self, output):
        return getattr(self, "kept").update(output).square().mean()  # noqa: B009


@pytest.mark.parametrize("by", ["forward", "closure", "method"])
def test_planning_leaves_what_a_step_writes_to_alone(by):
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    loop = Loop()
    kept = KEPT if by == "forward" else loop.kept
    loss_fn = {"closure": writing_loss(kept), "method": loop.loss}.get(by, mean_square)
    model = (Writes if by == "forward" else nn.Sequential)(*layers)
    profile = autosac.profile(model, rows(), loss_fn=loss_fn)
    assert kept.is_like_new()
    profile = autosac.calibrate(profile, progress=False)
    assert kept.is_like_new()
    autosac.plan(profile, memory_budget=profile.baseline_peak_bytes)
    assert kept.is_like_new()
    assert NUM_CALLS == 0


class Centre(nn.Module):
    """Keeps a running mean, one that it replaces and one that it writes to."""

    def __init__(self, num_elements=WIDTH):
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_elements))
        self.total = torch.zeros(num_elements)

    def forward(self, output):
        away = output - self.mean[:WIDTH] - self.total[:WIDTH]
        self.mean = self.mean * 0.9
        self.mean[:WIDTH] += 0.1 * output.detach().mean(0)
        self.total[:WIDTH] += 0.1 * output.detach().mean(0)
        return away.square().mean()


CENTRE = Centre()


class Centred(nn.Sequential):
    """Writes to a global name in forward."""

    def forward(self, x):
        output = super().forward(x)
        return output * CENTRE(output)


def centre_of_a_name(output):
    return CENTRE(output)


@pytest.mark.parametrize("by", ["loss", "large", "name", "forward"])
def test_each_verified_training_begins_with_the_same_state_of_the_users(by):
    def make_model():
        kind = Centred if by == "forward" else nn.Sequential
        return kind(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    own = Centre(LARGE if by == "large" else WIDTH)
    losses = {"name": centre_of_a_name, "forward": mean_square}
    loss_fn = losses.get(by, own)
    plan = autosac.plan(make_model(), rows(), memory_budget="1GiB", loss_fn=loss_fn)

    done = autosac.verify(plan, make_model, rows, loss_fn=loss_fn, timing_rounds=1)

    assert not done.differences
    for centre in (own, CENTRE):
        assert not centre.mean.any()
        assert not centre.total.any()
