import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autosac.devices.allocator_settings import AllocatorSettings
from autosac.profiles.profile import profile
from autosac.simulation import allocator_steps
from autosac.simulation.allocator_steps import (
    FirstStep,
    first_step,
    handed_out,
    replay,
)
from autosac.simulation.simulator import Simulator
from autosac.step.ledger import Ledger
from autosac.step.training_step import OptimizerInBackward
from tests.models import random_choice

MIB = 2**20
LOADED = AllocatorSettings(state_is_loaded=True)


def step_of(*rows, end=100):
    born, died, nbytes = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return Ledger(born=born, died=died, nbytes=nbytes * MIB, end=end)


# --- counted by hand ----------------------------------------------------------------


def test_state_made_in_the_first_step_pins_a_segment_of_forward():
    step = step_of(
        (0, 100, 12),  # a parameter,
        (0, 100, 12),  # its state,
        (1, 5, 30),  # an activation,
        (4, 100, 12),  # the gradient.
    )
    first = FirstStep(state_born={1: 7})

    # 12 + 30 + 12 in the first step, whose optimizer takes 12 of the free 30 for the
    # state. The next activation does not fit into the 18 that are left.
    assert replay(step, first=first).peak_reserved_bytes == (12 + 30 + 12 + 30) * MIB
    # With the state in a segment of its own each step uses those of the first.
    loaded = replay(step, first=first, settings=LOADED)
    assert loaded.peak_reserved_bytes == (12 + 12 + 30 + 12) * MIB
    # What is in use at once is the same.
    assert loaded.peak_allocated_bytes == (12 + 12 + 30 + 12) * MIB


def test_kept_gradients_are_made_in_the_first_backward_pass():
    step = step_of(
        (0, 100, 30),  # a gradient that is kept,
        (1, 5, 30),  # an activation,
        (3, 6, 30),  # what is added to the gradient,
        (5, 8, 30),  # a temporary in the place of the activation.
    )
    first = FirstStep(gradient_born={0: 3}, absent=frozenset({2}))

    # The first step has two at once, the others three.
    assert replay(step, first=first).peak_reserved_bytes == 90 * MIB
    # A first step alone needs no third one.
    alone = step_of((3, 100, 30), (1, 5, 30), (5, 8, 30))
    assert replay(alone).peak_reserved_bytes == 60 * MIB


def test_state_in_a_small_segment_makes_its_tensor_take_a_large_one():
    step = step_of((0, 100, 12), (1, 4, 14), (2, 6, 40))
    first = FirstStep(state_born={0: 7})

    # The state takes 12 of the 14. In the second step 14 come off the 40, which are
    # then reserved anew; in the third all finds its place.
    assert replay(step, first=first).peak_reserved_bytes == (14 + 40 + 40) * MIB


# --- large and small requests apart -------------------------------------------------

sizes = st.one_of(
    st.integers(0, 2048), st.integers(1, 2 * MIB), st.integers(1, 50 * MIB)
)
lifetimes = st.tuples(st.integers(-1, 9), st.integers(1, 12), sizes)
any_settings = st.sampled_from(
    [
        AllocatorSettings(),
        LOADED,
        AllocatorSettings(expandable_segments=True),
        AllocatorSettings(max_split_size_mb=32),
        AllocatorSettings(
            garbage_collection_threshold=0.3, memory_limit_bytes=100 * MIB
        ),
    ]
)


# What a first step makes is made by its ops, so before its end at 10.
@given(st.lists(lifetimes, min_size=1, max_size=30), any_settings, st.integers(0, 8))
def test_what_is_handed_out_is_what_a_replay_of_all_hands_out(rows, settings, made):
    born, died, nbytes = np.array(rows, dtype=np.int64).T
    step = Ledger(born=born, died=died, nbytes=nbytes, end=10)
    old = np.flatnonzero((born <= 0) & (died >= 10)).tolist()
    new = np.flatnonzero((born > 0) & (died < 10)).tolist()
    first = FirstStep(
        state_born=dict.fromkeys(old[::2], made + 1),
        gradient_born=dict.fromkeys(old[1::4], made + 1),
        absent=frozenset(new[:1] if old[1::4] else ()),
    )

    together = []
    replay(step, first=first, settings=settings, steps=together)

    # The others may need fewer steps until nothing is reserved any more.
    apart = handed_out(step, first=first, settings=settings)
    assert 0 < len(apart) <= len(together)
    for found, true in zip(apart, together, strict=False):
        assert found.peak_bytes == true.peak_bytes
        assert found.between_steps == true.between_steps
        places = found.keys.searchsorted(true.keys)
        assert (found.keys[places] == true.keys).all()
        assert (found.nbytes[places] == true.nbytes).all()


