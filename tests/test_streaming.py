"""Models whose saved tensors lie in far memory: bits, peaks, times, what is left."""

import random

import pytest
import torch
from torch import nn

import autosac
from autosac.errors import InfeasibleBudgetError
from autosac.planning.choices import lowest
from autosac.planning.dry_running import difference_in_dry_run
from autosac.profiles.restricting import restricted
from autosac.solving.incumbents import recompute_ms
from autosac.solving.streaming import Streaming
from autosac.units.policies import SAVE, Policy
from autosac.units.streamed import letter, moved
from autosac.verification.recipes import Recipe
from autosac.verification.verifying import verify_each
from benchmarks.offload_rules import every_saved
from tests import test_offloading as offloading
from tests.models import Case
from tests.planning.readers import BATCHES, make_model
from tests.test_offloading import STEPS, applied, far_step
from tests.training import train
from tests.units.test_far_times import SPEEDS, Engine, with_link

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def step():
    return far_step(STEPS["blocks"])


def drawn(step, seed):
    """Some of the saved tensors stay; others are fetched early, or late."""
    draw = random.Random(seed)
    stays = [draw.random() < 0.2 for _ in step.streamed.streams]
    numbers = [(0, 0, 1, 2, 7), (0, 1, 1, 3, 9)]  # of reads, of copies out
    letters = [SAVE if s else letter(draw.choice(n)) for n in numbers for s in stays]
    return {step.streamed: Policy("".join(letters))}


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", STEPS)
def test_dry_runs_are_as_simulated(name):
    step = restricted(STEPS[name].profile(), offload=True)
    for seed in range(2):
        assert not difference_in_dry_run(step, drawn(step, seed))


