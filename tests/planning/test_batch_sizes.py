from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autosac
from autosac.cli.demo import next_token_loss
from autosac.planning import batch_sizes
from tests.models import gpt

pytestmark = pytest.mark.usefixtures("one_thread")


def tokens(size):
    return torch.randint(32, (size, 8))


def floor_at(model, size, **options):
    options = {"device": "h100", **options}
    return autosac.floor(autosac.profile(model, tokens(size), **options))


class Counted:
    """Counts the sizes that are asked for."""

    def __init__(self):
        self.sizes = []

    def __call__(self, size):
        self.sizes.append(size)
        return tokens(size)


@dataclass
class Steps:
    """Floors that are flat, then rise in lines or jumps."""

    slopes: list[int]
    budget_bytes: int
    looks: set[int] = field(default_factory=set)

    def modelled_floor(self, size):
        self.looks.add(size)
        return sum(max(0, size - 40 * k) * s for k, s in enumerate(self.slopes))

    def fits(self, size):
        return self.modelled_floor(size) <= self.budget_bytes


@given(
    slopes=st.lists(st.integers(0, 9), max_size=5).map(lambda some: [*some, 7]),
    budget=st.integers(0, 10**5),
)
def test_the_search_for_the_largest_batch_finds_it_in_few_looks(slopes, budget):
    steps = Steps(slopes, budget)
    largest = next(n for n in range(1, 10**5) if not steps.fits(n + 1))
    steps.looks.clear()

    assert batch_sizes._largest(steps, 2**16) == largest
    assert len(steps.looks) <= 8 + 2 * largest.bit_length()


@pytest.fixture(scope="module")
def model():
    return gpt(2)


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_one_does_not(model):
    budget = floor_at(model, 21)  # so that the answer is known: at least 21
    make = Counted()

    largest = autosac.max_batch_size(model, make, memory_budget=budget, device="h100")

    assert largest.batch_size >= 21
    assert floor_at(model, largest.batch_size) <= budget
    assert floor_at(model, largest.batch_size + 1) > budget
    assert largest.plan.peak_bytes <= largest.plan.budget_bytes == budget
    assert largest.samples_per_s == pytest.approx(
        1000 * largest.batch_size / largest.plan.step_ms
    )
    assert len(set(make.sizes)) <= 12  # not one by one


@pytest.mark.slow
def test_measured_workspaces_count_where_the_model_is():
    model = gpt(1)
    lowest = autosac.plan(
        model, tokens(4), memory_budget="1GiB", loss_fn=lambda x: x.square().mean()
    ).baseline_peak_bytes

    largest = autosac.max_batch_size(
        model,
        tokens,
        memory_budget=lowest,
        make_loss_fn=next_token_loss,
    )

    assert largest.batch_size >= 4
    assert largest.plan.calibrated
    sizes = {trial.cell["batch_size"]: trial.floor_bytes for trial in largest.trials}
    assert sizes[largest.batch_size] <= lowest < sizes[largest.batch_size + 1]


def test_one_sample_that_does_not_fit_is_infeasible(model):
    with pytest.raises(
        autosac.InfeasibleBudgetError, match="At batch size 1"
    ) as caught:
        autosac.max_batch_size(model, tokens, memory_budget="1KiB", device="h100")

    assert caught.value.lowest_peak_bytes == floor_at(model, 1)


def test_a_share_is_of_the_devices_memory():
    model = nn.Linear(4, 4)

    with pytest.raises(ValueError, match="`most`=4 fits"):
        autosac.max_batch_size(
            model, lambda n: torch.randn(n, 4), memory_budget="50%", most=4,
            device="h100",
        )  # fmt: skip


@pytest.mark.slow
def test_the_best_batch_beats_every_other_one_that_was_tried(model):
    budget = floor_at(model, 6)

    best = autosac.best_batch_size(model, tokens, memory_budget=budget, device="h100")

    rates = {t.cell["batch_size"]: t.samples_per_s for t in best.trials if t.step_ms}
    assert rates[best.batch_size] == max(rates.values())
    assert {1, 2, 4} <= rates.keys()
    assert best.plan.peak_bytes <= budget
    # The sizes next to the best one were looked at, unless it is the largest.
    near = {best.batch_size - 1, best.batch_size + 1} - {0}
    assert near <= {t.cell["batch_size"] for t in best.trials}


@pytest.mark.slow
def test_recomputation_counts_in_the_throughput(model):
    ample = autosac.best_batch_size(
        model, tokens, memory_budget="8GiB", sizes=[16], device="h100"
    )
    tight = autosac.best_batch_size(
        model, tokens, memory_budget=floor_at(model, 16), sizes=[16], device="h100"
    )

    assert tight.plan.recompute_ms > ample.plan.recompute_ms == 0.0
    assert tight.samples_per_s < ample.samples_per_s


@pytest.mark.slow
def test_accumulation_spreads_the_optimizer_step_over_more_samples(model):
    rates = [
        autosac.best_batch_size(
            model, tokens, memory_budget="8GiB", sizes=[4], device="h100",
            optimizer=torch.optim.AdamW, accumulate=n,
        ).samples_per_s
        for n in (2, 8)
    ]  # fmt: skip

    assert rates[0] < rates[1]


@pytest.mark.slow
def test_sizes_that_do_not_fit_are_passed_over(model):
    best = autosac.best_batch_size(
        model, tokens, memory_budget=floor_at(model, 6), sizes=[64, 4, 2],
        device="h100",
    )  # fmt: skip

    assert best.batch_size in (2, 4)
    assert [t.cell["batch_size"] for t in best.trials] == [2, 4, 64]
    assert best.trials[-1].samples_per_s is None
    assert [row.status for row in best.trials] == ["planned"] * 2 + ["infeasible"]
    (panel,) = best.trials.picture().panels
    assert panel.y_label == "samples/s" and panel.lines[0].x == (2.0, 4.0)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"sizes": []}, ValueError, "positive"),
        (
            {"sizes": [0, 1]},
            ValueError,
            "`sizes` must be a whole number of at least 1, got 0",
        ),
        ({"loss_fn": torch.sum, "make_loss_fn": next_token_loss}, TypeError, "one of"),
    ],
)
def test_wrong_arguments_are_refused(options, error, match, model):
    with pytest.raises(error, match=match):
        autosac.best_batch_size(
            model, tokens, memory_budget="1GiB", device="h100", **options
        )


@pytest.mark.slow
def test_a_budget_that_no_size_fits_is_refused(model):
    with pytest.raises(autosac.InfeasibleBudgetError, match="At batch size 64"):
        autosac.best_batch_size(
            model, tokens, memory_budget=floor_at(model, 2), device="h100", sizes=[64]
        )


def test_a_loss_of_one_batch_names_what_makes_others():
    targets = torch.zeros(64, dtype=torch.long)
    with pytest.raises(autosac.TraceError, match="pass `make_loss_fn`, a function of"):
        autosac.max_batch_size(
            nn.Linear(4, 8),
            lambda size: torch.ones(size, 4),
            memory_budget="1GiB",
            loss_fn=lambda output: nn.functional.cross_entropy(output, targets),
        )
