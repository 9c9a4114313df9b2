import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autosac
from autosac import is_checkpointing, is_recomputing, pipeline_checkpoint
from autosac.step.training_step import default_loss, normalize_inputs
from autosac.verification.measuring import (
    capture_state,
    differences,
    measure_peak,
)
from tests.models import CASES, Counting
from tests.preceding import (
    FORWARD,
    RECOMPUTATION,
    RUNS,
    WIDTH,
    Recorded,
    rows,
    stage,
)


@pytest.fixture(autouse=True)
def no_runs():
    RUNS.clear()


# --- the same bits as a plain call ------------------------------------------------


def plainly(model, args, kwargs):
    return model(*args, **kwargs), lambda: None


def preceded(model, args, kwargs):
    output = pipeline_checkpoint(model, *args, **kwargs)
    return output.output, output.recompute


def by_itself(model, args, kwargs):
    return pipeline_checkpoint(model, *args, **kwargs).output, lambda: None


def three_micro_batches(case, call, *, autocast=False):
    """State after three micro-batches in flight, recomputed out of order."""
    model = case.model().train()
    torch.manual_seed(2)
    batches = [normalize_inputs(case.inputs()) for _ in range(3)]
    total = 0.0
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        running = [call(model, args, kwargs) for args, kwargs in batches]
        losses = [(case.loss_fn or default_loss)(output) for output, _ in running]
        running[1][1]()
    for place in (1, 0, 2):
        running[place][1]()
        torch.rand(1)  # others draw in between
        losses[place].backward()
        total = total + losses[place].detach()
    return capture_state(model, None, total)


STAGES = (
    "mlp",
    "gpt",
    "convolutions",
    "list inputs",
    "called twice",
    "tied weights",
    "frozen parameters",
    "dict outputs",
    "keywords only",
    "nested inputs",
    "custom function",
    "noise",
    "lstm",
    "llama",
)


def test_models_that_do_otherwise_without_gradients_give_the_same_bits():
    # In eval mode and without gradients it takes a fused kernel.
    model = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, WIDTH)
    expected = torch.autograd.grad(model(x).square().sum(), model.parameters())

    output = pipeline_checkpoint(model, x).output

    gradients = torch.autograd.grad(output.square().sum(), model.parameters())
    assert all(map(torch.equal, expected, gradients))


def test_it_can_be_inside_a_checkpoint_of_pytorch():
    model, x = stage(), rows()
    torch.manual_seed(0)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])

    torch.manual_seed(0)
    output = checkpoint(
        lambda x: pipeline_checkpoint(model, x).output, x, use_reentrant=False
    )

    gradients = torch.autograd.grad(output.sum(), [x, *model.parameters()])
    assert all(map(torch.equal, expected, gradients))


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("call", [preceded, by_itself])
@pytest.mark.parametrize("name", STAGES)
def test_gradients_buffers_and_random_streams_are_those_of_a_plain_call(
    name, call, one_thread
):
    expected = three_micro_batches(CASES[name], plainly)

    order = three_micro_batches(CASES[name], call)

    assert any(key.startswith("gradient") for key in expected)
    assert differences(expected, order) == ()


def test_buffers_that_forward_changes_and_backward_reads_are_changed_once():
    def after_two_steps(call):
        torch.manual_seed(0)
        model = nn.Sequential(Counting(), Counting())
        for _ in range(2):
            output, recompute = call(model, (rows(),), {})
            recompute()
            output.sum().backward()
        return capture_state(model, None, output.detach().sum())

    assert differences(after_two_steps(plainly), after_two_steps(preceded)) == ()


@pytest.mark.parametrize("name", ["mlp", "gpt", "convolutions"])
def test_casts_of_autocast_are_made_again(name, one_thread):
    expected = three_micro_batches(CASES[name], plainly, autocast=True)

    order = three_micro_batches(CASES[name], preceded, autocast=True)

    assert differences(expected, order) == ()


