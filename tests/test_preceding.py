import functools
import gc
import random
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autosac
from autosac import is_checkpointing, is_recomputing, pipeline_checkpoint
from autosac.checkpointing.cuda_streams import Moment
from autosac.step.training_step import default_loss, normalize_inputs
from autosac.verification.measuring import (
    capture_state,
    differences,
    measure_peak,
)
from tests.models import CASES, Counting

WIDTH = 8


def stage():
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Dropout(0.5),
        nn.ReLU(inplace=True),
        nn.Linear(WIDTH, WIDTH),
    )


def rows(*, requires_grad=True):
    return torch.randn(4, WIDTH, requires_grad=requires_grad)


class Recorded(nn.Module):
    """Notes what the flags say each time it runs."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner or nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        RUNS.append((is_checkpointing(), is_recomputing(), torch.is_grad_enabled()))
        return self.inner(x)


RUNS = []
FORWARD, RECOMPUTATION = (True, False, True), (False, True, True)


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


# --- schedules of one's own -------------------------------------------------------


class Noted(torch.autograd.Function):
    """Notes when backward comes through."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        RUNS.append(ctx.name)
        return gradient, None


@pytest.mark.parametrize("is_tied", [False, True])
def test_what_is_joined_goes_backward_before_what_was_forked(is_tied):
    # Autograd goes through the node that was made last first: through a, unless tied.
    a, b = rows(), rows()
    if is_tied:
        first, phony = autosac.fork(Noted.apply(a, "a"))
        second = Noted.apply(autosac.join(b, phony), "b")
    else:
        second = Noted.apply(b, "b")
        first = Noted.apply(a, "a")
    (first.sum() + second.sum()).backward()

    expected = ["b", "a"] if is_tied else ["a", "b"]
    assert expected == RUNS
    assert torch.equal(a.grad, torch.ones_like(a))
    assert torch.equal(b.grad, torch.ones_like(b))


def test_fork_and_join_are_no_part_of_a_graph_without_gradients():
    x = rows(requires_grad=False)
    same, phony = autosac.fork(x)

    assert same is x and phony.numel() == 0 and not phony.requires_grad
    assert autosac.join(x, phony) is x
    with torch.no_grad():
        assert autosac.fork(rows())[1].requires_grad is False


def test_a_joined_tensor_without_a_gradient_lets_backward_come_to_the_fork():
    forked, phony = autosac.fork(Noted.apply(rows(), "a"))
    joined = autosac.join(rows(requires_grad=False), phony)

    assert joined.requires_grad
    (joined.sum() + forked.sum()).backward()
    assert RUNS == ["a"]


# --- arguments and results --------------------------------------------------------


def test_results_of_every_kind_come_back_as_they_are():
    def fn(pair, *, flag):
        a, b = pair
        return {
            "sum": model(a) + b,
            "order": a.argsort(),
            "twice": [b * 2, None, "text", 3],
            "flag": flag,
            "constant": a * 2,
        }

    model, a, b = nn.Linear(WIDTH, WIDTH), rows(requires_grad=False), rows()
    checkpointed = pipeline_checkpoint(fn, (a, b), flag=True)
    output, expected = checkpointed.output, fn((a, b), flag=True)

    checkpointed.recompute()
    (output["sum"].sum() + output["twice"][0].square().sum()).backward()

    assert torch.equal(output["order"], expected["order"])
    assert not output["order"].requires_grad and not output["constant"].requires_grad
    assert output["twice"][1:] == [None, "text", 3] and output["flag"] is True
    assert a.grad is None
    assert torch.equal(b.grad, 1 + 8 * b.detach())


def test_a_result_that_is_an_argument_or_comes_twice_gets_its_gradients():
    def fn(x, count):
        y = x * weight
        return x, y, y, count

    weight, x = torch.tensor(3.0, requires_grad=True), rows()
    count = torch.arange(4)
    same, first, second, counted = pipeline_checkpoint(fn, x, count).output

    (same.sum() + first.sum() + 10 * second.sum()).backward()

    assert torch.equal(x.grad, torch.full_like(x, 1 + 11 * 3))
    assert weight.grad.item() == pytest.approx(11 * x.sum().item(), rel=1e-5)
    assert torch.equal(counted, count)


def test_an_argument_that_comes_twice_counts_once():
    x = rows()
    expected = torch.autograd.grad((x * x + x.sin() * x).sum(), x)[0]

    output = pipeline_checkpoint(lambda a, b: a * b + a.sin() * b, x, x).output

    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)


def test_a_result_can_be_changed_in_place_afterwards():
    model, x = nn.Linear(WIDTH, WIDTH), rows()
    expected = torch.autograd.grad(model(x).relu().sum(), x)[0]

    checkpointed = pipeline_checkpoint(model, x)
    output = checkpointed.output.relu_()
    checkpointed.recompute()

    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)


