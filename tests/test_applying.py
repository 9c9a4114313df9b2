import copy
import pickle

import pytest
import torch
from torch import nn

from autosac.applying import applying
from autosac.measuring.measuring import capture_state, differences
from autosac.planning.planning import spell_out
from autosac.tracing.stepping import normalize_inputs, training_step
from tests.models import (
    BATCH,
    CASES,
    WIDTH,
    Case,
    each_case,
    random_choice,
    random_policy,
)

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_PLANS = 5


def random_policies(case, seed=0, **options):
    made = case.profile()
    return spell_out(made, random_choice(made, seed, **options))


def planned(case, seed=0, **options):
    model = case.model()
    applying.install(model, random_policies(case, seed, **options))
    assert applying.installed(model)
    return model


def train(case, model, steps=2):
    """The states after each step, random generators and gradients included."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    args, kwargs = normalize_inputs(case.inputs())
    states = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for _ in range(steps):
            model.zero_grad()
            loss = training_step(
                model, args, kwargs, loss_fn=case.loss_fn, optimizer=optimizer
            )
            states.append(capture_state(model, optimizer, loss))
    return states


def assert_equal(expected, actual):
    for before, after in zip(expected, actual, strict=True):
        assert differences(before, after) == ()


@each_case
def test_two_steps_are_bit_identical_with_any_policy(case):
    expected = train(case, case.model())
    made = case.profile()
    shares = {0: 0.0, 1: 1.0}  # the extremes, then anything between
    for seed in range(NUM_PLANS):
        chosen = random_choice(made, seed, save_share=shares.get(seed))
        model = case.model()
        applying.install(model, spell_out(made, chosen))

        assert_equal(expected, train(case, model))


@each_case
def test_names_stay_the_same(case):
    plain, model = case.model(), planned(case, save_share=0.0)

    def names(m):
        return (
            [name for name, _ in m.named_parameters()],
            [name for name, _ in m.named_buffers()],
            [(name, type(module)) for name, module in m.named_modules()],
            list(m.state_dict()),
        )

    assert names(model) == names(plain)


@each_case
def test_unapplying_restores_every_module(case):
    model = case.model()
    before = [dict(module.__dict__) for module in model.modules()]
    applying.install(model, random_policies(case, save_share=0.0))

    applying.remove(model)

    after = [dict(module.__dict__) for module in model.modules()]
    assert [list(entry) for entry in after] == [list(entry) for entry in before]
    assert applying.installed(model) == ()


def test_unapplying_restores_a_forward_that_the_user_set():
    case = CASES["mlp"]
    model = case.model()
    own = [module.__dict__.setdefault("forward", module.forward) for module in model]

    applying.install(model, random_policies(case, save_share=0.0))
    applying.remove(model)

    assert [module.__dict__["forward"] for module in model] == own


@pytest.mark.parametrize("name", ["mlp", "convolutions", "gpt", "called twice"])
def test_a_deepcopy_trains_on_its_own_modules(name):
    case = CASES[name]
    model = planned(case, save_share=0.0)
    untouched = {key: value.clone() for key, value in model.state_dict().items()}

    twin = copy.deepcopy(model)

    assert applying.installed(twin) == applying.installed(model)
    for fqn in applying.installed(twin):
        module = twin.get_submodule(fqn)
        assert module.forward.module is module
    assert_equal(train(case, case.model()), train(case, twin))
    assert differences(untouched, model.state_dict()) == ()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["mlp", "convolutions", "gpt"])
def test_a_pickled_model_comes_back_with_its_plan(name):
    case = CASES[name]
    model = planned(case, save_share=0.5)

    back = pickle.loads(pickle.dumps(model))

    assert applying.installed(back) == applying.installed(model)
    assert_equal(train(case, case.model()), train(case, back))


def test_a_plans_state_dict_loads_into_a_plain_model_and_back():
    case = CASES["convolutions"]
    plain, model = case.model(), planned(case)
    train(case, model, steps=1)

    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())

    assert differences(plain.state_dict(), model.state_dict()) == ()


@pytest.fixture
def no_units(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("a unit ran under its plan")

    monkeypatch.setattr(applying, "Frame", fail)


@pytest.mark.parametrize("name", ["mlp", "convolutions", "gpt"])
def test_eval_mode_runs_plainly(name, no_units):
    case = CASES[name]
    args, _ = normalize_inputs(case.inputs())

    found = planned(case).eval()(*args)

    assert found.requires_grad
    assert torch.equal(found, case.model().eval()(*args))


@pytest.mark.parametrize("name", ["mlp", "convolutions", "gpt"])
def test_no_grad_runs_plainly(name, no_units):
    case = CASES[name]
    args, _ = normalize_inputs(case.inputs())
    model = planned(case)

    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(3)
        found = model(*args)
        torch.manual_seed(3)
        expected = case.model()(*args)

    assert torch.equal(found, expected)


def test_a_saved_in_place_random_op_trains():
    # On the CPU dropout is `empty_like`, `bernoulli_`, `div_`, `mul`; with
    # PyTorch's own selective contexts saving `bernoulli_` fails as "mutated".
    case = CASES["mlp"]
    policies = random_policies(case, save_share=1.0)
    saved = [
        name
        for policy in policies
        for name, action in zip(policy.names, policy.actions, strict=True)
        if action == "S"
    ]
    assert any("bernoulli_" in name for name in saved)

    model = case.model()
    applying.install(model, policies)

    assert_equal(train(case, case.model()), train(case, model))


class Reading(nn.Module):
    """Reads a tensor of the caller's, and may change it."""

    def __init__(self, changes):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.changes = changes

    def forward(self, x, total):
        out = torch.tanh(torch.sigmoid(self.linear(x)) + total)
        if self.changes:
            total.add_(1)
        return out.exp()


