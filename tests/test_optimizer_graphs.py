import copy

import pytest
import torch
from torch import nn

import autosac
from autosac.errors import ArgumentError, InfeasibleBudgetError, TraceError
from autosac.graphs.joint_graphs import joint_graph
from autosac.graphs.optimizer_steps import captured_step
from autosac.graphs.plans import GraphPlanner
from autosac.step.optimizer_state import optimizer_tensors
from autosac.storages import storage_bytes
from autosac.verification.measuring import capture_state, differences, measure_peak
from tests.models import ConvNet, gpt, tokens

pytestmark = pytest.mark.usefixtures("one_thread_throughout")

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov foreach": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, foreach=True
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "adam foreach": lambda p: torch.optim.Adam(
        p, lr=0.1, weight_decay=0.1, foreach=True, amsgrad=True
    ),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5),
}


class Mlp(nn.Sequential):
    def __init__(self):
        layers = [nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU()]
        super().__init__(*layers, nn.Linear(32, 8))


class Tied(nn.Module):
    """Two names of one weight; two weights with one gradient: one number, expanded."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.first = nn.Parameter(torch.zeros(4, 5, 16))
        self.second = nn.Parameter(torch.ones(4, 5, 16))

    def forward(self, ids):
        out = self.head(self.frozen(self.embedding(ids)))
        return out + (self.first + self.second)


def step_of(kind):
    """A model, its inputs and its loss."""
    torch.manual_seed(0)
    if kind == "mlp":
        return Mlp(), torch.randn(64, 8), lambda out: out.square().mean()
    if kind == "convolutions":
        return ConvNet(1), torch.randn(4, 3, 16, 16), lambda out: out.square().mean()
    if kind == "tied":
        return Tied(), torch.randint(16, (4, 5)), lambda out: out.sum()
    model = gpt(1)
    for module in model.modules():  # captured dropout rounds in another way
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, tokens(), lambda out: out.square().mean()


def real_step(model, inputs, loss_fn, optimizer):
    """All that a step of plain PyTorch leaves, by name."""
    optimizer.zero_grad()
    loss = loss_fn(model(inputs))
    loss.backward()
    optimizer.step()
    return capture_state(model, optimizer, loss)


def captured(kind, make_optimizer, **options):
    model, inputs, loss_fn = step_of(kind)
    return joint_graph(
        model, inputs, loss_fn=loss_fn, optimizer=make_optimizer, **options
    )


def assert_updated_alike(graph, real):
    """Parameters, buffers and state of a graph are those of a model, bit for bit."""
    updated = graph.named_inputs
    assert any(name.startswith("parameter") for name in updated)
    shared = {name: updated[name] for name in updated if name in real}
    given = {"gradient of the loss"} | {n for n in updated if n.startswith("input")}
    assert updated.keys() - real.keys() <= given
    assert differences({name: real[name] for name in shared}, shared) == ()


# --- what a graph does ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_from_the_first_on_equal_those_of_pytorch(name):
    make_optimizer = OPTIMIZERS[name]
    graph = captured("mlp", make_optimizer)
    model, inputs, loss_fn = step_of("mlp")
    optimizer = make_optimizer(model.parameters())

    for _ in range(3):
        real = real_step(model, inputs, loss_fn, optimizer)
        results = graph.run()
        assert_updated_alike(graph, real)
        assert torch.equal(results[0], real["loss"])
        for given, gradient in zip(graph.input_names, results[1:], strict=False):
            if given.startswith("parameter"):
                expected = real[f"gradient of {given.partition(' ')[2]}"]
                assert torch.equal(expected, gradient)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt", "adamw foreach"),
        ("convolutions", "adamw"),
        ("tied", "nesterov foreach"),
    ],
)
def test_a_later_step_equals_that_of_pytorch(kind, name):
    model, inputs, loss_fn = step_of(kind)
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(2):
        real_step(model, inputs, loss_fn, optimizer)

    graph = joint_graph(model, inputs, loss_fn=loss_fn, optimizer=optimizer)
    graph.run()

    assert_updated_alike(graph, real_step(model, inputs, loss_fn, optimizer))


@pytest.mark.slow
def test_every_group_has_its_options_and_frozen_parameters_stay():
    def grouped(model):
        groups = [
            {"params": [model[0].weight, model[0].bias], "lr": 0.5},
            {"params": [model[2].bias], "weight_decay": 0.3},
            {"params": [model[2].weight, model[4].weight]},  # and not model[4].bias
        ]
        return torch.optim.AdamW(groups, lr=0.1)

    model, inputs, loss_fn = step_of("mlp")
    for part in (model[0].weight, model[2].bias):
        part.requires_grad_(False)
    optimizer = grouped(model)
    real_step(model, inputs, loss_fn, optimizer)
    graph = joint_graph(model, inputs, loss_fn=loss_fn, optimizer=optimizer)
    frozen = model[0].weight.detach().clone()

    graph.run()

    real = real_step(model, inputs, loss_fn, optimizer)
    assert_updated_alike(graph, real)
    assert torch.equal(graph.named_inputs["parameter 0.weight"], frozen)
    assert torch.equal(graph.named_inputs["parameter 4.bias"], model[4].bias)
    states = {n for n in graph.input_names if n.startswith("optimizer state")}
    owners = {name.rpartition(" ")[2] for name in states}
    assert owners == {"0.bias", "2.weight", "4.weight"}


@pytest.mark.slow
def test_model_optimizer_gradients_and_random_state_are_left_alone():
    model, inputs, loss_fn = step_of("convolutions")
    optimizer = OPTIMIZERS["adamw foreach"](model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)  # wraps its `step`
    real_step(model, inputs, loss_fn, optimizer)
    options = copy.deepcopy([{**g, "params": None} for g in optimizer.param_groups])
    loss = torch.zeros(())
    before = capture_state(model, optimizer, loss)

    graph = joint_graph(model, inputs, loss_fn=loss_fn, optimizer=optimizer)
    graph.run()

    assert differences(before, capture_state(model, optimizer, loss)) == ()
    assert options == [{**g, "params": None} for g in optimizer.param_groups]


# --- stages and memory ------------------------------------------------------------

CASES = [
    ("mlp", "momentum"),
    ("mlp", "adamw"),
    ("gpt", "adamw"),
    ("tied", "nesterov foreach"),
]


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def case(request, one_thread_throughout):
    kind, name = request.param
    return kind, name, captured(kind, OPTIMIZERS[name])


def measured_peak(graph):
    _, measured = measure_peak(
        graph.run,
        device="cpu",
        persistent_bytes=graph.persistent_bytes,
        warm_up=graph.run,
    )
    return measured


@pytest.mark.slow_but_first
def test_simulated_peak_equals_the_measured_one(case):
    *_, graph = case

    assert graph.memory.peak_bytes() == measured_peak(graph)
    assert max(graph.stage_peaks().values()) == graph.memory.peak_bytes()


@pytest.mark.slow
def test_the_optimizer_is_the_last_stage(case):
    *_, graph = case
    order = ["placeholder", "forward", "loss", "backward", "optimizer"]
    ranks = [  # updates of buffers end forward, behind the loss
        order.index(stage)
        for node, stage in graph.stages.items()
        if stage == "optimizer" or not node.is_impure()
    ]

    assert ranks == sorted(ranks)
    assert list(graph.stage_peaks()) == order[1:]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("nesterov foreach", 0),  # it changes gradients in their memory
        ("momentum", 1),  # weight decay is added to a copy of each gradient
        ("adamw", 2),  # a root, and the root divided
    ],
)
def test_a_step_makes_nothing_but_temporaries_of_the_optimizer(name, share):
    graph = captured("mlp", OPTIMIZERS[name])
    num_bytes = sum(p.nbytes for p in Mlp().parameters())

    made = [
        graph.memory.nbytes[storage]
        for node, stage in graph.stages.items()
        if stage == "optimizer"
        for storage in graph.memory.nodes[node].makes
    ]

    assert sum(made) == share * num_bytes


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["momentum", "nesterov foreach", "adamw foreach"])
def test_the_optimizer_peaks_as_its_real_step(name):
    graph = captured("mlp", OPTIMIZERS[name])
    model, inputs, loss_fn = step_of("mlp")
    optimizer = OPTIMIZERS[name](model.parameters())
    real_step(model, inputs, loss_fn, optimizer)

    held = [*model.parameters(), *(p.grad for p in model.parameters())]
    held += [inputs, *optimizer_tensors(optimizer)]
    _, measured = measure_peak(
        lambda: optimizer.step(),
        device="cpu",
        persistent_bytes=storage_bytes(held),
        warm_up=lambda: optimizer.step(),
    )

    loss_and_its_gradient = 2 * 4
    assert graph.stage_peaks()["optimizer"] == measured + loss_and_its_gradient


@pytest.mark.slow
def test_accesses_of_the_optimizer_are_none_of_forward_or_backward():
    plain = captured("mlp", None).intermediates()
    found = captured("mlp", OPTIMIZERS["adamw"]).intermediates()

    accesses = [
        [(i.op, i.last_forward_access, i.first_backward_access) for i in items]
        for items in (plain, found)
    ]
    assert accesses[0] == accesses[1]


# --- plans ------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=["gpt", pytest.param("convolutions", marks=pytest.mark.slow)],
)
def planner(request, one_thread_throughout):
    return GraphPlanner(captured(request.param, OPTIMIZERS["momentum"]))


def outcome(graph):
    """Results and updated inputs of a step, which is taken back."""
    before = [tensor.detach().clone() for tensor in graph.inputs]
    results = [r.clone() for r in graph.run() if r is not None]
    after = [tensor.detach().clone() for tensor in graph.inputs]
    with torch.no_grad():
        for tensor, value in zip(graph.inputs, before, strict=True):
            tensor.copy_(value)
    return [*results, *after]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["milp", "capuchin"])
def test_plans_keep_the_budget_of_the_whole_step_and_its_updates(planner, strategy):
    low, high = planner.floor(strategy), planner.baseline_peak_bytes
    expected = outcome(planner.joint)
    budget = (low + high) // 2

    plan = planner.plan(budget, strategy=strategy, time_limit_s=10.0)

    assert low < high
    assert plan.recomputed
    assert all(map(torch.equal, expected, outcome(plan.joint)))
    assert plan.peak_bytes <= budget
    assert plan.peak_bytes == measured_peak(plan.joint)
    assert plan.joint.stage_peaks().keys() == planner.joint.stage_peaks().keys()


@pytest.mark.slow
def test_no_budget_lies_below_what_the_optimizer_takes(planner):
    least = planner.joint.stage_peaks()["optimizer"]

    with pytest.raises(InfeasibleBudgetError, match="optimizer state") as raised:
        planner.plan(least - 1, strategy="capuchin")

    assert raised.value.lowest_peak_bytes >= least


class Straight(torch.autograd.Function):
    """A product whose gradient is the factor itself."""

    @staticmethod
    def forward(ctx, weight, factor):
        ctx.save_for_backward(factor)
        return (weight * factor).sum()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0], None


class Straightened(nn.Module):
    """The gradient of its weight is a value of forward, made of another weight."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        factor = (self.scale * x).exp().detach()
        wide = (torch.outer(x, x) * self.scale).sin().cos().tanh()
        return Straight.apply(self.weight, factor) + wide.sum()


