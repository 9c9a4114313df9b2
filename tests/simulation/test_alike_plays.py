"""What is known of plans with the same large requests, against replays of each."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autosac.devices.allocator_settings import AllocatorSettings
from autosac.profiles.profile import profile
from autosac.simulation.alike_plays import AlikePlays
from autosac.simulation.allocator_steps import FirstStep, handed_out
from autosac.simulation.caching_allocator import SMALL_BYTES
from autosac.simulation.simulator import Simulator
from autosac.step.ledger import Ledger
from tests.models import random_choice

MIB = 2**20
END = 10
NUM_STORAGES = 5
small = st.integers(0, SMALL_BYTES)
large = st.integers(SMALL_BYTES + 1, 30 * MIB)
lifetimes = st.tuples(st.integers(-1, 9), st.integers(1, 12), small | large)
any_settings = st.sampled_from(
    [
        AllocatorSettings(),
        AllocatorSettings(state_is_loaded=True),
        AllocatorSettings(expandable_segments=True),
        AllocatorSettings(
            garbage_collection_threshold=0.3, memory_limit_bytes=100 * MIB
        ),
    ]
)


def first_of(rows):
    """State of every other row that is there all the time, a gradient of row 3."""
    old = [i for i, (born, died, _) in enumerate(rows[:4]) if born <= 0 and died >= END]
    return FirstStep(
        state_born=dict.fromkeys(old[::2], 5),
        gradient_born=dict.fromkeys(old[1::2], 4),
        absent=frozenset({4} if rows[4][0] > 0 else ()),
    )


def ledger_of(rows):
    born, died, nbytes = np.array(rows, dtype=np.int64).T
    return Ledger(born=born, died=died, nbytes=nbytes, end=END)


def peak_bytes(step, first, settings):
    return max(s.peak_bytes for s in handed_out(step, first=first, settings=settings))


# The first rows are the tape's; in other plans some rows differ in one thing each.
@given(
    rows=st.lists(lifetimes, min_size=NUM_STORAGES + 1, max_size=40),
    changes=st.lists(
        st.lists(st.tuples(st.integers(0, 39), st.integers(0, 2), lifetimes)),
        max_size=6,
    ),
    share=st.floats(0.3, 1.0),
    settings=any_settings,
)
def test_what_is_known_is_never_more_than_a_replay_says(rows, changes, share, settings):
    first = first_of(rows)
    known = AlikePlays(NUM_STORAGES, first, settings)
    budget_bytes = int(share * peak_bytes(ledger_of(rows), first, settings))
    for changed in ([], *changes):
        own = list(rows)
        for place, which, values in changed:
            row = list(own[place % len(own)])
            if place % len(own) >= NUM_STORAGES or which == 1:
                row[which] = values[which]
            own[place % len(own)] = tuple(row)
        step = ledger_of(own)
        alike = known.of(step)
        true_bytes = peak_bytes(step, first, settings)

        assert alike.least_bytes(budget_bytes) <= true_bytes

        steps = handed_out(
            step, first=first, settings=settings, most_bytes=budget_bytes
        )
        alike.note(steps, budget_bytes)
        if (steps[-1].nbytes > budget_bytes).any():
            assert budget_bytes < known.of(step).least_bytes(budget_bytes) <= true_bytes


@given(
    rows=st.lists(lifetimes, min_size=NUM_STORAGES + 1, max_size=40),
    place=st.integers(0, 39),
    values=lifetimes,
    which=st.integers(0, 2),
)
def test_plans_that_differ_in_large_requests_are_not_alike(rows, place, values, which):
    place %= len(rows)
    rows[place] = (rows[place][0], rows[place][1], SMALL_BYTES + 1)
    other = list(rows)
    row = list(rows[place])
    row[which] = (values[0], values[1], SMALL_BYTES + 2)[which]
    other[place] = tuple(row)
    known = AlikePlays(NUM_STORAGES, FirstStep(), AllocatorSettings())
    steps = [ledger_of(rows), ledger_of(other)]
    seen = [known.of(step).large_bytes for step in steps]

    def lives(step):
        is_real = (step.nbytes > SMALL_BYTES) & (step.died > step.born)
        return [
            *np.flatnonzero(is_real[:NUM_STORAGES]),
            *step.born[is_real],
            *step.died[is_real].clip(max=END),
            *step.nbytes[is_real],
        ]

    assert (seen[0] is seen[1]) == (lives(steps[0]) == lives(steps[1]))


def test_plans_that_differ_in_small_requests_are_replayed_until_one_breaks_the_budget():
    # Two blocks of large and of small layers: which of the small ones are recomputed
    # changes no large request.
    with torch.device("meta"):
        wide = [nn.Sequential(nn.Linear(600, 600), nn.GELU()) for _ in range(2)]
        narrow = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
        model = nn.Sequential(
            *wide, nn.Linear(600, 8), *narrow, nn.Linear(8, 600), nn.GELU()
        )
        inputs = torch.zeros(700, 600)
    made = profile(model, inputs, optimizer=torch.optim.AdamW, device="h100")
    simulator = Simulator(made.tape)
    choices = [random_choice(made, seed) for seed in range(40)]
    peaks = [made.simulator.true_peak_bytes(choice) for choice in choices]
    budget_bytes = min(peaks) - 1

    assert not any(simulator.fits(choice, budget_bytes) for choice in choices)

    distinct = len({frozenset(choice.items()) for choice in choices})
    assert 0 < simulator.num_replayed < distinct / 2
    for choice, peak in zip(choices, peaks, strict=True):
        assert simulator.fits(choice, peak)
        assert not simulator.fits(choice, peak - 1)
