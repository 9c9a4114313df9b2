"""Outputs that a training loop keeps are said where they raise the peak."""

import copy
import warnings

import pytest
import torch
from torch import nn

import autosac

ROWS, WIDTH, CLASSES = 64, 16, 256
SAID = "Outputs of earlier calls of the model"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.kept = []
        self.keeps = False

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).relu()
        logits = self.head(x)
        if self.keeps:
            self.kept.append(logits.detach())
            del self.kept[:-2]
        return logits


def loss_fn(logits):
    return logits.log_softmax(-1)[:, 0].mean()


def rows():
    return torch.randn(ROWS, WIDTH)


def planned(loss=loss_fn, share=0.5):
    profile = autosac.profile(Model(), rows(), loss_fn=loss)
    floor_bytes, peak_bytes = autosac.floor(profile), profile.baseline_peak_bytes
    budget_bytes = floor_bytes + int(share * (peak_bytes - floor_bytes))
    return autosac.plan(profile, memory_budget=budget_bytes).apply(Model())


def train(model, keep, num_steps=5, loss=loss_fn):
    for _ in range(num_steps):
        output = model(rows())
        loss(output).backward()
        keep(output)
        del output
        model.zero_grad()


KEPT = {
    "whole": lambda kept, output: kept.append(output),
    "detached": lambda kept, output: kept.append(output.detach()),
    "a view": lambda kept, output: kept.append({"rows": output.detach()[:2]}),
}


@pytest.mark.parametrize("how", KEPT)
def test_outputs_that_a_loop_collects_are_said_once(how):
    kept = []
    with pytest.warns(UserWarning, match=SAID) as caught:
        train(planned(), lambda output: KEPT[how](kept, output), 9)
    assert len(caught) == 1


def nothing(kept, output):
    pass


def copies(kept, output):
    kept.append(output.detach()[:2].clone())


def numbers(kept, output):
    kept.append(output.detach().argmax(-1))


def the_latest(kept, output):
    # There beside the next forward, whose memory is far from the peak of the loss.
    kept[:] = [output]


@pytest.mark.parametrize("keep", [nothing, copies, numbers, the_latest])
def test_what_the_peak_has_room_for_is_not_said(keep):
    kept = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(planned(), lambda output: keep(kept, output), 9)


class Selecting(Model):
    """Values decide how many rows it works on."""

    def forward(self, x):
        return super().forward(x[x[:, 0] > -2])


@pytest.mark.parametrize("keep", [nothing, the_latest, KEPT["whole"]])
def test_where_sizes_vary_only_a_collection_is_said(keep):
    kept = []
    profile = autosac.profile(Selecting(), rows(), loss_fn=loss_fn)
    plan = autosac.plan(profile, memory_budget=profile.baseline_peak_bytes)
    model = plan.apply(Selecting())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, lambda output: keep(kept, output))
    is_said = [SAID in str(one.message) for one in caught]
    assert is_said == [True] * (keep is KEPT["whole"])


def test_the_latest_output_is_said_where_forward_has_the_peak():
    kept = []
    model = planned(torch.sum)
    with pytest.warns(UserWarning, match="64.0 KiB of one of them"):
        train(model, lambda output: the_latest(kept, output), loss=torch.sum)


@pytest.mark.parametrize("deletes", [False, True])
def test_the_latest_output_is_said_where_the_optimizer_has_the_peak(deletes):
    # A loop's variable holds it until forward has returned the next one.
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    profile = autosac.profile(
        model, rows()[:4], loss_fn=loss_fn, optimizer=torch.optim.AdamW
    )
    plan = autosac.plan(profile, memory_budget=profile.baseline_peak_bytes)
    assert plan.headroom_bytes["kept"] == 0
    plan.apply(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            output = model(rows()[:4])
            loss_fn(output).backward()
            if deletes:
                del output
            optimizer.step()
            optimizer.zero_grad()
    assert [SAID in str(one.message) for one in caught] == [True] * (not deletes)


def test_what_the_model_itself_keeps_is_not_said():
    profile_of = Model()
    profile_of.keeps = True
    profile = autosac.profile(profile_of, rows(), loss_fn=loss_fn)
    plan = autosac.plan(profile, memory_budget=profile.baseline_peak_bytes)
    model = Model()
    model.keeps = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(plan.apply(model), lambda output: None)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, state):
        return (self.layer(x) + state).tanh()


def test_an_output_that_is_an_input_of_the_next_call_is_not_said():
    inputs = (rows(), torch.zeros(ROWS, WIDTH))
    profile = autosac.profile(Recurrent(), inputs, loss_fn=torch.sum)
    plan = autosac.plan(profile, memory_budget=profile.baseline_peak_bytes)
    model, state = plan.apply(Recurrent()), inputs[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            output = model(rows(), state)
            output.sum().backward()
            state = output.detach()
            del output
            model.zero_grad()


def test_a_copy_of_a_planned_model_is_looked_at_too():
    kept = []
    twin = copy.deepcopy(planned())
    with pytest.warns(UserWarning, match=SAID):
        train(twin, kept.append)
