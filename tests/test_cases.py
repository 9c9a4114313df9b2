"""Short models that once got wrong gradients, broken budgets or raw errors."""

import pytest

import autosac
from tests.models import Case
from tests.short_models import CASES, DRAWN, mean_square

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow_but_first
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CASES)
def test_it_is_planned_near_its_floor_and_trains_bit_by_bit(name):
    case = Case(*CASES[name], mean_square)
    profile = autosac.calibrate(case.profile(), progress=False)
    floor, peak = autosac.floor(profile), profile.baseline_peak_bytes
    plan = autosac.plan(profile, memory_budget=floor + (peak - floor) // 20)

    done = autosac.verify(
        plan, case.model, case.inputs, loss_fn=mean_square, timing_rounds=0
    )

    assert not done.differences
    assert done.measured_peak_bytes <= plan.budget_bytes
    if name not in DRAWN:
        assert done.predicted_peak_bytes == pytest.approx(
            done.measured_peak_bytes, rel=0.002, abs=64
        )


def test_verify_says_that_a_step_fails_without_a_plan():
    case = Case(*CASES["grouped"], mean_square)
    profile = case.profile()
    plan = autosac.plan(profile, memory_budget=profile.baseline_peak_bytes)

    with (
        pytest.raises(autosac.TraceError, match="fails without a plan, too"),
        pytest.warns(UserWarning, match="with a `loss_fn`, and `verify` got none"),
    ):
        autosac.verify(plan, case.model, case.inputs)  # its gradient is expanded
