"""Trainers on two processes: budgets by the allocator's counts, weights bit by bit."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader

import autosac
from autosac.errors import ArgumentError, InfeasibleBudgetError
from autosac.integrations.budgets import Loop
from autosac.integrations.worst_batches import lengthened
from benchmarks import allocator_shim as shim
from benchmarks.rank_server import run_processes
from tests.integrations import replica_runs
from tests.integrations.two_processes import forked

_RUNS = "tests.integrations.replica_runs"
_SCALARS_BYTES = 1024  # of losses, norms and counts; numbers that autograd wraps
_HELD_BYTES = {  # batches that the loop holds at most, of 4 x 96 numbers a tensor
    "huggingface": 3 * 3 * 4 * 96 * 8,
    "lora": 2 * 3 * 4 * 96 * 8,
    # One that is fetched ahead, and one as it was before it was moved to `cpu:0`.
    "images": 2 * 8 * 3 * 32 * 32 * 4,
    "lightning": 0,
    "accelerate": 2 * 4 * 96 * 8,
}


PACKAGES = {"lora": "peft", "huggingface": "transformers", "images": "transformers"}
needs_compiler = pytest.mark.skipif(
    shim.library() is None, reason="counting takes a C compiler"
)


@pytest.mark.slowest_but_first
@needs_compiler
@pytest.mark.parametrize(
    "kind", ["accelerate", "huggingface", "images", "lora", "lightning"]
)
def test_every_rank_keeps_the_budget_and_trains_the_same_weights(kind, tmp_path):
    pytest.importorskip(PACKAGES.get(kind, kind))
    ranks = forked(_RUNS, kind, tmp_path)

    plain = ranks[0]["plain"]["weights"]
    for rank in ranks:
        for training in rank.values():
            assert all(map(torch.equal, training["weights"].values(), plain.values()))
        planned, ample = rank["planned"], rank["ample"]
        assert planned["plan"] == ranks[0]["planned"]["plan"]
        assert planned["plan"]["policy"]
        assert not ample["plan"]["policy"]
        assert max(planned["peaks"]) <= planned["plan"]["budget_bytes"]
    # The longest batch of Accelerate's run is the second rank's.
    for training in ("planned", "ample"):
        measured = max(max(rank[training]["peaks"]) for rank in ranks)
        above = measured - ranks[0][training]["plan"]["peak_bytes"]
        assert -_SCALARS_BYTES <= above <= _HELD_BYTES[kind] + _SCALARS_BYTES
    assert min(ranks[1]["ample"]["peaks"]) > planned["plan"]["budget_bytes"]


@pytest.mark.slow
@needs_compiler
def test_an_error_of_the_rank_that_plans_is_raised_in_all(tmp_path):
    first, second = forked(_RUNS, "errors", tmp_path)

    assert first == second
    kind, message = first["Linear"]
    assert kind == "InfeasibleBudgetError"
    assert "288 B of each process are DDP's buckets" in message
    assert first["Stops"][0] == "TraceError"
    assert "`c10d.allreduce_.default` in the model's step waits" in first["Talks"][1]
    assert "in one of 2 processes" in first["unwrapped"][1]
    assert "sharded models are for `autosac.plan_parallel`" in first["sharded"][1]


@pytest.mark.slow
@needs_compiler
def test_a_loop_over_a_loader_of_accelerate_keeps_the_least_feasible_budget():
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    (training,) = run_processes(replica_runs.least_feasible, 1)

    plan = training["plan"]
    assert plan["policy"]
    # More than the step's own peak: the next batch is fetched already.
    assert plan["peak_bytes"] < max(training["peaks"]) <= plan["budget_bytes"]


class DataLoaderDispatcher(DataLoader):
    """Of the name of Accelerate's."""


