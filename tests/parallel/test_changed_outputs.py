"""No FSDP unit reshards whose output is a view that is changed in place.

What is true is said by FSDP2 itself, on a process group that moves nothing.
"""

import pytest
import torch
from torch import nn

import autosac
from autosac.parallel.fsdp_candidates import find_candidates
from autosac.parallel.fsdp_memory import RankSimulator
from autosac.parallel.fsdp_schedule import Schedule
from autosac.parallel.sharding import Sharding, fsdp_units
from tests.parallel.resharding import runs_with

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view"),
]


class Linear(nn.Linear):
    """Gives a view of sequences, as PyTorch's own does before 2.15."""

    def forward(self, x):
        y = super().forward(x)
        return y.view(y.shape) if y.ndim == 3 else y


class Block(nn.Module):
    def __init__(self, *, adds):
        super().__init__()
        self.up, self.down = Linear(16, 64), Linear(64, 16)
        self.act, self.adds = nn.ReLU(inplace=True), adds

    def forward(self, x):
        y = self.down(self.act(self.up(x)))
        if self.adds:
            y += x
        return y


class Stack(nn.Module):
    """Blocks that add their input, or to whose output the model adds it."""

    def __init__(self, *, adds=True):
        super().__init__()
        self.blocks = nn.ModuleList(Block(adds=not adds) for _ in range(2))
        self.head, self.adds = nn.Linear(16, 4), adds

    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            if self.adds:
                y += x
            x = y
        return self.head(x)


ROWS, SEQUENCES = torch.ones(6, 16), torch.ones(2, 3, 16)
UNITS = [
    (True, SEQUENCES, "blocks.0", False),
    (True, SEQUENCES, "blocks.1.up", False),
    (True, SEQUENCES, "blocks.0.down", False),
    (True, SEQUENCES, "head", True),
    (False, SEQUENCES, "blocks.0", True),
    (False, SEQUENCES, "blocks.0.down", False),
    (True, ROWS, "blocks.0", True),  # whose output is no view
    (True, ROWS, "blocks.1.up", True),
]


def profile_of(model, inputs):
    return autosac.profile(model, inputs, loss_fn=torch.sum, optimizer=torch.optim.SGD)


@pytest.mark.parametrize(("adds", "inputs", "fqn", "runs"), UNITS)
def test_no_unit_reshards_whose_hook_pytorch_drops(adds, inputs, fqn, runs):
    assert runs_with(Stack(adds=adds), inputs, fqn) == runs
    profile = profile_of(Stack(adds=adds), inputs)
    may_be = {own.fqn for own in find_candidates(Schedule(profile.tape), None)}
    ranks = RankSimulator(profile)
    resharding = Sharding(units=fsdp_units([fqn]), shard_degree=2)
    if runs:
        ranks.peak_bytes(resharding, {})
        return
    assert fqn not in may_be
    with pytest.raises(ValueError, match=f"`{fqn}` is a view that `aten.*in place"):
        ranks.peak_bytes(resharding, {})
    gathered = fsdp_units([fqn], reshard_after_forward=False)
    ranks.peak_bytes(Sharding(units=gathered, shard_degree=2), {})


def test_a_named_unit_whose_output_is_changed_is_refused():
    with pytest.raises(ValueError, match=r"`blocks.0`.* in place.* make a new tensor"):
        autosac.plan_parallel(
            Stack(),
            SEQUENCES,
            loss_fn=torch.sum,
            optimizer=torch.optim.SGD,
            cluster="pcie-l40s",
            num_gpus=2,
            memory_budget="1GiB",
            fsdp_units=["blocks.0"],
        )
