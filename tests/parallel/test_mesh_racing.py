"""Ways to divide a model against each other: bounds say which are planned."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autosac
from autosac.parallel.clusters import cluster_spec
from autosac.parallel.formulating import Setting
from autosac.parallel.mesh_racing import MeshRace, batch_ms
from autosac.parallel.plans import Alternative
from autosac.parallel.tp_styles import TensorParallel
from autosac.parallel.tp_tracing import fake_ranks, rank_profile
from autosac.profiles.compute_dtype import in_compute_dtype

STYLES = {"0": "colwise", "2": "rowwise"}


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


@dataclass(frozen=True)
class Planned:
    step_ms: float
    division: TensorParallel


# Time of a batch with 1, 2, 4 and 8 ranks a group, and what a bound lacks of it.
TIMES = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=4, max_size=4
)


@given(times=TIMES)
def test_the_cheapest_batch_wins_whatever_the_bounds(times):
    by_degree = dict(zip((1, 2, 4, 8), times, strict=True))
    planned = []

    def plan(tensor):
        planned.append(tensor.degree)
        return Planned(by_degree[tensor.degree][0] / tensor.degree, tensor)

    def least_ms(tensor):
        own_ms, lacks_ms = by_degree[tensor.degree]
        return own_ms - lacks_ms

    race = MeshRace(plan, least_ms)
    race.run(mlp(), (1, 2, 4, 8), STYLES, False)
    best_ms = min(own_ms for own_ms, _ in times)
    assert batch_ms(race.best) == best_ms
    # What was not planned could not win, and the reason says what it takes at least.
    for lost in race.lost():
        own_ms, lacks_ms = by_degree[lost.division.degree]
        if lost.division.degree not in planned:
            assert own_ms - lacks_ms >= best_ms
            more = (own_ms - lacks_ms) / best_ms - 1
            assert f", {more:.1%} more than" in lost.reason
    assert len(race.lost()) == 3


def test_what_lost_is_said_by_what_a_batch_takes_not_by_its_shared_step():
    # Steps of four ranks take less time, and they train on one batch together.
    race = MeshRace(
        lambda tensor: Planned(113.0, tensor), lambda tensor: 47.125 * tensor.degree
    )
    race.run(mlp(), (1, 4), STYLES, False)
    assert race.best.division.degree == 1
    assert [lost.reason for lost in race.lost()] == [
        "a batch takes 188 ms of a GPU at least (4 ranks share each step of 47.1 ms),"
        " 66.8% more than the 113 ms here"
    ]


def test_shards_and_replicas_are_said_in_plain_words():
    of_16 = [
        Alternative(shard_degree=n, replicate_degree=16 // n, reason="")
        for n in (16, 4, 1)
    ]
    assert list(map(str, of_16)) == [
        "sharded over 16 ranks, no replicas",
        "sharded over 4 ranks, 4 replicas",
        "not sharded, 16 replicas",
    ]


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("degree", [2, 4])
def test_a_division_in_the_gathered_type_is_that_of_its_own_type_cast(degree):
    profile = autosac.profile(
        mlp().to("meta"), torch.zeros(4, 8), optimizer="adamw", device="h100"
    )
    spec = cluster_spec("hgx-h100", num_gpus=8)
    tensor = TensorParallel(degree=degree, styles=STYLES)
    typed = Setting(param_dtype="bfloat16", reduce_dtype="float32")
    at_once = rank_profile(profile, tensor, spec, typed).tape
    own = rank_profile(profile, tensor, spec, Setting())
    with fake_ranks(degree, divides_loss=False):
        cast = in_compute_dtype(own, torch.bfloat16).tape
    assert at_once.storages == cast.storages
    assert at_once.parameters == cast.parameters
    facts = [
        [(op.name, op.phase, op.flops, op.moved_bytes, op.start) for op in tape.ops]
        for tape in (at_once, cast)
    ]
    assert facts[0] == facts[1]