@pytest.mark.parametrize(
    ("loader", "num_batches"),
    [
        (None, 0),
        (DataLoader([0]), 1),
        (DataLoaderDispatcher([0]), 3),
    ],
    ids=["none", "shard", "dispatcher"],
)
def test_batches_that_a_loader_fetches_ahead_are_paid_for(loader, num_batches):
    x = torch.ones(4, 8)
    plan = autosac.plan_replicas(
        torch.nn.Linear(8, 8), x, memory_budget=2**30, loader=loader
    )

    held_bytes = Loop.scalars_bytes + num_batches * x.nbytes
    assert plan.budget_bytes == 2**30 - held_bytes


def test_a_plan_without_the_batch_that_a_loader_of_accelerate_holds_is_warned_of():
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model, x = torch.nn.Linear(8, 8), torch.ones(4, 8)
    own = torch.optim.AdamW(model.parameters())
    prepared = accelerator.prepare(own)
    options = {"loss_fn": torch.sum, "optimizer": prepared}
    with pytest.warns(UserWarning, match=r"a batch ahead.*plan_replicas\(.*loader"):
        autosac.plan(model, x, memory_budget="1GiB", **options)

    # Warnings fail tests.
    autosac.plan_replicas(model, x, memory_budget="1GiB", **options)
    options["optimizer"] = own
    autosac.plan(model, x, memory_budget="1GiB", **options)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"model": 3}, "`model` must be a module, as `accelerator.prepare`.*, got 3"),
        ({"model": object()}, "`model` must be a module, .*, got object"),
        ({"loader": 3}, "`loader` must be the loader that .*, got 3"),
        ({"inputs": [(torch.ones(4, 8),)] * 2}, "a list of 2 batches, and one batch"),
    ],
    ids=["number", "object", "loader", "batches"],
)
def test_what_is_no_model_batch_or_loader_is_said(mistake, message):
    right = {"model": torch.nn.Linear(8, 8), "inputs": torch.ones(4, 8)}
    with pytest.raises(ArgumentError, match=message):
        autosac.plan_replicas(**{**right, **mistake}, memory_budget="1GiB")


def test_a_list_of_arguments_is_one_batch():
    x = torch.ones(4, 8)
    model = torch.nn.Bilinear(8, 8, 1)
    plan = autosac.plan_replicas(model, [x, x], memory_budget="1GiB")

    assert plan.composition["input"] == x.nbytes


def test_shards_are_saved_by_an_accelerator():
    sharded = pytest.importorskip("autosac.integrations.accelerate_sharded")
    with pytest.raises(ArgumentError, match=r"`accelerator` must be the .*, got 3"):
        sharded.save_sharded(3)


def test_an_infeasible_budget_is_pickled_with_its_figures():
    error = InfeasibleBudgetError(
        "No plan.",
        budget_bytes=1,
        lowest_peak_bytes=2,
        composition={"input": 2},
        advice="None.",
    )

    copy = pickle.loads(pickle.dumps(error))

    assert str(copy) == "No plan."
    assert vars(copy) == vars(error)


def test_ids_labels_and_masks_are_repeated_up_to_a_length():
    ids, scores = torch.arange(6).reshape(2, 3), torch.zeros(2, 5)
    mask = torch.ones(2, 1, 3, 3, dtype=torch.bool)

    longer = lengthened({"ids": ids, "mask": mask, "scores": scores, "n": 3}, 5)

    assert longer["ids"].tolist() == [[0, 1, 2, 0, 1], [3, 4, 5, 3, 4]]
    assert longer["mask"].shape == (2, 1, 5, 5)
    assert longer["scores"] is scores and longer["n"] == 3
    assert lengthened(ids, 3) is ids


@pytest.mark.parametrize(
    "batch", [torch.ones(2, 3), [torch.ones(2, n).long() for n in (3, 4)]]
)
def test_a_batch_without_one_length_asks_for_the_worst_batch(batch):
    with pytest.raises(ValueError, match=r"`max_length`=8 .*`worst_batch`"):
        lengthened(batch, 8)
