"""Steps whose values decide what they do: traced for real, planned, trained."""

import contextlib
import gc
import warnings
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from autosac import OptimizerInBackward, _compat, floor, plan, verify
from autosac.checkpointing import installing
from autosac.errors import ArgumentError, TraceError
from autosac.fake_tensors import real_layouts
from autosac.planning.spelling import spell_out
from autosac.profiles.profile import profile
from autosac.solving.incumbents import recompute_ms
from autosac.solving.solve_options import SolveOptions
from autosac.step.training_step import training_step
from autosac.tracing import single_run
from autosac.tracing import trace as tracing
from autosac.tracing.draws import may_decide, plain_peak_bytes, training_may_decide
from autosac.tracing.learned import Learned
from autosac.tracing.trace import trace
from autosac.verification.measuring import capture_state, differences
from tests.examples import seeds
from tests.models import BATCH, WIDTH, Case, each_case, random_policy, shared_profile
from tests.training import assert_equal, planned, random_policies, train
from tests.value_models import (
    ROWS,
    VALUE_CASES,
    Peeks,
    Routes,
    Step,
    drawn_case,
    rows,
    stack,
)

pytestmark = pytest.mark.usefixtures("one_thread")

each_value_case = pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in VALUE_CASES.items()]
)


def events(tape):
    """All that a tape says, part by part."""
    return tape.storages, tape.ops, tape.saved, tape.calls, tape.parameters


@pytest.mark.slow
@pytest.mark.slow_but_fifth
@each_case
def test_a_real_trace_is_the_trace_of_fakes(case):
    on_fakes = shared_profile(case, torch.optim.AdamW)

    on_real = trace(replace(on_fakes.step, learned=Learned(real=True)))

    for expected, event in zip(events(on_fakes.tape), events(on_real), strict=True):
        assert event == expected


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2, "clip_grad_norm": 1.0},
        {"autocast": torch.bfloat16},
        {"gradients_in_forward": True},
        {"keeps_gradients": True},
    ],
    ids=str,
)
def test_a_real_trace_is_that_of_fakes_whatever_the_step(options):
    model = nn.Sequential(Step(), nn.Dropout(0.1), nn.LayerNorm(WIDTH), Step())
    traced = profile(model, rows(), optimizer="adamw", loss_fn=_mean_square, **options)

    again = trace(replace(traced.step, learned=Learned(real=True)))

    assert events(again) == events(traced.tape)


def _mean_square(output):
    return output.square().mean()


@pytest.mark.slow_but_first
@each_value_case
def test_values_decide_and_gradients_are_equal(case):
    for seed in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # another draw or batch: departures
            trained = train(case, planned(case, seed))
        assert_equal(train(case, case.model()), trained)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("seed", range(8))