def test_it_recomputes_under_the_autocast_of_forward_not_of_backward():
    seen = []

    def fn(x):
        seen.append(torch.is_autocast_enabled("cpu"))
        return model(x)

    model = nn.Linear(WIDTH, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        output = pipeline_checkpoint(fn, rows())
    output.recompute()
    with torch.autocast("cpu", torch.bfloat16):
        other = pipeline_checkpoint(fn, rows())
        other.output.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        output.output.sum().backward()

    assert seen == [True] * 4


def test_gradients_of_inputs_leave_through_the_outer_graph():
    model, x = stage(), rows()
    torch.manual_seed(0)
    expected = torch.autograd.grad(model(x * 2).sum(), [x, *model.parameters()])

    torch.manual_seed(0)
    output = pipeline_checkpoint(model, x * 2)
    output.recompute()
    gradients = torch.autograd.grad(output.output.sum(), [x, *model.parameters()])

    assert all(map(torch.equal, expected, gradients))
    assert all(p.grad is None for p in (x, *model.parameters()))


def test_an_optimizer_in_backward_steps_each_parameter_once(one_thread):
    def trained(call):
        torch.manual_seed(0)
        model = stage()
        steps = autosac.OptimizerInBackward(model.parameters(), torch.optim.SGD)
        head = functional.linear(rows(), model[0].weight)  # a weight used outside too
        output, recompute = call(model, (rows(),), {})
        recompute()
        (output.sum() + head.sum()).backward()
        assert steps.param_groups
        return capture_state(model, None, output.detach().sum())

    assert differences(trained(plainly), trained(preceded)) == ()


def test_backward_can_go_through_twice_and_recomputes_each_time():
    model, x = Recorded(), rows()
    output = pipeline_checkpoint(model, x)

    output.output.sum().backward(retain_graph=True)
    once = x.grad.clone()
    output.output.sum().backward()

    assert torch.equal(x.grad, 2 * once)
    assert RUNS == [FORWARD, RECOMPUTATION, RECOMPUTATION]


def test_gradients_of_gradients_are_refused():
    x = rows()
    output = pipeline_checkpoint(nn.Linear(WIDTH, WIDTH), x).output
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)

    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# --- when it recomputes -----------------------------------------------------------


def test_recompute_runs_before_backward_and_only_once():
    output = pipeline_checkpoint(Recorded(), rows())
    assert RUNS == [FORWARD]

    output.recompute()
    output.recompute()
    assert RUNS == [FORWARD, RECOMPUTATION]

    output.output.sum().backward()
    assert RUNS == [FORWARD, RECOMPUTATION]
    assert not is_checkpointing() and not is_recomputing()


def test_without_a_call_backward_recomputes_by_itself():
    output = pipeline_checkpoint(Recorded(), rows())

    output.output.sum().backward()

    assert RUNS == [FORWARD, RECOMPUTATION]


