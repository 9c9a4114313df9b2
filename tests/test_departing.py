"""Units that do something else than their plan expects."""

import functools
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import autosac
from autosac.checkpointing import installing
from autosac.planning.spelling import spell_out
from autosac.step.training_step import normalize_inputs
from autosac.verification.measuring import measure_peak
from tests.examples import seeds
from tests.models import BATCH, CASES, WIDTH, Case, random_policy, shared_profile
from tests.training import Branching, Stack, assert_equal, planned, rows, train

pytestmark = pytest.mark.usefixtures("one_thread")


class Dropping(nn.Sequential):
    def __init__(self):
        layers = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Dropout(),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        super().__init__(*layers)


def test_a_unit_in_the_other_mode_than_its_model_departs():
    # As a backbone that is frozen after planning.
    def make_model():
        return nn.Sequential(*(Dropping() for _ in range(3)))

    case = Case(make_model, lambda: torch.randn(512, WIDTH), torch.sum)
    profile = case.profile(torch.optim.AdamW)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    model, plain = case.model(), case.model()
    plan.apply(model)
    for twin in (model, plain):
        twin[1].eval()
    expected = train(case, plain)

    with pytest.warns(UserWarning, match=r"`1` ran aten.*where its plan expects"):
        trained = train(case, model)

    assert "1" in plan.policy
    assert_equal(expected, trained)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).view(4, -1, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        return x + attended.transpose(1, 2).reshape(x.shape)


def test_other_kernels_of_attention_than_planned_are_there_in_backward_too():
    case = Case(
        lambda: nn.Sequential(*(Attends() for _ in range(3))),
        lambda: torch.randn(64, WIDTH),
        torch.sum,
    )
    profile = case.profile()
    model, plain = case.model(), case.model()
    autosac.plan(profile, memory_budget=autosac.floor(profile)).apply(model)
    gradients = []
    for twin in (plain, model):
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # units depart
            loss = twin(case.inputs()).square().sum()
        loss.backward()
        gradients.append([parameter.grad for parameter in twin.parameters()])

    assert installing.installed(model)
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("whole", [True, False], ids=["trains", "evaluates"])
def test_parts_in_the_other_mode_when_planned_are_units(whole):
    # As a backbone that is frozen, or one head that trains.
    def make_model():
        model = nn.Sequential(*(Dropping() for _ in range(3))).train(whole)
        model[:2].train(not whole)
        return model

    case = Case(make_model, lambda: torch.randn(512, WIDTH), torch.sum)
    profile = autosac.calibrate(case.profile(), progress=False)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))

    done = autosac.verify(
        plan, make_model, case.inputs, loss_fn=torch.sum, timing_rounds=0
    )

    assert not profile.units.refused and "0" in plan.policy
    assert done.identical
    assert done.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=2e-3)


def branching(branch, seed, num_rows=BATCH):
    """A model planned for the usual branch that takes another one, and its twin."""
    case = Case(Stack, lambda: torch.randn(num_rows, WIDTH))
    traced = Case(Stack, rows).profile()
    chosen = {
        unit: random_policy(unit, seed)
        for unit in traced.units.candidates
        if unit.fqn in ("parts.0", "parts.1")
    }
    model, plain = case.model(), case.model()
    installing.install(model, spell_out(traced, chosen))
    for twin in (model, plain):
        twin.parts[0].branch = branch
    return case, model, plain


@pytest.mark.slow_but_fifth
@seeds(8)
@pytest.mark.parametrize(
    ("branch", "num_rows"),
    [("random", BATCH), ("longer", BATCH), ("wide", 2 * BATCH)],
)
def test_another_branch_warns_once_and_keeps_gradients_exact(branch, num_rows, seed):
    case, model, plain = branching(branch, seed, num_rows)
    expected = train(case, plain, steps=1)

    with pytest.warns(UserWarning, match=r"`parts\.0` ran aten") as caught:
        trained = train(case, model, steps=1)

    assert len(caught) == 1
    assert_equal(expected, trained)


@seeds(8)
def test_a_shorter_branch_keeps_gradients_exact(seed):
    case, model, plain = branching("shorter", seed)

    assert_equal(train(case, plain, steps=1), train(case, model, steps=1))


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", ["mlp", "convolutions", "noise", "gpt"])
@pytest.mark.parametrize("seed", range(3))
def test_another_batch_size_keeps_gradients_exact(name, seed):
    case = CASES[name]
    args, _ = normalize_inputs(case.inputs())
    larger = Case(case.make_model, lambda: torch.cat([args[0], args[0]]), case.loss_fn)
    model = planned(case, seed)

    assert_equal(train(larger, larger.model()), train(larger, model))