def test_drawn_models_are_trained_bit_by_bit(seed):
    case = drawn_case(seed)
    expected = train(case, case.model(), steps=3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for save_share in (0.0, None):
            model = planned(case, seed, save_share=save_share)
            assert_equal(expected, train(case, model, steps=3))


class SeenFromFar(nn.Module):
    """A few places, made of nothing, seen from many rows."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(1, 1)

    def forward(self, x):
        places = torch.arange(32.0).expand(len(x), -1)
        return (places * self.scale(x)).sum()


def test_a_large_view_of_known_values_takes_no_memory_of_its_own():
    rows = 2**17 + 1  # more values than are worked out
    fakes = profile(SeenFromFar(), torch.ones(rows, 1), loss_fn=lambda total: total)

    on_real = trace(replace(fakes.step, learned=Learned(real=True)))

    for expected, event in zip(events(fakes.tape), events(on_real), strict=True):
        assert event == expected


@pytest.mark.slow_but_fifth
@each_value_case
def test_a_dry_run_confirms_what_was_simulated(case):
    traced = case.profile()
    lowest = floor(traced)
    between = (lowest + traced.baseline_peak_bytes) // 2

    for budget_bytes in (lowest, between):
        chosen = plan(traced, memory_budget=budget_bytes, dry_run=True)
        assert chosen.peak_bytes <= budget_bytes


@pytest.mark.slow
def test_what_values_decide_is_traced_for_real():
    real = {n for n, case in VALUE_CASES.items() if case.profile().step.learned.real}

    assert real == VALUE_CASES.keys() - {"Drops"}  # draws are known to fakes, too


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("name", "decide"), [("Routes", True), ("Peeks", False)])
def test_a_plan_says_that_values_decide_sizes(name, decide):
    traced = VALUE_CASES[name].profile()

    made = plan(traced, memory_budget=floor(traced) + 10_000, dry_run=False)

    assert ("decide sizes" in str(made)) is decide


@pytest.mark.slow_but_fifth
@each_value_case
def test_nothing_of_the_user_changes(case):
    model, inputs = case.model(), case.inputs()
    optimizer = torch.optim.AdamW(model.parameters())
    model(inputs).sum().backward()
    optimizer.step()
    before = capture_state(model, optimizer, torch.zeros(()))
    given, generator = inputs.clone(), torch.get_rng_state()

    profile(model, inputs, optimizer=optimizer, loss_fn=lambda y: y.sum())

    assert differences(before, capture_state(model, optimizer, torch.zeros(()))) == ()
    assert torch.equal(given, inputs)
    assert torch.equal(generator, torch.get_rng_state())


def test_the_copy_is_gone_when_the_trace_is_done():
    model = stack(Peeks)()
    gc.collect()
    before = sum(type(o) is nn.Parameter for o in gc.get_objects())

    traced = profile(model, rows(), loss_fn=_mean_square)

    now = sum(type(o) is nn.Parameter for o in gc.get_objects())
    assert traced.step.learned.real
    assert now == before


# --- draws that decide ------------------------------------------------------------


@pytest.mark.slow
def test_of_steps_that_draws_decide_the_largest_is_planned():
    case = VALUE_CASES["Drops"]
    traced = case.profile()

    peaks = []
    for seed in range(8):
        learned = replace(traced.step.learned, seed=seed, redrawn=[])
        step = replace(traced.step, learned=learned)
        peaks.append(plain_peak_bytes(tracing.trace_once(step)))

    assert plain_peak_bytes(traced.tape) == max(peaks) > min(peaks)
    again = tracing.trace_once(traced.step)
    assert plain_peak_bytes(again) == max(peaks)


class Experts(nn.Module):
    """Noise decides which of two networks a row goes through."""

    def __init__(self, draw=torch.randn):
        super().__init__()
        self.draw = draw
        self.router = nn.Linear(WIDTH, 1)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
            for _ in range(2)
        )

    def forward(self, x):
        is_first = (self.router(x) + self.draw(len(x), 1)).squeeze(1) > 0
        out = torch.zeros_like(x)
        for mask, expert in zip((is_first, ~is_first), self.experts, strict=True):
            out[mask] = expert(x[mask])
        return x + out


def experts(draw=torch.randn):
    torch.manual_seed(0)
    return nn.Sequential(*(Experts(draw) for _ in range(4)))


def uniform(*size):
    return 6 * torch.rand(*size) - 3


@cache
def traced_experts(draw):
    model, x = experts(draw), torch.randn(256, WIDTH)
    return x, profile(model, x, loss_fn=_mean_square)


@pytest.mark.slowest_but_first
@pytest.mark.parametrize("draw", [torch.randn, uniform])
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_a_plan_leaves_room_for_other_draws(share, draw):
    x, traced = traced_experts(draw)
    least, most = floor(traced), traced.baseline_peak_bytes
    chosen = plan(traced, memory_budget=least + int(share * (most - least)))

    assert chosen.policy and traced.redrawn
    for seed in range(3):
        done = verify(
            *(chosen, lambda: experts(draw), lambda: x),
            loss_fn=_mean_square,
            seed=seed,
            timing_rounds=0,
        )
        assert not done.differences
        assert done.measured_peak_bytes <= chosen.budget_bytes


@pytest.mark.slow
def test_room_for_other_draws_is_no_dearer_than_in_plans_of_smaller_budgets():
    traced = profile(experts(), torch.randn(256, WIDTH), loss_fn=_mean_square)
    least, most = floor(traced), traced.baseline_peak_bytes
    budget_bytes = least + 6 * (most - least) // 10
    room = traced.roomy_chooser
    targets = range(least, budget_bytes, (most - least) // 40)
    choices = [traced.chooser.choose(t, SolveOptions())[0] for t in targets]
    roomy = [c for c in choices if room.true_peak_bytes(c) <= budget_bytes]

    chosen = plan(traced, memory_budget=budget_bytes)

    assert roomy
    assert chosen.recompute_ms <= 1.005 * min(map(recompute_ms, roomy))


class DropsBlocks(nn.Module):
    """Blocks of which each is left out one time in two."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )
            for _ in range(8)
        )

    def forward(self, x):
        for block in self.blocks:
            if torch.rand([]) > 0.5:
                x = x + block(x)
        return x


