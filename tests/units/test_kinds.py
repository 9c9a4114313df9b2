"""A new kind of unit is a class that says what it does in backward, and no more."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest

from autosac.profiles.memory_history import history
from autosac.solvers import sac
from autosac.solving.formulation import formulate
from autosac.units import curves
from autosac.units.unit import Unit
from tests.models import CASES


@dataclass(frozen=True, kw_only=True, eq=False)
class Rehearsed(Unit):
    """A module that runs once for nothing before it is rerun."""

    def schedule(self, policy):
        (piece,) = super().schedule(policy)
        return (replace(piece, leave=self.call.exit), piece)


def most_rerun(unit):
    return curves.trade_off(unit).policies[-1]


def entries(ledger):
    columns = (ledger.born.tolist(), ledger.died.tolist(), ledger.nbytes.tolist())
    return Counter(zip(*columns, strict=True))


@pytest.fixture(scope="module")
def profile():
    return CASES["gpt"].profile()


@pytest.fixture(scope="module")
def plain(profile):
    return next(u for u in profile.units.candidates if u.fqn.endswith("blocks.0"))


@pytest.fixture(scope="module")
def toy(plain):
    return plain.as_kind(Rehearsed, key=("rehearsed", plain.key))


def test_its_time_is_that_of_all_pieces(plain, toy):
    policy = most_rerun(plain)

    once_ms = curves.recompute_ms(plain, policy) - plain.followed_ms
    twice_ms = curves.recompute_ms(toy, policy) - toy.followed_ms
    assert twice_ms == pytest.approx(2 * once_ms)


def test_the_picture_of_memory_has_its_time_and_the_simulated_peak(profile, plain, toy):
    policy = most_rerun(plain)

    before, after = (history(profile, {unit: policy}) for unit in (plain, toy))
    once_ms = curves.recompute_ms(plain, policy) - plain.followed_ms
    assert after.end_ms - before.end_ms == pytest.approx(once_ms)
    assert after.peak_bytes == profile.simulator.peak_bytes({toy: policy})


def test_what_it_makes_for_nothing_is_alive_only_before_its_rerun(profile, plain, toy):
    simulator, policy = profile.simulator, most_rerun(plain)
    first, last = (toy.trigger - 1) * simulator.span, toy.trigger * simulator.span

    once, twice = (entries(simulator.ledger({unit: policy})) for unit in (plain, toy))
    added = twice - once
    assert added and not once - twice
    assert all(first < born <= died < last for born, died, _ in added)


def test_its_predicted_peak_is_the_simulated_one(profile, toy):
    curve = curves.trade_off(toy)
    simulator = profile.simulator.in_blocks
    formulation = formulate(simulator, [toy], [curve])
    problem = formulation.problem(0)

    for point, policy in enumerate(curve.policies):
        weights = [[float(k == point) for k in range(len(curve.policies))]]
        predicted = max(sac.live_bytes(problem, weights))
        assert predicted == simulator.peak_bytes({toy: policy})
