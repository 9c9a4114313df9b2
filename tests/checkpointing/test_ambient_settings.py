"""Global settings that forward runs under, for some ops or all of it."""

import contextlib

import pytest
import torch
from torch import nn

import autosac

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration"),
]

ROWS, WIDTH = 256, 64


@contextlib.contextmanager
def _set(read, write, value):
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def in_float64():
    return _set(torch.get_default_dtype, torch.set_default_dtype, torch.float64)


def in_bfloat16_products():
    read, write = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    return _set(read, write, "medium")


def without_onednn():
    return torch.backends.mkldnn.flags(enabled=False)


def in_onednn_bfloat16():
    return torch.backends.mkldnn.flags(enabled=True, fp32_precision="bf16")


def on_two_threads():
    return _set(torch.get_num_threads, torch.set_num_threads, 2)


def without_denormals():
    return _set(lambda: False, torch.set_flush_denormal, True)


SETTINGS = [
    contextlib.nullcontext,
    in_float64,
    in_bfloat16_products,
    without_onednn,
    in_onednn_bfloat16,
    on_two_threads,
    without_denormals,
]


class Block(nn.Module):
    def __init__(self, around):
        super().__init__()
        self.around = around
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mix = nn.Conv1d(4, 4, 3, padding=1)
        self.register_buffer("tiny", torch.tensor(1e-39))
        self.register_buffer("huge", torch.tensor(1e38))

    def forward(self, x):
        with self.around():
            h = self.up(x)
            h = self.mix(h.view(-1, 4, WIDTH)).flatten(1)
            h = h * torch.randn(h.shape).float() + torch.linspace(0, 1, 256).sqrt()
            h = h.float() + (h.float() * self.tiny) * self.huge
            h = h + h.sum().sin()
        h = nn.functional.gelu(h.tanh()).sigmoid()
        return x + self.down(h)


def mean_square(output):
    return output.square().mean()


def trained_as_planned(make_model, share):
    """A verified plan, so far from its floor to its plain peak."""
    x = torch.randn(ROWS, WIDTH)
    profile = autosac.profile(make_model(), x, loss_fn=mean_square, optimizer="sgd")
    profile = autosac.calibrate(profile, progress=False)
    floor, highest = autosac.floor(profile), profile.baseline_peak_bytes
    plan = autosac.plan(profile, memory_budget=floor + int(share * (highest - floor)))
    return plan, autosac.verify(
        plan,
        make_model,
        lambda: x,
        make_optimizer="sgd",
        loss_fn=mean_square,
        timing_rounds=0,
    )


@pytest.mark.parametrize("around", SETTINGS)
def test_what_runs_under_another_setting_is_saved(around):
    plan, done = trained_as_planned(
        lambda: nn.Sequential(*[Block(around) for _ in range(3)]), 0.0
    )

    assert plan.policy
    assert not done.differences
    assert done.measured_peak_bytes == plan.peak_bytes <= plan.budget_bytes


@pytest.mark.slow
def test_a_setting_that_holds_in_the_whole_step_forbids_nothing():
    def make_model():
        return nn.Sequential(*[Block(contextlib.nullcontext) for _ in range(3)])

    expected, _ = trained_as_planned(make_model, 0.0)
    with without_onednn():
        plan, done = trained_as_planned(make_model, 0.0)

    assert plan.policy == expected.policy
    assert not done.differences


class Tail(nn.Module):
    """A block that has more ops than in the planned step once it is told to."""

    def __init__(self):
        super().__init__()
        self.block, self.departs = Block(contextlib.nullcontext), False

    def forward(self, x):
        y = self.block(x)
        return y.tanh().sin() if self.departs else y


@pytest.mark.filterwarnings("ignore:`torch.backends.mkldnn.enabled` is False")
@pytest.mark.filterwarnings("ignore:AC unit .* where its plan expects")
@pytest.mark.parametrize("departs", [False, True])
@pytest.mark.parametrize("around", SETTINGS[1:])
def test_reruns_have_the_settings_that_a_loop_sets_around_forward_only(around, departs):
    def make_model():
        torch.manual_seed(0)
        return nn.Sequential(*[Tail() for _ in range(3)])

    x = torch.ones(ROWS, WIDTH)

    def gradients(model):
        for tail in model:
            tail.departs = departs
        torch.manual_seed(1)
        with around():
            output = model(x)
        mean_square(output.float()).backward()
        return [p.grad for p in model.parameters()]

    planned = make_model()
    profile = autosac.profile(planned, x, loss_fn=mean_square)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    own = gradients(plan.apply(planned))

    for expected, gradient in zip(gradients(make_model()), own, strict=True):
        assert torch.equal(expected, gradient)


class Cast(nn.Module):
    """Blocks in another precision of products, as trainers run a training step."""

    def __init__(self, around):
        super().__init__()
        blocks = [Block(contextlib.nullcontext) for _ in range(3)]
        self.blocks, self.around = nn.Sequential(*blocks), around

    def forward(self, x):
        with self.around():
            return self.blocks(x)


def test_settings_around_whole_units_forbid_nothing():
    usual, _ = trained_as_planned(lambda: Cast(contextlib.nullcontext), 0.0)
    plan, done = trained_as_planned(lambda: Cast(in_onednn_bfloat16), 0.0)

    assert plan.policy.keys() == usual.policy.keys()
    assert not done.differences
    assert done.measured_peak_bytes == plan.peak_bytes <= plan.budget_bytes


def test_reruns_leave_precisions_to_follow_what_all_of_a_backend_has():
    def gradients(model):
        x = torch.ones(ROWS, WIDTH)
        for _ in range(3):
            model.zero_grad()
            torch.manual_seed(1)
            torch.backends.mkldnn.fp32_precision = "bf16"
            output = model(x)
            torch.backends.mkldnn.fp32_precision = "ieee"
            mean_square(output).backward()
        return [p.grad for p in model.parameters()]

    def make_model():
        torch.manual_seed(0)
        return nn.Sequential(*[Block(contextlib.nullcontext) for _ in range(3)])

    before = torch.backends.mkldnn.fp32_precision
    try:
        profile = autosac.profile(
            make_model(), torch.ones(ROWS, WIDTH), loss_fn=mean_square
        )
        plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
        own = gradients(plan.apply(make_model()))
        plain = gradients(make_model())
    finally:
        torch.backends.mkldnn.fp32_precision = before

    for expected, gradient in zip(plain, own, strict=True):
        assert torch.equal(expected, gradient)
