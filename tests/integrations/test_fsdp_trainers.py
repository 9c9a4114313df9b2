"""FSDP2 under trainers: budgets by the allocator's counts, weights bit by bit."""

import pytest
import torch

from tests.integrations.test_replicas import needs_compiler
from tests.integrations.two_processes import forked

_RUNS = "tests.integrations.fsdp_runs"
_SCALARS_BYTES = 4096  # of losses, norms and counts; numbers that autograd wraps
_BATCH_BYTES = 3 * 4 * 96 * 8  # 3 tensors of 4 x 96 numbers
_REFUSED_BY_LIGHTNING = {
    "calls itself": "call `self.forward(x)` or a submodule",
    "tensors": "`tensor_parallel_size=1` to `ModelParallelStrategy`",
    "ddp": "DDPStrategy does not leave sharding to `configure_model`",
}
_HELD_BYTES = {  # by the loop beside the batch of the step
    "huggingface": 2 * _BATCH_BYTES,
    "lora": _BATCH_BYTES,
    "lightning": 0,
    "accelerate": 0,
}


@pytest.mark.slowest_but_first
@needs_compiler
@pytest.mark.parametrize("kind", ["lora", "huggingface", "lightning", "accelerate"])
def test_every_rank_keeps_the_budget_and_trains_the_same_weights(kind, tmp_path):
    needed = {"lora": "peft", "accelerate": "accelerate", "lightning": "lightning"}
    pytest.importorskip(needed.get(kind, "transformers"))
    ranks = forked(_RUNS, kind, tmp_path)

    plain = ranks[0]["plain"]["weights"]
    for rank in ranks:
        for training in rank.values():
            assert all(map(torch.equal, training["weights"].values(), plain.values()))
            for name, weight in training.get("saved", {}).items():
                assert torch.equal(weight, plain[name])
        planned, ample = rank["planned"], rank["ample"]
        assert planned["plan"] == ranks[0]["planned"]["plan"]
        assert planned["plan"]["policy"]
        assert not ample["plan"]["policy"]
        assert max(planned["peaks"]) <= planned["plan"]["budget_bytes"]
        assert min(ample["peaks"]) > planned["plan"]["budget_bytes"]
        for training in (planned, ample):
            plan = training["plan"]
            above = max(training["peaks"]) - plan["peak_bytes"]
            most = _HELD_BYTES[kind] + _SCALARS_BYTES + plan["late_bytes"]
            assert -0.01 * plan["peak_bytes"] <= above <= most
        if kind == "lightning":
            assert rank["plain"]["refused"].keys() == _REFUSED_BY_LIGHTNING.keys()
            for name, told in rank["plain"]["refused"].items():
                _check_refused(told, _REFUSED_BY_LIGHTNING[name])


def _check_refused(told, sentence):
    kind, message = told
    assert kind == "UnsupportedError"
    assert sentence in message


@pytest.mark.slowest
@needs_compiler
def test_what_cannot_be_planned_is_said_in_all_ranks(tmp_path):
    pytest.importorskip("transformers")
    first, second = forked(_RUNS, "refused", tmp_path)

    assert first == second
    for name in ("infeasible", "less than batches take"):
        kind, message = first[name]
        assert kind == "InfeasibleBudgetError"
        assert "batches, figures and callbacks that it keeps besides" in message
    for name, sentence in {
        "quantized": "does not divide quantized parameters; train with DDP",
        "launched with FSDP": "ACCELERATE_USE_FSDP lets the trainer shard the model",
        "reads whole": "load_best_model_at_end=True reads whole weights into a model",
        "with optimizer": "pass `optimizer_cls_and_kwargs` instead",
        "callback": "`autosac.integrations.huggingface_fsdp.plan_and_shard` before",
    }.items():
        _check_refused(first[name], sentence)
