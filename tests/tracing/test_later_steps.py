"""Models and losses that do more in later steps, by a number that each step changes."""

import contextlib
import warnings
from collections import deque

import pytest
import torch
from torch import nn

import autosac
from autosac.step.training_step import training_step
from autosac.tracing.later_steps import Allocations, dearest
from tests.models import Case
from tests.training import assert_equal, peaks_of_training, train

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS, STEPS = 32, 64, 8


def block():
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    )


class Begins(nn.Module):
    """A second block that runs behind the first few steps."""

    def __init__(self):
        super().__init__()
        self.num_steps = 0
        self.first, self.second = block(), nn.Sequential(block(), block())

    def forward(self, x):
        self.num_steps += 1
        x = x + self.first(x)
        return x + self.second(x) if self.is_due else x

    @property
    def is_due(self):
        return self.num_steps > 2


class BeginsByBuffer(Begins):
    def __init__(self):
        super().__init__()
        del self.num_steps
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))


class Alternates(Begins):
    @property
    def is_due(self):
        return self.num_steps % 2 == 0


class Rarely(nn.Module):
    """The same block once more in every so many steps, or in the first few ones."""

    def __init__(self, is_due):
        super().__init__()
        self.num_steps, self.is_due = 0, is_due
        self.block = block()

    def forward(self, x):
        self.num_steps += 1
        x = x + self.block(x)
        return x + self.block(x) if self.is_due(self.num_steps) else x


class Penalizes(Rarely):
    """Its penalty of a gradient makes more than a step without it."""

    def forward(self, x):
        self.num_steps += 1
        if not self.is_due(self.num_steps):
            return self.block(x)
        x = x.detach().requires_grad_()
        y = self.block(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + gradient.square().sum()


class QueueLoss(nn.Module):
    """Compares with embeddings of earlier batches, in memory that is there already."""

    def __init__(self, num_rows=4 * ROWS):
        super().__init__()
        self.register_buffer("memory", torch.zeros(num_rows, WIDTH))
        self.num_filled = 0

    def forward(self, output):
        others = self.memory[: self.num_filled].clone()
        loss = (output @ torch.cat([others, output.detach()]).T).logsumexp(1).mean()
        if self.num_filled < len(self.memory):
            stop = self.num_filled + len(output)
            self.memory[self.num_filled : stop] = output.detach()
            self.num_filled = stop
        return loss


class KeepsLatest:
    """A loss that is no module, over the latest batches in a queue that it holds."""

    def __init__(self):
        self.latest = deque(maxlen=3)

    def __call__(self, output):
        self.latest.append(output.detach())
        return (output @ torch.cat([*self.latest]).T).logsumexp(1).mean()


def mean_square(output):
    return output.square().mean()


def model_of(middle):
    torch.manual_seed(0)
    return nn.Sequential(block(), middle(), block())


def rows():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def planned(make_model, loss_fn, share=0.0):
    profile = autosac.profile(
        make_model(), rows(), optimizer=torch.optim.AdamW, loss_fn=loss_fn
    )
    profile = autosac.calibrate(profile, progress=False)
    least, most = autosac.floor(profile), profile.baseline_peak_bytes
    return autosac.plan(profile, memory_budget=least + int(share * (most - least)))


def highest_peak(plan, make_model, make_loss, num_steps=STEPS):
    def make_step():
        model, loss_fn = make_model(), make_loss()
        optimizer = torch.optim.AdamW(model.parameters())
        plan.apply(model)
        x = rows()

        def step():
            training_step(model, (x,), {}, loss_fn=loss_fn, optimizer=optimizer)
            model.zero_grad()

        return step

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of units that depart early on
        return max(peaks_of_training(make_step, num_steps))


@pytest.mark.slow
@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("middle", [Begins, BeginsByBuffer, Alternates])
def test_a_model_that_does_more_in_some_step_is_planned_as_it_is_then(middle):
    says = contextlib.nullcontext()
    if middle is Alternates:
        says = pytest.warns(UserWarning, match="`Alternates.num_steps` changes")
    with says:
        plan = planned(lambda: model_of(middle), mean_square, share=0.3)

    assert plan.policy
    peak = highest_peak(plan, lambda: model_of(middle), lambda: mean_square)
    assert plan.peak_bytes == pytest.approx(peak, rel=0.002, abs=64)
    assert peak <= plan.budget_bytes


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("kind", "is_due"),
    [
        (Penalizes, lambda number: number % 2 == 0),
        (Rarely, lambda number: number % 16 == 0),
        (Rarely, lambda number: number in (2, 3)),
    ],
    ids=["penalty in every other", "every 16th", "second and third"],
)
def test_steps_that_take_more_now_and_then_are_covered(kind, is_due):
    def make_model():
        torch.manual_seed(0)
        return nn.Sequential(block(), kind(is_due), block())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as of steps beyond the first 16
        plan = planned(make_model, mean_square, share=0.3)

    peak = highest_peak(plan, make_model, lambda: mean_square, 2 * STEPS)
    assert peak <= plan.budget_bytes
    assert plan.peak_bytes == pytest.approx(peak, rel=0.002, abs=64)