@pytest.mark.slow
def test_where_no_room_is_left_the_fastest_choice_of_least_peak_is_planned():
    _, traced = traced_experts(torch.randn)
    least, units = floor(traced), traced.formulation
    fast = traced.chooser.lowest()
    alike = (
        {**fast, unit: policy}
        for unit, curve in zip(units.units, units.curves, strict=True)
        for policy in curve.policies
    )
    slow = next(
        choice
        for choice in alike
        if recompute_ms(choice) > 1.05 * recompute_ms(fast)
        and traced.peak_bytes(choice) == least
    )
    with patch("autosac.planning.choices.lowest", return_value=slow):
        planned = plan(traced, memory_budget=least, dry_run=False)

    assert traced.redrawn
    assert planned.peak_bytes == least
    assert planned.recompute_ms <= recompute_ms(fast)
    assert "room" not in str(replace(planned, bound_ms=0.0))


@pytest.mark.slow
def test_a_plan_that_leaves_room_is_no_dearer_at_a_larger_budget():
    torch.manual_seed(0)
    traced = profile(DropsBlocks(), torch.randn(256, WIDTH), loss_fn=_mean_square)
    least, most = floor(traced), traced.baseline_peak_bytes
    times = [
        plan(traced, memory_budget=least + (most - least) * i // 20).recompute_ms
        for i in range(21)
    ]

    assert traced.redrawn
    assert times == sorted(times, reverse=True)


def routed():
    torch.manual_seed(0)
    return stack(Routes)()


@pytest.mark.slow
def test_a_plan_leaves_room_for_what_a_router_learns():
    x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1))
    adamw = partial(torch.optim.AdamW, lr=0.01)
    traced = profile(routed(), x, optimizer=adamw, loss_fn=_mean_square)
    least, most = floor(traced), traced.baseline_peak_bytes
    chosen = plan(traced, memory_budget=least + int(0.6 * (most - least)))

    assert chosen.policy
    for steps in (2, 3, 5):
        done = verify(
            *(chosen, routed, lambda: x),
            make_optimizer=adamw,
            loss_fn=_mean_square,
            steps=steps,
            timing_rounds=0,
        )
        assert not done.differences
        assert done.measured_peak_bytes <= chosen.budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_step_after_training_is_the_real_one_after_it(in_backward):
    x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1))
    adamw = partial(torch.optim.AdamW, lr=0.03)
    if in_backward:
        adamw = partial(OptimizerInBackward, make_optimizer=adamw)
    traced = profile(routed(), x, optimizer=adamw, loss_fn=_mean_square)
    routes = []
    for num_updates in range(3):
        traced.step.learned.num_updates = num_updates
        routes.append(_num_rows(tracing.trace_once(traced.step)))

    model = routed()
    optimizer = adamw(model.parameters())
    counted = []
    for module in model.modules():
        if isinstance(module, nn.GELU):
            module.register_forward_pre_hook(lambda _, args: counted.append(*args))
    for expected in routes:
        training_step(*(model, (x,), {}), loss_fn=_mean_square, optimizer=optimizer)
        assert [len(rows) for rows in counted] == expected
        counted.clear()
        model.zero_grad()

    assert routes[0] != routes[1] != routes[2]


def _num_rows(tape):
    """How many rows each expert gets."""
    return [
        op.shapes[0][0]
        for op in tape.ops
        if op.name == "aten.gelu.default" and ".experts." in tape.modules[op.module].fqn
    ]


def test_training_does_not_decide_what_a_fixed_mask_selects():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Masked())
    traced = profile(model, rows(), optimizer="adamw", loss_fn=_mean_square)

    assert traced.step.learned.real
    assert not training_may_decide(traced.tape)


