"""Parameters that were frozen in the planned step and are trained in a later one."""

import pytest
import torch

import autosac
from autosac.errors import PlanMismatchError
from autosac.verification.measuring import measure_peak

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 64
FROZEN = 3


def block():
    first, last = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
    return torch.nn.Sequential(first, torch.nn.GELU(), last)


def make_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[block() for _ in range(6)])
    return model[:FROZEN].requires_grad_(False), model


def batch():
    return torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_of(output):
    return output.square().sum()


def step(model, inputs=None):
    model.zero_grad()
    output = model(batch() if inputs is None else inputs)
    loss_of(output).backward()


def peak_of(model):
    inputs = batch()

    def run():
        step(model, inputs)
        model.zero_grad()

    def held():
        return [inputs, *model.parameters()]

    return measure_peak(run, device="cpu", held=held, warm_up=run)[1]


def planned(on_mismatch):
    _, model = make_model()
    profile = autosac.profile(model, batch(), loss_fn=loss_of)
    lowest, highest = autosac.floor(profile), profile.baseline_peak_bytes
    return autosac.plan(
        model,
        batch(),
        loss_fn=loss_of,
        memory_budget=(lowest + highest) // 2,
        on_mismatch=on_mismatch,
    )


@pytest.fixture(scope="module")
def strict_plan():
    return planned("raise")


def gradients(model):
    step(model)
    return [parameter.grad for parameter in model.parameters()]


def same(ones, others):
    pairs = zip(ones, others, strict=True)
    return all(a is b or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("thawed_first", [False, True], ids=["later", "before"])
def test_a_warning_names_what_is_trained_and_gradients_are_right(thawed_first):
    plan = planned("recompute")
    frozen, model = make_model()
    frozen.requires_grad_(True)
    expected = gradients(model)
    frozen, model = make_model()
    if thawed_first:
        frozen.requires_grad_(True)
    plan.apply(model)
    if not thawed_first:
        step(model)
        frozen.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"trains `0.0.weight` and 11 more, frozen"):
        observed = gradients(model)

    assert same(observed, expected)


@pytest.mark.slow
def test_a_step_that_trains_more_is_planned_anew_and_keeps_the_budget():
    plan = planned("replan")
    frozen, model = make_model()
    plan.apply(model)
    before = peak_of(model)
    frozen.requires_grad_(True)
    with pytest.warns(UserWarning, match="planned for anew"):
        step(model)
    thawed = peak_of(model)
    frozen.requires_grad_(False)

    assert before == plan.peak_bytes == peak_of(model)
    assert thawed <= plan.budget_bytes
    assert before != thawed == model.forward.variants.plans[1].peak_bytes
    frozen.requires_grad_(True)
    plan.unapply(model)
    assert peak_of(model) > thawed


def test_it_is_an_error_where_one_is_asked_for(strict_plan):
    frozen, model = make_model()
    strict_plan.apply(model)
    frozen.requires_grad_(True)
    with pytest.raises(PlanMismatchError, match="Plan again while these are trained"):
        step(model)


def test_a_step_that_trains_less_follows_the_plan_and_takes_no_more(strict_plan):
    _, model = make_model()
    strict_plan.apply(model)
    model[FROZEN].requires_grad_(False)

    assert peak_of(model) <= strict_plan.peak_bytes


def test_plan_files_know_what_is_trained(strict_plan, tmp_path):
    strict_plan.save(tmp_path / "plan.json")
    plan = autosac.Plan.load(tmp_path / "plan.json")
    frozen, model = make_model()
    frozen.requires_grad_(True)
    plan.apply(model)
    with pytest.raises(PlanMismatchError, match=r"trains `0.0.weight`"):
        step(model)
