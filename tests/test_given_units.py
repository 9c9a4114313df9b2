"""AC and FSDP units that the user gives."""

import pytest
import torch
from torch import nn

import autosac
from autosac.cli.demo import GPT, Block, next_token_loss

BLOCKS = [f"blocks.{i}" for i in range(4)]


@pytest.fixture(scope="module")
def profile():
    tokens = torch.zeros(4, 128, dtype=torch.long)
    with torch.device("meta"):
        model = GPT(num_layers=4, width=128, num_heads=4, length=128)
    return autosac.profile(
        model, tokens, loss_fn=next_token_loss(tokens), device="h100"
    )


def halfway(profile, **given):
    """A budget between the least that given units can meet and the plain peak."""
    with pytest.raises(autosac.InfeasibleBudgetError) as error:
        autosac.plan(profile, memory_budget=1, **given)
    return (error.value.lowest_peak_bytes + profile.baseline_peak_bytes) // 2


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        (BLOCKS, BLOCKS),
        (["blocks.?"], BLOCKS),
        ("blocks.?", BLOCKS),
        ([Block], BLOCKS),
        (Block, BLOCKS),
        (tuple(BLOCKS), BLOCKS),
        (["blocks.0", "blocks.*.mlp"], ["blocks.0", *(f"{b}.mlp" for b in BLOCKS)]),
        (["blocks.1"], ["blocks.1"]),
    ],
    ids=str,
)
def test_only_given_modules_are_ac_units(profile, given, allowed):
    budget = halfway(profile, ac_units=allowed)

    plan = autosac.plan(profile, memory_budget=budget, ac_units=given)

    assert plan.policy
    assert set(plan.policy) <= set(allowed)
    assert plan.peak_bytes <= budget


def test_marks_may_come_from_a_generator(profile):
    budget = halfway(profile, ac_units=BLOCKS)

    plan = autosac.plan(profile, memory_budget=budget, ac_units=(b for b in BLOCKS))

    assert plan.policy
    assert set(plan.policy) <= set(BLOCKS)


@pytest.mark.slow
def test_the_same_modules_are_excluded_by_what_is_left(profile):
    others = [m.fqn for m in profile.tape.modules.nodes if m.fqn not in BLOCKS]
    model = profile.step.model
    tokens = torch.zeros(4, 128, dtype=torch.long)
    complement = autosac.profile(
        model,
        tokens,
        loss_fn=next_token_loss(tokens),
        device="h100",
        exclude=tuple(fqn for fqn in others if fqn),
    )
    for share in (0.3, 0.6, 0.9):
        lowest = autosac.floor(complement)
        budget = lowest + int(share * (profile.baseline_peak_bytes - lowest))
        given = autosac.plan(profile, memory_budget=budget, ac_units=BLOCKS)
        excluded = autosac.plan(complement, memory_budget=budget)
        gap = max(given.recompute_ms, excluded.recompute_ms) * 5e-3
        assert given.recompute_ms >= excluded.bound_ms - 1e-9
        assert excluded.recompute_ms >= given.bound_ms - 1e-9
        assert abs(given.recompute_ms - excluded.recompute_ms) <= gap + 1e-9


def test_a_given_unit_that_is_traced_is_traced_once(profile, monkeypatch):
    monkeypatch.setattr("autosac.profiles.profile.trace", None)
    budget = halfway(profile, ac_units=["blocks.2"])
    known = len(profile.with_given_units)

    for _ in range(2):
        autosac.plan(profile, memory_budget=budget, ac_units=["blocks.2"])

    assert len(profile.with_given_units) <= known + 1


def test_no_unit_lies_around_a_given_fsdp_unit(profile):
    inner = [f"{b}.mlp" for b in BLOCKS]
    budget = halfway(profile, fsdp_units=inner)

    plan = autosac.plan(profile, memory_budget=budget, fsdp_units=inner)

    assert plan.policy
    assert not any(
        f"{b}.mlp".startswith(f"{fqn}.") for fqn in plan.policy for b in BLOCKS
    )
    assert not any(p.chain or p.around or p.until for p in plan.op_policies)


