"""Twins of units with arguments in far memory: what they say, and what is so."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from autosac.devices.links import Link
from autosac.planning.dry_running import difference_in_dry_run
from autosac.profiles.profile import profile
from autosac.profiles.restricting import restricted
from autosac.solvers import sac
from autosac.solving.formulation import formulate
from autosac.solving.rules_of_thumb import policy_saving
from autosac.units import curves
from autosac.units.far_units import find_far_units
from autosac.units.groups import TapeIndex
from tests.far_choices import kind_of
from tests.models import CASES, Case
from tests.test_chains import Block

WIDTH, ROWS = 16, 6


class Keeper(nn.Module):
    """Keeps the argument of its second block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        self.kept = x = self.blocks[0](x)
        x = self.blocks[1](x)
        return self.blocks[3](self.blocks[2](x)).square().mean()


def far_step(case):
    return restricted(case.profile(), offload=True)


def late(step):
    """Twins that come back as their reruns begin."""
    return [unit for unit in step.far_units if kind_of(unit) == "late"]


@pytest.fixture(scope="module")
def keeper():
    return far_step(Case(Keeper, lambda: torch.randn(ROWS, WIDTH)))


def test_what_the_caller_or_the_model_still_needs_is_not_moved(keeper):
    # The first block's argument is the step's input; the second one's is kept.
    assert [unit.fqn for unit in late(keeper)] == ["blocks.2", "blocks.3"]


def test_arguments_go_at_the_end_of_the_next_call(keeper):
    # The last one's at its own end.
    by_fqn = {u.fqn: u for u in keeper.units.candidates}
    assert [(unit.until, unit.let_go) for unit in late(keeper)] == [
        ("blocks.3", by_fqn["blocks.3"].call.exit)
    ] * 2


def test_the_next_call_hides_a_copy_out_and_its_backward_one_back(keeper):
    candidates, op_ms = keeper.units.candidates, (1.0,) * len(keeper.tape.ops)
    nbytes = 4 * ROWS * WIDTH
    this, after = (u for u in candidates if u.fqn in ("blocks.2", "blocks.3"))
    num_ops = len(after.ops)
    num_back = sum(after.trigger <= op.start < this.trigger for op in keeper.tape.ops)
    assert num_back > 5

    def waits_ms(out_ms, back_ms):
        link = Link(
            out_bytes_per_s=1e3 * nbytes / out_ms,
            back_bytes_per_s=1e3 * nbytes / back_ms,
        )
        twins = find_far_units(keeper.tape, candidates, op_ms, link)
        policies = [policy_saving(unit, ()) for unit in twins]
        pairs = zip(twins, policies, strict=True)
        return [unit.waits_ms(policy) for unit, policy in pairs if not unit.results]

    # That of the second block, the same prefetched, that of the third one.
    assert waits_ms(num_ops / 2, 5) == pytest.approx([5, 0, 5 + num_ops / 2])
    assert waits_ms(num_ops + 2, 5) == pytest.approx([5 + 2, 2, 5 + num_ops + 2])
    back_ms = num_back + 3
    assert waits_ms(1, back_ms) == pytest.approx([back_ms, 3, back_ms + 1])


@pytest.mark.slowest_but_first
@pytest.mark.parametrize("name", ["gpt", "convolutions", "list inputs", "tied weights"])
def test_dry_runs_take_what_was_simulated(name):
    step = far_step(CASES[name])
    of_unit = dict(zip(step.formulation.units, step.formulation.curves, strict=True))
    assert step.far_units
    for unit in step.far_units:
        for policy in of_unit[unit].policies:
            assert not difference_in_dry_run(step, {unit: policy})
    units = [unit for unit in step.far_units if unit in of_unit]
    early, moved = ([u for u in units if kind_of(u) == k] for k in ("early", "results"))
    for some in (late(step), early, moved, units[::2]):
        together = {unit: of_unit[unit].policies[0] for unit in _apart(some)}
        assert not difference_in_dry_run(step, together)


def _apart(units):
    """Outermost units."""
    outer = []
    for unit in units:
        if not outer or unit.call.enter > outer[-1].call.exit:
            outer.append(unit)
    return outer


@pytest.mark.parametrize("name", ["gpt", "tied weights"])
def test_the_predicted_peak_of_each_point_is_the_simulated_one(name):
    step = far_step(CASES[name])
    simulator = step.simulator.in_blocks
    of_unit = dict(zip(step.formulation.units, step.formulation.curves, strict=True))
    for unit in step.far_units:
        curve = of_unit[unit]
        problem = formulate(simulator, [unit], [curve]).problem(0)
        for point, policy in enumerate(curve.policies):
            weights = [[float(k == point) for k in range(len(curve.policies))]]
            predicted = max(sac.live_bytes(problem, weights))
            assert predicted == simulator.peak_bytes({unit: policy})


def test_a_twin_frees_its_arguments_between_the_two_places():
    step = far_step(CASES["gpt"])
    simulator = step.simulator
    plain = {unit.call: unit for unit in step.units.candidates}
    index = TapeIndex(step.tape)
    for unit in step.far_units:
        policy = curves.trade_off(plain[unit.call]).policies[-1]
        both = [
            simulator.ledger({one: policy}).after_ticks(
                step.tape.num_ticks, simulator.span
            )
            for one in (plain[unit.call], unit)
        ]
        gained = both[0] - both[1]
        free = max(index.held_elsewhere_until(s, unit.saved) for s in unit.far)
        first = max(unit.let_go, free)
        assert first < unit.resumes < unit.trigger
        assert set(gained[first : unit.resumes].tolist()) == {unit.arguments_bytes}
        assert not gained[:first].any()


def test_nothing_is_offloaded_where_the_link_is_not_known():
    step = CASES["gpt"].profile()
    step = replace(step, device=replace(step.device, link=None))

    with pytest.raises(ValueError, match="`offload` takes the rates"):
        restricted(step, offload=True)


def test_a_link_has_rates():
    with pytest.raises(ValueError, match="above 0"):
        Link(out_bytes_per_s=0, back_bytes_per_s=1)


def test_a_profile_with_offload_is_made_once():
    step = profile(CASES["gpt"].model(), CASES["gpt"].inputs())
    far = restricted(step, offload=True)

    assert restricted(step, offload=True) is far
    assert restricted(far, offload=True) is far
    assert far.plain is step