class Wait(torch.autograd.Function):
    """Stands for a send whose backward waits for a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        RUNS.append("the gradient is there")
        return gradient


def test_what_is_preceded_recomputes_before_its_backward_waits():
    model, x = Recorded(), rows()
    output = pipeline_checkpoint(model, x)

    output.precede(Wait.apply(output.output)).sum().backward()

    assert RUNS == [FORWARD, RECOMPUTATION, "the gradient is there"]
    assert torch.equal(x.grad, torch.ones(4, WIDTH) @ model.inner.weight)


class Slow(torch.autograd.Function):
    """Takes one unit of time forward and two backward, on a clock of its own."""

    now = 0

    @staticmethod
    def forward(ctx, x):
        Slow.now += 1
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Slow.now += 2
        return gradient


def test_a_step_is_shorter_by_the_recomputation_that_the_wait_hides():
    def step_units(call):
        Slow.now = 0
        output, recompute = call(Slow.apply, (rows(),), {})
        answered = Slow.now + 3  # by another stage
        recompute()
        Slow.now = max(Slow.now, answered)
        output.backward(torch.ones_like(output))
        return Slow.now

    # Forward, wait, backward; the recomputation is in the wait or after it.
    assert step_units(preceded) == 1 + 3 + 2
    assert step_units(by_itself) == 1 + 3 + 1 + 2


def test_preceding_a_tensor_that_requires_no_gradient_is_refused():
    output = pipeline_checkpoint(Recorded(), rows())

    with pytest.raises(ValueError, match="requires no gradient"):
        output.precede(rows(requires_grad=False))


def test_without_gradients_it_is_a_plain_call():
    model, x = Recorded(), rows(requires_grad=False)

    with torch.no_grad():
        output = pipeline_checkpoint(model, x)
    output.recompute()

    assert len(RUNS) == 1 and RUNS[0][:2] == (False, False)
    assert torch.equal(output.output, model.inner(x))
    assert not output.output.requires_grad


def test_where_nothing_requires_a_gradient_a_schedule_can_go_backward_all_the_same():
    def fn(x):
        return model(x), x.argsort()

    model, x = Recorded().requires_grad_(False), rows(requires_grad=False)
    output, order = pipeline_checkpoint(fn, x).output

    assert output.requires_grad and not order.requires_grad
    output.sum().backward()

    assert RUNS == [FORWARD, RECOMPUTATION]
    assert x.grad is None and model.inner.weight.grad is None


def test_results_without_a_gradient_stay_so_beside_one_that_has_it():
    model, x = nn.Linear(WIDTH, WIDTH), rows(requires_grad=False)

    output, constant = pipeline_checkpoint(lambda x: (model(x), x * 2), x).output

    assert output.requires_grad and not constant.requires_grad


def test_only_the_arguments_are_kept_until_it_recomputes():
    model, x = nn.Sequential(nn.Linear(WIDTH, 50), nn.GELU(), nn.Linear(50, 1)), rows()
    kept = []

    def pack(tensor):
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        pipeline_checkpoint(model, x)

    assert kept == [x.shape]


def test_forward_takes_less_memory_than_with_a_graph():
    model, x = nn.Sequential(*(nn.Sigmoid() for _ in range(8))), torch.randn(50, 50)
    x.requires_grad_()

    def peak(call):
        return measure_peak(call, device="cpu", persistent_bytes=0)

    with_graph, plain_bytes = peak(lambda: model(x))
    observed, peak_bytes = peak(lambda: pipeline_checkpoint(model, x))

    assert torch.equal(observed.output, with_graph)
    assert plain_bytes >= 8 * x.nbytes
    random_states = 4 * torch.get_rng_state().nbytes
    assert peak_bytes <= 2 * x.nbytes + random_states


def test_everything_is_gone_after_backward_without_a_collection():
    activations = []

    def fn(x):
        hidden = model(x)
        activations.append(weakref.ref(hidden))
        return hidden.sin()

    model = nn.Linear(WIDTH, WIDTH)
    gc.collect()
    gc.disable()
    try:
        output = pipeline_checkpoint(fn, rows())
        call = weakref.ref(output._call)
        output.recompute()
        output.output.sum().backward()
        del output
        assert [ref() for ref in activations] == [None, None]
        assert call() is None
    finally:
        gc.enable()


# --- nested calls -----------------------------------------------------------------


class Nested(nn.Module):
    """Layers, each under a checkpoint of its own where that is asked for."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.call = lambda layer, x: layer(x)

    def forward(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x


def checkpointed(layer, x):
    return pipeline_checkpoint(layer, x).output


def checkpointed_and_recomputed(layer, x):
    output = pipeline_checkpoint(layer, x)
    if is_recomputing():
        output.recompute()
    return output.output


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("inner", [checkpointed, checkpointed_and_recomputed])
@pytest.mark.parametrize("outer", [preceded, by_itself])
@pytest.mark.parametrize("depth", [1, 2])
def test_nested_calls_give_the_bits_of_a_plain_one(inner, outer, depth, one_thread):
    def trained(call, part):
        torch.manual_seed(0)
        model = Nested(stage(), nn.Sequential(Counting(), stage()), stage())
        parts = [model]
        if depth == 2:
            model.layers[1] = Nested(*model.layers[1])
            parts.append(model.layers[1])
        for one in parts:
            one.call = part
        total = 0.0
        for _ in range(2):
            output, recompute = call(model, (rows(),), {})
            recompute()
            torch.rand(1)
            output.square().sum().backward()
            total = total + output.detach().sum()
        return capture_state(model, None, total)

    expected = trained(plainly, lambda layer, x: layer(x))

    assert differences(expected, trained(outer, inner)) == ()
    assert not is_checkpointing() and not is_recomputing()


def test_an_inner_call_runs_with_each_outer_one_and_once_more_in_backward():
    inner = Recorded()
    model, x = Nested(inner), rows()
    model.call = checkpointed

    output = pipeline_checkpoint(model, x)
    output.recompute()
    output.output.sum().backward()

    # In the outer call's recomputation the inner one is a first run again.
    assert RUNS == [FORWARD, (True, True, True), RECOMPUTATION]
    assert torch.equal(x.grad, torch.ones(4, WIDTH) @ inner.inner.weight)


def test_a_tensor_of_the_outer_function_gets_its_gradient_from_an_inner_one():
    def fn(x):
        hidden = model(x)
        return pipeline_checkpoint(lambda y: y * hidden.sin(), x).output

    model, x = nn.Linear(WIDTH, WIDTH), rows()
    sources = [x, *model.parameters()]
    expected = torch.autograd.grad((x * model(x).sin()).sum(), sources)

    output = pipeline_checkpoint(fn, x).output

    for wanted, got in zip(
        expected, torch.autograd.grad(output.sum(), sources), strict=True
    ):
        torch.testing.assert_close(got, wanted)
