import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autosac.checkpointing import installing
from autosac.planning.spelling import spell_out
from autosac.tracing.collecting import no_collections
from autosac.units.policies import RERUN, SAVE, Policy
from tests.models import WIDTH, Case
from tests.training import rows

pytestmark = pytest.mark.usefixtures("one_thread")


class Shifted(nn.Module):
    """Only the rerun reads what `linear` makes: backward of a sum reads nothing."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.holds = False

    def forward(self, x):
        hidden = self.linear(x)
        shifted = hidden + 1
        if not self.holds:
            del hidden
        return torch.sigmoid(torch.exp(shifted))


class Lifetimes(TorchDispatchMode):
    """Whether what `addmm` made is alive whenever `exp` runs."""

    def __init__(self):
        super().__init__()
        self.storage = lambda: None
        self.alive = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.exp.default:
            self.alive.append(self.storage() is not None)
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            self.storage = weakref.ref(out.untyped_storage())
        return out


def _planned(holds, at_end=RERUN):
    """`linear` is saved, what follows is made again, or all but what is at its end."""

    def make_model():
        model = nn.Sequential(Shifted())
        model[0].holds = holds
        return model

    case = Case(make_model, rows)
    profile, model = case.profile(), case.model()
    unit = profile.candidates[0]
    (policy,) = spell_out(profile, {unit: Policy(RERUN * len(unit.groups))})
    saved = {"aten.addmm.default": SAVE, "aten.add.Tensor": RERUN}
    saved["aten.exp.default"] = RERUN
    saved["aten.sigmoid.default"] = at_end
    actions = "".join(map(saved.get, policy.names, policy.actions))
    installing.install(model, (replace(policy, actions=actions),))
    return model


@pytest.mark.parametrize("holds", [False, True])
def test_a_saved_result_goes_in_the_rerun_where_it_went_in_forward(holds):
    model = _planned(holds)
    for _ in range(3):  # the first step is recorded, later ones go by a program
        with Lifetimes() as lifetimes:
            model(rows()).sum().backward()

        assert lifetimes.alive == [True, holds]  # forward, rerun


def test_a_saved_result_stays_while_the_graph_is_retained():
    model, inputs = _planned(holds=False), rows()
    for _ in range(3):
        gradients = []
        with Lifetimes() as lifetimes:
            loss = model(inputs).sum()
            for retain in (True, True, False):
                model.zero_grad()
                loss.backward(retain_graph=retain)
                gradients.append(model[0].linear.weight.grad)

        assert lifetimes.alive == [True, True, True, False]  # one forward
        assert all(torch.equal(gradients[0], gradient) for gradient in gradients)


@pytest.mark.parametrize("what", ["weight", "argument", "result"])
def test_what_a_known_unit_leaves_to_autograd_must_stay_as_it_is(what):
    model, inputs = _planned(holds=False, at_end=SAVE), rows().requires_grad_()
    for _ in range(3):
        model(inputs).sum().backward()
    output = model(inputs)
    tensors = {"weight": model[0].linear.weight, "argument": inputs, "result": output}
    with torch.no_grad():
        tensors[what].add_(1)

    with pytest.raises(RuntimeError, match="changed in place"):
        output.sum().backward()


def test_what_a_known_unit_leaves_to_autograd_goes_with_its_graph():
    model = _planned(holds=False, at_end=SAVE)
    for _ in range(3):
        model(rows()).sum().backward()
    gc.collect()
    with no_collections():
        output = model(rows())  # which its own function saves
        storage = weakref.ref(output.untyped_storage())
        del output

        assert storage() is None
