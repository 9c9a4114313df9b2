"""Which sizes of blocks the MILP adds up, on allocators counted by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import autosac
from autosac.simulation.usual_blocks import in_usual_blocks
from tests.models import GPT

REQUESTED = np.array([1000, 1000, 500])
PATH = [{}, *({"unit": number} for number in range(1, 13))]


class Step:
    """A step of three allocations, all alive at its peak.

    Its units and policies are what they like.

    Args:
        added: Of a choice, what the allocator adds to each.
        sizes: Of the allocations, as they are taken to be; None for requests.
    """

    def __init__(self, added, sizes=REQUESTED):
        self.tape = SimpleNamespace(device_type="cuda")
        self.requested_bytes = REQUESTED
        self.sizes = sizes
        self.replayed = []
        self._added = added

    def num_replays(self, most):
        return most

    def peak_bytes(self, choice):
        return int(self.sizes.sum())

    def block_bytes(self, choice):
        self.replayed.append(choice)
        return REQUESTED + self._added(choice)

    def allocator_peak_bytes(self, choice, cap):
        assert cap == "allocated"
        return int((REQUESTED + self._added(choice)).sum())

    @property
    def in_blocks(self):
        return self.resized(self.block_bytes({}))

    def resized(self, sizes):
        return Step(self._added, sizes)


def test_what_the_allocator_adds_to_all_plans_but_not_to_the_plain_step_is_counted():
    step = Step(lambda choice: np.array([300, 0, 0]) if choice else 0)

    assert in_usual_blocks(step, PATH).sizes.tolist() == [1300, 1000, 500]


def test_nothing_is_learned_where_blocks_are_those_of_the_plain_step():
    step = Step(lambda choice: np.array([0, 0, 12]))

    assert in_usual_blocks(step, PATH) is None
    assert step.replayed == [{}]


def test_equal_requests_share_what_is_added_where_it_is_another_one_in_every_plan():
    # All plans add 100 to one of two. Means of six are 66 and 33, which is 1 too few.
    def added(choice):
        if not choice:
            return np.array([0, 0, 0])
        is_first = choice["unit"] % 3 != 0
        return np.array([100, 0, 0]) if is_first else np.array([0, 100, 0])

    assert in_usual_blocks(Step(added), PATH).sizes.tolist() == [1050, 1050, 500]


def test_guesses_that_foretell_peaks_no_better_are_not_taken():
    # Every second choice is learned from, and it is the others that are to be foretold.
    def added(choice):
        return np.array([0, 0, 100 if choice.get("unit", 0) % 2 else 1])

    assert in_usual_blocks(Step(added), PATH) is None


def test_nothing_is_added_on_a_cpu():
    step = Step(None)
    step.tape.device_type = "cpu"

    assert in_usual_blocks(step, PATH) is None


@pytest.fixture(scope="module")
def profile(kept_workspaces):
    with torch.device("meta"):
        model = GPT(num_layers=3, width=576, num_heads=9, vocabulary=500, length=350)
    return autosac.profile(
        model,
        torch.zeros(3, 350, dtype=torch.long),
        loss_fn=lambda logits: logits.square().mean(),
        optimizer="adamw",
        device="h100",
        autocast=torch.bfloat16,
    )


def test_a_real_step_is_foretold_better_than_by_the_blocks_of_the_plain_one(profile):
    simulator, path = profile.simulator, profile.rules.greedy_path()
    plain, usual = simulator.in_blocks, in_usual_blocks(simulator, path)

    def error_bytes(guess):
        true = map(simulator.true_peak_bytes, path[1:])
        own = map(guess.peak_bytes, path[1:])
        return sum(abs(a - b) for a, b in zip(true, own, strict=True))

    assert plain.peak_bytes({}) == simulator.true_peak_bytes({})
    assert 2 * error_bytes(usual) < error_bytes(plain)


def test_in_the_blocks_of_a_plan_its_peak_is_the_true_one_or_near_it(profile):
    simulator, path = profile.simulator, profile.rules.greedy_path()[1:]

    def error_bytes(guess, plan):
        return abs(guess.peak_bytes(plan) - simulator.true_peak_bytes(plan))

    plain = [error_bytes(simulator.in_blocks, plan) for plan in path]
    own = [error_bytes(simulator.in_blocks_of(plan), plan) for plan in path]
    # What a rerun makes is taken for as large as what forward made.
    assert all(one < other for one, other in zip(own, plain, strict=True))
    assert own.count(0) > len(path) / 2
