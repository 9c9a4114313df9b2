"""A model that is called in the other mode than its plan is for."""

import pytest
import torch
from torch import nn

import autosac

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        hidden = nn.functional.dropout(self.up(x).tanh(), training=self.training)
        return x + self.down(hidden)


def planned(*, training):
    model = nn.Sequential(*(Block() for _ in range(3))).train(training)
    profile = autosac.profile(
        model, torch.randn(64, WIDTH), loss_fn=lambda y: y.square().sum()
    )
    return autosac.plan(profile, memory_budget=autosac.floor(profile)).apply(model)


@pytest.mark.parametrize("training", [True, False])
def test_a_step_in_the_other_mode_is_said_once(training):
    # Transformers hands models out in eval mode: who plans them so trains unplanned.
    model = planned(training=training).train(not training)
    other = "eval" if training else "train"
    with pytest.warns(UserWarning, match=f"in {other} mode with gradients.*{other}()"):
        model(torch.randn(64, WIDTH)).sum().backward()

    model(torch.randn(64, WIDTH)).sum().backward()  # warnings fail tests


def test_an_evaluation_without_gradients_is_not_said():
    model = planned(training=True).eval()
    with torch.no_grad():
        model(torch.randn(64, WIDTH))
