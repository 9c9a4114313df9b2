"""Random draws that decide what a step does: the largest step is planned."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import autosac
from autosac.step.random_streams import HIGHEST, LOWEST, seeded_streams

NUM_LAYERS, WIDTH = 10, 8
DRAWS = {
    "torch.rand": lambda: torch.rand([]),
    "uniform_": lambda: torch.empty(1).uniform_(0, 1).item(),
    "random.random": random.random,
    "random.uniform": lambda: random.uniform(0, 1),
    "numpy": lambda: np.random.random(),
}


class DropsLayers(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.draw = draw

    def forward(self, x):
        for layer in self.layers:
            if self.draw() >= 0.7:
                x = layer(x).tanh()
        return x + self.layers[0].weight[0]


class Loops(DropsLayers):
    """Runs a layer until a low number is drawn."""

    def forward(self, x):
        while self.draw() > 0.5:
            x = self.layers[0](x).tanh()
        return x + self.layers[0].weight[0]


def num_layers_run(model):
    tape = autosac.profile(model, torch.ones(4, WIDTH), loss_fn=torch.sum).tape
    return sum(op.name == "aten.tanh.default" for op in tape.ops)


@pytest.mark.slow
@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", DRAWS)
def test_a_step_that_drops_no_layer_is_planned_though_hardly_any_does(name):
    assert num_layers_run(DropsLayers(DRAWS[name])) == NUM_LAYERS


@pytest.mark.slow
def test_a_loop_until_a_low_number_is_drawn_is_planned_as_ordinary_draws_have_it():
    assert 0 < num_layers_run(Loops(random.random)) < 20


@pytest.mark.parametrize(("seed", "expected"), [(HIGHEST, 1), (LOWEST, 0)])
def test_extreme_streams_draw_extreme_numbers_and_are_put_back(seed, expected):
    def following():
        return random.random(), np.random.random(), torch.rand([]).item()

    with seeded_streams(0):
        expected_after = following()
    with seeded_streams(0):
        with seeded_streams(seed) as draws:
            assert not draws.are_met()
            numbers = [draw() for draw in DRAWS.values() for _ in range(9)]
            between = torch.empty(2).uniform_(3, 5)
        observed_after = following()

    assert draws.are_met()
    assert numbers == pytest.approx([expected] * len(numbers), abs=0.01)
    assert all(0 <= number < 1 for number in numbers)
    assert between.tolist() == pytest.approx([3 + 2 * expected] * 2, abs=0.01)
    assert observed_after == expected_after


class NeedsALayer(DropsLayers):
    """Cannot run if every layer is dropped, which hardly any step does."""

    def forward(self, x):
        kept = []
        for layer in self.layers:
            if self.draw() >= 0.2:
                x = layer(x).tanh()
                kept.append(x)
        return torch.stack(kept).mean(0)


def test_draws_that_no_step_survives_change_nothing_in_how_others_are_traced():
    model = NeedsALayer(DRAWS["torch.rand"])
    profile = autosac.profile(model, torch.ones(4, WIDTH), loss_fn=torch.sum)
    assert not profile.step.learned.real
    budget = autosac.floor(profile)
    assert autosac.plan(profile, memory_budget=budget).peak_bytes <= budget
