"""States of equal optimizers: made once, then again; the trace is the same."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from autosac import OptimizerInBackward, profile
from autosac._compat_distributed import fake_group
from autosac.fake_tensors.equal_states import EqualStates, keeps_state_only

optim = torch.optim


class Counting(optim.Adam):
    """An optimizer of the user's, which may keep more than its state."""


def hooked(parameters):
    optimizer = optim.Adam(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def trace(make_optimizer, *, device=None, in_backward=True):
    def make(parameters):
        if in_backward:
            return OptimizerInBackward(parameters, make_optimizer)
        return make_optimizer(parameters)

    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    return profile(model, torch.ones(8, 16), optimizer=make, device=device).tape


def test_all_of_pytorchs_optimizers_keep_their_state_only_and_no_other_may():
    weights = [nn.Parameter(torch.ones(2, 2))]
    own = [c for c in vars(optim).values() if isinstance(c, type)]
    own = [
        c for c in own if issubclass(c, optim.Optimizer) and c is not optim.Optimizer
    ]
    assert len(own) > 12
    assert all(keeps_state_only(make(weights)) for make in own)
    assert not keeps_state_only(Counting(weights))
    assert not keeps_state_only(hooked(weights))


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("in_backward", [True, False])
@pytest.mark.parametrize("device", [None, "h100"])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        optim.SGD,
        lambda p: optim.SGD(p, momentum=0.9),
        optim.AdamW,
        lambda p: optim.Adam(p, amsgrad=True),
        optim.Adafactor,
        optim.NAdam,
        optim.Rprop,
        optim.ASGD,
        Counting,
        hooked,
    ],
)
def test_the_tape_is_that_of_states_made_one_by_one(
    make_optimizer, device, in_backward, monkeypatch
):
    how = {"device": device, "in_backward": in_backward}
    tape = trace(make_optimizer, **how)

    monkeypatch.setattr(EqualStates, "like", lambda *_: None)

    assert tape == trace(make_optimizer, **how)


def test_a_gradient_of_another_layout_is_another_kind():
    rows, columns, more_rows = (nn.Parameter(torch.ones(4, 4)) for _ in range(3))
    for parameter in (rows, more_rows):
        parameter.grad = torch.ones(4, 4)
    columns.grad = torch.ones(4, 4).t()
    optimizer = optim.SGD([rows, columns, more_rows], momentum=0.9)
    (group,) = optimizer.param_groups

    kinds = [EqualStates(None).kind(optimizer, group, p) for p in group["params"]]

    assert kinds[0] == kinds[2] != kinds[1]


def test_a_parameter_of_several_ranks_is_another_kind():
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        whole = distribute_tensor(torch.ones(4), mesh, [Replicate()])
        parameters = [nn.Parameter(whole), nn.Parameter(torch.ones(4))]
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        optimizer = optim.AdamW(parameters)
        (group,) = optimizer.param_groups
        kinds = [EqualStates(None).kind(optimizer, group, p) for p in parameters]
    assert kinds[0] != kinds[1]


def test_groups_with_other_options_have_states_of_their_own(monkeypatch):
    def by_group(parameters):
        parameters = list(parameters)
        groups = [
            {"params": parameters[:4], "amsgrad": True},
            {"params": parameters[4:]},
        ]
        return optim.AdamW(groups, lr=1e-3)

    tape = trace(by_group, in_backward=False)
    monkeypatch.setattr(EqualStates, "like", lambda *_: None)

    assert tape == trace(by_group, in_backward=False)
    state_bytes = [s.nbytes for s in tape.storages if s.category == "optimizer"]
    # step and two moments of everything, and the largest second one of the first four
    assert len(state_bytes) == 3 * 8 + 4


@pytest.mark.parametrize("in_backward", [True, False])
def test_a_state_is_made_by_a_step_once_for_each_kind(in_backward, monkeypatch):
    learn, built = EqualStates.learn, []

    def noted(self, kind, state):
        built.append(kind)
        learn(self, kind, state)

    monkeypatch.setattr(EqualStates, "learn", noted)
    trace(optim.AdamW, in_backward=in_backward)

    assert len(built) == len(set(built)) == 2  # weights, biases


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("make_optimizer", [Counting, hooked])
def test_what_may_keep_more_than_its_state_makes_each_by_a_step(
    make_optimizer, monkeypatch
):
    tape = []
    monkeypatch.setattr(
        EqualStates, "learn", lambda _, kind, state: tape.append((kind, len(state)))
    )
    trace(make_optimizer)

    assert tape == [(None, 3)] * 8  # step and two moments of every parameter


def test_hooks_on_all_optimizers_make_each_state_by_a_step(monkeypatch):
    observed = []
    monkeypatch.setattr(
        EqualStates, "learn", lambda _, kind, state: observed.append(kind)
    )
    hook = register_optimizer_step_post_hook(lambda *_: None)
    try:
        trace(optim.AdamW)
    finally:
        hook.remove()

    assert observed == [None] * 8