class Masked(nn.Module):
    """Selects by its input's rows that are not empty, whatever they hold."""

    def forward(self, x):
        return x[self.mask]

    mask = torch.arange(ROWS) % 3 > 0


@pytest.mark.parametrize("last", [False, True])
def test_a_group_norm_keeps_the_memory_format_of_its_images(last):
    made = []
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode:
            wished = torch.channels_last if last else torch.contiguous_format
            images = torch.empty(2, 8, 4, 4).to(memory_format=wished)
            ones, sizes = torch.ones(8), (2, 8, 16, 2)
            args = (images, ones, ones, *sizes, 1e-5)
            out = torch.ops.aten.native_group_norm.default(*args)
            back_args = (images, images, out[1], out[2], ones, *sizes, [True] * 3)
            back = torch.ops.aten.native_group_norm_backward.default(*back_args)
            if isinstance(mode, FakeTensorMode):
                func = torch.ops.aten.native_group_norm
                out = real_layouts.on_cpu(func.default, args, out)
                func = torch.ops.aten.native_group_norm_backward
                back = real_layouts.on_cpu(func.default, back_args, back)
        made.append([tensor.stride() for tensor in (*out, *back)])

    assert made[0] == made[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_statistics_of_attention_have_the_type_of_the_kernel(dtype):
    func = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    made = []
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode:
            args = tuple(torch.zeros(1, 2, 8, 16, dtype=dtype) for _ in range(3))
            out = func(*args)
            if isinstance(mode, FakeTensorMode):
                out = real_layouts.on_cpu(func, args, out)
        made.append([(tensor.dtype, tensor.shape) for tensor in out])

    assert made[0] == made[1]


class Noisy(Step):
    """Draws, but nothing depends on it."""

    def between(self, hidden):
        return functional.dropout(hidden, 0.3) + torch.rand_like(hidden)


@pytest.mark.parametrize(("kind", "decides"), [(Noisy, False), (Peeks, False)])
def test_draws_that_decide_nothing_are_not_tried(kind, decides):
    traced = profile(kind(), rows(), loss_fn=_mean_square)

    assert may_decide(traced.tape) == decides


def test_a_number_that_comes_from_a_draw_may_decide():
    model = nn.Sequential(Noisy(), Peeks())

    assert may_decide(profile(model, rows(), loss_fn=_mean_square).tape)


# --- another batch takes another branch -------------------------------------------


@seeds(6)
def test_another_branch_than_planned_keeps_gradients_exact(seed):
    case = Case(stack(Peeks), rows)
    policies = random_policies(case, seed, save_share=0.3)
    plain, model = case.model(), case.model()
    installing.install(model, policies)
    for twin in (plain, model):
        twin[0].threshold = 1e9
    expected = train(case, plain)

    with pytest.warns(UserWarning, match="ran aten") as caught:
        trained = train(case, model)

    assert len(caught) <= 4  # once a step and unit
    assert_equal(expected, trained)


@pytest.mark.slow_but_fifth
@seeds(6)
def test_an_expert_without_rows_keeps_gradients_exact(seed):
    case = Case(stack(Routes), rows)
    few = Case(stack(Routes), lambda: torch.randn(1, WIDTH))
    policies = random_policies(case, seed, save_share=0.3)
    model = case.model()
    installing.install(model, policies)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for other in (few, case, few):
            expected = train(other, case.model(), steps=1)
            twin = case.model()
            installing.install(twin, policies)
            assert_equal(expected, train(other, twin, steps=1))


class Looks(Step):
    """Looks at a value, and does more than planned if it is told to."""

    departs = False

    def between(self, hidden):
        if hidden.sum().item() != 0.0 and self.departs:
            hidden = hidden.sin()
        return hidden.exp()


class Reads(TorchDispatchMode):
    """Counts how often a number is read."""

    num_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_reads += func is _compat.ITEM
        return func(*args, **(kwargs or {}))


def test_a_number_that_decided_in_forward_is_not_read_again():
    case = Case(lambda: nn.Sequential(Looks(), Step()), rows)
    traced = case.profile()
    (unit,) = (unit for unit in traced.units.candidates if unit.fqn == "0")
    policy = random_policy(unit, 0, save_share=0.0)
    model, plain = case.model(), case.model()
    installing.install(model, spell_out(traced, {unit: policy}))
    for twin in (model, plain):
        twin[0].departs = True
    plain(case.inputs()).sum().backward()

    with pytest.warns(UserWarning, match="ran aten"), Reads() as reads:
        model(case.inputs()).sum().backward()

    assert reads.num_reads == 1
    for fqn, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, model.get_parameter(fqn).grad)


