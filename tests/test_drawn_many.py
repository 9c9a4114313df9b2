"""Models drawn at random train as they do without a plan, bit for bit."""

import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import autosac
from autosac.applying import applying
from autosac.measuring.measuring import capture_state, differences
from autosac.planning.planning import spell_out
from tests.drawn_models import LENGTH, ROWS, WIDTH, Drawn, models
from tests.models import random_choice

pytestmark = pytest.mark.usefixtures("one_thread")

batches = st.lists(
    st.tuples(st.sampled_from([ROWS, ROWS + 2]), st.booleans()), min_size=2, max_size=4
)


def make(specs):
    torch.manual_seed(0)
    return Drawn(specs).train()


def train(model, sizes):
    """The state after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for num_rows, is_other in sizes:
            optimizer.zero_grad()
            loss = model(torch.randn(num_rows, LENGTH, WIDTH), is_other).square().mean()
            loss.backward()
            optimizer.step()
            states.append(capture_state(model, optimizer, loss))
    return states


def planned(specs, seed):
    traced = autosac.profile(make(specs), torch.randn(ROWS, LENGTH, WIDTH))
    share = {0: 0.0, 1: 1.0}.get(seed)
    model = make(specs)
    chosen = random_choice(traced, seed, save_share=share)
    applying.install(model, spell_out(traced, chosen))
    return model


@settings(
    max_examples=2500,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(specs=models, sizes=batches, seed=st.integers(0, 5))
def test_gradients_buffers_and_random_numbers_are_those_without_a_plan(
    specs, sizes, seed
):
    expected = train(make(specs), sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # units that depart say so
        found = train(planned(specs, seed), sizes)

    for before, after in zip(expected, found, strict=True):
        assert differences(before, after) == ()
