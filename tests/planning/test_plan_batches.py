"""Plans for several batches: every step follows the plan for its own."""

import copy
import pickle
import random
import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import autosac
from autosac.checkpointing import batch_variants, installing
from autosac.errors import ArgumentError, InfeasibleBudgetError
from autosac.planning.spelling import spell_out
from autosac.verification.measuring import (
    differences,
)
from tests.models import random_choice
from tests.planning.readers import (
    BATCHES,
    ROWS,
    Training,
    accumulated,
    batch_of,
    budget_of,
    is_for,
    make_model,
    plan_of_readers,
    step,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plan():
    return plan_of_readers()


# --- what a training may do -----------------------------------------------------


def forwards_first(batches):
    def act(model, optimizer):
        model.zero_grad()
        loss = sum(model(**batch)["loss"] for batch in batches)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return act


def evaluated(batch):
    def act(model, optimizer):
        with torch.no_grad():
            loss = model(**batch)["loss"]
        model.eval()
        loss = loss + model(**batch)["loss"].detach()
        model.train()
        return loss

    return act


BATCH = st.builds(
    batch_of, st.integers(2, 26), st.booleans(), st.sampled_from([ROWS, 2])
) | st.sampled_from(BATCHES)
ACT = st.one_of(
    BATCH.map(step),
    st.lists(BATCH, min_size=1, max_size=3).map(accumulated),
    st.lists(BATCH, min_size=1, max_size=3).map(forwards_first),
    BATCH.map(evaluated),
)


# Hypothesis draws batches that no plan is for, gradients that add up, calls of which
# backward comes later, and evaluation with gradients: these are warned of.
WARNED = (
    "ignore:A batch with",
    "ignore:AC unit",
    "ignore:Gradients of an earlier",
    "ignore:The model is called in eval",
    "ignore:The model is called again",
)


@pytest.mark.slow
@pytest.mark.filterwarnings(*WARNED)
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(acts=st.lists(ACT, min_size=2, max_size=6))
def test_any_training_is_the_plain_one_bit_by_bit(plan, acts):
    plain, planned = Training(), Training(plan)
    for act in acts:
        assert differences(plain.run(act), planned.run(act)) == ()


@pytest.mark.slow
@pytest.mark.filterwarnings(*WARNED)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    acts=st.lists(ACT, min_size=2, max_size=6),
)
def test_so_is_one_under_random_policies_of_every_unit(profiles, seed, acts):
    plans = [
        Policies(
            spell_out(built, random_choice(built, seed + number)),
            (built.signature,),
            (),
        )
        for number, built in enumerate(profiles)
    ]
    plain, model = Training(), make_model()
    batch_variants.install_plans(model, plans, lambda *_: seed % len(plans))
    planned = Training(model=model)
    for act in acts:
        assert differences(plain.run(act), planned.run(act)) == ()


@dataclass(frozen=True)
class Policies:
    op_policies: tuple
    signatures: tuple
    opening: tuple
    offload_dir: None = None
    finds_gradients: bool = False
    num_batches: int = 1
    budget_bytes: int = 0
    peak_bytes: int = 0
    offloads: bool = False
    reserved_bytes: None = None
    autocast: None = None  # from here on: so that nobody looks
    keeps_graph: None = None
    calls_again: None = None
    trains_inputs: None = None
    backends: None = None
    forward_bytes: None = None
    headroom_bytes: None = None
    far_state_bytes: int = 1  # so that nobody asks what is counted of it


@pytest.fixture(scope="module")
def profiles():
    # Of each signature one: openings are the business of `autosac.plan`.
    return [autosac.profile(make_model(), BATCHES[i]) for i in (0, 2, 3)]


# --- the plan ---------------------------------------------------------------------


