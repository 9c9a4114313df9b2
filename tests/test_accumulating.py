"""Sums of gradients that go into one of their summands."""

import pytest
import torch
from torch import fx, nn

from autosac.graphs.accumulating import add_up_in_place
from autosac.graphs.joint_graphs import given_graph, joint_graph
from autosac.verification.measuring import measure_peak

pytestmark = pytest.mark.usefixtures("one_thread")


def dies(loss, first, second, total):
    return loss, total


def first_is_a_result(loss, first, second, total):
    return loss, first, total


def a_view_is_a_result(loss, first, second, total):
    return loss, first.view(-1), total


def both_are_results(loss, first, second, total):
    return loss, first, second, total


def first_is_read_again(loss, first, second, total):
    return loss, total, total * first


def second_is_broadcast(loss, first, second, total):
    return loss, second + first.sum()


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(
    ("results", "into"),
    [
        (dies, "mul"),
        (first_is_a_result, "mul_1"),
        (a_view_is_a_result, "mul_1"),
        (both_are_results, None),
        (first_is_read_again, "mul_1"),
        (second_is_broadcast, "mul_1"),
    ],
)
def test_a_sum_goes_into_a_summand_that_nothing_reads_any_more(results, into):
    def step(x):
        loss = x.sum()
        first = loss * x
        second = first * 2.0
        return results(loss, first, second, first + second)

    x = torch.randn(3, 4)

    graph = given_graph(fx.symbolic_trace(step), x, num_forward_outputs=1)

    sums = [
        n for n in graph.module.graph.nodes if n.target is torch.ops.aten.add_.Tensor
    ]
    assert [n.args[0].name for n in sums] == ([] if into is None else [into])
    for one, other in zip(graph.run(), step(x), strict=True):
        assert torch.equal(one, other)


def test_inputs_and_what_forward_makes_are_never_written():
    def step(x):
        kept = x * 2.0
        loss = kept.sum()
        return loss, kept + loss * x, x + loss

    x = torch.randn(3, 4)
    before = x.clone()

    graph = given_graph(fx.symbolic_trace(step), x, num_forward_outputs=1)

    for one, other in zip(graph.run(), step(x), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(x, before)


class Tied(nn.Module):
    """Uses one layer four times, so that its gradients are added up."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        for _ in range(4):
            x = x + torch.tanh(self.layer(x))
        return x


@pytest.mark.slow
def test_gradients_of_a_tied_layer_are_those_of_autograd_and_take_less_memory():
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(8, 32)

    def loss_fn(out):
        return out.square().mean()

    graph = joint_graph(model, x, loss_fn=loss_fn)

    loss_fn(model(x)).backward()
    results = dict(zip(graph.input_names, graph.run()[1:], strict=False))
    for name, parameter in model.named_parameters():
        assert torch.equal(results[f"parameter {name}"], parameter.grad)
    _, measured = measure_peak(
        graph.run,
        device="cpu",
        persistent_bytes=graph.persistent_bytes,
        warm_up=graph.run,
    )
    assert measured == graph.memory.peak_bytes()
    sums = [
        n for n in graph.nodes_after_forward if n.target is torch.ops.aten.add.Tensor
    ]
    assert not sums


@pytest.mark.slow
def test_a_graph_without_such_sums_is_left_alone():
    model = nn.Linear(4, 4)
    graph = joint_graph(model, torch.randn(2, 4), loss_fn=lambda out: out.sum())

    is_changed = add_up_in_place(
        graph.module.graph, graph.memory, graph.nodes_after_forward
    )

    assert not is_changed
