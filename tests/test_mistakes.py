"""What people get wrong: each is an AutosacError of one sentence that says the fix."""

import functools
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import autosac
from autosac.errors import ArgumentError, AutosacError, InfeasibleBudgetError
from autosac.tracing import single_run
from autosac.verification.measuring import capture_state, differences

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH, CLASSES = 4, 64, 8
X, Y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, CLASSES)


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def loss(output):
    return functional.mse_loss(output, Y)


def plan(model, inputs=X, **options):
    return autosac.plan(
        model, inputs, **{"loss_fn": loss, "memory_budget": "10MiB", **options}
    )


class Around(nn.Module):
    """Calls a function between two layers."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.function = function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


@functools.cache
def planned():
    """A model that a plan was applied to."""
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))
        for _ in range(4)
    )
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))
    profile = autosac.profile(model, X.repeat(64, 1), loss_fn=torch.sum)
    return autosac.plan(profile, memory_budget=autosac.floor(profile)).apply(model)


def compiled_in_part():
    model = mlp()
    model[0].compile(backend="eager")
    return model


def without_hooks(x):
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        return x.sigmoid()


def replanned_for_another():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters())
    first = plan(model, optimizer=optimizer, on_mismatch="replan")
    loss(first.apply(mlp())(X[:2]))


class Multiplies(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = torch.eye(len(X)).to_sparse()

    def forward(self, x):
        return torch.sparse.mm(self.matrix, x)


class Multiplied(nn.Sequential):
    def __init__(self):
        super().__init__()
        self.model = mlp()
        self.product = Multiplies()


class Scaled(torch.Tensor):
    """A quantized tensor without `__tensor_flatten__`."""

    @staticmethod
    def __new__(cls, integers, scale):
        return cls._make_wrapper_subclass(cls, integers.shape, dtype=torch.float32)

    def __init__(self, integers, scale):
        self.integers, self.scale = integers, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [a.integers * a.scale if isinstance(a, cls) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Noted(torch.Tensor):
    """It has memory of its own, and does what ops do."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


class Called(torch.Tensor):
    """Functions are told of it, ops are not."""


def holding(name, tensor):
    """A model with such a buffer."""
    model = mlp()
    model.register_buffer(name, tensor)
    return model


def scripted(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        return make()


@functools.cache
def tiny_plan():
    return plan(mlp())


def inference_model():
    with torch.inference_mode():
        return mlp()


def inference_planned():
    with torch.inference_mode():
        plan(mlp())


def planned_with_cached_weights():
    with parametrize.cached():
        plan(mlp())


class LateParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(()))
        return self.layers(x) * self.scale


class WantsClosure(torch.optim.SGD):
    def step(self, closure=None):
        if closure is None:
            raise ValueError("it wants a closure")


class InThread(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.layers, x).result()