# --- refused ----------------------------------------------------------------------


def test_on_the_meta_device_a_real_model_is_asked_for():
    model = stack(Peeks)().to("meta")

    with pytest.raises(TraceError, match="pass a real model and a real batch"):
        profile(model, torch.empty(4, WIDTH, device="meta"), loss_fn=_mean_square)


def test_for_a_gpu_that_is_not_present_it_is_refused():
    with pytest.raises(TraceError, match="on the device that is planned for"):
        profile(stack(Peeks)(), rows(), loss_fn=_mean_square, device="h100")


def test_a_step_larger_than_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr(single_run, "_most_bytes", lambda step: 2000)

    with pytest.raises(TraceError, match=r"2\.0 KiB of memory that are free"):
        profile(stack(Peeks)(), rows(), loss_fn=_mean_square)


def test_what_fails_for_real_too_is_the_users_own_mistake():
    model = nn.Sequential(Step(), nn.Linear(WIDTH + 1, WIDTH))

    with pytest.raises(TraceError, match="The step fails: in module `1`"):
        profile(model, rows(), loss_fn=_mean_square)


# --- opaque -----------------------------------------------------------------------


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("marks", [["0.gate", "2.gate"], ["*.gate"], [nn.Linear]])
def test_an_opaque_module_is_never_run_again(marks):
    case = Case(stack(Routes), rows)
    traced = profile(case.model(), case.inputs(), opaque=marks, loss_fn=_mean_square)
    gate = traced.tape.modules.index["0.gate"]

    assert traced.units.refused.get("0.gate", "it is opaque") == "it is opaque"
    assert not any(unit.fqn.endswith("gate") for unit in traced.units.candidates)
    for unit in traced.units.candidates:
        for group in unit.groups:
            ops = [traced.tape.ops[unit.ops[place]] for place in group.ops]
            if any(op.module == gate for op in ops):
                assert group.pinned


def test_an_opaque_container_is_not_cut_inside():
    traced = profile(stack(Routes)(), rows(), opaque="0", loss_fn=_mean_square)

    assert not any(unit.fqn.startswith("0") for unit in traced.units.candidates)
    assert any(unit.fqn.startswith("2") for unit in traced.units.candidates)


def test_a_mark_for_no_module_is_an_argument_error():
    with pytest.raises(ArgumentError, match=r"`opaque` has 'moe\.gate', which stands"):
        profile(stack(Routes)(), rows(), opaque=["moe.gate"], loss_fn=_mean_square)


# --- what reruns rest on ----------------------------------------------------------


class Late(nn.Module):
    """Adds to a result, late, what was made from a reader of it."""

    def forward(self, x):
        first = x * 2
        second = first + 1
        third = second.sigmoid()
        first.add_(third)
        return first.exp() * second.tanh()


def test_groups_that_read_each_other_are_one():
    case = Case(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Late(), Step()), rows)
    for unit in case.profile().units.candidates:
        for place, group in enumerate(unit.groups):
            assert all(other < place for other in group.inputs)

    for seed in range(4):
        expected = train(case, case.model())
        assert_equal(expected, train(case, planned(case, seed)))


class Clips(nn.Sequential):
    """Changes in place what autograd keeps a copy of."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 4, 1), nn.ReLU6(inplace=True), nn.Conv2d(4, 3, 1), nn.Tanh()
        )


@seeds(6)
def test_a_copy_that_autograd_keeps_of_what_changes_is_no_departure(seed):
    case = Case(
        lambda: nn.Sequential(Clips(), Clips()),
        lambda: torch.randn(BATCH, 3, 4, 4),
        _mean_square,
    )
    expected = train(case, case.model(), steps=3)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(expected, train(case, planned(case, seed), steps=3))