class InVain(offloading.Stack):
    """Drops results, and with them what autograd has saved for them."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            (torch.sigmoid(x) * 2).exp()
        return x.square().mean()


def test_what_is_dropped_with_its_graph_is_freed():
    step = restricted(Case(InVain, offloading.rows).profile(), offload=True)

    assert not difference_in_dry_run(step, drawn(step, 0))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "blocks" else pytest.mark.slow)
             for n in STEPS]
)  # fmt: skip
def test_real_steps_have_the_same_bits_and_the_predicted_peak_at_any_rate(name):
    case = STEPS[name]
    step = far_step(case)
    plans = [
        applied(step, drawn(step, seed), bytes_per_s=rate)
        for seed in range(2)
        for rate in (None, offloading.SLOW_BYTES_PER_S)
    ]
    recipe = Recipe(
        make_model=case.model,
        make_inputs=case.inputs,
        loss_fn=case.loss_fn,
        timing_rounds=0,
    )

    done = verify_each(plans, recipe)
    assert not any(one.differences for one in done)
    for fast, slow in zip(done[::2], done[1::2], strict=True):
        assert fast.measured_peak_bytes == slow.measured_peak_bytes
        assert 0 <= offloading.overstated(fast) <= step.simulator.number_bytes


# --- time ---------------------------------------------------------------------------


class Player:
    """Runs the ops of a step one by one, with copies of streams beside them."""

    def __init__(self, step, choice):
        ((self.unit, self.policy),) = choice.items()
        self.step, self.link = step, step.device.link
        self.out, self.back = Engine(), Engine()
        self.going, self.now_ms, self.waited_ms = [], 0.0, 0.0

    def play(self):
        unit = self.unit
        fetched_with = unit.fetched_with(self.policy)
        self.with_it = {}
        for k in unit.reads(self.policy):
            self.with_it.setdefault(fetched_with[k], []).append(k)
        events = [(op.start, 2, self.run, i) for i, op in enumerate(self.step.tape.ops)]
        events.append((unit.call.exit, 1, self.end, None))
        for k in moved(self.policy):
            events.append((unit.streams[k].packed, 0, self.send, k))
            events.append((unit.streams[k].read, 0, self.read, k))
        for _, _, what, about in sorted(events, key=lambda event: event[:2]):
            what(about)
        return self.waited_ms

    def run(self, index):
        self.now_ms += self.step.op_ms[index]

    def send(self, k):
        nbytes = self.unit.streams[k].nbytes
        self.out.begin(k, self.now_ms, self.link.out_ms(nbytes, 1))
        self.going.append(k)
        self.let_go(len(self.out.done_ms) - 1)

    def end(self, _):
        self.let_go(len(self.going) + len(self.out.done_ms))

    def let_go(self, num_sent):
        ends = self.unit.let_go_with(self.policy)
        for k in [k for k in self.going if ends[k] <= num_sent]:
            self.going.remove(k)
            self.wait(self.out.done_ms[k])

    def read(self, k):
        for other in self.with_it.get(k, ()):
            nbytes = self.unit.streams[other].nbytes
            self.back.begin(other, self.now_ms, self.link.back_ms(nbytes, 1))
        self.wait(self.back.done_ms[k])

    def wait(self, until_ms):
        self.waited_ms += max(0.0, until_ms - self.now_ms)
        self.now_ms = max(self.now_ms, until_ms)


@pytest.mark.parametrize("issue_ms", [0.0, 0.5])
@pytest.mark.parametrize("bytes_per_s", SPEEDS)
def test_waits_are_those_of_a_step_that_is_played(step, bytes_per_s, issue_ms):
    linked = with_link(step.plain, bytes_per_s, issue_ms)
    for seed in range(4):
        choice = drawn(linked, seed)
        told_ms, peak_bytes = recompute_ms(choice), linked.peak_bytes(choice)
        (policy,) = choice.values()
        busy_ms = linked.streamed.followed_ms + 2 * issue_ms * len(moved(policy))
        assert told_ms == pytest.approx(Player(linked, choice).play() + busy_ms)
        assert told_ms >= linked.streaming.least_ms(peak_bytes)


# --- plans --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in STEPS if n not in ("bert", "gpt")])
def test_no_plan_is_dearer_than_the_rule_that_all_saved_tensors_are_moved(name):
    profile = STEPS[name].profile()
    for bytes_per_s in SPEEDS:
        step = with_link(profile, bytes_per_s)
        rule = every_saved(step, 511)
        plan = autosac.plan(step.plain, memory_budget=rule.peak_bytes, offload=True)

        assert autosac.floor(step) <= rule.peak_bytes
        assert plan.dry_run and plan.peak_bytes <= rule.peak_bytes
        assert plan.bound_ms <= plan.recompute_ms <= rule.waits_ms


@pytest.mark.slow
def test_more_memory_never_costs_more(step):
    low, peak = autosac.floor(step), step.baseline_peak_bytes
    budgets = [low + (peak - low) * share // 24 for share in range(24)]

    def times(in_order):
        streaming = Streaming(step.simulator, step.streamed, None)
        choices = {budget: streaming.cheapest(budget) for budget in in_order}
        for budget, choice in choices.items():
            assert step.peak_bytes(choice) <= budget
        return [recompute_ms(choices[budget]) for budget in budgets]

    upwards = times(budgets)
    assert upwards == sorted(upwards, reverse=True)
    assert len(set(upwards)) > 8
    assert times(budgets[::-1]) == upwards  # whichever is asked for first


@pytest.mark.slow
def test_a_plan_that_streams_is_applied_saved_and_told_of(step, tmp_path):
    case, low = STEPS["blocks"], autosac.floor(step)
    plan = autosac.plan(step.plain, memory_budget=low, offload=True)
    plan.save(tmp_path / "plan.json")
    loaded = autosac.Plan.load(tmp_path / "plan.json")
    done = autosac.verify(loaded, case.model, case.inputs, timing_rounds=0)

    assert low < step.peak_bytes(step.chooser.lowest())  # of AC units
    assert not done.differences and plan.policy == {}
    assert 0 <= offloading.overstated(done) <= step.simulator.number_bytes
    assert loaded == plan and autosac.check(loaded, step.plain) == plan.peak_bytes
    assert "back one by one" in str(plan)
    assert "offloaded" in str(plan.report(step.plain))
    with pytest.raises(InfeasibleBudgetError, match=str(low)):
        autosac.plan(step.plain, memory_budget=low - 1, offload=True)


def test_far_memory_keeps_its_cap(step):
    most_bytes = sum(stream.nbytes for stream in step.streamed.streams)
    for host_bytes in (most_bytes // 4, most_bytes // 2):
        capped = restricted(step.plain, offload=True, host_bytes=host_bytes)
        streaming = capped.streaming
        ((unit, policy),) = streaming.lowest().items()
        assert 0 < unit.far_bytes(policy) <= host_bytes
        choice = streaming.cheapest(capped.peak_bytes({unit: policy}))
        assert unit.far_bytes(choice[unit]) <= host_bytes


@pytest.mark.slow
def test_batches_that_values_tell_apart_are_not_streamed():
    model, batches = make_model(), BATCHES[:2]
    steps = [
        restricted(autosac.profile(model, batch), offload=True) for batch in batches
    ]
    floors = [step.peak_bytes(step.chooser.lowest()) for step in steps]  # of AC units
    budget = max(floors)
    plan = autosac.plan(model, batches, memory_budget=budget, offload=True)

    assert len(plan.variants) == 2
    assert not any(o.streamed for one in plan.each for o in one.op_policies)
    assert autosac.floor(steps[floors.index(budget)]) < budget
    with pytest.raises(InfeasibleBudgetError):
        autosac.plan(model, batches, memory_budget=budget - 1, offload=True)


# --- training -----------------------------------------------------------------------


@pytest.fixture
def planned(step):
    """A model of which all is streamed that can be, and its far memory."""
    model = STEPS["blocks"].model()
    choice = lowest(step)
    assert choice.keys() == {step.streamed}
    return model, applied(step, choice).apply(model).memory


def test_a_step_moves_every_storage_once(planned, step):
    model, memory = planned
    train(STEPS["blocks"], model, steps=3)

    nbytes = [stream.nbytes for stream in step.streamed.streams]
    assert len({stream.storage for stream in step.streamed.streams}) == len(nbytes)
    assert memory.peak_bytes == memory.pooled_bytes == sum(nbytes)


@pytest.mark.slow_but_fifth
@offloading.each_run
def test_nothing_stays_in_far_memory_and_the_next_step_is_as_ever(planned, run):
    offloading.assert_as_ever(*planned, run)


def test_gradients_of_two_backward_passes_and_of_gradients_are_plain(planned):
    plain, inputs = STEPS["blocks"].model(), STEPS["blocks"].inputs()
    found = []
    for one in (plain, planned[0]):
        offloading.keeps_graph(one, inputs)
        weights = list(one.parameters())
        first = torch.autograd.grad(one(inputs), weights, create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(penalty, weights, allow_unused=True)
        found.append([*(w.grad for w in weights), *second])

    pairs = zip(*found, strict=True)
    assert all(one is other or torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_change_in_place_is_an_error_until_the_program_has_let_go(step, when):
    model = Case(offloading.Changing, offloading.rows).model()
    plain, inputs = STEPS["blocks"].model(), STEPS["blocks"].inputs()
    model.when = when
    number = {"before": 99, "after": 1}[when]  # sent at once
    num_streams = len(step.streamed.streams)
    policy = letter(0) * num_streams + letter(number) * num_streams
    applied(step, {step.streamed: Policy(policy)}).apply(model)
    if when == "before":
        with pytest.raises(RuntimeError, match="changed in place"):
            model(inputs).backward()
        return
    for one in (model, plain):
        one(inputs).backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


def test_a_model_that_saves_other_tensors_is_told_of_and_trains_on(planned):
    model, _ = planned
    plain = STEPS["blocks"].model()
    for one in (plain, model):
        for block in one.blocks:
            block.norm = nn.Sequential(nn.Tanh(), nn.LayerNorm(offloading.WIDTH))
    with (
        pytest.warns(UserWarning, match="was replaced after a plan"),
        pytest.warns(UserWarning, match="saves other tensors"),
    ):
        for one in (plain, model):
            torch.manual_seed(0)
            one(STEPS["blocks"].inputs()).backward()

    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


class KeepsSeed(torch.autograd.Function):
    """Saves a seed, on the host or on the device, before what is large."""

    device = "cpu"

    @staticmethod
    def forward(ctx, x):
        seed = torch.zeros((), dtype=torch.int64, device=KeepsSeed.device)
        ctx.save_for_backward(seed, x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Seeded(nn.Module):
    def __init__(self):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = KeepsSeed.apply(layer(x))
        return x.square().sum()


@pytest.mark.parametrize("places", [("cpu", "meta"), ("meta", "cpu")], ids=str)
def test_where_kernels_keep_seeds_shifts_no_place(monkeypatch, places):
    traced, real = places  # on the device of the model, or elsewhere
    monkeypatch.setattr(KeepsSeed, "device", traced)
    case = Case(Seeded, lambda: torch.randn(256, 64))
    step = far_step(case)
    model, num_streams = case.model(), len(step.streamed.streams)
    policy = Policy(letter(0) * num_streams + letter(1) * num_streams)
    memory = applied(step, {step.streamed: policy}).apply(model).memory
    monkeypatch.setattr(KeepsSeed, "device", real)

    train(case, model, steps=2)  # a warning would fail
    assert memory.peak_bytes == sum(s.nbytes for s in step.streamed.streams)