class MakesGroups(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def parameters(self):
        return [{"params": super().parameters()}]


MISTAKES = {
    # --- the optimizer
    "of another model": (
        lambda: plan(mlp(), optimizer=torch.optim.AdamW(mlp().parameters())),
        "trains other parameters: none of its 4 are .* Make it anew",
    ),
    "of groups that parameters() makes": (
        lambda: plan(
            model := MakesGroups(), optimizer=torch.optim.SGD(model.parameters())
        ),
        r"`MakesGroups.parameters\(\)` gives a dict, .* a method of another name",
    ),
    "of two models": (
        lambda: plan(
            model := mlp(),
            optimizer=torch.optim.SGD([*model.parameters(), *mlp().parameters()]),
        ),
        "not all of its 8 are .* plan one module that holds all",
    ),
    "of no parameters": (
        lambda: plan(mlp(), optimizer=3),
        "`optimizer`=3 must be an optimizer of torch.optim, its class or name",
    ),
    "a parameter that forward makes": (
        lambda: plan(LateParameter(), optimizer=torch.optim.SGD),
        "makes the parameter `scale` .* call the model once on a batch",
    ),
    "two of them": (
        lambda: plan(
            model := mlp(), optimizer=[torch.optim.SGD(model.parameters())] * 2
        ),
        "`optimizer`=<list> must be .* Of several make one",
    ),
    "one that wants a closure": (
        lambda: plan(model := mlp(), optimizer=WantsClosure(model.parameters())),
        "says it wants a closure. .* pass the optimizer that it is built on",
    ),
    "verify with two of them": (
        lambda: autosac.verify(
            tiny_plan(), mlp, lambda: X, loss_fn=loss, make_optimizer=lambda model: []
        ),
        "got <function> that returns <list>. Of several make one",
    ),
    "an unknown name": (
        lambda: plan(mlp(), optimizer="adamx"),
        "'adamx' must be one of adadelta,.* adamw,",
    ),
    "a function of the model": (
        lambda: plan(mlp(), optimizer=lambda m: torch.optim.SGD(m.parameters())),
        "is called with the model's parameters, and says AttributeError",
    ),
    "a function that returns nothing": (
        lambda: plan(mlp(), optimizer=lambda parameters: None),
        "`optimizer` must return an optimizer .* it returned None",
    ),
    "verify with an optimizer": (
        lambda: autosac.verify(
            tiny_plan(),
            mlp,
            lambda: X,
            loss_fn=loss,
            make_optimizer=torch.optim.SGD(mlp().parameters()),
        ),
        "`make_optimizer` must be a class of torch.optim or a function",
    ),
    "verify with a function of parameters": (
        lambda: autosac.verify(
            tiny_plan(),
            mlp,
            lambda: X,
            loss_fn=loss,
            make_optimizer=lambda parameters: torch.optim.SGD(parameters),
        ),
        "`make_optimizer` is called with the model, and says TypeError: .* Pass a",
    ),
    "verify with the optimizer of another model": (
        lambda: autosac.verify(
            tiny_plan(),
            mlp,
            lambda: X,
            loss_fn=loss,
            make_optimizer=lambda model: torch.optim.SGD(mlp().parameters()),
        ),
        "trains other parameters",
    ),
    # --- the loss
    "a criterion of two arguments": (
        lambda: plan(mlp(), loss_fn=nn.MSELoss()),
        "MSELoss takes .*'target'. Let it hold its targets, as in `loss_fn=lambda",
    ),
    "a function of two arguments": (
        lambda: plan(mlp(), loss_fn=lambda output, target: output),
        r"it takes \(output, target\): .*'target'. Let it hold its targets",
    ),
    "verify with a criterion": (
        lambda: autosac.verify(tiny_plan(), mlp, lambda: X, loss_fn=nn.MSELoss()),
        "MSELoss takes .* Let it hold its targets",
    ),
    "the name of a loss": (
        lambda: plan(mlp(), loss_fn="mse"),
        "`loss_fn`='mse' must be a function of the model's output",
    ),
    "many numbers": (
        lambda: plan(mlp(), loss_fn=lambda output: output - Y),
        r"shape \(4, 8\) and must be one number: .*`loss.mean\(\)`",
    ),
    "a float": (
        lambda: plan(mlp(), loss_fn=lambda output: 0.5),
        "The loss is 0.5: `loss_fn` must return a tensor",
    ),
    "nothing": (
        lambda: plan(mlp(), loss_fn=lambda output: None),
        "The loss is None: `loss_fn` must return a tensor",
    ),
    "an item": (
        lambda: plan(mlp(), loss_fn=lambda output: loss(output).item()),
        r"The loss is \d\.\d+: `loss_fn` must return a tensor",
    ),
    "a detached loss": (
        lambda: plan(mlp(), loss_fn=lambda output: loss(output.detach())),
        r"no backward pass: the loss does not depend on .* Leave out `detach\(\)`",
    ),
    "all is frozen": (
        lambda: plan(mlp().requires_grad_(False)),
        r"no backward pass: no parameter requires a gradient. .*`requires_grad_\(\)`",
    ),
    "all is frozen, and no loss": (
        lambda: plan(mlp().requires_grad_(False), loss_fn=None),
        "no tensor that requires a gradient; train some parameters",
    ),
    # --- the model
    "a function": (lambda: plan(loss), "`model` must be a torch.nn.Module"),
    "planned": (
        lambda: plan(planned()),
        r"has a plan already \(`.*` is an AC unit\); call `plan.unapply\(model\)`",
    ),
    "estimate of a planned one": (
        lambda: autosac.estimate(planned(), X),
        "has a plan already",
    ),
    "compile of a planned one": (
        lambda: autosac.compile(planned(), memory_budget="1GiB"),
        "has a plan already",
    ),
    "compiled": (
        lambda: plan(torch.compile(mlp(), backend="eager")),
        "`model` is compiled by torch.compile.* as it was before that.*autosac.compile",
    ),
    "a function compiled": (
        lambda: plan(Around(torch.compile(functional.silu, backend="eager"))),
        "runs code that is compiled",
    ),
    "a part compiled": (
        lambda: plan(compiled_in_part()),
        "`0` is compiled by torch.compile",
    ),
    "applied to a compiled one": (
        lambda: tiny_plan().apply(torch.compile(mlp(), backend="eager")),
        "`model` is compiled by torch.compile",
    ),
    "scripted": (
        lambda: plan(scripted(lambda: torch.jit.script(mlp()))),
        "`model` is a TorchScript module.* pass the module that it was made from",
    ),
    "a nested tensor": (
        lambda: plan(mlp(), torch.nested.nested_tensor([X, X], layout=torch.jagged)),
        "pad them to one tensor",
    ),
    "a sparse tensor in a module": (
        lambda: plan(Multiplied(), X),
        "`product` at .* computes with a sparse tensor.* Use dense tensors",
    ),
    "a sparse buffer": (
        lambda: plan(holding("product", torch.eye(WIDTH).to_sparse())),
        "`product` holds a tensor of layout torch.sparse_coo.* make it dense",
    ),
    "a tensor made of others": (
        lambda: plan(holding("pair", TwoTensor(X, X))),
        "`pair` holds a TwoTensor.* compute with plain tensors",
    ),
    "a tensor made of others that no compiler knows": (
        lambda: plan(holding("scaled", Scaled(X.to(torch.int8), 0.01))),
        "`scaled` holds a Scaled.* compute with plain tensors",
    ),
    "an input made of others": (
        lambda: autosac.plan(mlp(), Scaled(X, 2.0), memory_budget="1GiB"),
        "`inputs` holds a Scaled.* compute with plain tensors",
    ),
    "a part traced": (
        lambda: plan(nn.Sequential(scripted(lambda: torch.jit.trace(mlp(), X)))),
        "`0` is a TorchScript module",
    ),
    "wrapped": (
        lambda: plan(nn.DataParallel(mlp())),
        "`model` is a DataParallel: pass the module inside, `model.module`",
    ),
    "applied to a wrapper": (
        lambda: tiny_plan().apply(nn.DataParallel(mlp())),
        "`model` is a DataParallel: pass the module inside, `model.module`",
    ),
    "lazy": (
        lambda: plan(nn.Sequential(nn.LazyLinear(CLASSES))),
        "`0.weight` of the model is lazy .* call the model once",
    ),
    "made in inference mode": (
        lambda: plan(inference_model()),
        "`0.weight` of the model was made under `torch.inference_mode",
    ),
    "planned in inference mode": (
        inference_planned,
        r"`torch.inference_mode\(\)` is on.* plan outside of it",
    ),
    "planned with cached weights": (
        planned_with_cached_weights,
        r"`torch.nn.utils.parametrize.cached\(\)` is on.* plan outside of it",
    ),
    # --- the inputs
    "integers for a float layer": (
        lambda: plan(mlp(), torch.ones(ROWS, WIDTH, dtype=torch.long)),
        "in aten.addmm.default of module `0`, RuntimeError says .* same dtype",
    ),
    "doubles for a float layer": (
        lambda: plan(nn.Sequential(nn.Identity(), mlp()), X.double()),
        "in aten.addmm.default of module `1.0`, RuntimeError says .* same dtype",
    ),
    "tokens that are not in the vocabulary": (
        lambda: plan(nn.Embedding(4, CLASSES), torch.tensor([1, 9, 2, 3])),
        "in aten.embedding.default of the model itself, IndexError says",
    ),
    "of another width": (
        lambda: plan(nn.Sequential(mlp(), nn.Linear(9, CLASSES))),
        r"in module `1`, .*\(4x8 and 9x8\)",
    ),
    "on the meta device": (
        lambda: plan(mlp(), X.to("meta")),
        "`inputs` lie on the meta device and the model on cpu: make both on one",
    ),
    "too many": (
        lambda: plan(mlp(), (X, Y)),
        "`inputs` do not fit Sequential.forward.* targets through `loss_fn`",
    ),
    "NumPy in forward": (
        lambda: plan(
            Around(lambda y: y + torch.from_numpy(y.detach().numpy())).to("meta"),
            X.to("meta"),
        ),
        r"in the model itself at .*test_mistakes.py.* pass a real model",
    ),
    "layers in another thread": (
        lambda: plan(InThread()),
        "`layers` runs in another thread than the step, where no trace sees",
    ),
    "jvp in forward": (
        lambda: scripted(  # as PyTorch's own rules are for it
            lambda: plan(Around(lambda y: torch.func.jvp(torch.sin, (y,), (y,))[1]))
        ),
        r"cannot be traced: .* differentiates\. .*`torch.autograd.grad\(",
    ),
    "grad in forward": (
        lambda: plan(Around(torch.func.grad(lambda y: y.sin().sum()))),
        r"cannot be traced: .* differentiates\. .*`torch.autograd.grad\(",
    ),
    "a profile that is pickled": (
        lambda: pickle.dumps(autosac.profile(mlp(), X, loss_fn=loss)),
        r"Pickle a plan, a sweep or `profile\.statistics`",
    ),
    "a batch planned anew with the optimizer of another model": (
        lambda: replanned_for_another(),
        "or plan with `optimizer` as a class, such as `torch.optim.AdamW`",
    ),
    "no hooks where tensors are saved": (
        lambda: plan(Around(without_hooks)),
        "`torch.autograd.graph.disable_saved_tensors_hooks` is in force there",
    ),
    "a joint graph of a planned model": (
        lambda: autosac.joint_graph(planned(), X),
        r"`model` has a plan already .*; call `plan.unapply\(model\)` first",
    ),
    "figures of a planned model": (
        lambda: autosac.graph_info(planned(), X),
        "`model` has a plan already",
    ),
    "tiles in a planned model": (
        lambda: autosac.tile_mlp(planned()),
        "`model` has a plan already",
    ),
    "a loss that is a class": (
        lambda: plan(mlp(), loss_fn=nn.CrossEntropyLoss),
        "`loss_fn` is the class CrossEntropyLoss, and must be a function",
    ),
    "a plan for another model": (
        lambda: tiny_plan().apply(nn.Linear(2, 2)),
        "it expects the model itself to be a Sequential with no parameters",
    ),
    "a joint graph with a loss that is none": (
        lambda: autosac.joint_graph(mlp(), X, loss_fn=3),
        "`loss_fn`",
    ),
    # --- options
    "far memory for nothing": (
        lambda: plan(mlp(), host_budget="1MiB"),
        "pass `offload`=True, or leave it out",
    ),
    "a switch that is neither on nor off": (
        lambda: plan(mlp(), keeps_gradients="no"),
        "`keeps_gradients` must be True or False, got 'no'",
    ),
    # --- names
    "one name in letters": (
        lambda: plan(mlp(), exclude="10"),
        "`exclude` has '10', which stands for no module of the model",
    ),
    "a type that is none": (
        lambda: plan(mlp(), autocast="bf17"),
        "`autocast`='bf17' is no type to compute in, such as torch.bfloat16,",
    ),
    "a type of integers": (
        lambda: plan(mlp(), autocast=torch.int32),
        "`autocast`=torch.int32 is no type to compute in",
    ),
    "part of a device's name": (
        lambda: plan(mlp(), device="4090"),
        r"'4090' is not a known device \(did you mean 'rtx4090'\?\)",
    ),
    "part of the name of a device that it may fit": (
        lambda: autosac.estimate(mlp(), X, loss_fn=loss).fits("4090"),
        r"did you mean 'rtx4090'\?",
    ),
    "a device in other letters": (
        lambda: plan(mlp(), device="H-100"),
        r"did you mean 'h100'\?",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_with_a_fix(name):
    make, sentence = MISTAKES[name]

    with pytest.raises(AutosacError, match=sentence):
        make()


def test_arguments_are_wrong_in_value_or_type():
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(ArgumentError, TypeError)


# --- what may look like a mistake and is none ---------------------------------------


@pytest.mark.parametrize("kind", [Noted, Called])
def test_tensors_with_memory_of_their_own_are_planned_as_plain_ones(kind):
    own = torch.Tensor._make_subclass(kind, X)
    peak_bytes = plan(holding("own", X)).peak_bytes
    assert plan(holding("own", own)).peak_bytes == peak_bytes


@pytest.mark.parametrize("exclude", ["1", ("1",), "[1]", nn.ReLU, (nn.ReLU,)])
def test_modules_are_excluded_by_name_pattern_or_class(exclude):
    profile = autosac.profile(mlp(), X, loss_fn=loss, exclude=exclude)
    assert profile.exclude == ("1",)


def test_an_optimizer_may_train_some_parameters():
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters())

    assert plan(model, optimizer=optimizer).baseline_peak_bytes > 0


@pytest.mark.parametrize("name", ["adamw", "AdamW"])
def test_an_optimizer_goes_by_name(name):
    by_name = autosac.profile(mlp(), X, loss_fn=loss, optimizer=name)
    by_class = autosac.profile(mlp(), X, loss_fn=loss, optimizer=torch.optim.AdamW)

    assert by_name.baseline_peak_bytes == by_class.baseline_peak_bytes


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16"])
def test_a_type_goes_by_name(name):
    by_name = autosac.profile(mlp(), X, loss_fn=loss, autocast=name)
    by_type = autosac.profile(mlp(), X, loss_fn=loss, autocast=torch.bfloat16)

    assert by_name.step.autocast == torch.bfloat16
    assert by_name.baseline_peak_bytes == by_type.baseline_peak_bytes


@pytest.mark.parametrize(
    "make_optimizer",
    [
        "sgd",
        torch.optim.SGD,
        functools.partial(torch.optim.SGD, lr=0.1),
        lambda model: torch.optim.SGD(model.parameters()),
    ],
    ids=["name", "class", "partial", "function"],
)
def test_verify_takes_an_optimizer_as_plan_does(make_optimizer):
    shown = autosac.verify(
        plan(mlp(), autocast="bf16"),
        mlp,
        lambda: X,
        loss_fn=loss,
        make_optimizer=make_optimizer,
        timing_rounds=0,
        autocast="bf16",
    )

    assert shown.identical


def test_functions_of_a_batch_are_planned():
    assert plan(Around(torch.vmap(torch.sin))).peak_bytes > 0


def test_a_weight_that_is_computed_is_planned():
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old weight norm is deprecated
        nn.utils.weight_norm(model[0])

    assert plan(model).peak_bytes > 0


# --- what is warned of --------------------------------------------------------------


class Pair(nn.Linear):
    """Returns losses by name, or an output with a loss."""

    def __init__(self, has_loss):
        super().__init__(WIDTH, CLASSES)
        self.has_loss = has_loss

    def forward(self, x):
        output = super().forward(x)
        if self.has_loss:
            return {"loss": output.mean(), "logits": output}
        return {"first": output.mean(), "second": output.square().mean()}


def test_outputs_summed_for_want_of_a_loss_are_warned_of_where_the_user_plans():
    for call in (autosac.profile, autosac.estimate):
        with pytest.warns(UserWarning, match="pass `loss_fn=lambda output") as caught:
            call(mlp(), X)

        assert [one.filename for one in caught] == [__file__]


@pytest.mark.parametrize(
    ("model", "loss_fn"),
    [
        (Pair(True), None),
        (Pair(False), None),
        (nn.Sequential(mlp(), nn.Flatten(0), nn.Linear(32, 1), nn.Flatten(0)), sum),
        (mlp(), torch.sum),
    ],
    ids=["its own", "losses by name", "of a builtin", "of a function"],
)
def test_a_loss_is_no_reason_to_warn(model, loss_fn):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autosac.profile(model, X, loss_fn=loss_fn)


class Sighted(nn.Linear):
    """Does something else when it is traced."""

    def forward(self, x):
        output = super().forward(x)
        return output.tanh() if type(output) is torch.Tensor else output.sin()


def test_a_real_step_that_is_not_its_trace_and_too_large_is_warned_of(monkeypatch):
    model = nn.Sequential(mlp(), Sighted(CLASSES, CLASSES))
    monkeypatch.setattr(single_run, "_most_bytes", lambda step: 100)

    with pytest.warns(UserWarning, match=r"in module `1` at .* runs aten.tanh.default"):
        plan(model)


# --- what is hinted at --------------------------------------------------------------


class Checkpointing(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = mlp(), nn.Linear(CLASSES, CLASSES)

    def forward(self, x):
        return self.head(checkpoint(self.block, x, use_reentrant=False))


def test_checkpointing_that_was_left_on_is_said_once():
    hints = [line for line in str(plan(Checkpointing())).splitlines() if "hint" in line]

    assert len(hints) == 1
    assert "`block` cannot be an AC unit" in hints[0]
    assert "own checkpointing (switch that off" in hints[0]


def test_a_plan_without_an_optimizer_says_what_it_leaves_out():
    model = mlp()
    state = autosac.quantities.format_bytes(
        2 * sum(p.nbytes for p in model.parameters())
    )
    options = [
        torch.optim.SGD(model.parameters()),
        torch.optim.SGD,
        lambda parameters: torch.optim.SGD(parameters),
    ]

    assert f"({state} for AdamW) is not counted" in str(plan(model))
    for optimizer in options:
        assert "is not counted" not in str(plan(model, optimizer=optimizer))


@pytest.mark.slow
def test_a_cache_that_was_left_on_is_said_once():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=8,
        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    model, tokens = transformers.GPT2LMHeadModel(config), torch.zeros(2, 8).long()
    batch = {"input_ids": tokens, "labels": tokens}

    shown = str(plan(model, batch, loss_fn=None))
    with pytest.raises(InfeasibleBudgetError, match="use_cache"):
        plan(model, batch, loss_fn=None, memory_budget="1KiB")

    assert shown.count("hint") == shown.count("`model.config.use_cache` to False") == 1


def test_a_plan_without_hints_has_no_line_for_them():
    assert "hint" not in str(tiny_plan())


# --- and nothing is changed ---------------------------------------------------------


def test_planning_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    before = capture_state(model, optimizer, torch.zeros(()))
    random_state = torch.get_rng_state()

    plan(model, optimizer=optimizer)

    after = capture_state(model, optimizer, torch.zeros(()))
    assert differences(before, after) == ()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any("forward" in vars(module) for module in model.modules())