@pytest.mark.slow
def test_every_step_keeps_the_budget_and_the_highest_is_predicted(plan):
    training = Training(plan)
    order = [3, 0, 1, 2, 1, 0, 0, 3, 1]
    for number in order[:3]:
        training.run(step(BATCHES[number]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no unit departs
        peaks = [training.peak_bytes(BATCHES[number]) for number in order]

    assert max(peaks) <= plan.budget_bytes
    assert max(peaks) <= plan.peak_bytes <= max(peaks) * 1.01
    for number, peak_bytes in zip(order, peaks, strict=True):
        most = max(p.peak_bytes for p in plan.each if is_for(p, BATCHES[number]))
        assert peak_bytes <= most


@pytest.mark.slow
def test_each_kind_has_the_plan_that_it_has_alone(plan):
    for batch in BATCHES[2:]:
        (own,) = (one for one in plan.variants if is_for(one, batch))
        alone = autosac.plan(
            make_model(), batch, memory_budget=plan.budget_bytes, optimizer="adamw"
        )
        assert own.op_policies == alone.op_policies
        assert own.peak_bytes == alone.peak_bytes


def test_the_whole_has_the_highest_peak_and_mean_times(plan):
    assert [one.num_batches for one in plan.variants] == [1] * 4
    assert plan.peak_bytes == max(one.peak_bytes for one in plan.variants)
    assert plan.op_policies == plan.variants[0].op_policies
    mean = sum(one.recompute_ms for one in plan.variants) / 4
    assert plan.recompute_ms == pytest.approx(mean)
    assert plan.recompute_ms < plan.variants[0].recompute_ms
    assert str(plan).count("\nbatches ") == 4


def test_batches_that_branch_alike_are_one_kind():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    inputs = [torch.rand(4, 8), torch.rand(2, 8), torch.rand(4, 8)]
    planned = autosac.plan(model, inputs, memory_budget="1GiB", loss_fn=torch.sum)

    assert [one.num_batches for one in planned.variants] == [2, 1]
    assert planned.num_batches == 3


def test_arguments_are_known_by_name_or_position(plan):
    training, batch = Training(plan), BATCHES[2]
    training.model(batch["tokens"], mask=batch["mask"])["loss"].backward()
    variants = training.model.forward.variants

    assert is_for(variants.plans[variants.current], batch)
    assert len(variants.plans) == 4


def test_a_branch_is_seen_before_the_first_unit(plan):
    training = Training(plan)
    variants = training.model.forward.variants
    followed = []
    for number in (0, 1, 0, 1):
        training.run(step(BATCHES[number]))
        followed.append(variants.current)

    assert followed[0] == followed[2] != followed[1] == followed[3]


@pytest.mark.slow
def test_each_branch_is_checked_and_reported(plan):
    for batch in BATCHES:
        traced = autosac.profile(make_model(), batch, optimizer="adamw")
        assert autosac.check(plan, traced) <= plan.budget_bytes
    assert str(plan.report()) == str(plan.variants[0].report())
    short = autosac.profile(make_model(), BATCHES[3], optimizer="adamw")
    assert "AC unit" in str(plan.report(short))


def test_a_plan_file_holds_all_kinds(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = autosac.Plan.load(tmp_path / "plan.json")

    assert loaded == plan
    plain, planned = Training(), Training(loaded)
    for batch in BATCHES:
        assert differences(plain.run(step(batch)), planned.run(step(batch))) == ()


@pytest.mark.parametrize(
    "twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_copy_follows_its_own_plans(plan, twin_of):
    model = plan.apply(make_model())
    twin = twin_of(model)
    plain, planned = Training(), Training(model=twin)
    for batch in (*BATCHES, batch_of(10)):
        assert differences(plain.run(step(batch)), planned.run(step(batch))) == ()

    assert installing.installed(twin) == installing.installed(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "forward" not in vars(plan.unapply(model))


# --- mistakes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "options", "sentence"),
    [
        ([], {}, "`inputs` is an empty list"),
        (BATCHES, {"on_mismatch": "ignore"}, "must be one of 'recompute', 'replan'"),
        (list(BATCHES[0].values()), {}, "stands for 2 batches: pass a tuple"),
        ([BATCHES[0], 3], {}, "`inputs` must be a tensor"),
        (
            BATCHES,
            {"loss_fn": torch.sum, "make_loss_fn": lambda batch: torch.sum},
            "`loss_fn` and `make_loss_fn` both",
        ),
    ],
)
def test_mistakes_are_one_sentence(inputs, options, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        autosac.plan(make_model(), inputs, memory_budget="1GiB", **options)


@pytest.mark.slow
def test_a_budget_below_one_floor_names_the_batch_and_the_least_for_all():
    with pytest.raises(InfeasibleBudgetError) as caught:
        autosac.plan(
            make_model(),
            BATCHES[::-1],
            memory_budget=budget_of(0.0) * 3 // 4,
            optimizer="adamw",
        )
    error = caught.value
    assert "one with mask [4, 24], tokens [4, 24] peaks" in str(error)
    planned = autosac.plan(
        make_model(),
        BATCHES,
        memory_budget=error.lowest_peak_bytes,
        optimizer="adamw",
    )
    assert planned.peak_bytes == error.lowest_peak_bytes


def test_losses_may_hold_the_targets_of_their_batch():
    def targets_of(inputs):
        return functional.one_hot(inputs.argmax(1), 8).float()

    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    inputs = [torch.rand(n, 8, generator=torch.Generator()) for n in (4, 2)]
    planned = autosac.plan(
        model,
        inputs,
        memory_budget="1GiB",
        on_mismatch="replan",
        make_loss_fn=lambda x: lambda y: functional.mse_loss(y, targets_of(x)),
    )
    assert len(planned.variants) == 2
    planned.apply(model)
    random.seed(0)
    model(torch.rand(3, 8)).sum().backward()
    assert len(model.forward.variants.plans) == 3
