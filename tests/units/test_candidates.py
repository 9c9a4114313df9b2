import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autosac import floor, plan, verify
from autosac.errors import InfeasibleBudgetError
from autosac.profiles.profile import profile
from autosac.step.tape import Tape
from tests.models import (
    BATCH,
    CASES,
    WIDTH,
    ConvNet,
    each_case,
    gpt,
    shared_profile,
    tokens,
)


def find(model, inputs=None, **options):
    if inputs is None:
        inputs = torch.randn(BATCH, WIDTH)
    return profile(model, inputs, **options)


def by_name(traced):
    return {unit.fqn: unit for unit in traced.units.candidates}


# --- refusals ---------------------------------------------------------------------


def test_every_call_of_a_module_is_a_unit_of_its_own():
    traced = shared_profile(CASES["called twice"])

    calls = [unit for unit in traced.units.candidates if unit.fqn == "shared"]
    assert [(unit.call_index, unit.num_calls) for unit in calls] == [(0, 2), (1, 2)]
    assert calls[0].call.exit < calls[1].call.enter
    assert calls[0].trigger > calls[1].trigger


class OwnCheckpointing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_a_module_under_checkpointing_of_its_own_is_refused():
    units = find(nn.Sequential(OwnCheckpointing()), torch.ones(2, WIDTH))

    refused = units.units.refused["0.inner"]
    assert "it has its own checkpointing (switch that off" in refused


class OwnHooks(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh())
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh())

    def forward(self, x):
        x = self.before(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return self.inner(x)


def test_modules_under_hooks_on_what_autograd_saves_are_refused_with_the_reason():
    found = find(nn.Sequential(OwnHooks()), torch.ones(2, WIDTH), loss_fn=torch.sum)

    assert "under `saved_tensors_hooks`" in found.units.refused["0.inner"]
    assert not any(fqn.startswith("0.before") for fqn in found.units.refused)
    with pytest.raises(InfeasibleBudgetError, match="leave them out"):
        plan(found, memory_budget=1)
    assert "leave them out" in str(plan(found, memory_budget="1GiB"))


def test_an_excluded_module_is_refused_and_what_is_inside_it_is_not():
    case = CASES["mlp"]

    units = find(case.model(), case.inputs(), exclude=("0",))

    assert units.units.refused == {"0": "it was excluded"}
    assert {"0.2", "1", "2"} <= by_name(units).keys()


class Cache:
    def __init__(self):
        self.seen = []


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache):
        cache.seen.append(x.shape)
        return torch.tanh(self.linear(x))


class PassesAnObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Remembering()

    def forward(self, x):
        return self.inner(x, Cache()).exp()


def test_a_module_that_is_given_an_object_is_refused():
    units = find(nn.Sequential(PassesAnObject(), nn.Tanh()))

    assert "its input holds a Cache" in units.units.refused["0.inner"]
    assert "0" in by_name(units)  # makes the object anew each time


class Appending(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        features.append(torch.tanh(self.linear(features[-1])))
        return features[-1].exp()


class PassesAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Appending()

    def forward(self, x):
        features = [x]
        out = self.inner(features)
        return torch.cat([out, *features])


def test_a_module_that_changes_the_list_it_was_given_is_refused():
    units = find(nn.Sequential(PassesAList(), nn.Tanh()))

    assert "it changes a container that it is given" in units.units.refused["0.inner"]


class AddsInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("total", torch.zeros(BATCH, WIDTH))

    def forward(self, x):
        out = torch.sigmoid(self.linear(x))
        self.total.add_(out.detach())
        return out.exp()


def test_a_change_of_nothing_but_a_tensor_from_outside_is_left_out_of_the_groups():
    units = find(nn.Sequential(AddsInPlace(), nn.Tanh()))
    inner = by_name(units)["0"]

    grouped = {name for g in inner.groups for name in _names(units.tape, inner, g)}

    assert "aten.sigmoid.default" in grouped
    assert "aten.add_.Tensor" not in grouped  # never runs a second time


class AddsToArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, total):
        out = torch.sigmoid(self.linear(x))
        total.add_(out)  # the caller sees this
        return out.exp()


class Accumulates(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = AddsToArgument()

    def forward(self, x):
        total = torch.zeros_like(x)
        return self.inner(x, total) + total


def test_a_module_that_changes_its_argument_is_refused():
    units = find(nn.Sequential(Accumulates(), nn.Tanh()))

    refusal = units.units.refused["0.inner"]
    assert refusal == "one of its arguments is changed in place before backward"


class AddsToBoth(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("total", torch.zeros(BATCH, WIDTH))

    def forward(self, x):
        level = self.linear(x).detach().floor()
        torch._foreach_add_([level, self.total], 1.0)
        return torch.sigmoid(self.linear(x)) * level


def test_an_op_that_changes_own_and_outside_tensors_makes_a_module_refused():
    units = find(nn.Sequential(AddsToBoth(), nn.Tanh()))

    refusal = units.units.refused["0"]
    assert "_foreach_add_" in refusal
    assert "changes a tensor from outside the module" in refusal


class Borrowing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.loans = []

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.loans[-1]


class Lending(nn.Module):
    """Its inner module reads a tensor that is gone after forward."""

    def __init__(self):
        super().__init__()
        self.inner = Borrowing()

    def forward(self, x):
        self.inner.loans.append(torch.cos(x.detach()) > 0)
        out = self.inner(x)
        self.inner.loans.clear()
        return out.exp()


def test_a_module_that_reads_what_is_gone_in_backward_is_refused():
    units = find(nn.Sequential(Lending(), nn.Tanh()))

    assert "neither an argument nor kept" in units.units.refused["0.inner"]


def test_a_module_whose_last_op_writes_to_what_autograd_has_already_is_refused():
    # A rerun ends with the last tensor that is saved: `rrelu` draws its slopes after.
    def make_model():
        ends = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU()) for _ in range(2)]
        around = nn.Sequential(ends[1], nn.Linear(WIDTH, WIDTH))
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), ends[0], around)

    profile = find(make_model(), torch.randn(256, WIDTH))

    assert set(profile.units.refused) == {"1", "1.1", "2.0", "2.0.1"}
    assert "handed to autograd before" in profile.units.refused["1"]
    done = verify(
        plan(profile, memory_budget=floor(profile)),
        make_model,
        lambda: torch.randn(256, WIDTH),
        timing_rounds=0,
    )
    assert done.identical


