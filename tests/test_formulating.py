import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

import autosac
from autosac.cli.demo import GPT
from autosac.solvers import sac
from autosac.solvers.curves import curve, knapsack
from autosac.solving.formulation import beside_points, formulate
from autosac.units.curves import UnitCurve
from tests.models import CASES, shared_profile


def random_choice(formulation, rng):
    """Whole points of units that do not lie inside one another."""
    taken = [None] * len(formulation.units)
    for i in rng.sample(range(len(taken)), len(taken)):
        unit = formulation.units[i]
        clashes = (
            formulation.units[j].call.enter <= unit.call.exit
            and unit.call.enter <= formulation.units[j].call.exit
            for j, point in enumerate(taken)
            if point is not None
        )
        if rng.random() < 0.6 and not any(clashes):
            taken[i] = rng.randrange(len(formulation.curves[i].policies))
    return taken


def chosen_units(formulation, points):
    """Units and policies of whole points."""
    return {
        unit: curve.policies[point]
        for unit, curve, point in zip(
            formulation.units, formulation.curves, points, strict=True
        )
        if point is not None
    }


def both_peaks(traced, formulation, points):
    """By the MILP's memory, and by simulation."""
    weights = [
        [int(k == point) for k in range(len(unit.points))]
        for unit, point in zip(formulation.solver_units, points, strict=True)
    ]
    chosen = chosen_units(formulation, points)
    predicted = max(sac.live_bytes(formulation.problem(0), weights))
    return predicted, traced.simulator.peak_bytes(chosen)


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", CASES)
def test_the_milp_predicts_the_peak_that_the_simulation_finds(name):
    traced = shared_profile(CASES[name])
    formulation = traced.formulation
    rng = random.Random(0)
    for _ in range(40):
        points = random_choice(formulation, rng)

        predicted, actual = both_peaks(traced, formulation, points)

        assert predicted == actual


@pytest.mark.slow
def test_memory_adds_up_at_every_position_where_autocast_drops_its_copies():
    # Relative position biases keep copies of weights alive for several blocks.
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
        ids = torch.zeros(2, 16, dtype=torch.long)
    traced = autosac.profile(
        model,
        {"input_ids": ids, "labels": ids},
        optimizer="sgd",
        device="h100",
        autocast=torch.bfloat16,
    )
    formulation, simulator = traced.formulation, traced.simulator.in_blocks
    solver = sac.Solver(formulation.problem(0))
    starts = formulation.edges * simulator.span
    rng = random.Random(0)
    for _ in range(30):
        points = random_choice(formulation, rng)

        chosen = chosen_units(formulation, points)
        alive = simulator.timeline(chosen).most_from(starts)

        assert (alive == solver.live(points)).all()


