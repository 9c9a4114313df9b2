"""Plans for several batches: every step follows the plan for its own."""

import copy
import itertools
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
from torch.utils.data import DataLoader

import autosac
from autosac.checkpointing import batch_variants, installing
from autosac.errors import ArgumentError, InfeasibleBudgetError, PlanMismatchError
from autosac.planning.batch_kinds import Kind, assign, buckets
from autosac.planning.spelling import spell_out
from autosac.step.batch_signatures import BatchSignature, signature_of
from autosac.step.training_step import training_step
from autosac.verification.measuring import (
    capture_state,
    differences,
    measure_peak,
    optimizer_tensors,
    storage_bytes,
)
from tests.models import random_choice

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS, NUM_TOKENS = 16, 4, 30
PLANNED = ((24, True), (24, False), (12, True), (6, True))  # length, padded


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, bias):
        y = self.norm(x)
        scores = y @ y.transpose(1, 2)
        if bias is not None:
            scores = scores + bias
        y = torch.softmax(scores, -1) @ y
        return x + self.drop(self.down(functional.gelu(self.up(y))))


class Reader(nn.Module):
    """Branches on whether there is padding, as Transformers' masks do."""

    def __init__(self, num_blocks=3):
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, tokens, mask):
        x = self.embed(tokens)
        bias = None
        if not bool(mask.all()):
            bias = torch.zeros(mask.shape).masked_fill(~mask, -1e4)[:, None]
        for block in self.blocks:
            x = block(x, bias)
        return {"loss": functional.cross_entropy(self.head(x).mT, tokens)}


def make_model():
    torch.manual_seed(0)
    return Reader()