def test_no_units_given_is_the_plain_step(profile):
    plan = autosac.plan(profile, memory_budget=profile.baseline_peak_bytes, ac_units=[])
    assert plan.policy == {}
    with pytest.raises(autosac.InfeasibleBudgetError) as error:
        autosac.plan(
            profile, memory_budget=profile.baseline_peak_bytes - 1, ac_units=[]
        )
    assert error.value.lowest_peak_bytes == profile.baseline_peak_bytes


def test_a_sweep_and_a_policy_keep_to_given_units(profile):
    sweep = autosac.sweep(profile, n=3, ac_units=["blocks.*.attention"])
    wanted = {f"{b}.attention" for b in BLOCKS}

    assert sweep.rows[0].budget_bytes > autosac.floor(profile)
    assert all(set(row.plan.policy) <= wanted for row in sweep.rows)
    assert sweep.rows[0].plan.policy
    budget = sweep.rows[0].budget_bytes
    policy = autosac.policy(
        profile, memory_budget=budget, ac_units=["blocks.*.attention"]
    )
    assert set(policy) <= wanted


@pytest.mark.slow
def test_several_batches_keep_to_given_units():
    model = GPT(num_layers=2, width=64, num_heads=4, length=64)
    batches = [torch.zeros(2, n, dtype=torch.long) for n in (32, 64)]
    options = {"make_loss_fn": next_token_loss, "device": "h100"}
    free = autosac.plan(model, batches, memory_budget="1GiB", **options)
    budget = int(0.99 * free.baseline_peak_bytes)

    plan = autosac.plan(
        model, batches, memory_budget=budget, ac_units=[Block], **options
    )

    assert any(one.policy for one in plan.each)

    assert all(set(one.policy) <= {"blocks.0", "blocks.1"} for one in plan.each)


def test_a_chain_or_a_slice_is_left_only_if_all_of_it_is_given():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))
    )
    profile = autosac.profile(model, torch.zeros(256, 64), loss_fn=torch.sum)
    lowest = autosac.floor(profile)

    every = autosac.plan(profile, memory_budget=lowest, ac_units=["?"])
    some = autosac.sweep(profile, n=2, ac_units=["0", "2", "4", "6"])

    assert every.peak_bytes <= lowest
    assert set(some.rows[0].plan.policy) <= {"0", "2", "4", "6"}


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"ac_units": ["blocks.9"]}, "`ac_units` has 'blocks.9', which stands for no"),
        ({"ac_units": [nn.Conv2d]}, "`ac_units` has 'Conv2d', which stands for no"),
        ({"ac_units": ["head"]}, "None of the modules in `ac_units` can be an AC"),
        ({"fsdp_units": [1]}, "`fsdp_units` has 1, which is no name"),
        ({"ac_units": [nn.Sequential(nn.ReLU())]}, "has a Sequential, which is no nam"),
        ({"world_size": 8}, "`world_size` is for statistics"),
    ],
)
def test_units_that_mean_nothing_are_refused(profile, given, match):
    with pytest.raises(autosac.ArgumentError, match=match):
        autosac.plan(profile, memory_budget="1GiB", **given)


# --- many GPUs -------------------------------------------------------------------


def parallel(profile, **given):
    options = {"cluster": "hgx-h100", "num_gpus": 8, "degrees": [8]}
    budget = given.pop("budget", "80GiB")
    return autosac.plan_parallel(profile, memory_budget=budget, **options, **given)


def fsdp_units(plan):
    return {unit.fqn for unit in plan.sharding.units if unit.fqn}


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["blocks.?"], BLOCKS),
        (["blocks.0", "blocks.2.mlp"], ["blocks.0", "blocks.2.mlp"]),
        ([Block, "head"], [*BLOCKS, "head"]),
        ([], []),
    ],
    ids=str,
)
def test_the_fsdp_units_of_a_plan_are_those_given(profile, given, expected):
    free = parallel(profile, fsdp_units=given)
    tight = parallel(profile, fsdp_units=given, budget=int(0.93 * free.peak_bytes))

    assert fsdp_units(free) == fsdp_units(tight) == set(expected)
    assert tight.policy
    assert tight.peak_bytes <= tight.budget_bytes
    inside = {fqn for fqn in tight.policy for e in expected if e.startswith(f"{fqn}.")}
    assert not inside


