import dataclasses

import pytest
import torch
from torch import nn

import autosac
from autosac.planning.choices import lowest
from autosac.profiles import memory_history
from autosac.step.tape import CATEGORIES
from autosac.units import curves
from tests.models import CASES, SMALL_GPT, random_choice, random_policy

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def gpt():
    return CASES["gpt"].profile(torch.optim.AdamW)


# --- the history of a step --------------------------------------------------------


SOME = ["gpt", "convolutions", "list inputs", "called twice", "lstm"]
each_of_some = pytest.mark.parametrize("name", SOME)


@pytest.mark.slow_but_fifth
@each_of_some
def test_the_history_peaks_where_the_simulation_does_and_counts_each_byte(name):
    traced = CASES[name].profile(torch.optim.SGD)
    for chosen in ({}, random_choice(traced, 0), random_choice(traced, 1)):
        step_history = memory_history.history(traced, chosen)

        assert step_history.peak_bytes == traced.simulator.peak_bytes(chosen)
        assert step_history.live_bytes.min() >= 0
        parts = dict(
            zip(
                CATEGORIES,
                step_history.live_bytes[:, step_history.peak_index].tolist(),
                strict=True,
            )
        )
        assert parts == traced.simulator.composition(chosen)
        recompute_ms = sum(curves.recompute_ms(*item) for item in chosen.items())
        assert step_history.end_ms == pytest.approx(traced.baseline_ms + recompute_ms)
        assert (step_history.times_ms[1:] >= step_history.times_ms[:-1]).all()


def test_chains_and_nests_take_their_time_in_the_history():
    traced = SMALL_GPT.profile(torch.optim.AdamW)
    chosen = lowest(traced)
    assert any(len(unit.calls) > 1 for unit in chosen)

    step_history = memory_history.history(traced, chosen)

    recompute_ms = sum(curves.recompute_ms(*item) for item in chosen.items())
    assert step_history.end_ms == pytest.approx(traced.baseline_ms + recompute_ms)
    assert step_history.peak_bytes == traced.peak_bytes(chosen)


class Spike(nn.Module):
    """Memory is highest while `first` makes something large for a moment."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4096), nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            scale = self.first(x).sum(1, keepdim=True)
        return self.last(x * scale)


def test_the_place_of_the_peak_is_named():
    estimate = autosac.estimate(Spike(), torch.randn(256, 4))

    assert (estimate.fqn, estimate.phase) == ("", "forward")
    assert estimate.op == "aten.sum.dim_IntList"


def test_an_optimizer_can_be_the_place_of_the_peak():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)

    assert autosac.estimate(model, torch.randn(1, 64), optimizer=optimizer).phase == (
        "optimizer"
    )


def test_a_rerun_can_be_the_place_of_the_peak():
    # What is large for a moment in forward is so again in the rerun, when the
    # gradient of the loss is there too.
    traced = autosac.profile(nn.Sequential(Spike()), torch.randn(256, 4))
    (unit,) = (unit for unit in traced.units.candidates if unit.fqn == "0")
    policy = random_policy(unit, 0, save_share=0.0)

    place = memory_history.peak_place(traced, {unit: policy})

    assert str(place) == "recomputation of `0`"
    assert place.op == "aten.sum.dim_IntList"


# --- the estimate -----------------------------------------------------------------


@pytest.mark.slow_but_fifth
@each_of_some
def test_categories_sum_to_the_peak_exactly(name):
    traced = CASES[name].profile(torch.optim.AdamW)

    estimate = autosac.estimate(traced)

    assert estimate.peak_bytes == traced.baseline_peak_bytes
    assert sum(estimate.breakdown.values()) == estimate.peak_bytes
    assert estimate.breakdown.keys() >= set(CATEGORIES)


def test_what_lives_from_step_to_step_is_what_pytorch_has():
    model, x = CASES["convolutions"].model(), CASES["convolutions"].inputs()
    optimizer = torch.optim.Adam(model.parameters())

    breakdown = autosac.estimate(model, x, optimizer=optimizer).breakdown

    model(x).sum().backward()
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values()]
    assert breakdown["parameter"] == sum(p.nbytes for p in model.parameters())
    assert breakdown["buffer"] == sum(b.nbytes for b in model.buffers())
    assert breakdown["optimizer"] == sum(t.nbytes for t in state)
    assert breakdown["input"] == x.nbytes


def test_blocks_of_libraries_and_kernels_are_workspaces(kept_workspaces):
    model, x = CASES["mlp"].model(), CASES["mlp"].inputs()
    estimate = autosac.estimate(model, x, device="h100")

    assert estimate.breakdown["workspace"] >= 2 * 32 * 2**20  # cuBLAS, for two threads
    assert sum(estimate.breakdown.values()) == estimate.peak_bytes


def test_modules_have_what_is_made_inside_them(gpt):
    estimate = autosac.estimate(gpt)
    by_fqn = {row.fqn: row for row in estimate.modules}

    assert list(by_fqn) == [node.fqn for node in gpt.tape.modules.nodes]
    made_in_step = sum(
        storage.nbytes
        for storage in gpt.tape.storages
        if storage.born > 0 and storage.category != "input"
    )
    assert 0 < by_fqn[""].peak_bytes <= made_in_step
    for row in estimate.modules[1:]:
        parent = by_fqn[row.fqn.rpartition(".")[0]]
        assert row.peak_bytes <= parent.peak_bytes


def test_fits_compares_with_devices_and_amounts(gpt):
    estimate = autosac.estimate(gpt)

    assert estimate.fits()
    assert estimate.fits(estimate.peak_bytes) and not estimate.fits(
        estimate.peak_bytes - 1
    )
    assert estimate.fits("1GiB") and not estimate.fits("1KiB")
    assert estimate.fits(torch.device("cpu"))
    twice = dataclasses.replace(estimate.device, memory_bytes=2 * estimate.peak_bytes)
    halved = dataclasses.replace(estimate, device=twice)
    assert halved.fits("50%") and not halved.fits("49%")
    small = dataclasses.replace(estimate.device, memory_bytes=estimate.peak_bytes - 1)
    assert not estimate.fits(small)


def test_a_device_of_other_kernels_is_refused(gpt):
    with pytest.raises(ValueError, match="profile the step for h100, and estimate"):
        autosac.estimate(gpt).fits("h100")
    with pytest.raises(ValueError, match="not a known device"):
        autosac.estimate(gpt).fits("h1000")

    model, x = CASES["mlp"].model(), CASES["mlp"].inputs()
    on_h100 = autosac.estimate(model, x, device="h100")
    assert on_h100.fits("h200")
    with pytest.raises(ValueError, match="other kernels"):
        on_h100.fits("a100")


def test_the_text_and_the_table_have_every_module_that_matters(gpt):
    pytest.importorskip("pandas")
    estimate = autosac.estimate(gpt)

    table = estimate.to_dataframe()

    assert table["fqn"].tolist() == [row.fqn for row in estimate.modules]
    assert "  attention (Attention)" in str(estimate)
    assert "MiB" in str(estimate) or "KiB" in str(estimate)
