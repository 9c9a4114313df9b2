"""A first step that sets something up counts, though a later one is planned."""

import functools
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import autosac
from autosac.errors import InfeasibleBudgetError

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS = 16, 96


class SetsUp(nn.Module):
    """Learns a mean from its first batch, by way of all differences of its rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("is_set_up", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.set_up(x.detach())
        return x - self.mean

    @torch.no_grad()
    def set_up(self, x):
        if not self.is_set_up:
            self.mean.copy_((x[:, None] - x[None]).mean((0, 1)))
            self.is_set_up.fill_(1)


class KeepsLatest(SetsUp):
    def forward(self, x):
        x = super().forward(x)
        self.latest = x.detach()
        return x


class KeepsTable(nn.Module):
    """Makes a table in its first step, and keeps it in a dict."""

    def __init__(self):
        super().__init__()
        self.tables = {}

    def forward(self, x):
        if "mean" not in self.tables:
            lines = torch.linspace(0, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
            self.tables["mean"] = (lines[:, None] * lines[None]).mean(0)
        return x - self.tables["mean"]


@functools.lru_cache
def table():
    lines = torch.linspace(0, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    return (lines[:, None] * lines[None]).mean(0)


class SharesTable(nn.Module):
    def forward(self, x):
        return x - table()


def block(*more):
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), *more
    )


@dataclass(frozen=True)
class Case:
    kind: type[nn.Module]
    is_inside: bool  # of a block, which can be an AC unit
    norms_weight: bool = False

    def model(self):
        table.cache_clear()
        torch.manual_seed(0)
        last = [block(self.kind())] if self.is_inside else [block(), self.kind()]
        first = block()
        if self.norms_weight:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is deprecated
                nn.utils.weight_norm(first[0])
        return nn.Sequential(first, block(), *last)


CASES = {
    "kept": Case(KeepsLatest, False),
    "kept inside": Case(KeepsLatest, True),
    "weight norm": Case(SetsUp, False, norms_weight=True),
    "table": Case(KeepsTable, False),
    "table inside": Case(KeepsTable, True),
    "cache": Case(SharesTable, False),
}


def inputs():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def mean_square(outputs):
    return outputs.square().mean()


def verified(plan, model, steps):
    return autosac.verify(
        *(plan, model, inputs), loss_fn=mean_square, steps=steps, timing_rounds=0
    )


def profile_of(case):
    with pytest.warns(UserWarning, match=r"^The first step takes .*B more than later"):
        profile = autosac.profile(case.model(), inputs(), loss_fn=mean_square)
    return autosac.calibrate(profile, progress=False)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.filterwarnings("ignore:.* cannot be an AC unit:UserWarning")
@pytest.mark.filterwarnings("ignore:AC unit:UserWarning")  # departs in the first step
def test_the_first_step_keeps_the_least_budget_too(case):
    profile = profile_of(case)

    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))

    done = verified(plan, case.model, 2)
    assert done.within_budget, (done.measured_peak_bytes, plan.budget_bytes)
    assert done.identical
    assert plan.peak_bytes == pytest.approx(done.measured_peak_bytes, rel=0.01)


def test_what_the_first_step_takes_is_in_the_peak_of_no_plan():
    case = CASES["kept"]

    profile = profile_of(case)

    plan = autosac.plan(profile, memory_budget="1GiB")
    measured = verified(plan, case.model, 1).baseline_peak_bytes
    assert profile.baseline_peak_bytes == pytest.approx(measured, rel=0.01)


def test_a_budget_that_later_steps_alone_would_keep_is_refused():
    case = CASES["kept"]
    profile = profile_of(case)
    rows_by_rows = ROWS * ROWS * WIDTH * 4

    with pytest.raises(InfeasibleBudgetError):
        autosac.plan(profile, memory_budget=rows_by_rows)


def test_a_model_that_was_called_before_has_no_such_step():
    model = CASES["kept"].model()
    with torch.no_grad():
        model(inputs())

    profile = autosac.profile(model, inputs(), loss_fn=mean_square)

    assert not profile.tape.earlier
    assert profile.baseline_peak_bytes < ROWS * ROWS * WIDTH * 4


class Scaled(nn.Sequential):
    """Scales its weight by what it computes with it in its first step."""

    def __init__(self):
        super().__init__(*block())
        self.register_buffer("is_set_up", torch.zeros((), dtype=torch.bool))

    def forward(self, x):
        if not self.is_set_up:
            with torch.no_grad():
                self[0].weight.data /= self[0](x).std(0)[:, None]
            self.is_set_up.fill_(True)
        return super().forward(x)


def scaled(*, is_set_up=False):
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), Scaled())
    if is_set_up:
        with torch.no_grad():
            model(inputs())
    return model


def test_units_whose_first_step_takes_more_are_named_with_what_to_do():
    first = autosac.profile(scaled(), inputs(), loss_fn=mean_square)
    later = autosac.profile(scaled(is_set_up=True), inputs(), loss_fn=mean_square)

    with pytest.warns(UserWarning, match=r"step 1 .* run the model once before"):
        least = autosac.floor(first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert autosac.floor(later) < least


@dataclass(frozen=True)
class NoPlan:
    budget_bytes: int
    peak_bytes: int = 1

    def apply(self, model):
        pass


def test_verify_says_if_an_earlier_step_than_the_last_is_over_the_budget():
    model = CASES["kept"].model
    highest = verified(NoPlan(0), model, 1).measured_peak_bytes

    over = verified(NoPlan(highest - 1), model, 3)
    kept = verified(NoPlan(highest), model, 3)

    assert over.measured_peak_bytes == kept.measured_peak_bytes == highest
    assert not over.within_budget and "EXCEEDED" in str(over.summary())
    assert kept.within_budget
