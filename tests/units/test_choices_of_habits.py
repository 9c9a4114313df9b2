"""Not only the choices that are best take the memory that was simulated."""

import pytest

from autosac.planning.dry_running import difference_in_dry_run
from autosac.solving.rules_of_thumb import policy_saving
from autosac.units.policies import RERUN
from tests import test_habits as habits

HABITS = (
    *(habits.IndexesByArray, habits.CastsWeights, habits.CastsWeightsUnderAutocast),
    *(habits.Conjugates, habits.Parametrized, habits.Picks),
)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("block", HABITS)
def test_any_result_of_a_block_can_be_kept_alone(block):
    profile = habits.of(block).profile()
    (unit,) = (unit for unit in profile.candidates if unit.fqn == "blocks.3")

    for g in (g for g, group in enumerate(unit.groups) if group.needed):
        policy = policy_saving(unit, {g})
        if RERUN in policy.choices:
            assert not difference_in_dry_run(profile, {unit: policy})
