import functools
import random
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autosac
from autosac import is_checkpointing, is_recomputing, pipeline_checkpoint
from autosac.checkpointing.cuda_streams import Moment
from tests.models import Counting
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


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: autosac.fork([rows()]), "tensor"),
        (lambda: autosac.join(rows(), None), "phony"),
        (lambda: autosac.join(rows(), autosac.fork(rows())), "phony"),
        (lambda: autosac.join(rows(), rows()), "phony"),
        (lambda: autosac.join(None, autosac.fork(rows())[1]), "tensor"),
        (lambda: pipeline_checkpoint(rows(), rows()), "fn"),
        (lambda: pipeline_checkpoint(torch.sin, rows()).precede(None), "tensor"),
    ],
)
def test_what_is_no_tensor_of_the_kind_that_is_wanted_is_refused(call, named):
    with pytest.raises(autosac.ArgumentError, match=f"`{named}` must be "):
        call()


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


class _Owner(nn.Module):
    """A module with a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        return x * torch.rand(x.shape, generator=self.generator)


def _closed_over():
    generator = torch.Generator().manual_seed(1)
    return lambda x: x * torch.rand(x.shape, generator=generator)


@pytest.mark.parametrize("make_fn", [_Owner, lambda: _Owner().forward, _closed_over])
def test_generators_of_its_own_give_the_same_numbers_again(make_fn):
    plain, fn, x = make_fn(), make_fn(), rows()
    inputs = (x, x.detach().clone().requires_grad_())
    for _ in range(2):  # micro-batches
        plain(inputs[0]).sum().backward()
    calls = [pipeline_checkpoint(fn, inputs[1]) for _ in range(2)]
    for call in calls:
        call.recompute()
        call.output.sum().backward()

    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert torch.equal(plain(inputs[0]), fn(inputs[1]))  # both go on alike


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


# PyTorch's remark on a graph that is recorded on another stream than it runs on.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
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
    profile = autosac.profile(model, x)
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
