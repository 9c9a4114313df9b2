import copy
import pickle

import pytest
import torch
from torch import nn

from autosac.checkpointing import installing
from autosac.planning.spelling import spell_out
from autosac.simulation.simulator import Simulator
from autosac.solving.rules_of_thumb import policy_saving
from autosac.step.training_step import normalize_inputs
from autosac.tracing.trace import dry_run
from autosac.verification.measuring import differences
from tests.examples import seeds
from tests.models import (
    CASES,
    WIDTH,
    Case,
    each_case,
    random_choice,
    shared_profile,
)
from tests.training import Stack, assert_equal, planned, random_policies, rows, train

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_PLANS = 4


@pytest.mark.slow_but_first
@each_case
def test_two_steps_are_bit_identical_with_any_policy(case):
    expected = train(case, case.model())
    traced = shared_profile(case)
    shares = {0: 0.0, 1: 1.0}  # the extremes, then anything between
    for seed in range(NUM_PLANS):
        chosen = random_choice(traced, seed, save_share=shares.get(seed))
        model = case.model()
        installing.install(model, spell_out(traced, chosen))

        assert_equal(expected, train(case, model))


@pytest.mark.slow_but_fifth
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


@pytest.mark.slow_but_fifth
@each_case
def test_unapplying_restores_every_module(case):
    model = case.model()
    before = [dict(module.__dict__) for module in model.modules()]
    installing.install(model, random_policies(case, save_share=0.0))

    installing.remove(model)

    after = [dict(module.__dict__) for module in model.modules()]
    assert [list(entry) for entry in after] == [list(entry) for entry in before]
    assert installing.installed(model) == ()


def test_unapplying_restores_a_forward_that_the_user_set():
    case = CASES["mlp"]
    model = case.model()
    own = [module.__dict__.setdefault("forward", module.forward) for module in model]

    installing.install(model, random_policies(case, save_share=0.0))
    installing.remove(model)

    assert [module.__dict__["forward"] for module in model] == own


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", ["mlp", "convolutions", "gpt", "called twice"])
def test_a_deepcopy_trains_on_its_own_modules(name):
    case = CASES[name]
    model = planned(case, save_share=0.0)
    untouched = {key: value.clone() for key, value in model.state_dict().items()}

    twin = copy.deepcopy(model)

    assert installing.installed(twin) == installing.installed(model)
    for fqn in installing.installed(twin):
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

    assert installing.installed(back) == installing.installed(model)
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

    monkeypatch.setattr(installing, "Frame", fail)


@pytest.mark.parametrize("name", ["mlp", "convolutions", "gpt"])
def test_eval_mode_runs_plainly(name, no_units):
    case = CASES[name]
    args, _ = normalize_inputs(case.inputs())

    observed = planned(case).eval()(*args)

    assert observed.requires_grad
    assert torch.equal(observed, case.model().eval()(*args))


@pytest.mark.parametrize("name", ["mlp", "convolutions", "gpt"])
def test_no_grad_runs_plainly(name, no_units):
    case = CASES[name]
    args, _ = normalize_inputs(case.inputs())
    model = planned(case)

    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(3)
        output = model(*args)
        torch.manual_seed(3)
        expected = case.model()(*args)

    assert torch.equal(output, expected)


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
    installing.install(model, policies)

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
@seeds(4)
def test_an_argument_that_changes_in_place_leaves_gradients_exact(seed, inside):
    case = Case(lambda: Accumulates(inside), rows)
    traced = shared_profile(case)
    model = case.model()
    installing.install(model, spell_out(traced, random_choice(traced, seed)))

    assert_equal(train(case, case.model()), train(case, model))


# --- misuse -----------------------------------------------------------------------


@pytest.mark.slow_but_fifth
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

    for expected, observed in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected.grad, observed.grad)


class _CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
        self.block = nn.Sequential(inner, nn.GELU(), nn.Linear(1, WIDTH), nn.GELU())

    def forward(self, x):
        return self.block(self.block(x))


def test_calls_inside_another_unit_count_as_calls_of_a_module():
    # Call 0 of the block is one unit, and what lies inside it is one in call 1 only.
    traced = Case(_CalledTwice, rows).profile()
    units = {(unit.fqn, unit.call_index): unit for unit in traced.units.candidates}
    keys = [("block", 0), ("block.0", 1)]
    chosen = {units[key]: policy_saving(units[key], ()) for key in keys}
    policies = spell_out(traced, chosen)

    dry = dry_run(traced.step, lambda model: installing.install(model, policies))

    assert _kept_bytes(Simulator(dry), {}) == _kept_bytes(traced.simulator, chosen)


def _kept_bytes(simulator, chosen):
    """Bytes alive as backward begins."""
    timeline = simulator.timeline(chosen, workspaces=False)
    begin = simulator.tape.phases["backward"] * simulator.span
    return timeline.live_bytes[timeline.keys <= begin][-1]
