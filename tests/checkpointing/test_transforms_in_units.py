"""Units whose ops `torch.vmap` batches do the same in every step."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import autosac

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 48


class Batched(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 7)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        y = torch.vmap(lambda row: torch.tanh(row @ self.weight))(x)
        return x + self.down(functional.gelu(self.up(y)))


@pytest.mark.parametrize("share", [0.6, 0.9])
def test_no_mode_begins_where_a_transform_hides_its_levels(share):
    # Its first op to be seen follows a result that autograd saves inside of vmap.
    def step(model):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return [loss, *(p.grad for p in model.parameters())]

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Batched() for _ in range(3))), torch.randn(6, 24, WIDTH)
    expected = step(model)
    profile = autosac.profile(model, x, loss_fn=lambda out: out.square().mean())
    floor, plain = autosac.floor(profile), profile.baseline_peak_bytes
    own = autosac.plan(profile, memory_budget=int(floor + share * (plain - floor)))
    assert any(policy.fqn in {"0", "1"} for policy in own.op_policies)
    own.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            assert all(map(torch.equal, step(model), expected))
