"""Batches that were not planned for."""

import gc

import pytest
import torch

import autosac
from autosac.errors import PlanMismatchError
from autosac.step.training_step import training_step
from autosac.storages import storage_bytes
from autosac.verification.measuring import differences, measure_peak
from tests.planning.readers import (
    BATCHES,
    PLANNED,
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


@pytest.mark.slow
def test_a_smaller_batch_follows_the_next_larger_one_and_keeps_the_budget(plan):
    training = Training(plan)
    training.run(step(BATCHES[0]))
    variants = training.model.forward.variants
    for length in (23, 13, 11, 7):
        batch = batch_of(length)
        assert training.peak_bytes(batch) <= plan.budget_bytes
        least = min(n for n, _ in PLANNED if n >= length)
        assert is_for(variants.plans[variants.current], batch_of(least))


def test_a_larger_batch_is_said_once_with_its_peak(plan):
    training = Training(plan)
    training.run(step(BATCHES[0]))
    with pytest.warns(UserWarning, match=r"is larger") as caught:
        training.run(step(batch_of(32)))
        training.run(step(batch_of(32, padded=False)))
        training.run(step(batch_of(40)))
        training.run(step(batch_of(36)))
    said = [str(one.message) for one in caught if "larger than all" in str(one.message)]
    text, later = said
    assert "tokens [4, 40]" in later and "above the budget" in later
    likely = int(text.partition("will be about ")[2].split()[0])

    assert likely == pytest.approx(training.peak_bytes(batch_of(32)), rel=0.05)
    assert len([one for one in caught if "AC unit" in str(one.message)]) == 0


@pytest.mark.slow
def test_a_larger_batch_is_not_recomputed_where_the_budget_is_ample():
    planned = autosac.plan(
        make_model(), BATCHES[1:3], memory_budget="1GiB", optimizer="adamw"
    )
    training = Training(planned)
    with pytest.warns(UserWarning, match="follows the plan of the largest; its peak"):
        training.run(step(batch_of(32)))

    assert training.model.forward.variants.plans == list(planned.each)
    assert all(one.traced is not None for one in planned.each)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Gradients of an earlier")
def test_replanning_keeps_the_budget_and_disturbs_nothing():
    cheapest = autosac.plan(
        make_model(),
        BATCHES[2:],
        memory_budget=budget_of(0.2),
        optimizer="adamw",
        on_mismatch="replan",
    )
    plain, planned = Training(), Training(cheapest)
    order = [BATCHES[2], batch_of(9), BATCHES[0], batch_of(9), BATCHES[3], BATCHES[0]]
    with pytest.warns(UserWarning, match="planned for anew"):
        for batch in order:
            both = accumulated([BATCHES[3], batch])
            assert differences(plain.run(both), planned.run(both)) == ()
    variants = planned.model.forward.variants

    assert len(variants.plans) == 4
    for batch in order:
        assert planned.peak_bytes(batch) <= cheapest.budget_bytes


@pytest.mark.slow
def test_replanning_in_the_middle_of_autocast_plans_the_same_step():
    options = {"optimizer": "adamw", "autocast": "bf16"}
    budget_bytes = budget_of(0.2, autocast="bf16")
    cheapest = autosac.plan(
        make_model(),
        BATCHES[3],
        memory_budget=budget_bytes,
        on_mismatch="replan",
        **options,
    )

    def under_autocast(model, optimizer):
        return training_step(
            model,
            (),
            BATCHES[0],
            loss_fn=None,
            optimizer=optimizer,
            autocast=torch.bfloat16,
        )

    plain, planned = Training(), Training(cheapest)
    with pytest.warns(UserWarning, match="planned for anew"):
        assert differences(plain.run(under_autocast), planned.run(under_autocast)) == ()
    alone = autosac.calibrate(autosac.profile(make_model(), BATCHES[0], **options))
    replanned = planned.model.forward.variants.plans[1]
    assert replanned.baseline_peak_bytes == alone.baseline_peak_bytes
    assert replanned.peak_bytes <= budget_bytes


@pytest.mark.slow
def test_opaque_modules_stay_so_when_a_batch_is_planned_anew():
    step_options = {"optimizer": "adamw", "opaque": "blocks.0"}
    small = autosac.calibrate(autosac.profile(make_model(), BATCHES[3], **step_options))
    plan = autosac.plan(
        make_model(),
        BATCHES[3],
        memory_budget=autosac.floor(small),
        on_mismatch="replan",
        **step_options,
    )

    larger = plan.replan(make_model(), (), BATCHES[0])  # does not fit: all is rerun
    units = {one.fqn for one in larger.op_policies}
    assert units and not any(fqn.startswith("blocks.0") for fqn in units)


@pytest.mark.slow
def test_what_cannot_fit_runs_with_the_least_peak_and_says_so():
    planned = autosac.plan(
        make_model(),
        BATCHES[3],
        memory_budget=budget_of(0.0, batch=BATCHES[3]),
        optimizer="adamw",
        on_mismatch="replan",
    )
    training = Training(planned)
    with pytest.warns(UserWarning, match="bytes .* above the budget") as caught:
        training.run(step(BATCHES[0]))
    text = str(caught[0].message)
    said = int(text.partition("its peak will be ")[2].split()[0])

    assert training.peak_bytes(BATCHES[0]) == pytest.approx(said, rel=0.01)


def test_raise_comes_before_anything_runs():
    planned = autosac.plan(
        make_model(), BATCHES[0], memory_budget="1GiB", on_mismatch="raise"
    )
    model = planned.apply(make_model())
    with pytest.raises(PlanMismatchError, match=r"tokens \[4, 9\].* was not planned"):
        model(**batch_of(9), nothing="that forward could take")
    with pytest.raises(PlanMismatchError, match=r"only mask \[4, 24\], tokens"):
        model(**batch_of(9))
    with torch.no_grad():
        model(**batch_of(9))
    model(**BATCHES[0])["loss"].backward()


def test_a_plan_from_a_file_says_that_it_cannot_replan(tmp_path):
    planned = autosac.plan(
        make_model(), BATCHES[0], memory_budget="1GiB", on_mismatch="replan"
    )
    planned.save(tmp_path / "plan.json")
    with pytest.warns(UserWarning, match="from a file knows neither loss"):
        autosac.Plan.load(tmp_path / "plan.json").apply(make_model())


@pytest.mark.slow
def test_a_plan_for_a_small_batch_recomputes_much_of_a_much_larger_one():
    # The small one's peak is that of its optimizer, which nothing recomputed lowers.
    small, large = batch_of(12, rows=1), batch_of(12, rows=12)
    options = {"optimizer": torch.optim.AdamW}
    least_bytes = autosac.floor(autosac.profile(make_model(), large, **options))
    profile = autosac.calibrate(autosac.profile(make_model(), small, **options))
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    training = Training(plan)
    training.run(step(small))
    with pytest.warns(UserWarning, match="All that saves memory is") as caught:
        training.run(step(large))
    (text,) = (str(one.message) for one in caught)
    likely = int(text.partition("will be about ")[2].split()[0])
    peak_bytes = training.peak_bytes(large)

    assert likely == pytest.approx(peak_bytes, rel=0.005)
    assert peak_bytes == pytest.approx(least_bytes, rel=0.1)


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x):
        return self.down(self.up(x).tanh())