class SavesItsOutput(nn.Module):
    """Recurrent or tanh-like layers, each before a dropout that holds its output."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.drops = nn.ModuleList(nn.Dropout(0.5) for _ in layers)

    def forward(self, x):
        for layer, drop in zip(self.layers, self.drops, strict=True):
            out = layer(x)
            x = drop(out[0] if isinstance(out, tuple) else out)
        return x


def tanh_like():
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh())


@pytest.mark.parametrize(
    "make_layer",
    [tanh_like, lambda: nn.LSTM(32, 32)],
    ids=["tanh", "lstm"],
)
def test_what_one_unit_frees_and_another_one_holds_is_alive(make_layer):
    model = SavesItsOutput([make_layer(), make_layer()])
    traced = autosac.profile(model, torch.randn(64, 8, 32, requires_grad=True))
    formulation = traced.formulation
    names = [unit.fqn for unit in formulation.units]
    pairs = [
        {names[u] for u, _ in (*hold.freed_by, *hold.holders)}
        for hold in formulation.holds
        if hold.freed_by
    ]
    for i in range(2):
        assert any({f"layers.{i}", f"drops.{i}"} <= pair for pair in pairs)
    # Where only these are alive at the peak, a hold left out would show.
    without = dataclasses.replace(formulation, holds=())
    missed = 0
    for picked in itertools.product((False, True), repeat=4):
        wanted = {
            name
            for name, is_in in zip(
                ("layers.0", "drops.0", "layers.1", "drops.1"), picked, strict=True
            )
            if is_in
        }
        points = [
            len(curve.policies) - 1 if name in wanted else None
            for name, curve in zip(names, formulation.curves, strict=True)
        ]

        predicted, actual = both_peaks(traced, formulation, points)

        assert predicted == actual
        missed += both_peaks(traced, without, points)[0] < actual
    assert missed


def test_what_one_unit_keeps_and_another_one_holds_is_counted_once():
    # The last op of each layer is a norm: saving it keeps the layer's output as well.
    layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3)]
    traced = autosac.profile(nn.Sequential(*layers), torch.randn(8, 16, 32))
    formulation = traced.formulation
    assert any(hold.kept_by for hold in formulation.holds)
    without = dataclasses.replace(
        formulation, holds=tuple(h for h in formulation.holds if not h.kept_by)
    )
    rng, overstated = random.Random(0), 0
    for _ in range(100):
        points = random_choice(formulation, rng)

        predicted, actual = both_peaks(traced, formulation, points)

        assert predicted == actual
        overstated += both_peaks(traced, without, points)[0] > actual
    assert overstated


def test_fitted_curves_keep_breakpoints_that_are_points_of_the_exact_curve():
    formulation = CASES["gpt"].profile().formulation

    fitted = formulation.fitted(2)

    for exact, thinned, kept in zip(
        formulation.solver_units, fitted.problem.units, fitted.kept, strict=True
    ):
        assert len(thinned.points) == len(kept) <= 3
        for point, k in zip(thinned.points, kept, strict=True):
            assert point.freed_bytes == exact.points[k].freed_bytes
            assert point.recompute_ms >= exact.points[k].recompute_ms


def test_points_beside_those_of_the_milp_are_no_worse_than_any_known_point():
    rng = np.random.default_rng(0)
    ms = np.sort(rng.uniform(1.0, 2.0, 20_000))
    saved = np.sort(rng.choice(10**9, len(ms), replace=False))[::-1]
    nothing = np.zeros((len(ms), 0), dtype=bool)
    front = knapsack.Front(
        problem=knapsack.SaveProblem(
            saved_bytes=(),
            runtime_ms=(),
            inputs=(),
            needed=frozenset(),
        ),
        saved=nothing,
        rerun=nothing,
        saved_bytes=saved,
        recompute_ms=ms,
        complete_below_ms=math.inf,
    )
    chosen = [0, 5_000, 19_999]
    freed = saved[0] - saved
    points = curve.TradeoffCurve(
        freed_bytes=tuple(freed[chosen].tolist()),
        recompute_ms=tuple(ms[chosen].tolist()),
    )
    of_unit = UnitCurve(points=points, policies=(), ratios=(), front=front)

    beside = beside_points(of_unit)

    ends = [[b.point + k for b in beside] for k in (0, 1)]
    low, high = np.array(points.freed_bytes)[ends]
    frees = low + np.array([b.share for b in beside]) * (high - low)
    frees = np.append(frees, points.freed_bytes)
    times = np.append([b.recompute_ms for b in beside], points.recompute_ms)
    order = frees.argsort()
    frees, least = frees[order], np.minimum.accumulate(times[order][::-1])[::-1]
    fastest = least[frees.searchsorted(freed - 1.0)]
    assert len(beside) < len(ms) / 2
    assert (fastest <= ms).all()
    assert (fastest >= ms * (1 - 2**-11)).all()


def test_units_that_look_alike_are_formulated_alike(monkeypatch):
    traced = autosac.profile(GPT(num_layers=6), torch.zeros(1, 32, dtype=torch.long))
    moved = traced.formulation
    seen = len(moved.units)

    monkeypatch.setattr("autosac.solving.formulation._moved", lambda *_: None)
    one_by_one = formulate(traced.simulator, moved.units, moved.curves)

    assert moved.solver_units == one_by_one.solver_units
    assert len({unit.key for unit in moved.units}) < seen / 2
