"""Ways to train: optimizers, clipping, accumulation; each is traced as it runs."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import autosac
from autosac import OptimizerInBackward
from autosac.profiles.profile import profile
from autosac.simulation.simulator import Simulator
from autosac.step.optimizer_state import optimizer_tensors
from autosac.step.training_step import training_step
from autosac.tracing.trace import dry_run
from autosac.verification.measuring import (
    capture_state,
    differences,
)
from tests.models import CASES
from tests.tracing.test_trace import LiveBytes

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 64
optim = torch.optim

OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum, for loop": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "momentum, foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "momentum, fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam, foreach": lambda p: optim.Adam(p, foreach=True, amsgrad=True),
    "adamw, for loop": lambda p: optim.AdamW(p, foreach=False),
    "adamw, fused": lambda p: optim.AdamW(p, fused=True),
    "adafactor": optim.Adafactor,
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "rmsprop, centered": lambda p: optim.RMSprop(p, centered=True, momentum=0.5),
    "sgd in backward": lambda p: OptimizerInBackward(p, optim.SGD),
    "adamw in backward": lambda p: OptimizerInBackward(p, optim.AdamW),
}
SETTINGS = {
    "clipped": {"clip_grad_norm": 0.1},
    "accumulated": {"accumulate": 3},
    "clipped and accumulated": {"clip_grad_norm": 0.1, "accumulate": 2},
}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
    )


def make_inputs():
    return torch.ones(32, WIDTH)


def real_peak(make_optimizer, **settings):
    """Most bytes of storages in a real step, by watching every op."""
    model, x = make_model(), make_inputs()
    optimizer = make_optimizer(model.parameters())
    options = {"loss_fn": None, "optimizer": optimizer, **settings}
    for _ in range(8):  # RAdam adapts from the sixth step on
        training_step(model, (x,), {}, **options)
        model.zero_grad()
    counter = LiveBytes([*model.parameters(), *optimizer_tensors(optimizer), x])
    with counter:
        training_step(model, (x,), {}, **options)
    return counter.peak


def assert_exact(make_optimizer, **settings):
    traced = profile(make_model(), make_inputs(), optimizer=make_optimizer, **settings)
    simulated = traced.simulator.peak_bytes({}, workspaces=False)

    dry = Simulator(dry_run(traced.step, lambda model: None))
    assert simulated == dry.baseline.peak_bytes
    assert simulated == real_peak(make_optimizer, **settings)
    plan = autosac.plan(traced, memory_budget=autosac.floor(traced))
    assert plan.peak_bytes <= traced.baseline_peak_bytes


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_peak_with_any_optimizer_is_that_of_a_real_step(name):
    assert_exact(OPTIMIZERS[name])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", SETTINGS)
def test_the_peak_in_any_setting_is_that_of_a_real_step(name):
    assert_exact(optim.AdamW, **SETTINGS[name])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["adamw in backward", "adafactor", "adamw, fused"])
def test_a_plan_trains_identically_with_any_optimizer(name):
    verification = autosac.verify(
        autosac.plan(
            autosac.calibrate(
                profile(make_model(), make_inputs(), optimizer=OPTIMIZERS[name])
            ),
            memory_budget=10**6,
        ),
        make_model,
        make_inputs,
        make_optimizer=lambda model: OPTIMIZERS[name](model.parameters()),
        steps=3,
        timing_rounds=0,
    )

    assert verification.identical
    assert verification.within_budget


# --- optimizers in backward -------------------------------------------------------


def test_stepping_in_backward_trains_as_stepping_afterwards():
    states = []
    for make in (optim.AdamW, OPTIMIZERS["adamw in backward"]):
        model = make_model()
        optimizer = make(model.parameters())
        for _ in range(3):
            options = {"loss_fn": None, "optimizer": optimizer}
            loss = training_step(model, (make_inputs(),), {}, **options)
            model.zero_grad()
        states.append(capture_state(model, optimizer, loss))

    assert differences(*states) == ()


def test_gradients_dropped_in_backward_lower_the_peak():
    peaks = [
        profile(make_model(), make_inputs(), optimizer=make).baseline_peak_bytes
        for make in (optim.SGD, OPTIMIZERS["sgd in backward"])
    ]

    assert peaks[1] < peaks[0]


def test_an_instance_that_steps_in_backward_is_traced_and_left_alone():
    model = make_model()
    optimizer = OptimizerInBackward(model.parameters(), optim.AdamW)
    traced = profile(model, make_inputs(), optimizer=optimizer)
    other = profile(
        make_model(), make_inputs(), optimizer=OPTIMIZERS["adamw in backward"]
    )

    assert traced.baseline_peak_bytes == other.baseline_peak_bytes
    assert list(optimizer.optimizers) == list(model.parameters())
    assert not any(o.state for o in optimizer.optimizers.values())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulate": 2}, "`accumulate`=2 keeps gradients"),
        ({"clip_grad_norm": 1.0}, r"`clip_grad_norm`=1\.0 needs all gradients"),
    ],
)
def test_what_needs_all_gradients_is_refused_with_a_step_in_backward(settings, message):
    make = OPTIMIZERS["sgd in backward"]

    with pytest.raises(ValueError, match=message):
        profile(make_model(), make_inputs(), optimizer=make, **settings)


@pytest.mark.parametrize(
    "kind", ["register_hook", "register_post_accumulate_grad_hook"]
)
def test_hooks_of_parameters_are_refused(kind):
    model = make_model()
    getattr(model[0][0].weight, kind)(lambda tensor: None)

    with pytest.raises(autosac.TraceError, match=r"`0\.0\.weight` has a hook"):
        profile(model, make_inputs())


def test_a_norm_to_clip_to_must_be_positive():
    with pytest.raises(ValueError, match="`clip_grad_norm` must be positive, got 0"):
        profile(make_model(), make_inputs(), clip_grad_norm=0)


def test_an_optimizer_that_runs_the_model_is_refused():
    with pytest.raises(NotImplementedError, match="`optimizer` is an LBFGS"):
        profile(make_model(), make_inputs(), optimizer=optim.LBFGS)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(kind):
    model = nn.Sequential(kind(16, WIDTH, sparse=True), nn.Tanh())

    with pytest.raises(autosac.TraceError, match="embeddings: `sparse=False`"):
        profile(model, torch.ones(4, 3, dtype=torch.long), optimizer=optim.SGD)


# --- backward under autocast ------------------------------------------------------


def test_backward_inside_autocast_reruns_the_casts_of_weights():
    case = CASES["gpt"]
    traced = profile(
        case.model(), case.inputs(), loss_fn=case.loss_fn, autocast=torch.bfloat16
    )
    plan = autosac.plan(traced, memory_budget=autosac.floor(traced))
    grads = []
    for planned in (False, True):
        model = case.model()
        if planned:
            plan.apply(model)
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = case.loss_fn(model(case.inputs()))
            with (
                pytest.warns(UserWarning, match="Backward runs inside of `torch.auto")
                if planned
                else nullcontext()
            ):
                loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])

    assert all(map(torch.equal, *grads))