class Longer(nn.Module):
    """Does something behind all that autograd saves; goes on if it is told to."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind, self.goes_on = nn.Linear(WIDTH, WIDTH), kind, False

    def forward(self, x):
        hidden = torch.tanh(self.linear(x))
        if self.kind == "draws":
            rest = torch.rand(WIDTH)
        elif self.kind == "draws in place":
            rest = torch.empty(2, WIDTH)[:1].uniform_(0, 1)
        else:
            rest = torch.zeros(WIDTH).add_(hidden.detach()[0]) + 1
        out = hidden + rest
        return (out.sin() * rest).exp() if self.goes_on else out


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("kind", ["draws", "draws in place", "adds"])
@seeds(4)
def test_what_nobody_was_expected_to_need_is_there_for_a_longer_branch(kind, seed):
    case = Case(lambda: nn.Sequential(Longer(kind), nn.Linear(WIDTH, WIDTH)), rows)
    traced = shared_profile(case)
    (unit,) = (unit for unit in traced.units.candidates if unit.fqn == "0")
    policies = spell_out(traced, {unit: random_policy(unit, seed)})
    plain, model = case.model(), case.model()
    installing.install(model, policies)
    plain[0].goes_on = model[0].goes_on = True
    expected = train(case, plain, steps=2)

    with pytest.warns(UserWarning, match="its plan expects its end"):
        trained = train(case, model, steps=2)

    assert_equal(expected, trained)


class Overwriting(nn.Module):
    """In the other branch a result is changed in place after something read it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.overwrites = False

    def forward(self, x):
        hidden = self.linear(x)
        level = hidden.floor()  # reads `hidden`, backward does not need it
        gate = torch.sigmoid(level + x)
        if self.overwrites:
            hidden.add_(1)
        return gate * hidden


@seeds(12)
def test_a_departure_that_overwrites_a_result_keeps_gradients_exact(seed):
    case = Case(lambda: nn.Sequential(Overwriting(), nn.Tanh()), rows)
    traced = shared_profile(case)
    (unit,) = (unit for unit in traced.units.candidates if unit.fqn == "0")
    policies = spell_out(traced, {unit: random_policy(unit, seed)})
    plain, model = case.model(), case.model()
    installing.install(model, policies)
    plain[0].overwrites = model[0].overwrites = True
    expected = train(case, plain, steps=1)

    with pytest.warns(UserWarning, match="ran aten"):
        trained = train(case, model, steps=1)

    assert_equal(expected, trained)


class Reuses(nn.Module):
    """Calls a module that is a unit elsewhere, on the other branch."""

    def __init__(self, shared):
        super().__init__()
        self.linear, self.shared = nn.Linear(WIDTH, WIDTH), shared
        self.departs = False

    def forward(self, x):
        x = torch.tanh(self.linear(x))
        if self.departs:
            x = self.shared(x)
        return torch.exp(x).sin()


class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.last = Reuses(self.shared)

    def forward(self, x):
        return self.last(self.shared(x))


@seeds(4)
def test_a_unit_called_inside_a_departed_one_is_a_part_of_it(seed):
    case = Case(Shares, rows)
    profile = shared_profile(case)
    chosen = {
        unit: random_policy(unit, seed)
        for unit in profile.units.candidates
        if unit.fqn in ("shared", "last")
    }
    model, plain = case.model(), case.model()
    installing.install(model, spell_out(profile, chosen))
    assert installing.installed(model) == ("shared", "last")
    plain.last.departs = model.last.departs = True
    expected = train(case, plain, steps=1)

    with pytest.warns(UserWarning, match="`last` ran aten"):
        states = train(case, model, steps=1)

    assert_equal(expected, states)


class Updates(nn.Module):
    """Reads a buffer that nobody keeps, changes it, and departs behind that."""

    def __init__(self, reads):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.ones(()))
        self.departs, self.reads = False, reads

    def forward(self, x):
        level = 1 + self.count
        step = level.floor()
        x = self.linear(x) + step
        self.count.add_(1)
        x = torch.tanh(x)
        if self.departs:
            x = x * level if self.reads else x.cos()
        return torch.exp(x).sin()


