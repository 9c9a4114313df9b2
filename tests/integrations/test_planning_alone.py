"""What one process plans for all, in one process of a group that does nothing."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import autosac
from autosac._compat_distributed import fake_group
from autosac.errors import InfeasibleBudgetError, UnsupportedError


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


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
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


def test_a_hook_is_said_once_there_is_a_plan(group):
    told = {}
    for case in ("failed", "planned", "applied"):
        model, x = nn.Linear(8, 8), torch.ones(4, 8)
        replica = nn.parallel.DistributedDataParallel(model)
        if case == "failed":
            with pytest.raises(InfeasibleBudgetError):
                autosac.plan_replicas(replica, x, memory_budget=64)
        else:
            plan = autosac.plan_replicas(replica, x, memory_budget="1GiB")
        if case == "applied":
            plan.apply(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            replica.register_comm_hook(None, fp16_compress_hook)
        told[case] = [str(one.message)[:20] for one in caught]

    said = ["A communication hook"]
    assert told == {"failed": [], "planned": said, "applied": said}


def _gathers_tensors(output):
    both, one = torch.zeros(4), torch.zeros(2)
    dist.all_gather_into_tensor(both, torch.ones(2))
    dist.all_gather([one, torch.zeros(2)], torch.ones(2))
    assert both.tolist() == [1] * 4 and one.tolist() == [1] * 2
    return output.square().sum()


def _polls(output):
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work.is_completed()
    work.wait()
    return output.square().sum()


@pytest.mark.filterwarnings("ignore:.*all_gather:FutureWarning")
@pytest.mark.parametrize("loss_fn", [_gathers_tensors, _polls])
def test_what_a_loss_gathers_or_waits_for_is_there_at_once(group, loss_fn):
    replica = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))

    plan = autosac.plan_replicas(
        replica, torch.ones(4, 8), memory_budget="1GiB", loss_fn=loss_fn
    )

    assert plan.peak_bytes


def _receives(output):
    dist.recv(torch.ones(1))
    return output.sum()


def _gathers_counts(output):
    counts = [None, None]
    dist.all_gather_object(counts, len(output))
    return output.square().sum() / sum(counts)


def _sends_name(output):
    dist.broadcast_object_list(["a name"])
    return output.square().sum()


@pytest.mark.parametrize(
    ("loss_fn", "name"),
    [
        (_receives, "c10d.recv_any_source_.default"),
        (_gathers_counts, "all_gather_object"),
        (_sends_name, "broadcast_object_list"),
    ],
)
def test_objects_and_what_any_process_sends_are_refused(group, loss_fn, name):
    replica = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    x = torch.ones(4, 8)
    with pytest.raises(UnsupportedError, match=f"^`{name}` in the model's step waits"):
        autosac.plan_replicas(replica, x, memory_budget="1GiB", loss_fn=loss_fn)