def test_a_buffer_that_is_returned_stays_a_buffer():
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x):
            self.seen += 1
            return x * self.weight, self.seen

    model = Returns()
    output, _ = pipeline_checkpoint(model, torch.ones(2)).output
    output.sum().backward()

    assert not model.seen.requires_grad
    assert torch.equal(model.seen, torch.ones(2))


def test_a_tensor_of_the_closure_gets_its_gradient():
    leaf, x = rows(), rows(requires_grad=False)
    memory = leaf.exp()
    (expected,) = torch.autograd.grad((x * memory).sum(), leaf, retain_graph=True)

    output = pipeline_checkpoint(lambda x: x * memory, x).output

    assert torch.equal(torch.autograd.grad(output.sum(), leaf)[0], expected)


def test_state_that_another_micro_batch_changes_is_found_as_it_was():
    # The second call changes the buffer that the first one read.
    model = nn.Sequential(Counting())
    plain = nn.Sequential(Counting())
    plain.load_state_dict(model.state_dict())
    x, y = rows(), rows()

    first, second = pipeline_checkpoint(model, x), pipeline_checkpoint(model, y)
    first.recompute()
    (gradient,) = torch.autograd.grad(first.output.sum(), x)
    second.output.sum().backward()

    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    plain(y)
    assert torch.equal(gradient, expected)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)


# --- random numbers ---------------------------------------------------------------


def test_without_preserve_rng_the_numbers_are_drawn_anew():
    masks = []

    def fn(x):
        masks.append(torch.rand(4))
        return x * 2

    for preserve_rng in (True, False):
        masks.clear()
        pipeline_checkpoint(fn, rows(), preserve_rng=preserve_rng).recompute()
        assert torch.equal(*masks) is preserve_rng


def test_a_recomputation_that_draws_more_numbers_is_an_error():
    model = nn.Dropout(0.5)
    counter = []

    def fn(x):
        counter.append(0)
        return model(x) if len(counter) == 1 else model(model(x))

    output = pipeline_checkpoint(fn, rows())
    state = torch.get_rng_state()

    with pytest.raises(RuntimeError, match="as many random numbers"):
        output.recompute()
    assert torch.equal(torch.get_rng_state(), state)
    assert not is_recomputing()


# --- threads ----------------------------------------------------------------------


def test_the_flags_belong_to_one_thread():
    inside, done = threading.Event(), threading.Event()

    def fn(x):
        inside.set()
        done.wait(10)
        return x * 2

    thread = threading.Thread(target=pipeline_checkpoint, args=(fn, rows()))
    thread.start()
    inside.wait(10)
    flags = is_checkpointing(), is_recomputing()
    done.set()
    thread.join()

    assert flags == (False, False)


def test_another_thread_may_recompute_and_backward_waits_for_it():
    started, go_on = threading.Event(), threading.Event()

    def fn(x):
        if is_recomputing():
            started.set()
            go_on.wait(10)
        return model(x)

    model, x = Recorded(), rows()
    output = pipeline_checkpoint(fn, x)
    helper = threading.Thread(target=output.recompute)
    helper.start()
    started.wait(10)
    threading.Timer(0.05, go_on.set).start()
    output.output.sum().backward()
    helper.join()

    assert RUNS == [FORWARD, RECOMPUTATION]
    assert torch.equal(x.grad, torch.ones(4, WIDTH) @ model.inner.weight)


# --- streams ----------------------------------------------------------------------


class FakeStream:
    device = torch.device("cuda", 0)

    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_event(self):
        return f"event of {self.name}"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class FakeTensor:
    device = FakeStream.device

    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_stream(self, stream):
        self.log.append(f"{self.name} is used on {stream.name}")


def test_work_on_another_stream_waits_and_keeps_its_memory(monkeypatch):
    log = []
    first, second = FakeStream("first", log), FakeStream("second", log)
    tensor = FakeTensor("tensor", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: first)
    moment = Moment([torch.device("cpu"), FakeStream.device])

    for use in (moment.wait, moment.lend, moment.take):
        use([tensor])
    assert log == []

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: second)
    moment.wait([tensor])
    moment.lend([tensor])
    moment.take([tensor])
    assert log == [
        "second waits for event of first",
        "tensor is used on second",
        "first waits for second",
        "tensor is used on first",
        "second waits for first",
        "tensor is used on second",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("same_stream", [True, False])
def test_a_gpu_stage_recomputes_on_the_present_stream(same_stream):
    model = nn.Sequential(*(stage() for _ in range(4))).cuda()
    x = torch.randn(4, WIDTH, device="cuda", requires_grad=True)
    torch.manual_seed(0)
    model.zero_grad()
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    state = torch.cuda.get_rng_state()

    torch.manual_seed(0)
    output = pipeline_checkpoint(model, x)
    other = torch.cuda.current_stream() if same_stream else torch.cuda.Stream()
    with torch.cuda.stream(other):
        output.recompute()
    gradients = torch.autograd.grad(output.output.sum(), [x, *model.parameters()])

    assert all(map(torch.equal, expected, gradients))
    assert torch.equal(torch.cuda.get_rng_state(), state)


# --- what is refused --------------------------------------------------------------


def test_checkpoints_of_pytorch_and_plans_can_be_inside():
    model = nn.Sequential(*(nn.Sequential(stage(), nn.Tanh()) for _ in range(3)))
    x = rows()
    profile = autosac.profile(model, x.detach())
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))

    def fn(x):
        return checkpoint(model, x, use_reentrant=False)

    def gradients(call):
        torch.manual_seed(0)
        return torch.autograd.grad(call().sum(), [x, *model.parameters()])

    expected = gradients(lambda: model(x))
    inside = gradients(lambda: pipeline_checkpoint(fn, x).output)
    plan.apply(model)
    planned = gradients(lambda: pipeline_checkpoint(model, x).output)

    assert plan.policy
    assert all(map(torch.equal, expected, inside))
    assert all(map(torch.equal, expected, planned))


