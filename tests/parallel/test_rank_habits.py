"""What training does otherwise than a rank's planned step is said once."""

import json
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import autosac
from autosac._compat_distributed import fake_group
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import cluster_spec
from tests.parallel.test_meshes import labelled, llama

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS, NUM_RANKS = 16, 256, 2


class Block(nn.Module):
    more = False

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x * 1.0 * 1.0 if self.more else x
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        return self.head(self.blocks(x))


def loss_fn(output):
    return output.float().square().mean()


def rows(number=ROWS, *, trained=False):
    return torch.ones(number, WIDTH, requires_grad=trained)


def planned(*, inputs=None, **options):
    """A plan that recomputes some of the model."""
    cluster = cluster_spec("pcie-l40s", num_gpus=NUM_RANKS)
    options = {"degrees": [2], "optimizer": torch.optim.SGD, **options}
    plan_of = partial(
        autosac.plan_parallel,
        Model(),
        rows() if inputs is None else inputs,
        loss_fn=loss_fn,
        cluster=replace(cluster, device=device_spec("cpu")),
        **options,
    )
    with pytest.raises(autosac.InfeasibleBudgetError) as error:
        plan_of(memory_budget=1)
    return plan_of(memory_budget=int(1.1 * error.value.lowest_peak_bytes))


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    made = planned()
    made.save(path)
    assert made.policy
    return autosac.ParallelPlan.load(path)


@pytest.fixture
def model(plan):
    with fake_group(NUM_RANKS):
        yield plan.apply(Model(), plan.make_mesh("cpu"))


# --- habits -------------------------------------------------------------------


def plain(model, optimizer, _):
    loss_fn(model(rows())).backward()
    optimizer.step()
    optimizer.zero_grad()


def calls_twice(model, *_):
    (loss_fn(model(rows())) + loss_fn(model(rows()))).backward()
    model.zero_grad()


def retains(model, *_):
    loss_fn(model(rows())).backward(retain_graph=True)
    model.zero_grad()


def adds_up(model, optimizer, number):
    model.set_is_last_backward(bool(number % 2))
    loss_fn(model(rows())).backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()


def drops_gradients_late(model, optimizer, _):
    loss = loss_fn(model(rows()))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def trains_more_rows(model, *_):
    loss_fn(model(rows(4 * ROWS))).backward()
    model.zero_grad()


def autocasts(model, *_):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_fn(model(rows()))
    loss.backward()
    model.zero_grad()


def has_another_loss(model, *_):
    output = model(rows())
    wide = torch.cat([output] * 32, dim=1)
    wide.exp().log().square().mean().backward()
    model.zero_grad()


class Keeps:
    """A loop that collects outputs."""

    def __init__(self):
        self.outputs = []

    def __call__(self, model, *_):
        output = model(rows())
        loss_fn(output).backward()
        self.outputs.append(output.detach())
        model.zero_grad()


def trains_inputs(model, *_):
    loss_fn(model(rows(trained=True))).backward()
    model.zero_grad()


def evaluates_with_gradients(model, *_):
    model.eval()
    model(rows())
    model.train()


def calls_a_unit(model, *_):
    model.blocks[0](rows())


