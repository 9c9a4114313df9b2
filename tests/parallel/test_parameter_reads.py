"""No FSDP unit holds a parameter that is read while the unit does not run.

What is true is said by FSDP2 itself, on a process group that moves nothing.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


class Scaled(nn.Module):
    """The parent multiplies by a parameter of each block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) * block.scale
        return self.head(x)


class Tied(nn.Module):
    """An embedding's weight is read again, as a head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(99, 16), nn.Linear(16, 16)

    def forward(self, x):
        return functional.linear(self.mix(self.embedding(x)), self.embedding.weight)


class Handing(nn.Module):
    """A module inside another returns a view of its parameter, which that one reads."""

    class Outer(nn.Module):
        class Inner(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(16, 16))

            def forward(self, x):
                return x * 2, self.weight.t()

        def __init__(self):
            super().__init__()
            self.inner = self.Inner()

        def forward(self, x):
            x, weight = self.inner(x)
            return x @ weight

    def __init__(self):
        super().__init__()
        self.first, self.outer = nn.Linear(16, 16), self.Outer()

    def forward(self, x):
        return self.outer(self.first(x))


FLOATS, TOKENS = torch.ones(2, 3, 16), torch.ones(2, 3, dtype=torch.long)
MODELS = {
    "scaled": (Scaled, FLOATS),
    "tied": (Tied, TOKENS),
    "handing": (Handing, FLOATS),
}
UNITS = [
    ("scaled", "blocks.0", False),
    ("scaled", "blocks.0.up", True),
    ("scaled", "head", True),
    ("tied", "embedding", False),
    ("tied", "mix", True),
    ("handing", "outer.inner", False),
    ("handing", "outer", True),
    ("handing", "first", True),
]


def plan_two_ranks(model, inputs, **options):
    options = {"memory_budget": "1GiB", "loss_fn": torch.sum, **options}
    return autosac.plan_parallel(
        model,
        inputs,
        optimizer=torch.optim.SGD,
        cluster="pcie-l40s",
        num_gpus=2,
        degrees=[2],
        **options,
    )


def profile_of(name):
    kind, inputs = MODELS[name]
    optimizer = torch.optim.SGD
    return autosac.profile(kind(), inputs, loss_fn=torch.sum, optimizer=optimizer)


@pytest.mark.parametrize("name", MODELS)
def test_all_candidates_that_may_be_units_run_as_such(name):
    kind, inputs = MODELS[name]
    candidates = find_candidates(Schedule(profile_of(name).tape), None)
    may_be = {own.fqn for own in candidates if own.fqn and own.can_be_unit}
    assert may_be
    for fqn in may_be:
        assert runs_with(kind(), inputs, fqn), fqn


@pytest.mark.parametrize(("name", "fqn", "runs"), UNITS)
def test_a_named_unit_is_refused_just_where_pytorch_meets_a_shard(name, fqn, runs):
    kind, inputs = MODELS[name]
    assert runs_with(kind(), inputs, fqn) == runs
    ranks = RankSimulator(profile_of(name))
    sharding = Sharding(units=fsdp_units([fqn]), shard_degree=2)
    if runs:
        plan = plan_two_ranks(kind(), inputs, fsdp_units=[fqn])
        assert fqn in [own.fqn for own in plan.sharding.units]
        ranks.peak_bytes(sharding, {})
        return
    said = rf"`{fqn}.*` is read in .* by `.*` .*while `{fqn}` does not run"
    with pytest.raises(ValueError, match=said):
        plan_two_ranks(kind(), inputs, fsdp_units=[fqn])
    with pytest.raises(ValueError, match=said):
        ranks.peak_bytes(sharding, {})
