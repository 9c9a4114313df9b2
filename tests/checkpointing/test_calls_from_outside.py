"""AC units that a training loop calls besides the model's forward."""

import pytest
import torch

from autosac.checkpointing.batch_variants import steps_by_hand
from tests.checkpointing.test_other_mode import WIDTH, planned


def test_a_unit_that_the_loop_calls_by_itself_is_said_once():
    # What its second call keeps, and its rerun, come on top of the planned peak.
    model, x = planned(training=True), torch.randn(64, WIDTH)
    with (
        pytest.warns(UserWarning, match="is not the planned loss"),
        pytest.warns(UserWarning, match="AC unit `0` is called outside of .*forward"),
    ):
        (model(x).sum() + model[0](x).sum()).backward()

    model[0](x).sum().backward()  # warnings fail tests


def test_a_call_without_gradients_or_in_a_step_that_begins_by_hand_is_not_said():
    model, x = planned(training=True), torch.randn(64, WIDTH)
    with torch.no_grad():
        model[0](x)
    begin = steps_by_hand(model)

    begin(x)
    model[0](x).sum().backward()


def test_a_thread_that_is_still_in_forward_as_another_one_leaves_it_is_inside():
    # No real threads: in torch 2.10 dispatch modes of two leave Dynamo off for good.
    model, x = planned(training=True), torch.randn(64, WIDTH)

    with model.forward.variants.running():  # as the one does
        model(x)  # the other one
        model[1](x)  # the one goes on; warnings fail tests

    with pytest.warns(UserWarning, match="AC unit `1` is called outside of .*forward"):
        model[1](x)
