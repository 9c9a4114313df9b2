"""What a loss takes by its graph is what its ops make, counted by hand and on tapes."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autosac
from autosac import _compat_autograd
from autosac.step.loss_graphs import loss_memory

ROWS, WIDTH = 8, 16
ONE = ROWS * WIDTH * 4  # bytes of one output
NUMBERS = 8  # bytes of two


def taken(loss_of):
    output = torch.randn(ROWS, WIDTH, requires_grad=True) * 1
    first = _compat_autograd.next_sequence_nr()
    loss = loss_of(output)
    before = loss_memory([loss.grad_fn], first)
    loss.backward()
    assert loss_memory([loss.grad_fn], first) == before  # though nothing is saved then
    return before.peak_bytes, before.handed_bytes


TARGETS = torch.arange(ROWS)
LIKE = torch.randn(ROWS, WIDTH)
BY_HAND = {
    # One number that is expanded.
    "sum": (lambda o: o.sum(), 0, 0),
    # expand() / n
    "mean": (lambda o: o.view(-1).mean(), ONE, ONE),
    # Logarithms are saved, and their gradient becomes that of the output.
    "cross entropy": (lambda o: functional.cross_entropy(o, TARGETS), 3 * ONE, ONE),
    # The difference is saved; gradients of its absolute values and of itself, signs.
    "L1": (lambda o: (o - LIKE).abs().mean(), 4 * ONE, ONE),
    # Both factors are the output; two gradients and that of the product.
    "square": (lambda o: (o * o).mean(), 3 * ONE, ONE),
    # The same gradient goes to the two halves; one is negative.
    "difference": (lambda o: (o - o.view(-1).view(o.shape)).mean(), 2 * ONE, ONE),
    # Float64 is twice as large.
    "double": (lambda o: o.double().exp().mean(), 3 * 2 * ONE, ONE),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_bytes_are_those_counted_by_hand(name):
    loss_of, peak_bytes, handed_bytes = BY_HAND[name]
    assert taken(loss_of) == (peak_bytes, handed_bytes)


def test_gradients_of_weights_that_the_loss_decays_are_handed_on():
    weight = nn.Parameter(torch.randn(ROWS, WIDTH))
    peak_bytes, handed_bytes = taken(lambda o: o.sum() + weight.square().sum())
    # Backward of a square makes two tensors on the way to the gradient that stays; the
    # gradients of both sums are numbers.
    assert peak_bytes == pytest.approx(3 * ONE, abs=NUMBERS)
    assert handed_bytes == pytest.approx(ONE, abs=NUMBERS)


def test_what_a_model_made_is_no_part_of_its_loss():
    layer = nn.Linear(WIDTH, WIDTH)
    hidden = layer(torch.randn(ROWS, WIDTH)).exp()
    first = _compat_autograd.next_sequence_nr()
    loss = hidden.mean() + layer.weight.sum()

    peak_bytes = loss_memory([loss.grad_fn], first).peak_bytes
    assert peak_bytes == pytest.approx(ONE, abs=NUMBERS)
    assert loss_memory([hidden.grad_fn], first).peak_bytes == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_tell_nothing():
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    nested = torch.nested.nested_tensor(parts, requires_grad=True)
    loss = nested.relu().to_padded_tensor(0.0).sum()
    assert loss_memory([loss.grad_fn], 0) is None


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda o: functional.cross_entropy(o, TARGETS, label_smoothing=0.1),
        lambda o: functional.mse_loss(o, LIKE),
        lambda o: functional.smooth_l1_loss(o, LIKE),
        lambda o: functional.l1_loss(o, LIKE),
        lambda o: functional.huber_loss(o, LIKE),
        lambda o: ((1 - o.softmax(-1)) ** 2 * o.log_softmax(-1)).mean(),
        lambda o: o.square().mean(),
        lambda o: o.norm(),
        lambda o: -functional.logsigmoid(o).mean(),
        lambda o: (o.sigmoid() * LIKE).mean(),
    ],
)
def test_bytes_are_those_of_the_traced_step_but_for_vectors(loss_of):
    model = nn.Linear(WIDTH, WIDTH)
    rows = torch.randn(ROWS, WIDTH)
    profile = autosac.profile(model, rows, loss_fn=loss_of)
    tape = profile.tape
    timeline, span = profile.simulator.timeline({}), profile.simulator.span
    begins = [op.start for op in tape.ops if op.phase == "backward"]
    end = max(start for start in begins if start < tape.phases["model backward"])
    before = timeline.live_bytes[timeline.keys <= tape.phases["loss"] * span][-1]
    is_inside = (timeline.keys > tape.phases["loss"] * span) & (
        timeline.keys < end * span
    )
    traced_bytes = timeline.live_bytes[is_inside].max() - before
    assert tape.loss.peak_bytes == pytest.approx(traced_bytes, abs=ONE / 2)