def test_a_batch_that_is_planned_anew_goes_with_the_step():
    # It stayed until Python's collector ran, one for each new shape.
    model = torch.nn.Sequential(*(Bag() for _ in range(3)))
    profile = autosac.profile(model, torch.ones(2, 8), loss_fn=torch.sum)
    budget_bytes = autosac.floor(profile)
    autosac.plan(profile, memory_budget=budget_bytes, on_mismatch="replan").apply(model)
    shape = (64, 8)
    gc.collect()
    gc.disable()
    try:
        with pytest.warns(UserWarning, match="planned for anew.*above the budget"):
            model(torch.ones(shape)).sum().backward()
        alive = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
        assert not [one for one in alive if one.shape == shape and not one.is_meta]
    finally:
        gc.enable()


class Scores(torch.nn.Module):
    """Attention that keeps a score for each pair of its rows."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            x = x + (y @ y.transpose(-1, -2)).softmax(-1) @ x
        return x


@pytest.mark.parametrize("lengths", [[48], [24, 48]])
def test_what_grows_with_the_square_of_the_length_is_in_what_is_said(lengths):
    def run(length):
        model(torch.ones(2, length, 4)).sum().backward()

    model = Scores()
    batches = [torch.ones(2, length, 4) for length in lengths]
    autosac.plan(model, batches, loss_fn=torch.sum, memory_budget="700KB").apply(model)
    with pytest.warns(UserWarning, match="is larger than all") as caught:
        run(192)  # four times as long
    text = str(caught[0].message)
    last = text.rpartition(" bytes (")[0].split()[-1]
    model.zero_grad()
    weights_bytes = storage_bytes(model.parameters())
    peak_bytes = measure_peak(
        lambda: run(192), device="cpu", persistent_bytes=weights_bytes
    )[1]

    if len(lengths) == 1:
        assert "if as its square" in text and "perhaps above the budget" in text
        assert 700_000 < peak_bytes <= int(last) <= 1.3 * peak_bytes
    else:
        assert "above the budget" in text and "perhaps" not in text
        assert int(last) == pytest.approx(peak_bytes, rel=0.05)
