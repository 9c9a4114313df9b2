"""Random draws that decide what a step does: the largest step is planned."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import autosac
from autosac.step import extreme_draws
from autosac.step.random_streams import HIGHEST, LOWEST, seeded_streams
from autosac.verification.measuring import measure_peak

NUM_LAYERS, WIDTH = 10, 8
DRAWS = {
    "torch.rand": lambda: torch.rand([]),
    "uniform_": lambda: torch.empty(1).uniform_(0, 1).item(),
    "random.random": random.random,
    "random.uniform": lambda: random.uniform(0, 1),
    "numpy": lambda: np.random.random(),
}
# Above or below 0.7 by another distribution, which no extreme word of a stream tells.
SOME_ARE_HIGH = {
    "bernoulli": lambda: torch.bernoulli(torch.tensor(0.4)),
    "bernoulli_": lambda: torch.empty(()).bernoulli_(0.4),
    "Bernoulli": lambda: torch.distributions.Bernoulli(0.4).sample(),
    "Categorical": lambda: torch.distributions.Categorical(torch.ones(5)).sample() - 2,
    "torch.randint": lambda: torch.randint(0, 10, ()) - 5,
    "random_": lambda: torch.empty(()).random_(0, 10) - 5,
    "torch.randn": lambda: torch.randn(()) + 0.5,
    "random.randint": lambda: random.randint(0, 9) - 5,
    "random.choice": lambda: random.choice([False, True]),
    "random.choices": lambda: random.choices([0, 1], [6, 4])[0],
    "random.gauss": lambda: random.gauss(0.5, 1),
    "np.random.randint": lambda: np.random.randint(10) - 5,
    "np.random.choice": lambda: np.random.choice([0, 1]),
    "np.random.binomial": lambda: np.random.binomial(1, 0.4),
    "np.random.randn": lambda: np.random.randn() + 0.5,
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
@pytest.mark.parametrize("name", DRAWS | SOME_ARE_HIGH)
def test_a_step_that_drops_no_layer_is_planned_though_hardly_any_does(name):
    model = DropsLayers((DRAWS | SOME_ARE_HIGH)[name])
    assert num_layers_run(model) == NUM_LAYERS


class SkipsAdapter(nn.Module):
    """Adds what an adapter makes, or does not, as its draw says."""

    def __init__(self, draw, rate):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.draw, self.rate = draw, rate

    def forward(self, x):
        out = self.linear(x).tanh()
        if self.draw() >= self.rate:
            out = out + nn.functional.linear(x, self.weight.reshape(WIDTH, WIDTH))
        return out


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["torch.rand", "bernoulli", "bernoulli_"])
def test_modules_that_draw_what_they_do_are_units_in_a_step_of_extreme_draws(name):
    draw = (DRAWS | SOME_ARE_HIGH)[name]

    def floor_bytes(rate):
        layers = [SkipsAdapter(draw, rate) for _ in range(6)]
        x = torch.ones(64, WIDTH)
        profile = autosac.profile(nn.Sequential(*layers), x, loss_fn=torch.sum)
        return autosac.floor(profile), profile.step.learned.seed

    expected, ordinary = floor_bytes(0.0)  # no draw is lower
    assert ordinary == 0
    assert floor_bytes(0.7) == (expected, HIGHEST)  # with no warning of any left out


class DrawsRows(nn.Module):
    """Does much for the rows that a drawn mask has."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.linear(x)
        rows = x[torch.bernoulli(torch.full((len(x),), 0.5)) > 0.5]
        return rows.tanh().exp().sin().sum() + x.sum()


def test_a_step_with_all_of_the_rows_that_a_mask_draws_is_planned():
    x = torch.ones(12, WIDTH)
    tape = autosac.profile(DrawsRows(), x, loss_fn=torch.sum).tape
    [made] = [op.creates for op in tape.ops if op.name == "aten.tanh.default"]
    assert tape.storages[made[0]].nbytes == x.nbytes


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


@pytest.mark.parametrize("name", SOME_ARE_HIGH)
def test_all_draws_are_extreme_move_their_streams_and_are_as_ever_afterwards(name):
    draw = SOME_ARE_HIGH[name]

    def following():
        return float(draw()), random.random(), np.random.random(), torch.rand([]).item()

    with seeded_streams(0):
        expected_after = following()
    for seed, is_high in ((HIGHEST, True), (LOWEST, False)):
        with seeded_streams(seed) as draws:
            assert [bool(draw() >= 0.7) for _ in range(9)] == [is_high] * 9
            assert draws.are_met()
    with seeded_streams(0):
        assert following() == expected_after


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.bernoulli(torch.tensor(0.5)),
        lambda: random.randint(0, 9) > 4,
        lambda: np.random.randint(10) > 4,
    ],
)
def test_a_loop_until_another_number_is_drawn_ends(draw, monkeypatch):
    monkeypatch.setattr(extreme_draws, "_NUM_DRAWN", 20)
    for seed, is_high in ((HIGHEST, True), (LOWEST, False)):
        with seeded_streams(seed):
            while draw() == is_high:
                pass


def test_draws_of_many_numbers_are_as_ever():
    def draws():
        many = torch.bernoulli(torch.full((2000,), 0.5))
        return [many.mean().item(), np.random.randint(2, size=2000).mean()]

    with seeded_streams(HIGHEST):
        assert draws() == pytest.approx([0.5] * 2, abs=0.1)
        assert len({random.sample(range(1000), 3)[-1] for _ in range(3)}) == 3
        distinct = torch.multinomial(torch.ones(9), 9)
    assert sorted(distinct.tolist()) == list(range(9))


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


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.narrow(self.wide(x).tanh())


class DropsResiduals(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(4))
        self.draw = draw

    def forward(self, x):
        for layer in self.layers:
            if self.draw() >= 0.7:
                x = layer(x)
        return x + self.layers[0].narrow.bias


def test_layers_that_some_steps_drop_take_no_memory_besides():
    """Plans are those of the model that keeps all layers, and no step takes more."""
    x = torch.ones(64, WIDTH)

    def plans(model):
        profile = autosac.profile(model, x, loss_fn=torch.sum)
        low, high = autosac.floor(profile), profile.baseline_peak_bytes
        budgets = [low + (high - low) * part // 8 for part in (4, 1, 0, 6)]
        return [autosac.plan(profile, memory_budget=budget) for budget in budgets]

    def figures(plan):
        return plan.budget_bytes, plan.peak_bytes, plan.recompute_ms

    model = DropsResiduals(DRAWS["torch.rand"])
    found, expected = plans(model), plans(DropsResiduals(lambda: 1.0))

    assert list(map(figures, found)) == list(map(figures, expected))
    held = [*model.parameters(), x]
    for plan in found:
        plan.apply(model)
        for seed in range(6):
            torch.manual_seed(seed)
            _, peak_bytes = measure_peak(
                lambda: model(x).sum().backward(), device="cpu", held=lambda: held
            )
            assert peak_bytes <= plan.peak_bytes
            model.zero_grad()
        plan.unapply(model)
