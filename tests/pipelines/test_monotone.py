"""More memory, bandwidth or GPUs is never slower, in drawn cases; fewest GPUs."""

import random
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
import torch

import autosac
from autosac.errors import ArgumentError, InfeasibleBudgetError
from autosac.parallel.clusters import cluster_spec
from autosac.pipelines.mesh_choosing import parts
from tests.pipelines.stages import language_loss
from tests.pipelines.test_planning import Model

pytestmark = pytest.mark.usefixtures("one_thread", "traced_once")

NODE = 4
SPEC = replace(cluster_spec("hgx-h100"), gpus_per_node=NODE)
OPEN = {"pp": None, "fsdp": None}
TYPES = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


def plan(num_layers, budget, *, num_gpus, links=(1, 1), **options):
    intra, inter = links
    fabric = replace(
        SPEC.fabric,
        intra_bandwidth_bytes_per_s=intra * SPEC.fabric.intra_bandwidth_bytes_per_s,
        inter_bandwidth_bytes_per_s=inter * SPEC.fabric.inter_bandwidth_bytes_per_s,
    )
    return autosac.plan_pipeline(
        *rows(num_layers),
        memory_budget=budget,
        cluster=replace(SPEC, fabric=fabric).resized(num_gpus),
        **step(),
        **options,
    )


def rows(num_layers):
    with torch.device("meta"):
        model = Model(num_layers)
    return model, torch.zeros(1, 512, dtype=torch.int64)


def step():
    return {
        "target": torch.zeros(1, 512, dtype=torch.int64),
        "loss_fn": language_loss,
        "optimizer": torch.optim.AdamW,
    }


def step_ms(*args, **options):
    try:
        own = plan(*args, **options)
    except InfeasibleBudgetError:
        return inf
    assert own.highest_peak_bytes <= own.budget_bytes
    assert own.bound_ms <= own.step_ms * (1 + 1e-9)
    return own.step_ms


def assert_never_slower(times):
    assert all(more <= (1 + 1e-9) * less for less, more in pairwise(times)), times


def assert_monotone(draw, num_layers, num_gpus, **options):
    """Draw links and budgets, and go up in budgets, in links, and in GPUs."""
    links = tuple(10 ** draw.uniform(-3, 1) for _ in "ab")
    case = {"num_gpus": num_gpus, "links": links, **options}
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(num_layers, 1000, **case)
    least_bytes = caught.value.lowest_peak_bytes
    fastest = plan(num_layers, 2**40, **case)
    assert not any(stage.policy for stage in fastest.stage_plans)
    between = int(draw.random() * (fastest.peak_bytes - least_bytes))
    budgets = least_bytes, least_bytes + between
    times = [step_ms(num_layers, budget, **case) for budget in budgets]
    assert_never_slower([*times, fastest.step_ms])
    budget, own_ms = draw.choice([*zip(budgets, times, strict=True)])

    def other_ms(**changed):
        return step_ms(num_layers, budget, **{**case, **changed})

    slower, faster = (tuple(f * link for link in links) for f in (0.1, 10))
    assert_never_slower([other_ms(links=slower), own_ms, other_ms(links=faster)])
    if None in options["mesh"].values():
        larger = [other_ms(num_gpus=k * num_gpus) for k in (2, 3)]
        assert_never_slower([own_ms, *larger])


@pytest.mark.slowest
def test_more_memory_bandwidth_or_gpus_is_never_slower():
    assert_monotone(
        random.Random(3), 1, 4, mesh={"pp": 2, "fsdp": None}, global_batch=4
    )


@pytest.mark.slowest
@pytest.mark.parametrize(
    ("num_layers", "num_gpus", "options"),
    [
        (2, 4, {"mesh": {**OPEN, "replicate": None}, "global_batch": 12, **TYPES}),
        (4, 2, {"mesh": {"pp": 2}, "global_batch": 4, "schedules": ["GPipe"]}),
    ],
)
def test_likewise_of_more_meshes_and_longer_stages(num_layers, num_gpus, options):
    assert_monotone(random.Random(num_layers), num_layers, num_gpus, **options)


@pytest.mark.slow
def test_gpus_that_no_mesh_makes_faster_are_left_idle():
    # Between nodes links are so slow that one node is fastest.
    own = plan(1, 2**40, num_gpus=8, links=(1, 1e-4), mesh=OPEN, global_batch=4)
    alone = plan(1, 2**40, num_gpus=4, links=(1, 1e-4), mesh=OPEN, global_batch=4)
    assert own.num_ranks <= NODE and own.num_gpus == 8
    assert own.step_ms == alone.step_ms
    assert f"{8 - own.num_ranks} of 8 GPUs" in own.report()
    assert own.num_ranks == alone.num_ranks


def test_parts_of_clusters_do_not_depend_on_how_large_they_are():
    sizes = {n: [c.num_gpus for c in parts(SPEC.resized(n))] for n in (8, 12, 256)}
    assert sizes[12] == [12, 8, 4, 2, 1]
    for small, large in ((8, 12), (12, 256)):
        assert sizes[large][-len(sizes[small]) :] == sizes[small]


@pytest.mark.slow
def test_on_the_fewest_gpus_a_plan_fits_and_on_fewer_none():
    options = {"mesh": OPEN, "global_batch": 4}
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(1, 1000, num_gpus=4, **options)
    budget = caught.value.lowest_peak_bytes
    how = {**step(), **options, "cluster": SPEC, "most_gpus": 16}
    fewest = autosac.min_gpus(*rows(1), memory_budget=budget, **how)
    assert 2 < fewest <= 4
    assert plan(1, budget, num_gpus=fewest, **options).num_ranks == fewest
    with pytest.raises(InfeasibleBudgetError):
        plan(1, budget, num_gpus=fewest // 2, **options)
    assert autosac.min_gpus(*rows(1), memory_budget=1000, **how) is None
    with pytest.raises(ArgumentError, match="take no profile"):
        autosac.min_gpus(*rows(1), memory_budget=budget, ac_units=["blocks.*"], **how)