@pytest.mark.slow
def test_given_units_are_never_better_than_the_best(profile):
    free = parallel(profile)
    budget = int(0.93 * free.peak_bytes)
    best = parallel(profile, budget=budget)

    for given in ({"fsdp_units": ["blocks.?"]}, {"ac_units": [Block]}, {"segments": 2}):
        plan = parallel(profile, budget=budget, **given)
        assert plan.peak_bytes <= budget
        assert plan.milp_ms >= best.bound_ms * (1 - 1e-6)
        if "ac_units" in given:
            assert set(plan.policy) <= set(BLOCKS)


@pytest.mark.slow
def test_more_segments_never_take_a_parallel_step_longer(profile):
    budget = int(0.85 * parallel(profile).peak_bytes)
    times = [parallel(profile, budget=budget, segments=k).step_ms for k in (1, 2, 3)]

    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"fsdp_units": ["blocks.0.attention.dropout"]}, "a unit without parameters"),
        ({"fsdp_units": ["blocks"]}, "not modelled: FSDP unit `blocks` is never calle"),
        ({"ac_units": ["blocks.0.norm1"]}, "None of the modules in `ac_units`"),
        ({"ac_units": ["x"]}, "`ac_units` has 'x'"),
    ],
)
def test_parallel_units_that_cannot_be_are_refused(profile, given, match):
    with pytest.raises((autosac.ArgumentError, autosac.UnsupportedError), match=match):
        parallel(profile, **given)


def test_a_model_without_any_unit_is_told_to_leave_them_out():
    profile = autosac.profile(nn.Linear(8, 8), torch.randn(4, 8))

    with pytest.raises(autosac.ArgumentError, match=r"nor can any other .* leave"):
        autosac.plan(profile, memory_budget="1GiB", ac_units=[""])


# --- sweeps, batch sizes, the command line ----------------------------------------


def small_step(width):
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(64, width)


@pytest.mark.slow
def test_cells_of_a_grid_plan_with_given_units():
    given = {"ac_units": (f"{i}" for i in (1, 2)), "fsdp_units": "3"}

    rows = autosac.sweep_grid(small_step, {"width": [8, 16]}, n=3, **given)

    for width in (8, 16):
        profile = autosac.profile(*small_step(width))
        alone = autosac.sweep(profile, n=3, ac_units=["1", "2"], fsdp_units="3")
        free = autosac.sweep(profile, n=3)
        own = [row for row in rows if row.cell["width"] == width]
        assert [row.floor_bytes for row in own] == [r.floor_bytes for r in alone]
        assert own[0].floor_bytes > free.rows[0].floor_bytes


def test_a_cell_without_a_given_unit_fails_and_says_so():
    (row,) = autosac.sweep_grid(
        small_step, {"width": [8]}, memory_budgets=["1GiB"], ac_units="blocks.7"
    )

    assert row.status == "failed"
    assert "`ac_units`" in row.reason


def test_kept_cells_of_other_units_are_done_again(tmp_path):
    grid = {"width": [8]}
    free = autosac.sweep_grid(small_step, grid, n=2, directory=tmp_path)

    given = autosac.sweep_grid(
        small_step, grid, n=2, directory=tmp_path, ac_units=["1"]
    )

    assert given.rows[0].floor_bytes > free.rows[0].floor_bytes


@pytest.mark.slow
@pytest.mark.parametrize("search", [autosac.max_batch_size, autosac.best_batch_size])
def test_batch_sizes_are_searched_with_given_units(search):
    model, _ = small_step(64)

    def make_inputs(size):
        return torch.randn(size, 64)

    def lowest(size):
        profile = autosac.profile(model, make_inputs(size), device="h100")
        with pytest.raises(autosac.InfeasibleBudgetError) as error:
            autosac.plan(profile, memory_budget=1, ac_units=["1"])
        return error.value.lowest_peak_bytes

    best = search(
        model,
        make_inputs,
        memory_budget=lowest(40),
        device="h100",
        ac_units=(name for name in ["1"]),
    )

    assert set(best.plan.policy) <= {"1"}
    floors = {row.cell["batch_size"]: row.floor_bytes for row in best.trials}
    assert floors[best.batch_size] == lowest(best.batch_size)
    if search is autosac.max_batch_size:
        assert lowest(best.batch_size) <= lowest(40) < lowest(best.batch_size + 1)