def batch_of(length, padded=True, rows=ROWS):
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(NUM_TOKENS, (rows, length), generator=generator)
    mask = torch.ones(rows, length, dtype=torch.bool)
    if padded:
        mask[0, length // 2 :] = False
    return {"tokens": tokens, "mask": mask}


BATCHES = [batch_of(*kind) for kind in PLANNED]


def budget_of(share, batch=BATCHES[0], **options):
    traced = autosac.profile(make_model(), batch, optimizer="adamw", **options)
    lowest = autosac.floor(traced)
    return int(lowest + share * (traced.baseline_peak_bytes - lowest))


@pytest.fixture(scope="module")
def plan():
    return autosac.plan(
        make_model(), BATCHES, memory_budget=budget_of(0.2), optimizer="adamw"
    )


class Training:
    def __init__(self, plan=None, model=None):
        self.model = make_model() if model is None else model
        if plan is not None:
            plan.apply(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        torch.manual_seed(3)
        self.random_state = torch.get_rng_state()

    def run(self, act):
        """Do something in this training's own stream of random numbers."""
        torch.set_rng_state(self.random_state)
        loss = act(self.model, self.optimizer)
        self.random_state = torch.get_rng_state()
        return capture_state(self.model, self.optimizer, loss)

    def peak_bytes(self, batch):
        lasting = [*self.model.parameters(), *self.model.buffers(), *batch.values()]
        self.model.zero_grad()
        return measure_peak(
            lambda: step(batch)(self.model, self.optimizer),
            device="cpu",
            persistent_bytes=storage_bytes(
                [*lasting, *optimizer_tensors(self.optimizer)]
            ),
        )[1]


# --- what a training may do -----------------------------------------------------


def step(batch):
    return lambda model, optimizer: training_step(
        model, (), batch, loss_fn=None, optimizer=optimizer
    )


def accumulated(batches):
    def act(model, optimizer):
        model.zero_grad()
        losses = []
        for batch in batches:
            losses.append(model(**batch)["loss"])
            losses[-1].backward()
        optimizer.step()
        return sum(losses).detach()

    return act


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


# Hypothesis draws batches that no plan is for: these are warned of.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A batch with", "ignore:AC unit")
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
@pytest.mark.filterwarnings("ignore:A batch with", "ignore:AC unit")
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


@pytest.fixture(scope="module")
def profiles():
    # Of each signature one: openings are the business of `autosac.plan`.
    return [autosac.profile(make_model(), BATCHES[i]) for i in (0, 2, 3)]


# --- the plan ---------------------------------------------------------------------


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
        most = max(p.peak_bytes for p in plan.each if _is_for(p, BATCHES[number]))
        assert peak_bytes <= most


def _is_for(plan, batch):
    return signature_of((), batch) in plan.signatures


def test_each_kind_has_the_plan_that_it_has_alone(plan):
    for batch in BATCHES[2:]:
        (own,) = (one for one in plan.variants if _is_for(one, batch))
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

    assert _is_for(variants.plans[variants.current], batch)
    assert len(variants.plans) == 4


def test_a_branch_is_seen_before_the_first_unit(plan):
    training = Training(plan)
    variants = training.model.forward.variants
    followed = []
    for number in (0, 1, 0, 1):
        training.run(step(BATCHES[number]))
        followed.append(variants.current)

    assert followed[0] == followed[2] != followed[1] == followed[3]


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


# --- batches that were not planned for -------------------------------------------


def test_a_smaller_batch_follows_the_next_larger_one_and_keeps_the_budget(plan):
    training = Training(plan)
    training.run(step(BATCHES[0]))
    variants = training.model.forward.variants
    for length in (23, 13, 11, 7):
        batch = batch_of(length)
        assert training.peak_bytes(batch) <= plan.budget_bytes
        least = min(n for n, _ in PLANNED if n >= length)
        assert _is_for(variants.plans[variants.current], batch_of(least))


def test_a_larger_batch_is_said_once_with_its_peak(plan):
    training = Training(plan)
    training.run(step(BATCHES[0]))
    with pytest.warns(UserWarning, match=r"tokens \[4, 32\] is larger") as caught:
        training.run(step(batch_of(32)))
        training.run(step(batch_of(32, padded=False)))
        training.run(step(batch_of(40)))
    said = [str(one.message) for one in caught if "larger than all" in str(one.message)]
    (text,) = said
    likely = int(text.partition("will be about ")[2].split()[0])

    assert likely == pytest.approx(training.peak_bytes(batch_of(32)), rel=0.05)
    assert len([one for one in caught if "AC unit" in str(one.message)]) == 0


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


# --- loaders and buckets ----------------------------------------------------------


def collated(lengths):
    return batch_of(max(lengths), rows=len(lengths))


def test_a_loader_is_planned_for_all_its_lengths_and_not_disturbed():
    lengths = [6] * 24 + [12] * 12 + [24] * 4

    def loader():
        generator = torch.Generator().manual_seed(5)
        return DataLoader(
            lengths,
            batch_size=4,
            shuffle=True,
            generator=generator,
            collate_fn=collated,
        )

    used, fresh = loader(), loader()
    planned = autosac.plan(
        make_model(), used, memory_budget=budget_of(0.2), optimizer="adamw"
    )

    assert planned.num_batches == 10
    assert any(_is_for(one, batch_of(24)) for one in planned.each)
    for one, other in zip(used, fresh, strict=True):
        assert torch.equal(one["tokens"], other["tokens"])


def test_the_largest_batch_of_sorted_texts_is_found():
    loader = DataLoader(
        [length for length in range(1, 200) for _ in range(ROWS)],
        batch_size=ROWS,
        collate_fn=collated,
    )
    kinds = buckets(make_model(), loader)

    assert len(kinds) == 16
    assert kinds[0].batch["tokens"].shape == (ROWS, 199)
    assert sum(one.num_batches for one in kinds) == 199
    assert sum(len(one.signatures) for one in kinds) == 199


def kind(*sizes):
    return Kind(BatchSignature((("x", "torch.float32", sizes),)), ())


def covers(one, other):
    return one.signature.covers(other.signature)


KINDS = st.dictionaries(
    st.builds(kind, st.integers(1, 9), st.integers(1, 9)),
    st.integers(1, 20),
    min_size=1,
)


@given(counts=KINDS, most=st.integers(1, 6))
def test_every_kind_follows_one_that_covers_it(counts, most):
    served = assign(counts, most)
    followed = {one: head for head, kinds in served.items() for one in kinds}

    assert len(served) <= max(most, 1)
    assert all(kinds[0] is head for head, kinds in served.items())
    assert all(covers(head, one) for one, head in followed.items())
    left = counts.keys() - followed.keys()
    assert not any(covers(head, one) for one in left for head in served)
    if len(counts) <= most:
        assert served.keys() == counts.keys()


@given(counts=KINDS)
def test_more_kinds_never_make_a_batch_follow_a_larger_one(counts):
    def wasted(most):
        return sum(
            counts[one] * (head.signature.num_elements - one.signature.num_elements)
            for head, kinds in assign(counts, most).items()
            for one in kinds
        )

    tops = sum(not any(a is not b and covers(a, b) for a in counts) for b in counts)
    costs = [wasted(most) for most in range(tops, len(counts) + 1)]
    assert all(more <= less for less, more in itertools.pairwise(costs))
    assert costs[-1] == 0


def test_frequent_lengths_get_plans_of_their_own():
    counts = {kind(4, n): 1 for n in range(1, 101)} | {kind(4, 60): 1000}
    assert {kind(4, 100), kind(4, 60)} == set(assign(counts, 2))


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