class TakesTurns(nn.Module):
    """Allocates much in steps, a little at a time or once all at the same time."""

    def __init__(self):
        super().__init__()
        self.num_steps, self.block = 0, block()

    def forward(self, x):
        self.num_steps += 1
        with torch.no_grad():
            if self.num_steps in (5, 6, 7):
                for _ in range(40 + self.num_steps):
                    x.repeat(8, 1)
            if self.num_steps == 8:
                held = [x.repeat(8, 1) for _ in range(20)]
                del held
        return x + self.block(x)


@pytest.mark.slow
def test_the_step_of_the_highest_peak_is_covered_though_others_allocate_more():
    def make_model():
        torch.manual_seed(0)
        return nn.Sequential(block(), TakesTurns(), block())

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Of the first")  # others are parts of these
        plan = planned(make_model, mean_square, share=0.3)

    peak = highest_peak(plan, make_model, lambda: mean_square)
    assert peak <= plan.budget_bytes
    assert plan.peak_bytes == pytest.approx(peak, rel=0.002, abs=64)


def made(*nbytes, left_bytes=0):
    """A step of storages that die at once, behind others that have left some."""
    live_bytes = tuple(left_bytes + n for n in nbytes)
    return Allocations(nbytes, live_bytes)


def test_the_dearest_step_is_planned_and_other_kinds_are_told():
    cheap, dear, dearer = made(1), made(2, 2), made(9, 9)
    every_third = [dear, cheap, cheap, dearer] + 4 * [cheap, cheap, dearer]
    growing = [made(n) for n in range(1, 17)]

    assert dearest(every_third, 1, None) == [3, 1]
    assert dearest([dear, *15 * [cheap]], 1, "count") == [1]
    assert dearest(growing, 4, None) == [15]  # it takes what the others take
    with pytest.warns(UserWarning, match="`count` changes with every step"):
        dearest(growing, 1, "count")


def test_steps_that_are_not_covered_are_said_with_what_they_take():
    ways = [made(n, left_bytes=99 - 2 * n) for n in range(1, 6)]
    with pytest.warns(UserWarning, match=r"2 more .* up to 95 B .*\(98 B the planned"):
        assert dearest([made(9), *ways[::-1]], 1, None) == [5, 4, 3]


@pytest.mark.slow
def test_a_loss_over_a_queue_that_fills_is_planned_as_it_is_when_full():
    loss = QueueLoss()
    plan = planned(lambda: model_of(nn.Identity), lambda output: loss(output))

    assert loss.num_filled == 0
    peak = highest_peak(plan, lambda: model_of(nn.Identity), QueueLoss)
    assert plan.peak_bytes == pytest.approx(peak, rel=0.002, abs=64)


@pytest.mark.slow
def test_a_loss_that_is_no_module_is_followed_until_its_queue_is_full():
    loss = KeepsLatest()
    plan = planned(lambda: model_of(nn.Identity), loss)

    assert not loss.latest
    peak = highest_peak(plan, lambda: model_of(nn.Identity), KeepsLatest)
    assert plan.peak_bytes == pytest.approx(peak, rel=0.002, abs=64)


@pytest.mark.slow
def test_what_goes_on_to_grow_is_said():
    loss = QueueLoss(num_rows=100 * ROWS)
    with pytest.warns(UserWarning, match=r"`QueueLoss.num_filled` changes with every"):
        planned(lambda: model_of(nn.Identity), lambda output: loss(output))


def test_batches_that_norms_have_seen_are_no_count_to_trace_other_steps_for():
    class NormAct(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x).relu()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), NormAct(WIDTH))
    profile = autosac.profile(model, rows(), loss_fn=mean_square)

    assert profile.step.learned.counts is None


@pytest.mark.slow
def test_steps_have_the_bits_of_plain_ones():
    case = Case(lambda: model_of(Begins), rows, mean_square)
    model, plain = case.model(), case.model()
    planned(case.model, mean_square).apply(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equal(train(case, plain, steps=4), train(case, model, steps=4))
