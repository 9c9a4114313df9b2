from dataclasses import replace

import pytest
import torch
from torch import nn

from autosac.errors import TraceError
from autosac.graphs.joint_graphs import joint_graph
from autosac.verification.measuring import measure_peak
from tests.models import ConvNet, Mlp

pytestmark = pytest.mark.usefixtures("one_thread_throughout")


class Views(nn.Module):
    """Splits, transposes and mutates in place; returns its own loss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 48)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        query, key, value = self.linear(x).split(16, -1)
        out = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        return torch.relu_(out).square().mean()


def step_of(kind):
    torch.manual_seed(0)
    if kind == "convolutions":
        return ConvNet(), torch.randn(4, 3, 16, 16), lambda out: out.square().mean()
    if kind == "views":
        return Views(), torch.randn(4, 8, 16), lambda loss: loss
    return Mlp(), torch.randn(32, 8), lambda out: out.square().mean()


@pytest.fixture(scope="module", params=["dropout", "convolutions", "views"])
def step(request, one_thread_throughout):
    model, inputs, loss_fn = step_of(request.param)
    return model, inputs, loss_fn, joint_graph(model, inputs, loss_fn=loss_fn)


@pytest.mark.slow
def test_capture_runs_nothing():
    model, inputs, loss_fn = step_of("convolutions")
    torch.manual_seed(3)
    before, state = torch.get_rng_state(), {**model.state_dict()}
    copies = {name: value.clone() for name, value in state.items()}

    joint_graph(model, inputs, loss_fn=loss_fn)

    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(state[name], copies[name]) for name in state)
    assert all(p.grad is None for p in model.parameters())


def measured_bytes(graph):
    """Most bytes alive in a later run of a graph, by allocator events."""
    run = {"device": "cpu", "persistent_bytes": graph.persistent_bytes}
    return measure_peak(graph.run, **run, warm_up=graph.run)[1]


@pytest.mark.slow_but_fifth
def test_simulated_peak_equals_the_measured_one(step):
    *_, graph = step

    assert graph.memory.peak_bytes() == measured_bytes(graph)


class Slices(nn.Module):
    """Writes to a part of a larger tensor; its gradient does so in backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.filter = nn.Parameter(torch.randn(4096))

    def forward(self, x):
        rows = x.new_zeros(512, 64)
        rows[: len(x)] = x
        waves = torch.view_as_real(torch.fft.rfft(self.filter.sin()))
        return self.linear(rows.mean(0)).square().mean() + waves.square().mean()


def test_a_write_to_a_slice_counts_the_memory_around_it():
    torch.manual_seed(0)
    graph = joint_graph(Slices(), torch.randn(8, 64), loss_fn=lambda loss: loss)

    assert graph.memory.peak_bytes() == measured_bytes(graph)


def test_gradients_equal_those_of_autograd(step):
    model, inputs, loss_fn, graph = step
    random = any(isinstance(m, nn.Dropout) for m in model.modules())

    torch.manual_seed(1)
    results = graph.run()
    if random:  # a captured dropout rounds differently; the graph must agree itself
        torch.manual_seed(1)
        expected = graph.run()
    else:
        loss = loss_fn(model(inputs))
        loss.backward()
        of_parameter = {id(p): p.grad for p in model.parameters()}
        results = [results[0], *results[graph.num_forward_outputs :]]
        expected = [loss, *(of_parameter.get(id(i)) for i in graph.inputs[:-1])]

    assert len(results) == len(expected)
    for actual, wanted in zip(results, expected, strict=True):
        assert (actual is None) == (wanted is None)
        if actual is not None:
            torch.testing.assert_close(actual, wanted)


def test_stages_follow_each_other(step):
    *_, graph = step
    order = ["placeholder", "forward", "loss", "backward"]
    ranks = [  # updates of buffers end forward, behind the loss
        order.index(stage)
        for node, stage in graph.stages.items()
        if not node.is_impure()
    ]

    assert ranks == sorted(ranks)
    assert set(graph.stages.values()) >= {"placeholder", "forward", "backward"}


def test_accesses_of_intermediates_are_those_of_all_their_aliases():
    model, inputs, loss_fn = step_of("views")
    graph = joint_graph(model, inputs, loss_fn=loss_fn)
    observed = {item.op: item for item in graph.intermediates()}

    product = observed["aten.addmm.default"]  # read by views of its parts only
    stages = {node.name: stage for node, stage in graph.stages.items()}
    assert product.num_bytes == 4 * 8 * 48 * 4
    assert stages[product.last_forward_access] == "forward"
    assert stages[product.first_backward_access] == "backward"


def test_the_loss_function_is_a_stage_of_its_own(step):
    model, *_, graph = step
    loss_ops = [str(n.target) for n, s in graph.stages.items() if s == "loss"]

    if not isinstance(model, Views):
        assert loss_ops == ["aten.pow.Tensor_Scalar", "aten.mean.default"]


def test_times_and_workspaces_are_measured(step):
    *_, graph = step
    costs = graph.memory.costs

    doubled = {s: replace(c, runtime_ms=2 * c.runtime_ms) for s, c in costs.items()}

    assert all(cost.runtime_ms > 0 for cost in costs.values())
    assert graph.memory.with_costs(doubled).costs == doubled


def test_a_step_that_breaks_the_graph_is_refused():
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            out = self.linear(x)
            torch._dynamo.graph_break()
            return out

    with pytest.raises(TraceError, match="cannot be captured as one graph"):
        joint_graph(Breaks(), torch.randn(2, 2))


def test_a_model_without_gradients_is_refused():
    with pytest.raises(TraceError, match="no backward pass"):
        joint_graph(Mlp().requires_grad_(False), torch.randn(2, 8))
