"""What training does otherwise than a stage's planned step is said once."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

import autosac
from autosac._compat_distributed import fake_group
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import cluster_spec
from tests.pipelines.stages import Mlp

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS, NUM_MICRO_BATCHES = 32, 64, 2  # rows of a micro-batch
CLUSTER = cluster_spec("pcie-l40s", num_gpus=4)


class Block(Mlp):
    more = False

    def forward(self, x):
        return super().forward(x * 1.0 * 1.0 if self.more else x)


def model():
    return nn.Sequential(*(Block(2) for _ in range(4)))


def loss_fn(output, target):
    return (output - target).square().mean()


def rows(*, trained=False):
    return torch.ones(ROWS, WIDTH, requires_grad=trained)


def planned(*, num_micro_batches=NUM_MICRO_BATCHES, schedule="GPipe", **options):
    """A plan whose first stage recomputes some of its blocks."""
    batch = torch.ones(num_micro_batches * ROWS, WIDTH)
    plan_of = partial(
        autosac.plan_pipeline,
        model(),
        batch,
        target=batch,
        loss_fn=loss_fn,
        optimizer=torch.optim.SGD,
        cluster=replace(CLUSTER, device=device_spec("cpu")),
        num_ranks=2,
        num_micro_batches=num_micro_batches,
        schedules=[schedule],
        **options,
    )
    with pytest.raises(autosac.InfeasibleBudgetError) as error:
        plan_of(memory_budget=1)
    return plan_of(memory_budget=int(1.1 * error.value.lowest_peak_bytes))


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    planned().save(path)
    saved = autosac.PipelinePlan.load(path)
    assert saved == planned()
    assert saved.stage_plans[0].policy
    return saved


@pytest.fixture
def stage(plan):
    with fake_group(plan.num_ranks):
        (first,) = plan.stages(model(), plan.make_mesh("cpu"))
        yield first.submod


# --- habits, of GPipe on the first rank ---------------------------------------


def runs(stage, *, trained=False, retain_graph=False):
    """All micro-batches forward, then all backward."""
    outputs = [stage(rows(trained=trained)) for _ in range(NUM_MICRO_BATCHES)]
    for output in outputs:
        output.backward(torch.ones_like(output), retain_graph=retain_graph)


def plain(stage, optimizer):
    runs(stage)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        stage.eval()
        stage(rows())
        stage.train()


def adds_up(stage, *_):
    runs(stage)


def trains_inputs(stage, optimizer):
    runs(stage, trained=True)
    optimizer.zero_grad()


def retains(stage, optimizer):
    runs(stage, retain_graph=True)
    optimizer.zero_grad()


def evaluates_with_gradients(stage, _):
    stage.eval()
    stage(rows())
    stage.train()


def has_another_optimizer(stage, _):
    runs(stage)
    optimizer = torch.optim.AdamW(stage.parameters())
    optimizer.step()
    optimizer.zero_grad()


def calls_a_unit(stage, _):
    stage.get_submodule(stage.block_fqns[0])(rows())


SAID = {
    adds_up: "Gradients of an earlier step",
    trains_inputs: "Inputs of the model .* require gradients",
    retains: "Backward keeps its graph",
    evaluates_with_gradients: "called in eval mode with gradients",
    has_another_optimizer: "AdamW keeps .* of state",
    calls_a_unit: "called outside of the planned model's `forward`",
}


def train(stage, step, num_steps=4):
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e-3)
    for _ in range(num_steps):
        step(stage, optimizer)


@pytest.mark.parametrize("step", SAID)
def test_what_a_stage_is_not_planned_for_is_said_once(stage, step):
    with pytest.warns(UserWarning, match=SAID[step]) as said:
        train(stage, step)
    assert len(said) == 1


@pytest.fixture
def plain_stage(plan):
    """One without units, which would say themselves that they depart."""
    each = tuple(replace(one, op_policies=()) for one in plan.stage_plans)
    plan = replace(plan, stage_plans=each)
    with fake_group(plan.num_ranks):
        (first,) = plan.stages(model(), plan.make_mesh("cpu"))
        yield first.submod


def test_a_forward_that_makes_more_is_said(plain_stage):
    train(plain_stage, plain)
    for block in plain_stage.children():
        block.more = True
    with pytest.warns(UserWarning, match="forward makes .* of results") as said:
        train(plain_stage, plain)
    assert len(said) == 1


def test_another_autocast_is_said(plain_stage):
    def autocasts(stage, optimizer):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = [stage(rows()) for _ in range(NUM_MICRO_BATCHES)]
        for output in outputs:
            output.backward(torch.ones_like(output))
        optimizer.zero_grad()

    with pytest.warns(UserWarning, match="under autocast to bfloat16") as said:
        train(plain_stage, autocasts)
    assert len(said) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, {"pp": 2, "fsdp": 2}])
def test_nothing_is_said_of_what_is_planned(mesh):
    plan = planned(mesh=mesh)
    with fake_group(plan.num_ranks), warnings.catch_warnings():
        warnings.simplefilter("error")
        (first,) = plan.stages(model(), plan.make_mesh("cpu"))
        train(first.submod, plain, 18)


def test_files_of_stages_that_know_nothing_of_their_step_say_nothing(plan):
    each = tuple(
        replace(one, facts=type(one.facts)(), state_bytes=None)
        for one in plan.stage_plans
    )
    old = replace(plan, stage_plans=each)
    with fake_group(plan.num_ranks), warnings.catch_warnings():
        warnings.simplefilter("error")
        (first,) = old.stages(model(), old.make_mesh("cpu"))
        for step in (plain, adds_up, trains_inputs, retains, has_another_optimizer):
            train(first.submod, step)


# --- schedules, on the first rank: the others' part is not there -----------------


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B"])
def test_a_schedule_that_runs_more_forward_than_the_planned_one_is_said(schedule):
    plan = planned(num_micro_batches=4, schedule=schedule)
    batch = torch.ones(4 * ROWS, WIDTH)
    is_more = schedule == "1F1B"  # it has 2 in flight, and GPipe 4
    with fake_group(plan.num_ranks), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        stages = plan.stages(model(), plan.make_mesh("cpu"))
        for _ in range(2):
            plan.schedule(stages, loss_fn).step(batch, **plan.step_kwargs)
        assert not [one for one in said if "in flight" in str(one.message)]
        if len(stages) == 1:
            ScheduleGPipe(stages[0], 4).step(batch)
            ScheduleGPipe(stages[0], 4).eval(batch)
    told = [str(one.message) for one in said if "in flight" in str(one.message)]
    assert len(told) == is_more
    assert all("has 3 micro-batches in flight, and its plan knows 2" in t for t in told)
