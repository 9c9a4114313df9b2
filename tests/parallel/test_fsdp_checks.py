"""Optimizers that do not step on distributed tensors are refused, and no others."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import autosac
from autosac._compat_distributed import fake_group
from autosac.parallel.fsdp_memory import RankSimulator
from tests.models import CASES

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view"),
]
CASE = CASES["mlp"]
STEP = (
    *("SGD", "Adam", "AdamW", "RAdam", "NAdam"),
    *("Adamax", "ASGD", "Adadelta", "Adagrad", "RMSprop"),
)
FOREACH = ("ASGD", "Adagrad", "RMSprop")
ALL_STEP = {
    **{name: getattr(torch.optim, name) for name in STEP},
    **{
        f"{name} of lists": partial(getattr(torch.optim, name), foreach=True)
        for name in FOREACH
    },
}
RPROP_OF_LISTS = partial(torch.optim.Rprop, foreach=True)
REFUSAL = "which PyTorch refuses to do to distributed tensors"


def steps_on_shards(make_optimizer):
    """Whether PyTorch's distributed tensors take a step."""
    with fake_group(2):
        model = CASE.model()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = make_optimizer(model.parameters())
        model(CASE.inputs()).sum().backward()
        try:
            optimizer.step()
        except (RuntimeError, NotImplementedError):
            return False
        return True


def plan_two_ranks(make_optimizer, **options):
    return autosac.plan_parallel(
        CASE.model(),
        CASE.inputs(),
        loss_fn=torch.mean,
        optimizer=make_optimizer,
        cluster="pcie-l40s",
        num_gpus=2,
        memory_budget="1GiB",
        **options,
    )


@pytest.mark.parametrize("name", ALL_STEP)
def test_what_steps_on_distributed_tensors_is_planned(name):
    assert steps_on_shards(ALL_STEP[name])
    RankSimulator(CASE.profile(ALL_STEP[name]))


@pytest.mark.parametrize("make_optimizer", [torch.optim.Rprop, RPROP_OF_LISTS])
def test_rprop_is_refused_where_distributed_tensors_refuse_it(make_optimizer):
    # They take it from torch 2.15 on, but not as one of lists.
    steps = steps_on_shards(make_optimizer)
    assert not steps or make_optimizer is not RPROP_OF_LISTS
    step_profile = CASE.profile(make_optimizer)
    refused = pytest.raises(autosac.UnsupportedError, match=REFUSAL)
    with nullcontext() if steps else refused:
        RankSimulator(step_profile)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("options", [{"degrees": [2]}, {"mesh": {"tp": 2}}])
def test_fused_optimizers_that_distributed_tensors_refuse_name_those_that_step(
    kind, options
):
    fused = partial(kind, lr=0.1, fused=True)
    assert not steps_on_shards(fused)
    with pytest.raises(autosac.UnsupportedError, match=f"{REFUSAL}.*`foreach=True`"):
        plan_two_ranks(fused, **options)
    for fix in ({"foreach": True}, {"fused": False}):
        assert steps_on_shards(partial(kind, lr=0.1, **fix))
        RankSimulator(CASE.profile(partial(kind, lr=0.1, **fix)))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_step_that_distributed_tensors_take_on_whole_copies_first_is_refused(kind):
    def with_tensor(parameters, **options):
        return kind(parameters, lr=torch.tensor(0.01), **options)

    fused, loop = (partial(with_tensor, fused=is_fused) for is_fused in (True, False))
    whole = 4 * sum(p.nbytes for p in CASE.model().parameters())
    assert real_bytes_of_first_step(fused) >= whole
    with pytest.raises(autosac.UnsupportedError, match="Pass `lr` as a float"):
        plan_two_ranks(fused)
    for fix in (partial(kind, lr=0.01, fused=True), loop):
        assert real_bytes_of_first_step(fix) < whole
        plan_two_ranks(fix)


def real_bytes_of_first_step(make_optimizer):
    """What ops of a first step get that are no shards, as they run for shapes."""
    with fake_group(2):
        model = CASE.model()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = make_optimizer(model.parameters())
        model(CASE.inputs()).sum().backward()
        with torch.profiler.profile(profile_memory=True, acc_events=True) as taken:
            optimizer.step()
    made = (event for event in taken.events() if event.name == "aten::zeros_like")
    return sum(event.cpu_memory_usage for event in made)


def counting(parameters):
    """One that assigns to selected elements of a tensor of its own."""
    sgd, counts = torch.optim.SGD(parameters, lr=0.1), torch.zeros(3)

    def count(*_):
        counts[counts < 1] = 1.0

    sgd.register_step_pre_hook(count)
    return sgd


def test_tensors_that_are_no_parameters_may_be_assigned_to():
    assert steps_on_shards(counting)
    RankSimulator(CASE.profile(counting))


@pytest.mark.parametrize("options", [{"degrees": [1]}, {"mesh": {"tp": 2}}])
def test_rprop_is_refused_wherever_parameters_are_distributed(options):
    with pytest.raises(autosac.UnsupportedError, match=REFUSAL):
        plan_two_ranks(RPROP_OF_LISTS, **options)


def test_rprop_is_planned_for_one_process():
    plan = autosac.plan(CASE.profile(torch.optim.Rprop), memory_budget="1GiB")
    assert plan.peak_bytes > 0
