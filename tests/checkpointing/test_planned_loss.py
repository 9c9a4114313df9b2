"""Another loss than the planned one is said if it takes more, and nothing else is."""

import copy
import threading
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import autosac
from autosac import _compat_autograd

ROWS, WIDTH, CLASSES = 64, 16, 256


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.decay = 0.0

    def forward(self, x, targets=None):
        for layer in self.layers:
            x = x + layer(x).relu()
        self.hidden = x
        logits = self.head(x)
        if targets is None:
            return logits
        return {"loss": functional.cross_entropy(logits, targets), "logits": logits}


TARGETS = torch.arange(ROWS)


def rows():
    return torch.randn(ROWS, WIDTH)


def cross_entropy(logits):
    return functional.cross_entropy(logits, TARGETS)


def smoothed(logits):
    return functional.cross_entropy(logits, TARGETS, label_smoothing=0.1)


def focal(logits):
    weights = (1 - logits.softmax(-1)) ** 2
    return -(weights * logits.log_softmax(-1))[:, 0].mean()


def summed(logits):
    return logits.sum()


def planned(loss_fn, share=0.5, **options):
    profile = autosac.profile(Model(), rows(), loss_fn=loss_fn, **options)
    floor_bytes, peak_bytes = autosac.floor(profile), profile.baseline_peak_bytes
    budget_bytes = floor_bytes + int(share * (peak_bytes - floor_bytes))
    return autosac.plan(profile, memory_budget=budget_bytes)


def train(model, loss_of, num_steps=3):
    for _ in range(num_steps):
        loss_of(model(rows())).backward()
        model.zero_grad()


def silently(model, loss_of, num_steps=3):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, loss_of, num_steps)


@pytest.mark.parametrize("num_twice", [1, 4, 9])
def test_a_loss_is_looked_at_again_once_the_model_is_called_as_planned(num_twice):
    model = planned(summed).apply(Model())
    with pytest.warns(UserWarning, match="is called again before backward") as caught:
        for _ in range(num_twice):
            (model(rows()).sum() + model(rows()).sum()).backward()
            model.zero_grad()
    assert len(caught) == 1

    with pytest.warns(UserWarning, match="The loss, or what else") as caught:
        train(model, focal, 16)
    assert len(caught) == 1


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize(
    ("planned_loss", "loss", "name"),
    [
        (summed, cross_entropy, "LogSoftmax"),
        (None, cross_entropy, "LogSoftmax"),
        (cross_entropy, focal, "Softmax"),
    ],
)
def test_a_loss_that_takes_more_is_said_once(planned_loss, loss, name, share, tmp_path):
    planned(planned_loss, share).save(tmp_path / "plan.json")
    model = autosac.Plan.load(tmp_path / "plan.json").apply(Model())

    with pytest.warns(UserWarning, match=f"for `{name}`.*not the planned") as caught:
        train(model, loss, 5)
    assert len(caught) == 1


def test_a_loss_that_begins_later_is_said():
    model = planned(cross_entropy).apply(Model())
    silently(model, cross_entropy, 5)

    with pytest.warns(UserWarning, match="is not the planned loss") as caught:
        train(model, focal, 5)  # up to step 8
    assert len(caught) == 1


@pytest.mark.parametrize("loss", [summed, cross_entropy, smoothed, focal])
def test_the_planned_loss_is_not_said(loss):
    silently(planned(loss).apply(Model()), loss)


@pytest.mark.parametrize("loss", [summed, cross_entropy])
def test_a_loss_that_takes_less_is_not_said(loss):
    silently(planned(focal).apply(Model()), loss)


def scaled(logits):
    return cross_entropy(logits) * 65536 / 4


def reads_it(logits):
    loss = cross_entropy(logits)
    assert loss.item() > 0
    return loss


def by_rows(logits):
    losses = functional.cross_entropy(logits, TARGETS, reduction="none")
    return losses.sum() / len(losses)


def with_small_terms(logits):
    return cross_entropy(logits) + 0.01 * logits.mean(0).square().sum().detach()


class _Named(torch.autograd.Function):
    """Its context hides the name of its autograd node."""

    @staticmethod
    def forward(ctx, x):
        ctx.name = "mine"
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def named(logits):
    return _Named.apply(cross_entropy(logits))


@pytest.mark.parametrize("loss", [scaled, reads_it, by_rows, with_small_terms, named])
def test_ways_to_write_the_planned_loss_are_not_said(loss):
    silently(planned(cross_entropy).apply(Model()), loss)


def test_a_loss_that_the_model_computes_is_no_other_one():
    # As a trainer that uses the `loss` of the output, divided, and looks at logits.
    profile = autosac.profile(Model(), {"x": rows(), "targets": TARGETS})
    budget_bytes = profile.baseline_peak_bytes
    model = autosac.plan(profile, memory_budget=budget_bytes).apply(Model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            output = model(x=rows(), targets=TARGETS)
            (output["loss"] / 2).backward()
            assert output["logits"].argmax(-1).shape == (ROWS,)
            model.zero_grad()
            del output


def test_a_term_of_what_is_inside_of_the_model_counts_by_itself():
    # Its graph runs through the model, which is no part of the loss.
    model = planned(cross_entropy).apply(Model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, lambda logits: cross_entropy(logits) + 0.1 * model.hidden.sum())


def test_accumulated_gradients_are_those_of_the_planned_loss():
    plan = planned(cross_entropy, accumulate=2)
    model = plan.apply(Model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for _ in range(2):
                (cross_entropy(model(rows())) / 2).backward()
            model.zero_grad()


def test_where_room_is_there_nothing_is_said():
    plan = planned(summed)
    room = {name: size + 2**20 for name, size in plan.headroom_bytes.items()}
    silently(replace(plan, headroom_bytes=room).apply(Model()), cross_entropy)
    silently(replace(plan, headroom_bytes=None).apply(Model()), cross_entropy)


def test_a_copy_of_a_planned_model_is_looked_at_too():
    model = planned(summed).apply(Model())
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="is not the planned loss"):
        train(twin, cross_entropy)


def test_roots_of_backward_are_found_from_its_own_threads():
    found = []

    def look(_):
        found.append(_compat_autograd.backward_roots())
        thread = threading.Thread(
            target=lambda: found.append(_compat_autograd.backward_roots())
        )
        thread.start()
        thread.join()

    output = torch.ones(3, requires_grad=True) * 2
    output.grad_fn.register_prehook(look)
    loss = output.sum()
    loss.backward()

    assert found == [(loss.grad_fn,)] * 2
    assert _compat_autograd.backward_roots() == ()
