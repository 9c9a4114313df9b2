"""What one process plans for all, in one process of a group that does nothing."""

import pytest
import torch
from torch import nn

import autosac
from autosac._compat_distributed import fake_group


@pytest.fixture
def group():
    with fake_group(2):
        yield


class Branches(nn.Module):
    """One large weight, and smaller ones that are more in all."""

    def __init__(self):
        super().__init__()
        self.large = nn.Linear(700, 700, bias=False)
        self.small = nn.ModuleList(nn.Linear(700, 90, bias=False) for _ in range(8))

    def forward(self, x):
        x = torch.relu(self.large(x))
        return sum(layer(x).square().mean() for layer in self.small)


def test_a_batch_is_planned_anew_for_all_parts_of_a_divided_state(group):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, x = Branches(), torch.ones(4, 700)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, foreach=False
    )
    plan = autosac.plan_replicas(
        nn.parallel.DistributedDataParallel(model),
        x,
        memory_budget="40MiB",
        optimizer=optimizer,
        on_mismatch="replan",
    )

    again = plan.replan(model, (x,), {})

    assert again.peak_bytes == plan.peak_bytes
    assert again.composition == plan.composition
