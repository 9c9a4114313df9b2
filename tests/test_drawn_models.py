"""Models drawn at random train as they do without a plan, bit for bit."""

import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st

import autosac
from autosac.checkpointing import installing
from autosac.planning.spelling import spell_out
from autosac.verification.measuring import capture_state, differences
from tests.drawn_models import LENGTH, ROWS, WIDTH, BlockSpec, Drawn, models
from tests.models import random_choice

pytestmark = pytest.mark.usefixtures("one_thread")

sizes = st.lists(
    st.tuples(st.sampled_from([ROWS, ROWS + 2]), st.booleans()), min_size=2, max_size=4
)


@dataclass(frozen=True)
class Habits:
    """How a model is trained.

    Attributes:
        sizes: Of each step: rows, and whether it takes another branch.
        autocast: Whether it computes in half precision.
        twice: Whether each loss goes backward twice.
        touches: Whether attributes change between forward and backward.
    """

    sizes: list[tuple[int, bool]]
    autocast: bool
    twice: bool
    touches: bool


def make(specs):
    torch.manual_seed(0)
    return Drawn(specs).train()


def forward(model, habits, *args):
    with torch.autocast("cpu", torch.bfloat16, enabled=habits.autocast):
        return model(*args).square().mean()


def train(model, habits):
    """The state after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for num_rows, is_other in habits.sizes:
            optimizer.zero_grad()
            loss = forward(
                model, habits, torch.randn(num_rows, LENGTH, WIDTH), is_other
            )
            if habits.touches:
                model.touch()
            if habits.twice:
                loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            states.append(capture_state(model, optimizer, loss))
    return states


def planned(specs, habits, seed):
    inputs = torch.randn(ROWS, LENGTH, WIDTH)
    autocast = torch.bfloat16 if habits.autocast else None
    traced = autosac.profile(make(specs), inputs, autocast=autocast)
    share = {0: 0.0, 1: 1.0}.get(seed)
    model = make(specs)
    chosen = random_choice(traced, seed, save_share=share)
    installing.install(model, spell_out(traced, chosen))
    return model


@pytest.mark.slow
@settings(max_examples=14, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    specs=models,
    habits=st.builds(Habits, sizes, st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 5),
)
@example(  # it departs with a write to what its plan expects nobody to need
    specs=(BlockSpec(("linear",), ("linear", "residual"), 0, "size", False),),
    habits=Habits([(ROWS + 2, False), (ROWS, False)], False, False, False),
    seed=1,
)
def test_gradients_buffers_and_random_numbers_are_those_without_a_plan(
    specs, habits, seed
):
    try:
        expected = train(make(specs), habits)
    except RuntimeError as error:  # what a block was given may not be changed
        assert "modified by an inplace operation" in str(error)
        reject()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # units that depart say so
        states = train(planned(specs, habits, seed), habits)

    for before, after in zip(expected, states, strict=True):
        assert differences(before, after) == ()


@pytest.mark.slow
def test_memory_that_is_used_again_in_a_rerun_is_not_taken_for_what_lay_there():
    # A clone of a buffer that has been changed since dies, and a number from Python
    # comes to lie where it lay, in some of these runs.
    specs = (
        BlockSpec(("codes", "choose", "codes"), ("literal",) * 2, 1, "flag", True),
    )
    sizes = [(ROWS, True), (ROWS, False), (ROWS, False), (ROWS + 2, False)]
    habits = Habits(sizes, False, False, False)
    expected = train(make(specs), habits)
    for _ in range(12):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # units that depart say so
            states = train(planned(specs, habits, 4), habits)
        for before, after in zip(expected, states, strict=True):
            assert differences(before, after) == ()
