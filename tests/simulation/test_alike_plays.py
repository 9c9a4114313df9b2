"""What is known of plans with the same large requests, against replays of each."""

import random

import numpy as np
import pytest
import torch
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
NUM_STORAGES = 8
ALL_SETTINGS = (
    AllocatorSettings(),
    AllocatorSettings(state_is_loaded=True),
    AllocatorSettings(expandable_segments=True),
    AllocatorSettings(garbage_collection_threshold=0.3, memory_limit_bytes=100 * MIB),
)
# Parameters, state and gradients that are there all the time; the first step makes the
# latter two, and adds nothing to the gradient of row 4.
FIRST = FirstStep(state_born={1: 6, 2: 6}, gradient_born={3: 5}, absent=frozenset({4}))
KEPT = 4


def drawn_bytes(draws):
    small = draws.randint(1, SMALL_BYTES)
    return draws.choice((small, draws.randint(SMALL_BYTES + 1, 30 * MIB)))


def drawn_life(draws):
    born = draws.randint(1, END - 1)
    return [born, draws.randint(born, END + 1), drawn_bytes(draws)]


def drawn_rows(draws):
    kept = [[0, END, drawn_bytes(draws)] for _ in range(KEPT)]
    added = [1, END, SMALL_BYTES]
    return [*kept, added, *(drawn_life(draws) for _ in range(draws.randint(6, 24)))]


def changed(rows, draws):
    """Other small requests, and maybe one thing of a large one."""
    rows = [list(row) for row in rows]
    if draws.random() < 0.3:
        rows[KEPT][:2] = drawn_life(draws)[:2]
        return rows
    for row in rows[NUM_STORAGES:]:
        if row[2] <= SMALL_BYTES and draws.random() < 0.5:
            row[:] = [*drawn_life(draws)[:2], draws.randint(0, SMALL_BYTES)]
    for row in rows[KEPT:NUM_STORAGES]:  # of a storage only its end may change
        if row[2] <= SMALL_BYTES:
            row[1] = draws.randint(row[0], END + 1)
    if draws.random() < 0.4:
        row, which = draws.choice(rows[NUM_STORAGES:]), draws.randint(0, 2)
        row[which] = drawn_life(draws)[which]
    return rows


def ledger_of(rows):
    born, died, nbytes = np.array(rows, dtype=np.int64).T
    return Ledger(born=born, died=died, nbytes=nbytes, end=END)


def peak_bytes(step, settings):
    return max(s.peak_bytes for s in handed_out(step, first=FIRST, settings=settings))


@pytest.mark.parametrize("settings", ALL_SETTINGS)
def test_what_is_known_is_never_more_than_a_replay_says(settings):
    draws, num_refuted = random.Random(0), 0
    for _ in range(12):
        rows = drawn_rows(draws)
        known = AlikePlays(FIRST, settings)
        share = draws.choice((0.8, 0.9, 0.97))
        budget_bytes = int(share * peak_bytes(ledger_of(rows), settings))
        for number in range(16):
            step = ledger_of(changed(rows, draws) if number else rows)
            alike, true_bytes = known.of(step), peak_bytes(step, settings)
            is_refuted = alike.least_bytes(budget_bytes) > budget_bytes
            num_refuted += is_refuted

            assert alike.least_bytes(1000 * MIB) <= true_bytes

            steps = handed_out(
                step, first=FIRST, settings=settings, most_bytes=budget_bytes
            )
            alike.note(steps, budget_bytes)
            if (steps[-1].nbytes > budget_bytes).any():
                again = known.of(step).least_bytes(budget_bytes)
                assert budget_bytes < again <= true_bytes
    assert num_refuted > 20 or settings.garbage_collection_threshold


def test_plans_that_differ_in_small_requests_are_replayed_until_one_breaks_the_budget():
    with torch.device("meta"):
        wide = [nn.Sequential(nn.Linear(600, 600), nn.GELU()) for _ in range(2)]
        narrow = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
        model = nn.Sequential(
            *wide, nn.Linear(600, 8), *narrow, nn.Linear(8, 600), nn.GELU()
        )
        inputs = torch.zeros(700, 600)
    made = profile(model, inputs, optimizer=torch.optim.AdamW, device="h100")
    simulator = Simulator(made.tape)
    choices = [random_choice(made, seed) for seed in range(10)]
    peaks = [made.simulator.true_peak_bytes(choice) for choice in choices]
    budget_bytes = min(peaks) - 1

    assert not any(simulator.fits(choice, budget_bytes) for choice in choices)

    distinct = len({frozenset(choice.items()) for choice in choices})
    assert 0 < simulator.num_replayed < distinct / 2
    for choice, peak in zip(choices, peaks, strict=True):
        assert simulator.fits(choice, peak)
        assert not simulator.fits(choice, peak - 1)