def updating(reads):
    case = Case(lambda: nn.Sequential(Updates(reads), nn.Tanh()), rows)
    profile = shared_profile(case)
    (unit,) = (unit for unit in profile.units.candidates if unit.fqn == "0")
    (policy,) = spell_out(profile, {unit: random_policy(unit, 0, save_share=0.0)})
    assert policy.names[:2] == ("aten.add.Tensor", "aten.floor.default")
    policy = replace(policy, actions="-S" + policy.actions[2:])  # `level` is dropped
    model, plain = case.model(), case.model()
    installing.install(model, (policy,))
    plain[0].departs = model[0].departs = True
    return case, plain, model


@pytest.mark.parametrize("reads", [False, True])
def test_what_changed_before_a_departure_is_read_as_it_was(reads):
    case, plain, model = updating(reads=reads)

    with pytest.warns(UserWarning, match="ran aten"):
        states = train(case, model)

    assert_equal(train(case, plain), states)


class Scaled(nn.Module):
    """Scales its weights by what it computes with them in its first step."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.is_set_up = True

    def forward(self, x):
        if not self.is_set_up:
            with torch.no_grad():
                self.up.weight.data /= self.up(x).std(0)[:, None]
            self.is_set_up = True
        return self.down(torch.tanh(self.up(x)))


def scaling():
    """A model with such units, and its twin without a plan."""
    case = Case(lambda: nn.Sequential(Scaled(), Scaled()), rows)
    traced = shared_profile(case)
    chosen = {u: random_policy(u, 0) for u in traced.units.candidates}
    chosen = {u: p for u, p in chosen.items() if u.fqn in ("0", "1")}
    model, plain = case.model(), case.model()
    installing.install(model, spell_out(traced, chosen))
    for twin in (plain, model):
        for block in twin:
            block.is_set_up = False
    return case, plain, model


def test_data_that_a_departed_unit_changes_is_as_without_a_plan():
    case, plain, model = scaling()

    with pytest.warns(UserWarning, match="ran aten"):
        states = train(case, model, steps=2)

    assert_equal(train(case, plain, steps=2), states)


def test_a_weight_whose_data_a_departed_unit_changed_is_refused_if_it_changes():
    case, _, model = scaling()
    with pytest.warns(UserWarning, match="ran aten"):
        loss = model(case.inputs()).sum()
    with torch.no_grad():
        model[1].up.weight.mul_(2.0)

    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


@pytest.mark.parametrize("branch", ["usual", "longer"])
@seeds(4)
def test_parameters_of_the_callers_are_those_of_the_rerun(branch, seed):
    case, model, plain = branching(branch, seed)
    gradients = []
    for twin in (plain, model):
        twin.parts[1].branch = branch
        scaled = {k: 1.5 * v for k, v in twin.named_parameters()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = torch.func.functional_call(twin, scaled, case.inputs()).sum()
        del scaled
        loss.backward()
        gradients.append([parameter.grad for parameter in twin.parameters()])

    assert all(map(torch.equal, *gradients))


def test_departed_units_take_no_more_memory_than_checkpointed_ones():
    case = Case(Wide, lambda: torch.randn(64, WIDTH))
    peaks = []
    for model in (case.model(), planned(case, save_share=0.0)):
        is_plain = not installing.installed(model)
        for part in model.parts:
            part.branch = "longer"
            if is_plain:
                part.forward = functools.partial(
                    checkpoint, part.forward, use_reentrant=False
                )
        inputs = case.inputs()

        def step(model=model, inputs=inputs):
            model(inputs).sum().backward()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):  # what an earlier step left behind would count
                _, peak = measure_peak(step, device="cpu", persistent_bytes=0)
        peaks.append(peak)

    expected, peak = peaks
    assert peak <= 1.05 * expected


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Branching() for _ in range(8))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


@seeds(4)
def test_other_code_in_the_rerun_of_a_departed_unit_is_refused(seed, monkeypatch):
    case, model, _ = branching("longer", seed)
    with pytest.warns(UserWarning, match="ran aten"):
        loss = model(case.inputs()).sum()
    monkeypatch.setattr(torch, "tanh", torch.sin)

    with pytest.raises(RuntimeError, match="Exclude it from the plan"):
        loss.backward()


@pytest.mark.parametrize("branch", ["usual", "longer"])
@seeds(4)
def test_parameters_that_change_before_backward_are_refused(branch, seed):
    case, model, plain = branching(branch, seed)
    for twin in (plain, model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = twin(case.inputs().requires_grad_()).sum()
        with torch.no_grad():
            twin.parts[0].linear.weight.mul_(2)

        with pytest.raises(RuntimeError, match=r"in[- ]?place"):
            loss.backward()


class Draws(nn.Module):
    """Multiplies by a number that no module knows, on the other branch."""

    level = 2.0

    def __init__(self, how):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.how = how
        self.departs = False

    def forward(self, x):
        x = torch.tanh(self.linear(x))
        if self.departs and self.how == "literal":
            x = x * torch.tensor(Draws.level)
        elif self.departs:
            x = x * Draws.level
        return torch.exp(x).sin()


def departed(how):
    case = Case(lambda: nn.Sequential(Draws(how), nn.Tanh()), rows)
    model, plain = planned(case, save_share=0.0), case.model()
    model[0].departs = plain[0].departs = True
    expected = plain(case.inputs()).sum()
    with pytest.warns(UserWarning, match="ran aten"):
        loss = model(case.inputs()).sum()
    return plain, expected, model, loss


def test_a_tensor_made_of_numbers_is_the_same_when_a_departed_unit_is_rerun(
    monkeypatch,
):
    plain, expected, model, loss = departed("literal")
    monkeypatch.setattr(Draws, "level", 3.0)

    expected.backward()
    loss.backward()

    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_another_number_in_the_rerun_of_a_departed_unit_is_refused(monkeypatch):
    *_, loss = departed("number")
    monkeypatch.setattr(Draws, "level", 3.0)

    with pytest.raises(RuntimeError, match="Exclude it from the plan"):
        loss.backward()


class Settling(nn.Module):
    """A block that does something else from its second call on."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 128), nn.Linear(128, 32)
        self.is_new = True

    def forward(self, x):
        act = functional.gelu if self.is_new else functional.silu
        self.is_new = False
        return x + self.second(act(self.first(x)))


