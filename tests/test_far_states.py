"""Steps of optimizers with state in far memory: predicted, planned, and run."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import autosac
from autosac.errors import ArgumentError, UnsupportedError
from autosac.far_memory import FarMemory
from autosac.graphs.optimizer_steps import captured_step
from autosac.step.op_signatures import Copies
from autosac.verification.measuring import differences
from autosac.verification.recipes import Recipe
from autosac.verification.verifying import _measure
from tests.models import Case
from tests.test_offloading import Stack, rows
from tests.value_models import Peeks

pytestmark = pytest.mark.usefixtures("one_thread")
SLOW_BYTES_PER_S = 1e7
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW": partial(torch.optim.AdamW, foreach=False),
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": partial(torch.optim.RMSprop, centered=True),
    "Adafactor": torch.optim.Adafactor,
}
WIDTH, DEPTH, BATCH = 48, 4, 96


class Wide(nn.Module):
    """Its parameters take more memory than its activations."""

    def __init__(self, depth=DEPTH):
        super().__init__()
        layers = (
            [nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)]
            for _ in range(depth)
        )
        self.blocks = nn.ModuleList(nn.Sequential(*own) for own in layers)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x).square().mean()


WIDE = Case(Wide, lambda: torch.randn(BATCH, WIDTH))
FLAT = Case(partial(Wide, 1), lambda: torch.randn(BATCH, WIDTH))


def plain(make):
    return lambda model: make(model.parameters())


def far(make, **options):
    return lambda model: autosac.OffloadedOptimizer(make(model.parameters()), **options)


def in_backward(make):
    def one(parameters):
        return autosac.OffloadedOptimizer(make(parameters))

    return lambda model: autosac.OptimizerInBackward(model.parameters(), one)


def profiled(case, make_optimizer, **options):
    step = autosac.profile(
        case.model(),
        case.inputs(),
        optimizer=lambda parameters: make_optimizer(_Parameters(parameters)),
        loss_fn=case.loss_fn,
        **options,
    )
    return autosac.calibrate(step, progress=False)


class _Parameters:
    """What a function of a model is given in a trace: its parameters."""

    def __init__(self, parameters):
        self._parameters = list(parameters)

    def parameters(self):
        return self._parameters


def verified(plan, case, make_optimizer, **options):
    return autosac.verify(
        plan,
        case.model,
        case.inputs,
        make_optimizer=make_optimizer,
        loss_fn=case.loss_fn,
        timing_rounds=0,
        **options,
    )


def assert_kept(plan, case, make_optimizer, **options):
    """Real steps take what was predicted, with the bits of those without a plan."""
    done = verified(plan, case, make_optimizer, steps=3, **options)
    over = done.predicted_peak_bytes - done.measured_peak_bytes
    # Numbers that autograd may keep or not: no fake tensor shows them.
    assert 0 <= over <= plan.traced.simulator.number_bytes
    assert done.predicted_peak_bytes <= done.budget_bytes
    assert not done.differences


@pytest.fixture(scope="module")
def step():
    return profiled(WIDE, far(torch.optim.AdamW))


@pytest.mark.slow
@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("chunk_bytes", [1, None])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_real_steps_keep_budgets_below_the_plain_floor(name, chunk_bytes):
    make = OPTIMIZERS[name]
    moved = far(make, chunk_bytes=chunk_bytes)
    step = profiled(WIDE, moved)
    low, floor = autosac.floor(step), autosac.floor(profiled(WIDE, plain(make)))
    plan = autosac.plan(step, memory_budget=low)

    assert low < floor
    assert plan.dry_run and plan.peak_bytes == low
    assert_kept(plan, WIDE, moved)


@pytest.mark.slow
def test_nothing_in_far_memory_counts_where_hooks_may_keep_more():
    def hooked(model):
        optimizer = far(torch.optim.AdamW)(model)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    without = profiled(WIDE, far(torch.optim.AdamW))
    assert profiled(WIDE, hooked).baseline_peak_bytes == without.baseline_peak_bytes


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_planned_steps_have_the_bits_of_the_plain_ones(name):
    make, states = OPTIMIZERS[name], []
    step = profiled(WIDE, far(make))
    plan = autosac.plan(step, memory_budget=autosac.floor(step))
    for make_optimizer, own in ((plain(make), None), (far(make), plan)):
        recipe = Recipe(
            make_model=WIDE.model,
            make_inputs=WIDE.inputs,
            make_optimizer=make_optimizer,
            steps=3,
            timing_rounds=0,
        )
        states.append(_measure(recipe, own)[1])

    assert differences(*states) == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "AdamW foreach", "AdamW"])
def test_slow_copies_give_the_same_peak(name):
    def slow(model):
        optimizer = far(OPTIMIZERS[name])(model)
        optimizer.memory = FarMemory(bytes_per_s=SLOW_BYTES_PER_S, at_once_bytes=0)
        return optimizer

    step = profiled(WIDE, far(OPTIMIZERS[name]))
    plan = autosac.plan(step, memory_budget=autosac.floor(step))
    assert_kept(plan, WIDE, slow)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad"])
def test_optimizers_in_backward_fetch_one_parameters_state(name):
    make = OPTIMIZERS[name]
    step = profiled(WIDE, in_backward(make))
    low = autosac.floor(step)
    plan = autosac.plan(step, memory_budget=low)

    assert low < autosac.floor(profiled(WIDE, far(make)))
    assert_kept(plan, WIDE, in_backward(make))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 3},
        {"clip_grad_norm": 0.1},
        {"keeps_gradients": True},
        {"gradients_in_forward": True},
    ],
    ids=str,
)
def test_steps_of_other_kinds_take_what_was_predicted(options):
    make = far(torch.optim.AdamW)
    step = profiled(WIDE, make, **options)
    plan = autosac.plan(step, memory_budget=autosac.floor(step))
    assert_kept(plan, WIDE, make, **options)


def test_a_step_whose_values_decide_is_traced_with_real_states():
    case = Case(Peeks, lambda: torch.randn(4, 8), lambda output: output.sum())
    make = far(torch.optim.AdamW)
    step = profiled(case, make)
    assert step.step.learned.real
    plan = autosac.plan(step, memory_budget=autosac.floor(step))
    done = verified(plan, case, make, steps=3)

    assert not done.differences
    assert done.measured_peak_bytes <= done.predicted_peak_bytes


def test_planning_changes_nothing_of_an_optimizer_in_training():
    model = WIDE.model()
    optimizer = far(torch.optim.AdamW)(model)
    for _ in range(2):
        model(WIDE.inputs()).backward()
        optimizer.step()
    before = {p: dict(s) for p, s in optimizer.state.items()}
    values = [t.clone() for t in optimizer.far_tensors()]
    step = autosac.profile(model, WIDE.inputs(), optimizer=optimizer)

    assert autosac.floor(step) == autosac.floor(profiled(WIDE, far(torch.optim.AdamW)))
    assert optimizer.noted is None
    assert {p: dict(s) for p, s in optimizer.state.items()} == before
    pairs = zip(optimizer.far_tensors(), values, strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_every_state_leaves_and_comes_once_a_step(step):
    copies = [op.signature for op in step.tape.ops if isinstance(op.signature, Copies)]
    nbytes = 2 * sum(p.nbytes for p in WIDE.model().parameters())

    assert "by the rates of the link" in str(step.calibration)
    assert sum(one.out_bytes for one in copies) == nbytes
    assert sum(one.back_bytes for one in copies) == nbytes == step.far_state_bytes


def test_the_program_is_busy_with_every_tensor_that_leaves_or_comes(step):
    copies = [op.signature for op in step.tape.ops if isinstance(op.signature, Copies)]
    busy = replace(step.device.link.without_issue, issue_ms=0.5)
    free, dear = (
        autosac.profile(
            WIDE.model(),
            WIDE.inputs(),
            optimizer=lambda own: far(torch.optim.AdamW)(_Parameters(own)),
            device=replace(step.device, link=link),
        ).baseline_ms
        for link in (busy.without_issue, replace(busy, at_once_bytes=0))
    )
    number = sum(len(one.out_sizes) + len(one.back_sizes) for one in copies)
    assert number and dear - free == pytest.approx(0.5 * number)


def test_the_step_takes_as_long_as_its_copies(step):
    times = []
    for gb_per_s in (0.1, 1.0, 10.0):
        rate = 1e9 * gb_per_s
        link = replace(step.device.link, out_bytes_per_s=rate, back_bytes_per_s=rate)
        device = replace(step.device, link=link)
        slower = autosac.profile(
            WIDE.model(),
            WIDE.inputs(),
            optimizer=lambda own: far(torch.optim.AdamW)(_Parameters(own)),
            device=device,
        )
        times.append(slower.baseline_ms)
        assert slower.baseline_ms >= 1e3 * step.far_state_bytes / rate
    assert times == sorted(times, reverse=True)


@pytest.mark.slow
def test_a_gpu_that_is_not_there_keeps_the_state_on_its_host():
    def on_gpu(make):
        return autosac.profile(
            WIDE.model(),
            WIDE.inputs(),
            optimizer=lambda own: make(_Parameters(own)),
            device="h100",
        )

    moved, resident = on_gpu(far(torch.optim.AdamW)), on_gpu(plain(torch.optim.AdamW))
    nbytes = 2 * sum(p.nbytes for p in WIDE.model().parameters())
    assert moved.far_state_bytes == nbytes
    assert autosac.floor(moved) < autosac.floor(resident)
    unknown = replace(moved.device, link=None)
    with pytest.raises(ArgumentError, match="pass a `DeviceSpec` with a `link`"):
        autosac.profile(
            WIDE.model(),
            WIDE.inputs(),
            optimizer=lambda own: far(torch.optim.AdamW)(_Parameters(own)),
            device=unknown,
        )


@pytest.mark.slow
def test_activations_and_states_share_the_hosts_budget():
    case = Case(Stack, rows)
    make = far(torch.optim.AdamW)
    step = profiled(case, make)
    states = step.far_state_bytes
    low = autosac.floor(step, offload=True)
    assert low < autosac.floor(step)
    plan = autosac.plan(step, memory_budget=low, offload=True)
    assert plan.offloaded_bytes and plan.far_state_bytes == states
    done = verified(plan, case, make, steps=3)
    assert not done.differences
    over = done.predicted_peak_bytes - done.measured_peak_bytes
    assert 0 <= over <= step.simulator.number_bytes

    budget = autosac.floor(step)
    for host_bytes in (states, states + plan.offloaded_bytes // 2):
        capped = autosac.plan(
            step, memory_budget=budget, offload=True, host_budget=host_bytes
        )
        assert capped.offloaded_bytes + capped.far_state_bytes <= host_bytes
    for offload in (False, "auto", True):
        with pytest.raises(ArgumentError, match=r"`host_budget`=.* is less"):
            autosac.plan(
                step, memory_budget=budget, offload=offload, host_budget=states - 1
            )


def test_reports_and_files_say_what_lies_in_far_memory(step, tmp_path):
    plan = autosac.plan(step, memory_budget=autosac.floor(step))
    resident = profiled(WIDE, plain(torch.optim.AdamW))
    other = autosac.plan(resident, memory_budget=autosac.floor(resident))
    for one in (plan, other):
        one.save(tmp_path / "plan.json")
        assert autosac.Plan.load(tmp_path / "plan.json") == one
    assert plan.far_state_bytes == step.far_state_bytes > other.far_state_bytes == 0
    assert "of the optimizer in a file between updates" in str(plan)
    assert "of its state in far memory" in str(step)
    assert "far memory" not in str(resident)


def advised(optimizer, model):
    advice = autosac.advise(model, FLAT.inputs(), optimizer=optimizer)
    return advice, {row.cell["change"]: row for row in advice}


@pytest.mark.slow
def test_advice_says_what_it_lowers_the_floor_to():
    _, rows = advised("adamw", FLAT.model())
    row = rows["optimizer state offloaded"]

    assert row.cell["results"] == "same"
    assert row.floor_bytes == autosac.floor(profiled(FLAT, far(torch.optim.AdamW)))
    model = FLAT.model()
    _, again = advised(far(torch.optim.AdamW)(model), model)
    assert "optimizer state offloaded" not in again


@pytest.mark.slowest
def test_advice_knows_groups_and_says_what_cannot_be_moved():
    model = FLAT.model()
    first, *others = model.parameters()
    groups = [{"params": [first], "weight_decay": 0.0}, {"params": others}]
    _, rows = advised(torch.optim.AdamW(groups), model)
    assert "optimizer state offloaded" in rows

    class Own(torch.optim.AdamW):
        pass

    advice, _ = advised(Own(model.parameters(), foreach=False), model)
    assert "is a Own" in advice.not_simulated["optimizer state offloaded"]


def test_other_plans_refuse_what_they_do_not_know():
    def moved(parameters):
        return far(torch.optim.AdamW)(_Parameters(parameters))

    model = WIDE.model()
    cluster = {"cluster": "hgx-h100", "memory_budget": "1GiB"}
    with pytest.raises(UnsupportedError, match="is not planned for many GPUs: pass"):
        autosac.plan_parallel(model, WIDE.inputs(), optimizer=moved, **cluster)
    with pytest.raises(UnsupportedError, match="`offload` is for single plans"):
        autosac.min_gpus(model, WIDE.inputs(), offload=True, **cluster)
    chain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    pipeline = {
        "target": WIDE.inputs(),
        "loss_fn": nn.functional.mse_loss,
        "num_ranks": 2,
        "num_micro_batches": 2,
        "memory_budget": "1GiB",
    }
    with pytest.raises(UnsupportedError, match="are not planned with an `Offloaded"):
        autosac.plan_pipeline(chain, WIDE.inputs(), optimizer=moved, **pipeline)
    parameters = list(model.parameters())
    with pytest.raises(UnsupportedError, match="are not part of a graph"):
        captured_step(moved(parameters), model, parameters)