# Many requests: replays end after a piece of a step.
@given(st.lists(lifetimes, min_size=1, max_size=60), any_settings, st.floats(0.0, 1.1))
def test_a_replay_that_ends_early_says_whether_the_peak_is_higher(
    rows, settings, share
):
    born, died, nbytes = np.array(rows, dtype=np.int64).T
    step = Ledger(born=born, died=died, nbytes=nbytes, end=10)
    old = np.flatnonzero((born <= 0) & (died >= 10)).tolist()
    first = FirstStep(state_born=dict.fromkeys(old[::2], 5))

    def peak_bytes(most_bytes=None):
        steps = handed_out(step, first=first, settings=settings, most_bytes=most_bytes)
        return max(own.peak_bytes for own in steps)

    true_bytes = peak_bytes()
    for most_bytes in (int(share * true_bytes), true_bytes - 1):
        found_bytes = peak_bytes(most_bytes)
        assert found_bytes <= true_bytes
        assert (found_bytes > most_bytes) == (true_bytes > most_bytes)
    assert peak_bytes(true_bytes) == true_bytes


def test_a_replay_ends_in_the_midst_of_a_step_that_takes_too_much(monkeypatch):
    rows = [(k, k + 1, 3) for k in range(1, 390)]
    played = []

    class Counting(allocator_steps.LargeBlocks):
        def play(self, events):
            played.extend(events.tolist())
            return super().play(events)

    monkeypatch.setattr(allocator_steps, "LargeBlocks", Counting)
    step = step_of((5, 7, 40), *rows, end=400)

    steps = handed_out(step, most_bytes=20 * MIB)

    assert len(steps) == 1 and steps[0].peak_bytes > 20 * MIB
    assert 0 < len(played) < len(rows) / 2


def test_the_peak_of_large_and_small_requests_apart_is_that_of_all():
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(600, 600), nn.GELU()) for _ in range(3))
        )
        inputs = torch.zeros(700, 600)
    made = profile(model, inputs, optimizer=torch.optim.AdamW, device="h100")
    sizes = made.tape.nbytes
    assert (sizes > MIB).any() and ((sizes > 0) & (sizes < MIB)).any()
    for seed in range(3):
        chosen = random_choice(made, seed)
        peak_bytes = made.simulator.allocator_peak_bytes(chosen, "allocated")

        assert peak_bytes == made.simulator.replay(chosen).peak_allocated_bytes
        fresh = Simulator(made.tape)
        assert not fresh.fits(chosen, peak_bytes - 1)
        assert not fresh.takes_replay(chosen)
        assert fresh.fits(chosen, peak_bytes)
        assert fresh.true_peak_bytes(chosen) == peak_bytes


# --- read off a step ----------------------------------------------------------------


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.second(self.first(x).relu()).sum()


def traced(optimizer=torch.optim.Adam, **options):
    return profile(
        Two(), torch.zeros(8, 64), optimizer=optimizer, device="h100", **options
    ).tape


def of_category(tape, category):
    pairs = enumerate(tape.storages)
    return {i for i, s in pairs if s.category == category and s.born <= 0}


@pytest.mark.parametrize("clip_grad_norm", [None, 1.0])
def test_an_optimizer_makes_all_its_state_before_its_first_kernel(clip_grad_norm):
    tape = traced(clip_grad_norm=clip_grad_norm)

    first = first_step(tape, span=1)

    state = of_category(tape, "optimizer")
    uses = [op.start for op in tape.ops if state & {*op.reads, *op.writes}]
    assert len(state) == 8  # two averages of each of four parameters
    assert first.state_born == dict.fromkeys(state, min(uses))
    assert min(uses) > max(op.start for op in tape.ops if op.phase == "backward")
    assert not first.gradient_born


def test_optimizers_in_backward_make_their_state_one_after_the_other():
    tape = traced(lambda parameters: OptimizerInBackward(parameters, torch.optim.Adam))

    born = first_step(tape, span=1).state_born

    assert set(born) == of_category(tape, "optimizer")
    assert len(set(born.values())) == 4
    last = max(op.start for op in tape.ops if op.phase == "backward")
    assert min(born.values()) < last


@pytest.mark.parametrize("options", [{"keeps_gradients": True}, {"accumulate": 2}])
def test_what_is_added_to_a_kept_gradient_is_it_in_the_first_step(options):
    tape = traced(None, **options)

    first = first_step(tape, span=1)

    gradients = of_category(tape, "gradient")
    assert set(first.gradient_born) == gradients
    assert len(first.absent) == len(gradients) == 4
    births = sorted(tape.storages[i].born for i in first.absent)
    assert sorted(first.gradient_born.values()) == births
    # A step without gradients before it makes the same ones at the same ops.
    plain = traced(None)
    gradients = [s for s in plain.storages if s.category == "gradient"]
    assert sorted(s.nbytes for s in gradients) == sorted(
        tape.storages[i].nbytes for i in first.absent
    )


def test_kept_gradients_are_there_all_the_time():
    plain, kept = traced(), traced(keeps_gradients=True)
    nbytes = 2 * (64 * 64 * 4 + 512)  # a bias of 256 bytes takes 512

    born = [s for s in kept.storages if s.category == "gradient"]

    assert all(s.born == 0 and s.died == kept.num_ticks for s in born)
    assert sum(s.nbytes for s in born) == nbytes
    assert not of_category(plain, "gradient")