class Accumulates(nn.Module):
    """A tensor that autograd need not keep changes from unit to unit."""

    def __init__(self, inside):
        super().__init__()
        self.inner = nn.ModuleList([Reading(inside), Reading(inside)])
        self.inside = inside

    def forward(self, x):
        total = torch.zeros_like(x)
        for part in self.inner:
            x = part(x, total)
            if not self.inside:
                total.add_(1)
        return x


@pytest.mark.parametrize("inside", [False, True], ids=["by caller", "by unit"])
@pytest.mark.parametrize("seed", range(4))
def test_an_argument_that_changes_in_place_leaves_gradients_exact(seed, inside):
    case = Case(lambda: Accumulates(inside), rows)
    made = case.profile()
    model = case.model()
    applying.install(model, spell_out(made, random_choice(made, seed)))

    assert_equal(train(case, case.model()), train(case, model))


# --- departures from the trace --------------------------------------------------


class Branching(nn.Module):
    """Takes another branch when ``branch`` is set."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.branch = "usual"

    def forward(self, x):
        hidden = self.linear(x)
        gate = torch.sigmoid(hidden)
        hidden = torch.tanh(hidden)
        if self.branch == "random":
            gate = nn.functional.dropout(gate, 0.5)
        elif self.branch == "longer":
            gate = torch.sin(gate) * torch.cos(hidden)
        elif self.branch == "wide" and x.shape[0] > BATCH:
            gate = gate.reshape(-1).exp().view_as(gate)
        elif self.branch == "shorter":
            return gate
        return torch.exp(hidden * gate)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Branching(), Branching()])

    def forward(self, x):
        return self.parts[1](self.parts[0](x)).square()


def rows():
    return torch.randn(BATCH, WIDTH)


def branching(branch, seed, num_rows=BATCH):
    """A model planned for the usual branch that takes another one, and its twin."""
    case = Case(Stack, lambda: torch.randn(num_rows, WIDTH))
    made = Case(Stack, rows).profile()
    chosen = {
        unit: random_policy(unit, seed)
        for unit in made.units.candidates
        if unit.fqn in ("parts.0", "parts.1")
    }
    model, plain = case.model(), case.model()
    applying.install(model, spell_out(made, chosen))
    for twin in (model, plain):
        twin.parts[0].branch = branch
    return case, model, plain


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("branch", "num_rows"),
    [("random", BATCH), ("longer", BATCH), ("wide", 2 * BATCH)],
)
def test_another_branch_warns_once_and_keeps_gradients_exact(branch, num_rows, seed):
    case, model, plain = branching(branch, seed, num_rows)
    expected = train(case, plain, steps=1)

    with pytest.warns(UserWarning, match=r"`parts\.0` ran aten") as caught:
        found = train(case, model, steps=1)

    assert len(caught) == 1
    assert_equal(expected, found)


@pytest.mark.parametrize("seed", range(8))
def test_a_shorter_branch_keeps_gradients_exact(seed):
    case, model, plain = branching("shorter", seed)

    assert_equal(train(case, plain, steps=1), train(case, model, steps=1))


@pytest.mark.parametrize("name", ["mlp", "convolutions", "noise", "gpt"])
@pytest.mark.parametrize("seed", range(3))
def test_another_batch_size_keeps_gradients_exact(name, seed):
    case = CASES[name]
    args, _ = normalize_inputs(case.inputs())
    larger = Case(case.make_model, lambda: torch.cat([args[0], args[0]]), case.loss_fn)
    model = planned(case, seed)

    assert_equal(train(larger, larger.model()), train(larger, model))


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


@pytest.mark.parametrize("seed", range(12))
def test_a_departure_that_overwrites_a_result_keeps_gradients_exact(seed):
    case = Case(lambda: nn.Sequential(Overwriting(), nn.Tanh()), rows)
    made = case.profile()
    (unit,) = (unit for unit in made.units.candidates if unit.fqn == "0")
    policies = spell_out(made, {unit: random_policy(unit, seed)})
    plain, model = case.model(), case.model()
    applying.install(model, policies)
    plain[0].overwrites = model[0].overwrites = True
    expected = train(case, plain, steps=1)

    with pytest.warns(UserWarning, match="ran aten"):
        found = train(case, model, steps=1)

    assert_equal(expected, found)


# --- misuse -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "convolutions", "noise", "gpt"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_second_backward_recomputes_again(name, share):
    case = CASES[name]
    args, _ = normalize_inputs(case.inputs())
    gradients = []
    for model in (case.model(), planned(case, save_share=share)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            loss = model(*args).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])

    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_second_backward_of_a_freed_graph_is_refused(share):
    model = planned(CASES["mlp"], save_share=share)
    loss = model(CASES["mlp"].inputs()).sum()
    loss.backward()

    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_an_attribute_that_changes_between_forward_and_rerun_changes_nothing(share):
    case = Case(Stack, rows)
    gradients = []
    for model in (case.model(), planned(case, save_share=share)):
        loss = model(case.inputs()).sum()
        for part in model.parts:
            part.branch = "longer"
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert [part.branch for part in model.parts] == ["longer", "longer"]

    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_code_that_changes_between_forward_and_rerun_changes_nothing(
    share, monkeypatch
):
    case = Case(Stack, rows)
    plain, model = case.model(), planned(case, save_share=share)
    plain(case.inputs()).sum().backward()
    loss = model(case.inputs()).sum()
    monkeypatch.setattr(torch, "tanh", torch.sin)
    loss.backward()

    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


@pytest.mark.parametrize("seed", range(4))
def test_other_code_in_the_rerun_of_a_departed_unit_is_refused(seed, monkeypatch):
    case, model, _ = branching("longer", seed)
    with pytest.warns(UserWarning, match="ran aten"):
        loss = model(case.inputs()).sum()
    monkeypatch.setattr(torch, "tanh", torch.sin)

    with pytest.raises(RuntimeError, match="Exclude it from the plan"):
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