# Dynamo makes an instance of such functions, in torch 2.10
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_gradients_that_forward_makes_are_kept_past_updates_of_what_made_them():
    torch.manual_seed(0)
    graph = joint_graph(
        Straightened(),
        torch.randn(64),
        loss_fn=lambda loss: loss,
        optimizer=OPTIMIZERS["momentum"],
    )
    gradient = graph.module.graph.output_node().args[0][
        1 + graph.input_names.index("parameter weight")
    ]
    assert gradient in graph.forward_nodes
    planner = GraphPlanner(graph)
    expected = outcome(graph)

    for strategy in ("milp", "capuchin"):
        plan = planner.plan(planner.floor(strategy), strategy=strategy)
        assert plan.recomputed
        assert all(map(torch.equal, expected, outcome(plan.joint)))


# --- refusals ---------------------------------------------------------------------


class OutOfPlace(torch.optim.Optimizer):
    def __init__(self, params, *, counts=False, reads=None):
        super().__init__(params, {"count": 0})
        self.counts, self.reads = counts, reads

    def __getstate__(self):
        return {**super().__getstate__(), "counts": self.counts, "reads": self.reads}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += self.counts
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p)

    def update(self, p):
        if self.reads is not None:
            p.sub_(p.grad * self.reads)
        elif self.counts:
            p.sub_(p.grad)
        else:
            state = self.state[p]
            state["mean"] = 0.9 * state.get("mean", 0.0) + p.grad
            p.sub_(state["mean"])


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        closure()
        super().step()


