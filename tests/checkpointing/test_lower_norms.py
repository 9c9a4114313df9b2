"""Batch norms without weights, of a lower type: statistics say how they compute."""

import pytest
import torch
from torch import nn

import autosac

WIDTH = 32


class Head(nn.Module):
    """The last norm of a projector, as in SimSiam, has no weight."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.norm = nn.BatchNorm1d(64, affine=False)
        self.squashes = False

    def forward(self, x):
        hidden = self.norm(self.up(x))
        return self.down(torch.tanh(hidden) if self.squashes else hidden.relu())


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(Head() for _ in range(4)))


def rows():
    return torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(0))


def mean_square(output):
    return output.float().square().mean()


def trained(model, squashes=False):
    for head in model:
        head.squashes = squashes
    for _ in range(2):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean_square(model(rows()))
        loss.backward()
    return [parameter.grad for parameter in model.parameters()] + [*model.buffers()]


def planned():
    profile = autosac.profile(
        make_model(), rows(), loss_fn=mean_square, autocast=torch.bfloat16
    )
    budget = autosac.floor(profile)
    assert budget < profile.baseline_peak_bytes
    model = make_model()
    autosac.plan(profile, memory_budget=budget).apply(model)
    return model


def test_gradients_and_statistics_are_those_without_a_plan():
    assert all(map(torch.equal, trained(planned()), trained(make_model())))


@pytest.mark.filterwarnings("ignore:AC unit:UserWarning")
def test_so_they_are_where_units_depart():
    departed = trained(planned(), squashes=True)

    assert all(map(torch.equal, departed, trained(make_model(), squashes=True)))