# --- keys -------------------------------------------------------------------------


def test_identical_blocks_have_equal_keys():
    units = by_name(find(gpt(3), tokens()))

    keys = [units[f"blocks.{i}"].key for i in range(3)]
    assert keys[1] == keys[0]
    assert keys[2] == keys[0]
    assert units["blocks.0.mlp"].key == units["blocks.1.mlp"].key


def test_different_blocks_have_different_keys():
    model = gpt(4)
    model.blocks[1].mlp[1] = nn.SiLU()
    model.blocks[2].mlp[3].p = 0.0
    model.blocks[3].mlp[0] = nn.Linear(16, 24)
    model.blocks[3].mlp[2] = nn.Linear(24, 16)

    units = by_name(find(model, tokens()))

    keys = [units[f"blocks.{i}"].key for i in range(4)]
    assert all(a != b for a, b in itertools.combinations(keys, 2))


def test_units_with_equal_keys_have_equal_groups_and_sizes():
    traced = shared_profile(CASES["bert"])
    for one, other in itertools.combinations(traced.units.candidates, 2):
        if one.key == other.key:
            assert one.activation_bytes == other.activation_bytes
            for a, b in zip(one.groups, other.groups, strict=True):
                assert (a.ops, a.inputs, a.saved_bytes) == (
                    b.ops,
                    b.inputs,
                    b.saved_bytes,
                )


# --- groups -----------------------------------------------------------------------


def _names(tape: Tape, unit, group):
    return [tape.ops[unit.ops[i]].name for i in group.ops]


def test_an_in_place_chain_is_one_group():
    case = CASES["convolutions"]
    traced = case.profile()
    unit = by_name(traced)["blocks.1"]

    (group,) = (
        g for g in unit.groups if "aten.add_.Tensor" in _names(traced.tape, unit, g)
    )
    names = _names(traced.tape, unit, group)

    # `out += identity` and the ReLU change what the second batch norm made.
    assert names[-2:] == ["aten.add_.Tensor", "aten.relu_.default"]
    assert "batch_norm" in names[0]
    relus = sum(
        "aten.relu_.default" in _names(traced.tape, unit, g) for g in unit.groups
    )
    assert relus == 2


@pytest.mark.slow_but_fifth
@each_case
def test_every_op_is_in_one_group_at_most_and_groups_read_earlier_ones(case):
    traced = shared_profile(case)
    for unit in traced.units.candidates:
        positions = [i for group in unit.groups for i in group.ops]
        assert len(positions) == len(set(positions))
        storages = [s for group in unit.groups for s in group.storages]
        assert len(storages) == len(set(storages))
        for g, group in enumerate(unit.groups):
            assert all(h < g for h in group.inputs)
            assert all(i < len(unit.ops) for i in group.ops)


@pytest.mark.slow_but_fifth
@each_case
def test_a_group_lists_every_group_whose_storages_it_reads(case):
    traced = shared_profile(case)
    for unit in traced.units.candidates:
        maker = {s: g for g, group in enumerate(unit.groups) for s in group.storages}
        for g, group in enumerate(unit.groups):
            read = {
                maker[s]
                for i in group.ops
                for s in traced.tape.ops[unit.ops[i]].reads
                if s in maker
            }
            assert read - {g} == set(group.inputs)


def test_a_value_read_before_it_is_overwritten_moves_with_the_writer():
    class Stale(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            hidden = self.linear(x)
            level = hidden.floor()
            hidden.mul_(2)
            return torch.tanh(hidden + level)

    units = find(nn.Sequential(Stale(), nn.Tanh()))
    unit = by_name(units)["0"]
    groups = [_names(units.tape, unit, g) for g in unit.groups]

    (group,) = (names for names in groups if "aten.mul_.Tensor" in names)
    assert "aten.floor.default" in group


def test_what_nobody_can_save_is_marked():
    units = find(ConvNet(), torch.randn(2, 3, 10, 10))
    unit = by_name(units)["blocks.1.norm2"]

    # `out += identity` changes its result after it is done.
    assert unit.groups[-1].unsavable


@pytest.mark.parametrize("name", ["mlp", "gpt", "convolutions"])
def test_activation_bytes_are_what_forward_saves_less_in_and_output(name):
    traced = shared_profile(CASES[name])
    for unit in traced.units.candidates:
        boundary = {*unit.call.inputs, *unit.call.outputs}
        kept = {
            traced.tape.saved[i].storage
            for i in unit.saved
            if unit.call.enter
            < traced.tape.storages[traced.tape.saved[i].storage].born
            < unit.call.exit
        }
        sizes = [traced.tape.storages[s].nbytes for s in kept - boundary]
        assert unit.activation_bytes == sum(sizes)