class ReadsBefore(torch.optim.Optimizer):
    """Reads its count before and after an update by an op on a list."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            count = self.state[p].setdefault("count", torch.tensor(0.0))
            before = count.item()
            torch._foreach_add_([count], 1.0)
            p.sub_(p.grad, alpha=count.item() ** 2 - before)


@pytest.mark.slow
def test_numbers_are_those_at_the_moment_they_are_read():
    graph = captured("mlp", ReadsBefore)
    model, inputs, loss_fn = step_of("mlp")
    optimizer = ReadsBefore(model.parameters())

    for _ in range(3):
        real = real_step(model, inputs, loss_fn, optimizer)
        graph.run()
        assert_updated_alike(graph, real)


def hooked(params):
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def sgd_of_others(params):
    return torch.optim.SGD(Mlp().parameters(), lr=0.1)


REFUSALS = {
    "closure": (torch.optim.LBFGS, NotImplementedError, "closure"),
    "own closure": (NeedsClosure, NotImplementedError, "needs a closure"),
    "branch": (torch.optim.RAdam, TraceError, "depend on values"),
    "hooks": (hooked, NotImplementedError, "has hooks around its step"),
    "tensor option": (
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
        NotImplementedError,
        "option `lr` of `Adam` is a tensor",
    ),
    "replaced state": (OutOfPlace, NotImplementedError, "replaces its"),
    "counts in Python": (
        lambda p: OutOfPlace(p, counts=True),
        NotImplementedError,
        "counts in Python by its",
    ),
    "outside": (
        lambda p: OutOfPlace(p, reads=torch.ones(())),
        NotImplementedError,
        "neither parameters, gradients nor",
    ),
    "other parameters": (sgd_of_others, TraceError, "other parameters"),
    "not one": (lambda p: None, TypeError, "must be a torch.optim.Optimizer"),
    "none": ("adam", TypeError, "must be a torch.optim.Optimizer"),
}


@pytest.mark.parametrize("key", REFUSALS)
def test_what_cannot_be_captured_is_refused(key):
    make_optimizer, error, message = REFUSALS[key]

    model = Mlp()

    with pytest.raises(error, match=message):
        captured_step(make_optimizer, model, list(model.parameters()))


@pytest.mark.slow
def test_optimizers_of_other_models_in_backward_and_hooks_are_refused():
    model, inputs, loss_fn = step_of("mlp")
    others = torch.optim.SGD(Mlp().parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="`optimizer` trains other parameters"):
        joint_graph(model, inputs, loss_fn=loss_fn, optimizer=others)

    model[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(NotImplementedError, match=r"`0.weight` has a hook"):
        joint_graph(model, inputs, loss_fn=loss_fn, optimizer=OPTIMIZERS["momentum"])

    model, inputs, loss_fn = step_of("mlp")
    within = autosac.OptimizerInBackward(model.parameters(), OPTIMIZERS["momentum"])
    with pytest.raises(NotImplementedError, match="while backward runs"):
        joint_graph(model, inputs, loss_fn=loss_fn, optimizer=within)
