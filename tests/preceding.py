"""What tests of calls that recompute before backward share."""

import torch
from torch import nn

from autosac import is_checkpointing, is_recomputing

WIDTH = 8


def stage():
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Dropout(0.5),
        nn.ReLU(inplace=True),
        nn.Linear(WIDTH, WIDTH),
    )


def rows(*, requires_grad=True):
    return torch.randn(4, WIDTH, requires_grad=requires_grad)


class Recorded(nn.Module):
    """Notes what the flags say each time it runs."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner or nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        RUNS.append((is_checkpointing(), is_recomputing(), torch.is_grad_enabled()))
        return self.inner(x)


RUNS = []
FORWARD, RECOMPUTATION = (True, False, True), (False, True, True)
