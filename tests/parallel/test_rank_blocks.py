"""What the allocator adds to ranks on GPUs, on ledgers counted by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import autosac
from autosac.cli.demo import GPT
from autosac.devices.specs import device_spec
from autosac.parallel import fsdp_memory
from autosac.parallel.clusters import cluster_spec
from autosac.parallel.rank_blocks import excess_bytes, reserved_bytes
from autosac.simulation.allocator_steps import FirstStep
from autosac.step.ledger import Ledger

MIB = 2**20
NONE = np.array([], dtype=np.int64)


def ledger(*entries):
    """One of MiB that are born and die at instants, in streams; all but those at 0."""
    nbytes, born, died, stream = map(np.array, zip(*entries, strict=True))
    sizes = (nbytes * MIB).astype(np.int64)
    return Ledger(born=born, died=died, nbytes=sizes, end=10, stream=stream)


@pytest.mark.parametrize(
    ("entries", "whole", "added"),
    [
        ([(19.5, 1, 5, 0)], NONE, 0.5),  # half a MiB of its segment stays with it
        ([(3, 1, 5, 0)], NONE, 0),
        ([(19.5, 1, 5, 0), (19.5, 2, 5, 1)], NONE, 1),
        ([(19.5, 1, 3, 0), (19.5, 4, 6, 1)], NONE, 0.5),  # not at one instant
        ([(19.5, 1, 5, 1), (3, 1, 5, 0)], NONE, 0.5),
        # A parameter that was there before leaves a block that is too large by 0.75.
        ([(29.25, 0, 10, 0)], np.array([30 * MIB]), 0.75),
        ([(29.25, 0, 10, 1)], np.array([40 * MIB]), 0.75),  # other streams': 30 again
        ([(20, 0, 10, 0)], np.array([30 * MIB]), 0),
        ([(0.5, 0, 10, 0)], np.array([MIB // 2]), 0),
    ],
)
def test_what_blocks_have_left_over_adds_up_over_streams(entries, whole, added):
    step = ledger((1, 0, 10, 0), *entries)

    assert excess_bytes(step, FirstStep(), whole) == added * MIB


def test_no_stream_gets_what_another_one_has_freed():
    one_by_one = [(30, 1, 3, 0), (30, 4, 6, 0)]
    apart = [(30, 1, 3, 0), (30, 4, 6, 1)]

    assert reserved_bytes(ledger(*one_by_one), FirstStep(), NONE) == 30 * MIB
    assert reserved_bytes(ledger(*apart), FirstStep(), NONE) == 60 * MIB


def _refuse(*_):
    raise AssertionError("nothing is added on a CPU")


@pytest.mark.slow
def test_a_plan_for_gpus_counts_what_the_allocator_adds_and_one_for_cpus_does_not(
    monkeypatch,
):
    with torch.device("meta"):
        model = GPT(num_layers=2, width=512, num_heads=8, vocabulary=1000, length=512)
    inputs = torch.zeros(4, 512, dtype=torch.long)

    def plan(cluster):
        return autosac.plan_parallel(
            model,
            inputs,
            cluster=cluster,
            num_gpus=8,
            memory_budget="1GiB",
            loss_fn=lambda logits: logits.square().mean(),
            optimizer="adamw",
        )

    on_gpus = plan("hgx-h100")
    monkeypatch.setattr(fsdp_memory, "excess_bytes", lambda *_: 0)
    as_asked = plan("hgx-h100")
    monkeypatch.setattr(fsdp_memory, "excess_bytes", _refuse)
    on_cpus = plan(replace(cluster_spec("hgx-h100"), device=device_spec("cpu")))

    assert on_gpus.policy == as_asked.policy
    assert on_gpus.sharding == as_asked.sharding
    assert on_gpus.peak_bytes > as_asked.peak_bytes
    assert sum(on_gpus.composition.values()) == on_gpus.peak_bytes
    assert on_gpus.reserved_bytes > on_gpus.peak_bytes
    assert "reserved" in str(on_gpus)
    assert on_cpus.reserved_bytes is None
    assert "reserved" not in str(on_cpus)
