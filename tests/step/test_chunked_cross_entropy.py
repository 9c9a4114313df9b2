import pytest
import torch
from torch.nn import functional

import autosac
from autosac.verification.measuring import measure_peak

WIDTH, CLASSES = 24, 300


def case(dtype=torch.float32, num_rows=50):
    torch.manual_seed(0)
    hidden = torch.randn(num_rows, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(CLASSES, WIDTH, dtype=dtype, requires_grad=True)
    bias = torch.randn(CLASSES, dtype=dtype, requires_grad=True)
    targets = torch.randint(CLASSES, (num_rows,))
    targets[::7] = -100
    return hidden, weight, bias, targets


def plain(hidden, weight, bias, targets, reduction="mean"):
    logits = functional.linear(hidden, weight, bias)
    return functional.cross_entropy(logits, targets, reduction=reduction)


def gradients(loss, *tensors):
    return loss.detach(), *torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.usefixtures("one_thread")
def test_one_chunk_is_the_plain_loss_bit_by_bit(dtype, reduction):
    hidden, weight, bias, targets = case(dtype)
    loss = autosac.chunked_cross_entropy(
        hidden, weight, targets, bias=bias, num_chunks=1, reduction=reduction
    )
    expected = plain(hidden, weight, bias, targets, reduction)

    pairs = zip(
        gradients(loss, hidden, weight, bias),
        gradients(expected, hidden, weight, bias),
        strict=True,
    )
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.usefixtures("one_thread")
def test_several_chunks_are_the_stated_order_of_ops_bit_by_bit():
    hidden, weight, bias, targets = case()
    loss = autosac.chunked_cross_entropy(
        hidden, weight, targets, bias=bias, num_chunks=4
    )
    total = (targets != -100).sum()
    losses, of_hidden, of_weight, of_bias = torch.zeros(()), [], None, None
    for rows, some in zip(hidden.detach().split(13), targets.split(13), strict=True):
        logits = functional.linear(rows, weight.detach(), bias.detach())
        logits.requires_grad_()
        summed = functional.cross_entropy(logits, some, reduction="sum")
        (of_logits,) = torch.autograd.grad(summed, logits, 1 / total)
        losses = losses + summed.detach()
        of_hidden.append(of_logits @ weight.detach())
        if of_weight is None:
            of_weight, of_bias = of_logits.t() @ rows, of_logits.sum(0)
        else:
            of_weight = torch.addmm(of_weight, of_logits.t(), rows)
            of_bias = of_bias + of_logits.sum(0)

    actual = gradients(loss, hidden, weight, bias)
    expected = losses / total, torch.cat(of_hidden), of_weight, of_bias
    assert all(map(torch.equal, actual, expected))


def test_several_chunks_and_a_factor_give_the_plain_loss_but_for_rounding():
    hidden, weight, bias, targets = case(torch.float64)
    loss = 3 * autosac.chunked_cross_entropy(
        hidden, weight, targets, bias=bias, num_chunks=7
    )
    expected = 3 * plain(hidden, weight, bias, targets)

    for one, other in zip(
        gradients(loss, hidden, weight, bias),
        gradients(expected, hidden, weight, bias),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("one_thread")
def test_under_autocast_one_chunk_is_the_plain_loss():
    hidden, weight, _, targets = case()
    with torch.autocast("cpu", torch.bfloat16):
        loss = autosac.chunked_cross_entropy(hidden, weight, targets, num_chunks=1)
        expected = plain(hidden, weight, None, targets)

    actual = gradients(loss, hidden, weight)
    assert all(map(torch.equal, actual, gradients(expected, hidden, weight)))


@pytest.mark.slow
@pytest.mark.slow_but_first
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("budget_bytes", [3 * CLASSES * 4, 100_000, 2**20])
def test_a_chunk_keeps_its_budget_by_the_allocators_events(budget_bytes):
    hidden, weight, bias, targets = case(num_rows=1000)
    lasting = sum(t.nbytes for t in (hidden, weight, bias))  # gradients

    def run():
        return autosac.chunked_cross_entropy(
            hidden, weight, targets, bias=bias, memory_budget=budget_bytes
        )

    _, peak_bytes = measure_peak(run, device="cpu", persistent_bytes=0)
    _, plain_bytes = measure_peak(
        lambda: plain(hidden, weight, bias, targets), device="cpu", persistent_bytes=0
    )
    # Masks and scalars of all rows, and the hidden rows of a chunk.
    small_bytes = 2 * len(targets) + CLASSES * 4 + hidden.nbytes + 1024
    assert peak_bytes <= lasting + budget_bytes + small_bytes
    assert peak_bytes < plain_bytes


class WithLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 8 * WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(8 * WIDTH, WIDTH),
        )
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x, targets):
        return autosac.chunked_cross_entropy(
            self.body(x), self.head.weight, targets, bias=self.head.bias, num_chunks=5
        )


@pytest.mark.usefixtures("one_thread")
def test_a_step_with_it_is_planned_to_the_byte():
    inputs = torch.randn(200, WIDTH), torch.randint(CLASSES, (200,))
    options = {"loss_fn": lambda loss: loss}
    profile = autosac.profile(WithLoss(), inputs, optimizer="adamw", **options)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    verification = autosac.verify(
        plan, WithLoss, lambda: inputs, make_optimizer="adamw", **options
    )

    assert plan.policy and plan.dry_run
    assert verification.identical
    assert 0 <= plan.peak_bytes - verification.measured_peak_bytes <= 64


def test_a_second_backward_is_refused():
    hidden, weight, _, targets = case()
    loss = autosac.chunked_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(NotImplementedError, match="makes its gradients once"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(CLASSES, 3)}, "do not go together"),
        ({"targets": torch.ones(3, dtype=torch.int64)}, r"integers of shape \(50,\)"),
        ({"bias": torch.ones(CLASSES, device="meta")}, "`bias` on meta"),
        ({"num_chunks": 0}, "at least 1"),
        ({"reduction": "none"}, "'mean' or 'sum'"),
        ({"memory_budget": "much"}, "must be a positive int"),
        ({"memory_budget": 11 * CLASSES}, "no room for one row of logits, which takes"),
    ],
)
def test_what_cannot_be_meant_is_refused(change, message):
    hidden, weight, _, targets = case()
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, **change}
    with pytest.raises(ValueError, match=message):
        autosac.chunked_cross_entropy(**arguments)
