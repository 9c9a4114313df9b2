"""Times of units that offload are no less than those of a step that is played."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn

from autosac.devices.links import Link
from autosac.profiles.restricting import restricted
from autosac.solving.incumbents import far_bytes
from autosac.units import curves
from autosac.units.far_units import FarUnit
from autosac.units.policies import SAVE
from benchmarks.offload_rules import every_saved
from tests.far_choices import KINDS, far_choice
from tests.models import CASES, Case
from tests.test_chains import Block

WIDTH, ROWS, DEPTH = 16, 60, 5
SEEDS = range(8)
SPEEDS = (1e6, 1e7, 1e8)  # bytes per second, of steps that move kilobytes


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Repeated(Stack):
    """Blocks that are called twice: copies of two calls may be under way at once."""

    def forward(self, x):
        for block in self.blocks:
            x = block(block(torch.tanh(x)))
        return x.square().mean()


def rows():
    return torch.randn(ROWS, WIDTH)


STEPS = {
    "blocks": Case(Stack, rows),
    "called twice": Case(Repeated, rows),
    **{name: CASES[name] for name in ("gpt", "convolutions", "bert")},
}


@dataclass
class Engine:
    """Copies one way, one after the other."""

    free_ms: float = 0.0
    done_ms: dict = field(default_factory=dict)

    def begin(self, unit, now_ms, ms):
        self.free_ms = self.done_ms[unit] = max(self.free_ms, now_ms) + ms


@dataclass
class Player:
    """Runs the ops of a step one by one, with copies beside them."""

    step: object
    chosen: dict
    has_reruns: bool
    now_ms: float = 0.0
    waited_ms: float = 0.0

    def play(self):
        self.out, self.back = Engine(), Engine()
        self.rerun, self.followers = set(), {}
        events = [(op.start, 1, "run", i) for i, op in enumerate(self.step.tape.ops)]
        for unit in self.chosen:
            events.append((unit.trigger, 0, "resume", unit))
            if self.moved(unit):
                events.append((unit.call.exit, 2, "send", unit))
                events.append((unit.let_go, 3, "let_go", unit))
            if self.moved(unit) and unit.fetched is not None:
                events.append((unit.fetched, 0, "prefetch", unit))
        for *_, what, about in sorted(events, key=lambda event: event[:2]):
            getattr(self, what)(about)
        return self.waited_ms

    def moved(self, unit):
        """Bytes that a unit moves, and number of copies; nothing of other units."""
        if not isinstance(unit, FarUnit):
            return ()
        policy = self.chosen[unit]
        saved = [g for g in unit.results if policy.choices[g] == SAVE]
        num_results = sum(len(unit.groups[g].storages) for g in saved)
        return unit.far_bytes(policy), len(unit.far) + num_results

    def run(self, index):
        self.now_ms += self.step.op_ms[index]

    def send(self, unit):
        link = self.step.device.link
        self.out.begin(unit, self.now_ms, link.out_ms(*self.moved(unit)))

    def let_go(self, unit):
        self.wait(self.out.done_ms[unit])

    def prefetch(self, unit):
        around = [
            other
            for other in self.chosen
            if self.moved(other) and other.fetched is None and other not in self.rerun
            and f"{unit.until}.".startswith(f"{other.fqn}.")
        ]  # fmt: skip
        if around:
            self.followers.setdefault(around[0], []).append(unit)
        else:
            self.begin(unit)

    def begin(self, unit):
        link = self.step.device.link
        self.back.begin(unit, self.now_ms, link.back_ms(*self.moved(unit)))

    def resume(self, unit):
        self.rerun.add(unit)
        if self.moved(unit):
            if unit not in self.back.done_ms:
                self.begin(unit)
            for follower in self.followers.pop(unit, ()):
                self.begin(follower)
            self.wait(self.back.done_ms[unit])
        if self.has_reruns:
            own_ms = curves.recompute_ms(unit, self.chosen[unit]) - unit.waits_ms(
                self.chosen[unit]
            )
            self.now_ms += own_ms

    def wait(self, until_ms):
        self.waited_ms += max(0.0, until_ms - self.now_ms)
        self.now_ms = max(self.now_ms, until_ms)


def with_link(step, bytes_per_s, issue_ms=0.0):
    link = Link(
        out_bytes_per_s=bytes_per_s,
        back_bytes_per_s=bytes_per_s,
        latency_ms=1e-3,
        issue_ms=issue_ms,
    )
    device = replace(step.device, link=link)
    return restricted(replace(step, device=device), offload=True)


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("kinds", [("late",), ("early",), ("results",), tuple(KINDS)])
@pytest.mark.parametrize("name", STEPS)
def test_waits_add_up_to_no_less_than_a_step_that_is_played(name, kinds):
    profile = STEPS[name].profile()
    num_moved = num_equal = 0
    for bytes_per_s in SPEEDS:
        step = with_link(profile, bytes_per_s)
        for seed in SEEDS:
            choice = far_choice(step, seed, kinds)
            told_ms = sum(u.waits_ms(p) for u, p in choice.items())
            played_ms = Player(step, choice, has_reruns=True).play()
            plain_ms = Player(step, choice, has_reruns=False).play()
            assert played_ms <= told_ms + 1e-9
            assert plain_ms <= told_ms + 1e-9
            num_moved += far_bytes(choice) > 0
            num_equal += told_ms > 0 and plain_ms == pytest.approx(told_ms)
            if kinds == ("late",) and name != "called twice":
                assert played_ms == pytest.approx(told_ms)
    assert num_moved and num_equal


def sent(unit, policy):
    """Storages that a unit with twins sends to far memory."""
    if isinstance(unit, FarUnit):
        yield from unit.far
        for g in unit.results:
            if policy.choices[g] == SAVE:
                yield from unit.groups[g].storages


def test_the_program_is_busy_with_each_tensor_there_and_back():
    profile = STEPS["blocks"].profile()
    free, busy = (with_link(profile, SPEEDS[-1], ms) for ms in (0.0, 0.5))
    num_moved = 0
    for seed in SEEDS:
        times = []
        for step in (free, busy):
            choice = far_choice(step, seed, tuple(KINDS))
            times.append(sum(u.waits_ms(p) for u, p in choice.items()))
        moved = [storage for u, p in choice.items() for storage in sent(u, p)]
        num_moved += len(moved)
        assert times[1] == pytest.approx(times[0] + 2 * 0.5 * len(moved))
    assert num_moved


def test_the_rule_that_all_saved_tensors_are_moved_waits_for_a_slow_link():
    profile = STEPS["blocks"].profile()
    slow, fast = (every_saved(with_link(profile, rate), 0) for rate in SPEEDS[::2])
    nothing = every_saved(with_link(profile, SPEEDS[0]), 2**30)

    assert nothing.peak_bytes == profile.baseline_peak_bytes
    hooks_ms = nothing.waits_ms
    assert nothing.moved_bytes == 0 < hooks_ms
    assert slow.peak_bytes == fast.peak_bytes < nothing.peak_bytes
    back_ms = 1e3 * slow.moved_bytes / SPEEDS[0]
    slow_ms, fast_ms = (rule.waits_ms - hooks_ms for rule in (slow, fast))
    assert slow_ms > back_ms > fast_ms > 1e3 * fast.moved_bytes / SPEEDS[-1]
