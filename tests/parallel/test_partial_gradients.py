"""Parameters that no style divides, and that meet a part on each rank."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import autosac
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import cluster_spec
from benchmarks import rank_models

SPEC = replace(cluster_spec("pcie-l40s", num_gpus=4), device=device_spec("cpu"))
WIDTH, NUM_TOKENS, LENGTH = 96, 1024, 16


class Learnt(nn.Module):
    """An activation with a weight of its own, as xIELU and PReLU."""

    def __init__(self, shape=(1,)):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return functional.softplus(functional.softplus(self.slope) * x)


class Block(rank_models.Block):
    """With that activation, or a factor of the MLP's output."""

    def __init__(self, activation=None, factor=None):
        super().__init__()
        if activation is not None:
            self.mlp[1] = activation
        self.factor = factor

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        made = self.mlp(self.ln_2(x))
        return x + (made if self.factor is None else self.factor * made)


class Model(rank_models.GPT):
    def __init__(self, **options):
        super().__init__()
        self.h = nn.ModuleList([Block(**options)])


def tokens():
    return torch.randint(NUM_TOKENS, (2, LENGTH))


def softplus(output):
    return functional.softplus(output).mean()


def plan(model, tp_plan, **mesh):
    return autosac.plan_parallel(
        *(model, tokens()),
        loss_fn=softplus,
        cluster=SPEC,
        memory_budget="1GiB",
        mesh={"tp": 2, **mesh},
        tp_plan=tp_plan,
    )


MLP = {"h.*.mlp.0": "colwise", "h.*.mlp.2": "rowwise"}
FACTOR = {"factor": nn.Parameter(torch.ones(WIDTH))}


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(
    ("options", "tp_plan", "mesh", "fqn"),
    [
        ({"activation": Learnt()}, MLP, {}, "h.0.mlp.1.slope"),
        ({"activation": nn.PReLU()}, MLP, {}, "h.0.mlp.1.weight"),
        ({"activation": Learnt()}, MLP, {"cp": 2}, "h.0.mlp.1.slope"),
        (FACTOR, "sequence", {}, "h.0.factor"),
    ],
)
def test_whole_parameters_that_meet_a_part_are_refused(options, tp_plan, mesh, fqn):
    with pytest.raises(autosac.ArgumentError, match=f"`{fqn}` meets a part of what"):
        plan(Model(**options), tp_plan, **mesh)


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(
    ("options", "tp_plan"),
    [({}, MLP), ({}, "sequence"), (FACTOR, "tensor")],
)
def test_those_that_meet_the_whole_are_planned(options, tp_plan):
    assert plan(Model(**options), tp_plan).tensor.degree == 2


def test_frozen_ones_have_no_gradient():
    assert plan(Model(activation=Learnt().requires_grad_(False)), MLP)


def test_stages_refuse_them_too():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.act, self.down = nn.Linear(8, 32), Learnt(), nn.Linear(32, 8)

        def forward(self, x):
            return self.down(self.act(self.up(x)))

    with pytest.raises(autosac.ArgumentError, match=r"`\d.act.slope` meets a part"):
        autosac.plan_pipeline(
            *(nn.Sequential(*(Part() for _ in range(4))), torch.randn(8, 8)),
            target=torch.randn(8, 8),
            loss_fn=functional.mse_loss,
            cluster=SPEC,
            memory_budget="1GiB",
            num_ranks=2,
            num_micro_batches=4,
            mesh={"tp": 2},
            tp_plan={"*.up": "colwise", "*.down": "rowwise"},
        )
