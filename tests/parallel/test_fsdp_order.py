"""FSDP2 itself, in a fake process group: the order of its collectives."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.testing._internal.distributed.fake_pg import FakeStore

from autosac.solvers.fsdp import (
    FsdpChoice,
    FsdpModule,
    FsdpProblem,
    schedule,
)
from autosac.solvers.fsdp.collectives import AffineCost
from autosac.solvers.sac import SacProblem

WORDS = {"FSDP::all_gather": "gather", "FSDP::post_backward_reduce": "reduce"}


class Part(nn.Module):
    """Two linear maps, each of which can be a unit, around a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.second(self.first(x * self.scale)) + x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = Part(), Part(), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.b(self.a(x)))


@pytest.fixture
def mesh():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def _problem(model):
    """Modules with parameters, in a step with an instant for each event."""
    names = {module: name for name, module in model.named_modules()}
    spans = {"forward": {}, "backward": {}}
    clock = [0]

    def walk(module, span, order):
        start, clock[0] = clock[0], clock[0] + 1
        for child in order(list(module.children())):
            walk(child, span, order)
        clock[0] += 1
        span[names[module]] = (start, clock[0])

    walk(model, spans["forward"], list)
    walk(model, spans["backward"], lambda inner: inner[::-1])
    index = {name: k for k, name in enumerate(names.values())}
    modules = tuple(
        FsdpModule(
            fqn=name,
            parent=index[name.rpartition(".")[0]] if name else None,
            forward=spans["forward"][name],
            backward=spans["backward"][name],
            gather_bytes=sum(p.nbytes for p in module.parameters(recurse=False)),
            reduce_bytes=sum(p.nbytes for p in module.parameters(recurse=False)),
            dtype="float32",
        )
        for module, name in names.items()
    )
    cost = AffineCost(latency_ms=1.0, ms_per_byte=0.0)
    return FsdpProblem(
        modules=modules,
        sac=SacProblem(units=(), base_bytes=(1,) * clock[0], budget_bytes=1),
        inside=(),
        rerun_at=(),
        compute_ms=(0.0,) * clock[0],
        gather=cost,
        reduce=cost,
    )


def _expected(model, chosen):
    """Order by the schedule: forward's gathers; backward's, and its reductions."""
    problem = _problem(model)
    names = [module.fqn for module in problem.modules]
    choice = FsdpChoice(
        units=tuple(not name or name in chosen for name in names),
        reshard=tuple(chosen.get(name, False) for name in names),
        points=(),
    )
    units = [name for name in names if not name or name in chosen]
    its_schedule = schedule(problem, choice)
    owns = {u for u, times in enumerate(its_schedule.units) if times.gather_ms}
    events = [("gather", units[u]) for u, _ in its_schedule.forward if u in owns]
    begins = [event.unit for event in its_schedule.backward if event.begins]
    following = dict(itertools.pairwise(begins))
    for event in its_schedule.backward:
        target = following.get(event.unit)
        if (
            event.begins
            and target is not None
            and its_schedule.units[target].regather_ms
        ):
            events.append(("gather", units[target]))  # issued one unit ahead
        if not event.begins and event.unit in owns:
            events.append(("reduce", units[event.unit]))
    return events


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"a": True, "b": True, "head": True},
        {"a": True, "b": False, "head": True},
        {"a": True, "a.first": True, "b": True, "b.second": False},
        {"a.first": True, "a.second": True, "b.first": True, "b.second": True},
        {"a": False, "a.second": True, "b": True, "b.first": True, "b.second": True},
    ],
    ids=str,
)
def test_fsdp2_issues_its_collectives_in_the_order_of_the_schedule(
    mesh, monkeypatch, chosen
):
    issued = []

    @contextlib.contextmanager
    def record(name):
        words, _, fqn = name.partition(" (")
        if words in WORDS:
            issued.append((WORDS[words], fqn.rstrip(")")))
        yield

    monkeypatch.setattr(_fsdp_param_group, "record_function", record)
    model = Model()
    expected = _expected(model, chosen)
    for name in sorted(chosen, key=len, reverse=True):
        fully_shard(
            model.get_submodule(name), mesh=mesh, reshard_after_forward=chosen[name]
        )
    fully_shard(model, mesh=mesh)

    model(torch.ones(3, 4, requires_grad=True)).sum().backward()

    assert issued == expected