def test_a_model_that_changes_in_its_first_step_stays_near_its_budget_in_the_next(
    one_thread,
):
    def make_model():
        return nn.Sequential(*(Settling() for _ in range(6)))

    profile = autosac.profile(make_model(), torch.randn(64, 32))
    low, high = autosac.floor(profile), profile.baseline_peak_bytes
    plan = autosac.plan(profile, memory_budget=low + (high - low) // 2)
    with pytest.warns(UserWarning, match="where its plan expects"):
        verification = autosac.verify(
            plan, make_model, lambda: torch.randn(64, 32), timing_rounds=0
        )
    assert verification.identical
    # Whole units are recomputed; saved, these would take 17 % more than the budget.
    assert verification.measured_peak_bytes < 1.02 * plan.budget_bytes


class Dropped(nn.Module):
    """A layer that steps may leave out, as layer drop does."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.is_dropped = False

    def forward(self, x):
        if self.is_dropped:
            return x
        return x + self.down(torch.tanh(self.up(x)))


def planned_at_floor(layer):
    """Three layers planned at their floor, a step of them, and what it holds."""

    def make_model():
        return nn.Sequential(*(layer() for _ in range(3)))

    def mean_square(output):
        return output.square().mean()

    case = Case(make_model, lambda: torch.randn(256, WIDTH), mean_square)
    profile = autosac.calibrate(shared_profile(case), progress=False)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    model, x = plan.apply(case.model()), case.inputs()

    def step():
        model.zero_grad()
        mean_square(model(x)).backward()

    return plan, model, x, step, lambda: [*model.parameters(), x]


def test_a_layer_that_was_dropped_for_some_steps_is_recomputed_as_planned_again():
    plan, model, x, step, held = planned_at_floor(Dropped)

    def drops(is_dropped):
        for layer in model:
            layer.is_dropped = is_dropped

    drops(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such a step is not as planned
        for _ in range(3):
            model(x)
    drops(False)
    _, peak_bytes = measure_peak(step, device="cpu", held=held)

    assert plan.peak_bytes < plan.baseline_peak_bytes
    assert peak_bytes <= plan.peak_bytes


class Varying(Dropped):
    """A layer that leaves something out where it draws a low number."""

    rate = 0.0

    def forward(self, x):
        hidden = self.up(x)
        if torch.rand(1) >= self.rate:
            hidden = hidden * 2
        return x + self.down(torch.tanh(hidden).exp())


def test_a_unit_that_draws_what_it_does_departs_within_the_budget_after_other_steps():
    plan, model, _, step, held = planned_at_floor(Varying)

    for _ in range(3):
        step()
    for layer in model:
        layer.rate = 1.0  # above all draws
    with pytest.warns(UserWarning, match="where its plan expects"):
        _, peak_bytes = measure_peak(step, device="cpu", held=held)

    assert plan.peak_bytes < plan.baseline_peak_bytes
    assert peak_bytes <= plan.peak_bytes
