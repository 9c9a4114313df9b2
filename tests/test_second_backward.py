"""Steps that go backward more than once: bit for bit as without a plan, or refused."""

import functools
import gc
import warnings
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad, functional
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.utils._pytree import tree_leaves

import autosac
from autosac.checkpointing import installing
from autosac.planning.spelling import spell_out
from autosac.step.training_step import normalize_inputs
from autosac.storages import storage_bytes
from autosac.tracing.collecting import no_collections
from tests.alive import tensors_alive
from tests.examples import at_most, seeds
from tests.models import CASES, WIDTH, Case, random_choice, random_policy
from tests.test_chains import CHAINS
from tests.training import random_policies, rows

pytestmark = pytest.mark.usefixtures("one_thread")


def number(output, function=torch.square):
    """One number of all that a model returns."""
    return sum(function(t).sum() for t in tree_leaves(output) if t.requires_grad)


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def gradients(model):
    return [p.grad for p in model.parameters()]


def plain(model, args, kwargs):
    number(model(*args, **kwargs)).backward()
    return gradients(model)


def twice(model, args, kwargs):
    loss = number(model(*args, **kwargs))
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def two_losses(model, args, kwargs):
    output = model(*args, **kwargs)
    first, second = number(output), number(output, torch.sin)
    first.backward(retain_graph=True)
    second.backward()
    return gradients(model)


def a_gradient_per_parameter(model, args, kwargs):
    """The graph stays; then it goes for good."""
    loss = number(model(*args, **kwargs))
    observed = [
        torch.autograd.grad(loss, parameter, retain_graph=True, allow_unused=True)[0]
        for parameter in trained(model)[::-1]
    ]
    loss.backward()
    return [*observed, *gradients(model)]


def gradient_penalty(model, args, kwargs):
    """As WGAN-GP: the gradient of the inputs is to be of norm one."""
    inputs = [t.clone() for t in args if t.is_floating_point()]
    leaves = [t.requires_grad_() for t in inputs] or trained(model)
    loss = number(model(*(inputs or args), **kwargs))
    observed = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    penalty = sum((g.norm() - 1).square() for g in observed if g is not None)
    (loss + penalty).backward()
    return [*gradients(model), *(leaf.grad for leaf in leaves)]


def hessian_vector_products(model, args, kwargs):
    loss = number(model(*args, **kwargs))
    gradients = torch.autograd.grad(
        loss, trained(model), create_graph=True, allow_unused=True
    )
    total = sum(g.sum() for g in gradients if g is not None and g.requires_grad)
    return [
        product
        for retain in (True, False)
        for product in torch.autograd.grad(
            total, trained(model), retain_graph=retain, allow_unused=True
        )
    ]


def many_gradients_at_once(model, args, kwargs):
    loss = number(model(*args, **kwargs))
    return torch.autograd.grad(
        loss,
        trained(model),
        torch.arange(3.0),
        is_grads_batched=True,
        allow_unused=True,
    )


def two_calls(model, args, kwargs):
    """As a discriminator that sees what is real and what is not."""
    first = number(model(*args, **kwargs))
    second = number(model(*args, **kwargs), torch.sin)
    first.backward()
    second.backward()
    return gradients(model)


def frozen(model, args, kwargs):
    """As a discriminator that only judges: its parameters get no gradients."""
    wanted = trained(model)
    for parameter in wanted:
        parameter.requires_grad_(False)
    inputs = [t.clone().requires_grad_() for t in args if t.is_floating_point()]
    output = model(*(inputs or args), **kwargs)
    if inputs:
        number(output).backward()
    for parameter in wanted:
        parameter.requires_grad_()
    return [t.grad for t in inputs]


WAYS = {
    way.__name__: way
    for way in (
        *(plain, twice, two_losses, a_gradient_per_parameter, gradient_penalty),
        *(hessian_vector_products, many_gradients_at_once, two_calls, frozen),
    )
}
_NAMES = ("mlp", "convolutions", "noise", "lstm", "called twice", "custom function")
_CHAINS = ("tuples", "choices and statistics", "blocks in parts", "one tensor twice")
MODELS = {
    **{name: CASES[name] for name in _NAMES},
    **{f"chain of {name}": CHAINS[name] for name in _CHAINS},
}