def goes_backward_under_autocast(model, *_):
    loss = loss_fn(model(rows()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    model.zero_grad()


def has_another_optimizer(model, *_):
    optimizer = torch.optim.AdamW(model.parameters())
    loss_fn(model(rows())).backward()
    optimizer.step()
    optimizer.zero_grad()


SAID = {
    calls_twice: "called again before backward",
    retains: "Backward keeps its graph",
    adds_up: "Gradients of an earlier step",
    drops_gradients_late: "Gradients of an earlier step",
    trains_more_rows: "is larger than all that were planned for",
    has_another_loss: "it is not the planned loss",
    Keeps: "Outputs of earlier calls",
    trains_inputs: "Inputs of the model .* require gradients",
    evaluates_with_gradients: "called in eval mode with gradients",
    calls_a_unit: "called outside of the planned model's `forward`",
    goes_backward_under_autocast: "inside of `torch.autocast`",
    has_another_optimizer: "AdamW keeps .* of state",
}


def train(model, step, num_steps=6):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in range(num_steps):
        step(model, optimizer, number)


@pytest.mark.parametrize("step", SAID)
def test_what_a_rank_is_not_planned_for_is_said_once(model, step):
    step, message = step() if isinstance(step, type) else step, SAID[step]
    with pytest.warns(UserWarning, match=message) as said:
        train(model, step)
    assert len(said) == 1


@pytest.fixture
def plain_model(plan):
    """One without units, which would say themselves that they depart."""
    plan = replace(plan, op_policies=())
    with fake_group(NUM_RANKS):
        yield plan.apply(Model(), plan.make_mesh("cpu"))


def test_another_autocast_is_said(plain_model):
    with pytest.warns(UserWarning, match="under autocast to bfloat16") as said:
        train(plain_model, autocasts)
    assert len(said) == 1


def test_a_forward_that_makes_more_is_said(plain_model):
    train(plain_model, plain)
    for block in plain_model.blocks:
        block.more = True
    with pytest.warns(UserWarning, match="forward makes .* of results") as said:
        train(plain_model, plain)
    assert len(said) == 1


# --- of which nothing is said -------------------------------------------------


def adds_up_as_planned(model, optimizer, number):
    loss_fn(model(rows())).backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()


def varies(model, optimizer, number):
    """Smaller batches, evaluation, clipped gradients, a checkpoint."""
    loss_fn(model(rows(ROWS - number))).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    model.state_dict()
    with torch.no_grad():
        model.eval()
        model(rows(2 * ROWS))
        model.train()


STYLES = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
AS_PLANNED = {
    "plain": ({}, plain),
    "varied": ({}, varies),
    "micro-batches": ({"accumulate": 2}, adds_up_as_planned),
    "of another type": (BF16, varies),
    "cast alone": ({**BF16, "degrees": [1]}, plain),
    "late": ({"gradients_in_forward": True}, drops_gradients_late),
    "under autocast": ({"autocast": "bf16"}, autocasts),
    "of inputs": ({"inputs": rows(trained=True)}, trains_inputs),
    "in slices": ({"mesh": {"tp": 2}, "tp_plan": STYLES, "degrees": [1]}, plain),
}


@pytest.mark.slowest_but_first
@pytest.mark.parametrize("case", AS_PLANNED)
def test_nothing_is_said_of_what_is_planned(case):
    options, step = AS_PLANNED[case]
    plan = planned(**options)
    with fake_group(NUM_RANKS), warnings.catch_warnings():
        warnings.simplefilter("error")
        train(plan.apply(Model(), plan.make_mesh("cpu")), step, 18)


def test_files_of_plans_that_know_nothing_of_their_step_say_nothing(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    record = json.loads((tmp_path / "plan.json").read_text())
    del record["signatures"], record["facts"]
    (tmp_path / "plan.json").write_text(json.dumps(record))
    old = autosac.ParallelPlan.load(tmp_path / "plan.json")
    with fake_group(NUM_RANKS), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = old.apply(Model(), old.make_mesh("cpu"))
        for step in (plain, trains_more_rows, calls_twice, adds_up, Keeps()):
            train(model, step)


def test_nothing_is_said_of_parts_of_a_sequence():
    cluster = replace(
        cluster_spec("pcie-l40s", num_gpus=NUM_RANKS), device=device_spec("cpu")
    )
    plan = autosac.plan_parallel(
        llama(),
        labelled(),
        optimizer=torch.optim.SGD,
        cluster=cluster,
        mesh={"cp": NUM_RANKS},
        memory_budget="1GiB",
    )
    with fake_group(NUM_RANKS), warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = plan.make_mesh("cpu")
        model = plan.apply(llama(), mesh)
        for _ in range(3):
            batch = labelled()
            args, kwargs = plan.part_of(batch, mesh)
            model(*args, **kwargs).loss.backward()
            model.zero_grad()