def changes_its_argument(x):
    return x.mul_(2)


def changes_a_leaf(x):
    return x.mul_(2)


def changes_its_list(pair):
    pair.append(pair[0] * 2)
    return pair[0] * 3


def draws_elsewhere(x):
    return x * random.random()


def goes_backward(x):
    return torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    "fn, make_argument, message",
    [
        (changes_its_argument, lambda: torch.ones(4), "changes an argument in place"),
        (changes_a_leaf, lambda: rows() * 1, "used in an in-place operation"),
        (changes_its_list, lambda: [rows()], "changes a list or dict"),
        (draws_elsewhere, rows, "Python's or NumPy's random numbers"),
        (goes_backward, rows, "goes backward inside its own forward"),
    ],
)
def test_a_function_that_cannot_run_again_is_refused(fn, make_argument, message):
    weight = torch.ones((), requires_grad=True)

    with pytest.raises(RuntimeError, match=message):
        pipeline_checkpoint(lambda x: (fn(x), weight * 1), make_argument())
    assert not is_checkpointing()


def test_opaque_arguments_and_results_are_refused():
    with pytest.raises(TypeError, match="an argument holds a Generator"):
        pipeline_checkpoint(lambda x, g: x, rows(), torch.Generator())
    with pytest.raises(TypeError, match="the result holds a Event"):
        pipeline_checkpoint(lambda x: (x, threading.Event()), rows())


def test_a_parameter_that_changed_before_recomputation_is_an_error():
    model = nn.Linear(WIDTH, WIDTH)
    output = pipeline_checkpoint(model, rows())
    with torch.no_grad():
        model.bias.add_(1)

    with pytest.raises(RuntimeError, match="has changed since its forward pass"):
        output.recompute()


def test_an_argument_that_changed_before_recomputation_is_an_error():
    x = rows() * 1
    output = pipeline_checkpoint(nn.Linear(WIDTH, WIDTH), x)
    x.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.recompute()


def test_a_result_that_depends_on_something_else_is_an_error():
    output = pipeline_checkpoint(lambda x: x[: 4 - is_recomputing()] * 2, rows())

    with pytest.raises(RuntimeError, match="other shapes, types or values"):
        output.output.sum().backward()


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_tensor_that_was_not_found_is_an_error_not_a_lost_gradient(is_leaf):
    hidden = rows() if is_leaf else rows() * 2

    class Hides:
        def get(self):
            return vars(self)["hidden"]

    owner = Hides()
    vars(owner)["hidden"] = hidden

    with pytest.raises(RuntimeError, match="its gradient would be lost"):
        pipeline_checkpoint(lambda x: x * owner.get(), rows())


def test_a_gradient_hook_that_would_run_twice_is_refused():
    model = nn.Linear(WIDTH, WIDTH)
    model.weight.register_hook(lambda gradient: gradient * 2)

    with pytest.raises(RuntimeError, match="has a gradient hook"):
        pipeline_checkpoint(model, rows())


def test_hooks_of_arguments_run_once():
    x, calls = rows() * 1, []
    x.register_hook(lambda gradient: calls.append(gradient))

    pipeline_checkpoint(nn.Linear(WIDTH, WIDTH), x).output.sum().backward()

    assert len(calls) == 1


def test_partial_functions_and_methods_are_looked_into():
    class Owner:
        def __init__(self):
            self.model = nn.Linear(WIDTH, WIDTH)

        def inner(self, x):
            return self.model(x)

        def outer(self, x, scale):
            return self.inner(x) * scale

    owner, scale = Owner(), torch.tensor(2.0, requires_grad=True)
    output = pipeline_checkpoint(
        functools.partial(owner.outer, scale=scale), rows()
    ).output
    output.sum().backward()

    assert scale.grad is not None
    assert all(p.grad is not None for p in owner.model.parameters())