@functools.cache
def profile_of(name):
    return MODELS[name].profile()


def planned(name, seed, save_share=None):
    """A model under policies drawn at random."""
    choice = random_choice(profile_of(name), seed, save_share=save_share)
    model = MODELS[name].model()
    installing.install(model, spell_out(profile_of(name), choice))
    return model


def follow(case, model, ways):
    """What each step gives, one after the other."""
    args, kwargs = normalize_inputs(case.inputs())
    observed = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for way in ways:
            model.zero_grad()
            given = WAYS[way](model, args, kwargs)
            observed.append([None if g is None else g.clone() for g in given])
    return observed


def are_equal(expected, observed):
    return all(
        one is other if one is None or other is None else torch.equal(one, other)
        for before, after in zip(expected, observed, strict=True)
        for one, other in zip(before, after, strict=True)
    )


@pytest.mark.slow_but_first
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_a_planned_model_gives_the_gradients_of_the_plain_one(name, way):
    case = MODELS[name]
    expected = follow(case, case.model(), [way] * 2)
    for seed in range(2):
        model = planned(name, seed, save_share={0: 0.0}.get(seed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of inputs that require gradients now
            outcome = follow(case, model, [way] * 2)

        assert are_equal(expected, outcome)


@pytest.mark.slow
@settings(
    max_examples=at_most(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    name=st.sampled_from(sorted(MODELS)),
    ways=st.lists(st.sampled_from(sorted(WAYS)), min_size=2, max_size=6),
    seed=st.integers(0, 9),
)
def test_steps_of_several_kinds_may_follow_each_other(name, ways, seed):
    case, model = MODELS[name], planned(name, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of calls that are not what was planned
        outcome = follow(case, model, ways)

    assert are_equal(follow(case, case.model(), ways), outcome)


# --- what changes between two backward passes -----------------------------------


class Heads(nn.Module):
    """Two outputs that do not depend on each other."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, x):
        return self.one(x), self.other(x)


TWO_HEADS = Case(lambda: nn.Sequential(Heads()), rows)


def heads(seed):
    """A model one of whose units has both outputs."""
    profile, model = TWO_HEADS.profile(), TWO_HEADS.model()
    (unit,) = (unit for unit in profile.candidates if unit.fqn == "0")
    share = {0: 0.0, 1: 1.0}.get(seed)
    policy = random_policy(unit, seed, save_share=share)
    installing.install(model, spell_out(profile, {unit: policy}))
    return model


@pytest.mark.parametrize("retain", [False, True])
@seeds(4)
def test_outputs_may_go_backward_one_after_the_other(retain, seed):
    observed = []
    for model in (TWO_HEADS.model(), heads(seed)):
        one, other = model(TWO_HEADS.inputs())
        one.sum().backward(retain_graph=retain)
        other.sum().backward()
        observed.append([gradients(model)])

    assert are_equal(*observed)


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("what", ["weight", "input"])
@seeds(4)
def test_what_changes_between_two_backward_passes_is_an_error(what, retain, seed):
    for model in (TWO_HEADS.model(), heads(seed)):
        for _ in range(2):
            x = TWO_HEADS.inputs()
            one, other = model(x)
            one.sum().backward(retain_graph=retain)
            with torch.no_grad():
                (x if what == "input" else model[0].other[2].weight).mul_(2)

            with pytest.raises(RuntimeError, match=r"in.?place"):
                other.square().sum().backward()


# --- GANs -----------------------------------------------------------------------


def network():
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()) for _ in range(1)),
        nn.Sequential(nn.Linear(4 * WIDTH, 4 * WIDTH), nn.Dropout(0.2), nn.Tanh()),
        nn.Linear(4 * WIDTH, WIDTH),
    )


def gan(plans=()):
    """Parameters of a generator and a discriminator after some steps."""
    torch.manual_seed(0)
    models = network(), network()
    for plan, model in zip(plans, models, strict=False):
        plan.apply(model)
    generator, judge = models
    of_generator, of_judge = (
        torch.optim.Adam(model.parameters(), lr=0.01) for model in models
    )
    for _ in range(4):
        fake, real = generator(rows()), rows()
        of_judge.zero_grad()
        mixed = (0.5 * real + 0.5 * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        wrong = judge(fake.detach()).mean() - judge(real).mean()
        (wrong + (slope.norm(2, 1) - 1).square().mean()).backward()
        of_judge.step()

        of_generator.zero_grad()
        judge.requires_grad_(False)
        (-judge(fake).mean()).backward()
        judge.requires_grad_()
        of_generator.step()
    return [p.detach() for model in models for p in model.parameters()]


def test_a_gan_of_planned_models_trains_as_without_plans():
    plans = []
    for _ in range(2):
        torch.manual_seed(0)
        profile = autosac.profile(
            network(), rows(), loss_fn=lambda out: out.square().sum()
        )
        budget = (profile.baseline_peak_bytes + autosac.floor(profile)) // 2
        plans.append(autosac.plan(profile, memory_budget=budget))
    assert all(plan.policy for plan in plans)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of calls that are not what was planned
        networks = gan(plans)

    assert all(map(torch.equal, gan(), networks))


class Critic(nn.Module):
    """Goes backward in forward, for a penalty of one of its three calls."""

    def __init__(self):
        super().__init__()
        self.judge = nn.Sequential(*network(), *network())

    def forward(self, real, fake):
        mixed = (0.5 * real + 0.5 * fake).requires_grad_()
        output = self.judge(mixed).sum()
        (slope,) = torch.autograd.grad(output, mixed, create_graph=True)
        penalty = (slope.norm(2, 1) - 1).square().mean()
        return self.judge(fake).mean() - self.judge(real).mean() + penalty


def critic():
    torch.manual_seed(0)
    return Critic()


def two_batches():
    torch.manual_seed(1)
    return torch.randn(64, WIDTH), torch.randn(64, WIDTH)


@pytest.mark.slow
def test_a_penalty_in_forward_is_planned_around():
    profile = autosac.profile(critic(), two_batches(), loss_fn=lambda loss: loss)
    floor, peak = autosac.floor(profile), profile.baseline_peak_bytes
    assert floor < peak
    assert "more than once" in profile.units.refused["judge"]
    for budget in (floor, (floor + peak) // 2):
        plan = autosac.plan(profile, memory_budget=budget)
        done = autosac.verify(plan, critic, two_batches, timing_rounds=0)

        assert plan.dry_run
        assert not done.differences
        assert done.measured_peak_bytes <= budget


# --- transforms and compilers ---------------------------------------------------


def _under_forward_mode(model, x):
    with forward_ad.dual_level():
        output = model(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(output).tangent


def _of_parameters(model, x):
    def loss(parameters):
        return functional_call(model, parameters, (x,)).square().sum()

    return tuple(grad(loss)(dict(model.named_parameters())).values())


def _per_sample(model, x):
    return vmap(grad(lambda row: model(row[None]).square().sum()))(x)


TRANSFORMS = {
    "grad": _of_parameters,
    "jvp of grad": lambda m, x: jvp(grad(lambda y: m(y).sum()), (x,), (x,))[1],
    "hessian": lambda m, x: hessian(lambda y: m(y).square().sum())(x),
    "vmap": lambda m, x: vmap(lambda row: m(row[None]))(x),
    "per sample": _per_sample,
    "forward mode": _under_forward_mode,
}


def smooth():
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(16, WIDTH))
            for _ in range(3)
        )
    )


SMOOTH = Case(smooth, rows)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:FutureWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_under_a_transform_nothing_is_recomputed_and_that_is_said(transform):
    model = SMOOTH.model()
    installing.install(model, random_policies(SMOOTH))

    expected = transform(SMOOTH.model(), SMOOTH.inputs())
    with pytest.warns(UserWarning, match=r"AC unit .* runs under a transform"):
        transformed = transform(model, SMOOTH.inputs())

    assert all(map(torch.equal, tree_leaves(expected), tree_leaves(transformed)))


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", ["mlp", "noise"])
@pytest.mark.parametrize("vectorize", [False, True])
def test_hessians_are_those_of_the_plain_model(name, vectorize):
    case, observed = CASES[name], []
    for model in (case.model(), planned(name, seed=0, save_share=0.0)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            observed.append(
                functional.hessian(
                    lambda x, model=model: model(x).square().sum(),
                    case.inputs(),
                    vectorize=vectorize,
                )
            )

    assert torch.equal(*observed)


def whole(model):
    return torch.compile(model, backend="eager")


def in_place(model):
    model.compile(backend="eager")
    return model


def a_part(model):
    part = next(m for m in model.modules() if isinstance(m, nn.Linear))
    return in_place(part) and model


def in_a_function(model):
    return torch.compile(lambda x: model(x).sum(), backend="eager")


def exported(model):
    return lambda x: torch.export.export(model, (x,))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("how", [whole, in_place, a_part, in_a_function, exported])
def test_a_planned_model_that_is_compiled_says_what_to_do(how, monkeypatch):
    # Before torch 2.14 an export that fails leaves its hook for all modules behind.
    hooks = OrderedDict()  # which handles refer to weakly
    monkeypatch.setattr(nn.modules.module, "_global_buffer_registration_hooks", hooks)
    model = SMOOTH.model()
    x = rows()
    profile = autosac.profile(model, x, loss_fn=torch.sum)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    plan.apply(model)
    compiled = how(model)

    with pytest.raises(autosac.errors.UnsupportedError, match=r"plan\.unapply\(model"):
        compiled(x)


@pytest.mark.parametrize("of_unit", [False, True])
def test_a_planned_model_in_one_graph_is_refused_with_the_reason(of_unit):
    model = SMOOTH.model()
    installing.install(model, random_policies(SMOOTH))
    unit = model.get_submodule(installing.installed(model)[0])
    compiled = torch.compile(unit if of_unit else model, fullgraph=True)

    with pytest.raises(RuntimeError, match=r"plan\.unapply\(model"):  # of Dynamo
        compiled(rows())


def test_units_that_are_compiled_say_what_to_do():
    model = SMOOTH.model()
    installing.install(model, random_policies(SMOOTH))
    unit = model.get_submodule(installing.installed(model)[0])

    with pytest.raises(autosac.errors.UnsupportedError, match=r"AC unit `.*compiled"):
        whole(unit)(rows())


class Fused(nn.Module):
    """Runs compiled code; a value may decide something before that."""

    def __init__(self, decides):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.gate = torch.compile(lambda x: x * torch.sigmoid(x), backend="eager")
        self.decides = decides

    def forward(self, x):
        x = self.layer(x)
        if self.decides and x.sum().item() > 1e9:
            x = x + 1
        return self.gate(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's own
@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("is_warm", [False, True])
def test_compiled_code_inside_a_model_is_no_step_to_plan(decides, is_warm):
    model, x = Fused(decides), torch.randn(4, 8)
    if is_warm:
        model(x)

    with pytest.raises(autosac.errors.TraceError, match=r"compiled by torch\.compile"):
        autosac.profile(model, x, loss_fn=torch.sum)


# --- memory ---------------------------------------------------------------------


@dataclass(frozen=True)
class Left:
    """Bytes of storages that are alive: what a step leaves behind."""

    nbytes: int

    @staticmethod
    def of_process():
        gc.collect()
        return Left(storage_bytes(tensors_alive()))


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["mlp", "chain of blocks in parts"])
def test_a_step_leaves_nothing_behind(name, way):
    case, model = MODELS[name], planned(name, seed=0, save_share=0.5)
    follow(case, model, [way] * 2)
    model.zero_grad()
    before = Left.of_process()
    for _ in range(3):
        follow(case, model, [way])
        model.zero_grad()

    assert Left.of_process() == before


@pytest.mark.parametrize("name", ["mlp", "chain of blocks in parts"])
def test_a_call_that_never_goes_backward_leaves_nothing_to_collect(name):
    # As steps do that are skipped for a loss that is not finite.
    case, model = MODELS[name], planned(name, seed=0, save_share=0.5)
    args, kwargs = normalize_inputs(case.inputs())
    follow(case, model, [next(iter(WAYS))])
    model.zero_grad()
    gc.collect()
    with no_collections():
        before = storage_bytes(tensors_alive())
        model(*args, **kwargs)

        assert storage_bytes(tensors_alive()) == before
