"""Parts of a batch: arguments by place as by name, and attention without a kernel."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import autosac
from autosac._compat_distributed import fake_group
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import cluster_spec
from autosac.parallel.context_parallel import ContextParallel
from autosac.parallel.sequence_parts import part_of

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH, WIDTH, HEADS = 8, 16, 4
CPUS = replace(cluster_spec("pcie-l40s", num_gpus=2), device=device_spec("cpu"))


class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = dropout

    def forward(self, x):
        heads = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout, is_causal=True
        )
        return y.transpose(1, 2).reshape(x.shape)


class Model(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.tokens = nn.Embedding(32, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.attention = Attention(dropout)

    def forward(self, x, positions=None):
        if positions is None:
            positions = torch.arange(x.shape[1])[None]
        return self.attention(self.tokens(x) + self.places(positions))


def plan(inputs, dropout=0.0):
    return autosac.plan_parallel(
        Model(dropout),
        inputs,
        loss_fn=lambda output: output.square().mean(),
        optimizer=torch.optim.AdamW,
        cluster=CPUS,
        memory_budget="1GiB",
        mesh={"cp": 2},
    )


def batch():
    return torch.arange(4 * LENGTH).view(4, LENGTH), torch.arange(LENGTH)[None]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_positions_by_place_are_cut_as_those_by_name(tmp_path):
    tokens, positions = batch()
    plan((tokens, positions)).save(tmp_path / "plan.json")
    planned = autosac.ParallelPlan.load(tmp_path / "plan.json")
    assert planned.peak_bytes == plan({"x": tokens, "positions": positions}).peak_bytes
    model, whole = Model(), (slice(None), slice(4, None))
    with fake_group(2, rank=1):
        mesh = planned.make_mesh("cpu")
        by_place, none = planned.part_of((tokens, positions), mesh)
        assert not none
        assert [t.tolist() for t in by_place] == [
            t[whole].tolist() for t in (tokens, positions)
        ]
        (own,), added = planned.part_of(tokens, mesh)
        assert torch.equal(own, by_place[0])
        assert torch.equal(added["positions"], by_place[1])
        planned.apply(model, mesh)
        assert model(*by_place).shape == (4, LENGTH // 2, WIDTH)


NAMES = ("input_ids", "attention_mask", "position_ids", "labels")


def test_arguments_by_place_count_as_those_by_name():
    tokens, positions = batch()
    context = ContextParallel(
        degree=2, positions="position_ids", shifts_labels=True, arguments=NAMES
    )
    args, more = part_of(((tokens, None, None, tokens), {}), context, 1)
    assert torch.equal(args[2], positions[:, 4:])  # in place of the None
    named = part_of(((), {"input_ids": tokens, "labels": tokens}), context, 1)[1]
    assert more.keys() == {"shift_labels", "num_items_in_batch"}
    assert torch.equal(more["shift_labels"], named["shift_labels"])
    with pytest.raises(autosac.UnsupportedError, match="`attention_mask` cannot"):
        part_of(((tokens, torch.ones_like(tokens)), {}), context, 1)


def test_attention_without_a_kernel_is_named_with_its_reason():
    with pytest.raises(autosac.UnsupportedError, match="dropout, for which the CPU"):
        plan(batch(), dropout=0.1)
    with (
        sdpa_kernel(SDPBackend.MATH),
        pytest.raises(autosac.UnsupportedError, match=r"`attention` calls .* on 'cpu'"),
    ):
        plan(batch())
