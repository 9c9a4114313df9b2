import copy
import itertools
from dataclasses import replace
from functools import partial

import pandas
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

import autosac
from autosac._compat_distributed import fake_group
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import cluster_spec
from autosac.parallel.fewest import fewest_gpus
from autosac.parallel.formulating import ParallelFormulation, Setting
from autosac.parallel.meshes import multiples
from autosac.parallel.preparing import chooser_of
from autosac.parallel.racing import make_parallel_plan, shard_degrees
from autosac.parallel.sharding import Sharding, fsdp_units
from autosac.parallel.solving import ParallelChooser
from autosac.simulation.varied_simulator import VariedSimulator, peaks_of_variants
from autosac.solvers import fsdp
from autosac.solvers.curves import knapsack
from autosac.solvers.fsdp import FsdpChoice, FsdpSolution
from autosac.solvers.fsdp.step_time import linear
from autosac.solvers.milp.solution import Termination
from autosac.solving.solve_options import SolveOptions
from autosac.units.curves import policy_of, save_problem
from autosac.units.far_units import FarUnit
from benchmarks.fsdp_ranks import LARGEST_DIFFERENCE, LARGEST_ERROR
from benchmarks.ranks import Recipe, reference, run_gloo_ranks, run_rank
from benchmarks.sharded_models import RECIPES
from tests.value_models import Routes, stack

pytestmark = pytest.mark.usefixtures("one_thread")
GPT = RECIPES["GPT"]


def on_cpu(num_gpus, name="pcie-l40s"):
    """Ranks on the CPU, with the links of a known cluster."""
    return replace(cluster_spec(name, num_gpus=num_gpus), device=device_spec("cpu"))


@pytest.fixture(scope="module")
def traced():
    return autosac.calibrate(GPT.profile())


def chooser_for(profile):
    return ParallelChooser(ParallelFormulation(profile, Setting()))


@pytest.fixture(scope="module")
def chooser(traced):
    return chooser_for(traced)


@pytest.fixture(scope="module")
def lowest_bytes(chooser):
    return chooser.at(on_cpu(2), 2).lowest(SolveOptions()).highest_peak_bytes


def budgets(chooser, lowest_bytes):
    """Near the least peak, in the middle, and nearly enough to recompute nothing."""
    search = chooser.at(on_cpu(2), 2).search(2**40, SolveOptions())
    free = search.best.highest_peak_bytes
    return [
        int(lowest_bytes + share * (free - lowest_bytes)) for share in (0.02, 0.4, 0.9)
    ]


@pytest.fixture(scope="module")
def routed():
    """A step whose sizes a router decides, which learns."""
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    adamw = partial(torch.optim.AdamW, lr=0.03)
    torch.manual_seed(0)
    return autosac.profile(
        stack(Routes)(), x, optimizer=adamw, loss_fn=lambda y: y.square().mean()
    )


@pytest.mark.slow
def test_units_in_far_memory_are_found_in_other_steps_of_a_router(routed, monkeypatch):
    monkeypatch.setattr(VariedSimulator, "_usual_bytes", lambda self, peak_bytes: 0)
    setting = Setting(link=on_cpu(2).link)
    at = chooser_of(routed, setting).at(on_cpu(2), 2)

    lowest = at.lowest(SolveOptions())

    assert any(isinstance(unit, FarUnit) for unit in lowest.chosen)
    assert lowest.room_bytes > 0


@pytest.mark.slow
def test_ranks_leave_room_for_what_a_router_learns(routed):
    chooser = chooser_for(routed)
    at = chooser.at(on_cpu(2), 2)
    least = at.lowest(SolveOptions()).highest_peak_bytes
    free = at.search(2**40, SolveOptions()).best.highest_peak_bytes
    budget_bytes = least + 4 * (free - least) // 10

    best = at.search(budget_bytes, SolveOptions()).best

    room = VariedSimulator(routed.simulator, routed.redrawn, ())
    own_bytes = room.peak_bytes(best.chosen, workspaces=False)
    others = peaks_of_variants(routed.redrawn, best.chosen)
    assert best.chosen and others
    assert best.peak_bytes + max(others) - own_bytes <= budget_bytes
    assert best.peak_bytes + room.margin_bytes(best.chosen) <= budget_bytes


@pytest.mark.slowest
def test_planned_ranks_keep_the_cap_and_train_as_one_process(
    traced, chooser, lowest_bytes
):
    caps = budgets(chooser, lowest_bytes)
    plans = [
        autosac.plan_parallel(traced, cluster=on_cpu(2), memory_budget=cap)
        for cap in caps
    ]

    ranks = run_gloo_ranks(
        2,
        [
            (
                GPT,
                plan.sharding,
                (),
                {"plan": plan, "want_gradients": True, "num_measured": 8},
            )
            for plan in plans
        ],
    )

    losses, gradients = reference(GPT, 2)
    scale = max(float(g.abs().max()) for g in gradients.values())
    for plan, cap, results in zip(plans, caps, ranks, strict=True):
        for result in results:
            assert result.peak_bytes <= plan.peak_bytes
            assert result.highest_peak_bytes <= plan.highest_peak_bytes <= cap
        worst = max(result.peak_bytes for result in results)
        assert plan.peak_bytes <= (1 + LARGEST_ERROR) * worst
        assert [result.loss for result in results] == losses
        for name, gradient in gradients.items():
            off = float((results[0].gradients[name] - gradient).abs().max())
            assert off <= LARGEST_DIFFERENCE * scale
    assert plans[0].policy and not plans[0].step_ms < plans[1].step_ms
    assert plans[1].step_ms >= plans[2].step_ms


def test_a_giant_embedding_leaves_room_to_recompute_its_blocks():
    recipe = RECIPES["giant embedding"]
    chooser = chooser_for(recipe.profile())
    form = chooser.form
    by_hand = Sharding(units=fsdp_units(recipe.blocks), shard_degree=2)
    all_rerun = {}
    for unit in form.units:
        all_rerun[unit] = policy_of(knapsack.front(save_problem(unit)), -1)

    least = chooser.at(on_cpu(2), 2).lowest(SolveOptions())

    peak_by_hand = form.ranks.peak_bytes(by_hand, all_rerun)
    assert peak_by_hand < form.ranks.peak_bytes(by_hand)
    late_by_hand = form.ranks.late_bytes(by_hand)
    assert least.highest_peak_bytes <= peak_by_hand + late_by_hand


@pytest.mark.slow
@pytest.mark.parametrize("num_gpus", [2, 4])
def test_slow_threads_of_gloo_have_room_in_the_cap(num_gpus):
    step_profile = RECIPES["giant embedding"].profile()
    chooser, spec = chooser_for(step_profile), on_cpu(num_gpus)
    with pytest.raises(autosac.InfeasibleBudgetError) as caught:
        make_parallel_plan(chooser, spec, 2**20)
    floor = caught.value.lowest_peak_bytes
    assert sum(caught.value.composition.values()) == floor

    plans = [
        make_parallel_plan(chooser, spec, int(share * floor))
        for share in (1.0, 1.02, 1.05, 1.1, 1.2, 2.0)
    ]

    for plan in plans:
        assert plan.peak_bytes + plan.late_bytes <= plan.budget_bytes
        assert plan.late_bytes == chooser.form.ranks.late_bytes(plan.sharding)
        assert ("if threads of gloo are slow" in plan.report()) is (num_gpus > 1)
    with pytest.raises(autosac.InfeasibleBudgetError):
        make_parallel_plan(chooser, spec, floor - 1)


def test_two_shards_of_a_giant_embedding_need_less_than_two_replicas():
    # Threads may hold twice its gradient in either case.
    chooser = chooser_for(RECIPES["giant embedding"].profile())
    floors = []
    for degrees in ([1], [2], None):
        with pytest.raises(autosac.InfeasibleBudgetError) as caught:
            make_parallel_plan(chooser, on_cpu(2), 2**20, degrees=degrees)
        floors.append(caught.value.lowest_peak_bytes)

    assert floors[2] == floors[1] < floors[0]
    assert fewest_gpus(chooser, on_cpu(2), floors[0]) == 1
    assert "held by slow threads of gloo" in caught.value.composition


@pytest.mark.parametrize("degree", [3, "2", 2.0, True, None])
def test_a_degree_that_does_not_fit_is_named_with_those_that_do(chooser, degree):
    why = rf"`degrees` has {degree!r}, which must be one of 1, 2, 4 on 4 GPUs"
    with pytest.raises(autosac.ArgumentError, match=why):
        make_parallel_plan(chooser, on_cpu(4), 2**40, degrees=[4, degree])
    with pytest.raises(autosac.ArgumentError, match=why):
        multiples([degree], 2, on_cpu(4))


def test_an_impossible_cap_says_the_least_peak_and_how_many_gpus_are_enough(
    traced, lowest_bytes
):
    with pytest.raises(autosac.InfeasibleBudgetError) as caught:
        autosac.plan_parallel(traced, cluster=on_cpu(2), memory_budget=lowest_bytes - 1)

    error = caught.value
    assert error.lowest_peak_bytes == lowest_bytes
    assert sum(error.composition.values()) == lowest_bytes
    enough = autosac.min_gpus(traced, cluster=on_cpu(2), memory_budget=lowest_bytes - 1)
    assert f"{enough} GPUs" in str(error)
    with pytest.raises(autosac.InfeasibleBudgetError, match="more GPUs would not"):
        autosac.plan_parallel(traced, cluster=on_cpu(2), memory_budget="1MiB")


def test_a_plan_that_no_solve_finds_is_not_said_to_be_all_avoidable(
    chooser, lowest_bytes, monkeypatch
):
    # At a budget that hardly anything fits, the MILP may overstate the best choice.
    nothing = FsdpSolution(termination=Termination.INFEASIBLE)
    monkeypatch.setattr(fsdp, "solve", lambda *_, **__: nothing)
    at = chooser.at(on_cpu(2), 2)
    least = at.search(lowest_bytes, SolveOptions()).best
    compute_ms = sum(at.problem.compute_ms)
    assert compute_ms < least.bound_ms <= least.milp_ms

    plan = make_parallel_plan(chooser, on_cpu(2), lowest_bytes, degrees=[2])
    assert plan.bound_ms == least.bound_ms

    monkeypatch.setattr(type(at), "lower_bound", lambda *_: None)
    assert at.search(lowest_bytes, SolveOptions()).best.bound_ms == compute_ms


def test_the_fewest_gpus_have_a_plan_and_one_step_fewer_have_none(traced, lowest_bytes):
    budget = int(0.9 * lowest_bytes)

    fewest = autosac.min_gpus(traced, cluster=on_cpu(8), memory_budget=budget)

    plan = autosac.plan_parallel(
        traced, cluster=on_cpu(8), num_gpus=fewest, memory_budget=budget
    )
    assert plan.highest_peak_bytes <= budget
    assert plan.num_gpus == fewest
    with pytest.raises(autosac.InfeasibleBudgetError):
        autosac.plan_parallel(
            traced, cluster=on_cpu(8), num_gpus=fewest - 1, memory_budget=budget
        )


def test_the_fewest_gpus_are_counted_for_the_given_units(traced, lowest_bytes):
    size, budget = {"cluster": on_cpu(8)}, int(0.9 * lowest_bytes)
    fewest = autosac.min_gpus(traced, memory_budget=budget, **size)
    alone = {"ac_units": [next(u.fqn for u in traced.units.candidates if u.fqn)]}

    more = autosac.min_gpus(traced, memory_budget=budget, **size, **alone)

    assert more is None or more > fewest
    with pytest.raises(autosac.InfeasibleBudgetError):
        autosac.plan_parallel(
            traced, num_gpus=fewest, memory_budget=budget, **size, **alone
        )


def test_a_saved_plan_comes_back_and_is_made_again(traced, lowest_bytes, tmp_path):
    cap = int(1.2 * lowest_bytes)
    plan = autosac.plan_parallel(traced, cluster=on_cpu(2), memory_budget=cap)
    plan.save(tmp_path / "plan.json")

    assert autosac.ParallelPlan.load(tmp_path / "plan.json") == plan
    again = autosac.plan_parallel(traced, cluster=on_cpu(2), memory_budget=cap)
    assert again == plan
    (tmp_path / "other.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99"):
        autosac.ParallelPlan.load(tmp_path / "other.json")
    (tmp_path / "damaged.json").write_text('{"format": 1, "sharding": {}}')
    with pytest.raises(ValueError, match="damaged"):
        autosac.ParallelPlan.load(tmp_path / "damaged.json")


def test_a_model_that_trains_what_was_frozen_is_another_one():
    model = GPT.model()
    name, parameter = next(iter(model.named_parameters()))
    parameter.requires_grad_(False)
    plan = autosac.plan_parallel(
        model, GPT.inputs(), cluster=on_cpu(2), memory_budget="1GiB"
    )
    with fake_group(2):
        mesh = plan.make_mesh("cpu")
        with pytest.raises(autosac.PlanMismatchError, match=f"`{name}` frozen"):
            plan.apply(GPT.model(), mesh)
        model = GPT.model()
        model.requires_grad_(False)  # of more it knows less is needed
        plan.apply(model, mesh)


def test_a_plan_is_for_its_model_its_mesh_and_once(traced, lowest_bytes):
    cap = int(1.2 * lowest_bytes)
    plan = autosac.plan_parallel(traced, cluster=on_cpu(2), memory_budget=cap)
    with fake_group(2):
        mesh = plan.make_mesh("cpu")
        with pytest.raises(autosac.PlanMismatchError):
            plan.apply(nn.Linear(2, 2), mesh)
        model = GPT.model()
        with pytest.raises(ValueError, match="mesh"):
            plan.apply(model, init_device_mesh("cpu", (2, 1)))
        plan.apply(model, mesh)
        with pytest.raises(ValueError, match="sharded already"):
            plan.apply(model, mesh)
        with torch.device("meta"):
            empty = GPT.make_model()
        plan.apply(empty, mesh)
        shards = dict(model.named_parameters())
        for name, parameter in empty.named_parameters():
            assert parameter.is_meta
            assert parameter.to_local().shape == shards[name].to_local().shape


def test_no_unit_of_a_sharded_model_keeps_more_than_is_planned(traced, lowest_bytes):
    cap = int(1.2 * lowest_bytes)
    plan = autosac.plan_parallel(traced, cluster=on_cpu(2), memory_budget=cap)
    with fake_group(2):
        model = plan.apply(GPT.model(), plan.make_mesh("cpu"))
        units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        assert len(units) > 1
        for unit in units:
            refused = {
                "plan with `accumulate`": lambda u: u.set_requires_gradient_sync(
                    requires_gradient_sync=False
                ),
                r"set_reshard_after_forward\(False": lambda u: (
                    u.set_reshard_after_forward(False, False)
                ),
                "the plan decides it": lambda u: u.set_reshard_after_forward(True),
                "after backward": lambda u: u.set_reshard_after_backward(False),
                "earlier": lambda u: u.set_modules_to_forward_prefetch([model]),
                "own order": lambda u: u.set_modules_to_backward_prefetch([model]),
            }
            for why, call in refused.items():
                with pytest.raises(autosac.UnsupportedError, match=why):
                    call(unit)
            unit.set_requires_gradient_sync(True, recurse=False)
            unit.set_reshard_after_backward(True)


@pytest.mark.slow
def test_what_is_replaced_or_compiled_on_a_rank_is_said(traced, lowest_bytes):
    cap = int(1.2 * lowest_bytes)
    plan = autosac.plan_parallel(traced, cluster=on_cpu(2), memory_budget=cap)
    with fake_group(2):
        model = plan.apply(GPT.model(), plan.make_mesh("cpu"))
        batch = GPT.inputs()
        model(batch)  # warnings are errors
        fqn = next(iter(plan.policy))
        model.set_submodule(fqn, GPT.model().get_submodule(fqn))
        with pytest.warns(UserWarning, match=f"`{fqn}` was replaced after"):
            model(batch)
        model(batch)
        model.head.compile()
        with pytest.raises(autosac.UnsupportedError, match="`head` of a planned"):
            model(batch)


class Gated(nn.Module):
    def __init__(self, gate, shape=(1,)):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 32), gate, nn.Linear(32, 8)
        self.factor = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return self.factor * self.down(self.gate(self.up(x)))


def plan_gated(model, **options):
    return autosac.plan_parallel(
        *(model, torch.ones(4, 8)),
        loss_fn=torch.mean,
        cluster=on_cpu(2),
        memory_budget="1GiB",
        **options,
    )


def test_what_has_a_module_that_others_call_too_is_no_fsdp_unit():
    gate = nn.PReLU(32)
    model = nn.Sequential(Gated(gate), Gated(gate), nn.Linear(8, 8))
    units = {unit.fqn for unit in plan_gated(model).sharding.units}
    assert not {"0", "0.gate", "1.gate"} & units
    with pytest.raises(autosac.UnsupportedError, match=r"`0`.*that others call"):
        plan_gated(model, fsdp_units=["0"])


class DropsTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.map, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.map(self.drop(x)))


def test_a_module_that_cannot_be_an_fsdp_unit_is_named_with_its_own_reason():
    model = nn.Sequential(nn.Sequential(DropsTwice(), DropsTwice()), nn.Linear(8, 8))
    why = (
        r"names `0.0.drop`.* called 2 times .* lies in `0.0`.* the class of the blocks"
    )
    with pytest.raises(autosac.UnsupportedError, match=why):
        plan_gated(model, fsdp_units=["0.*", "0.0", "0.0.drop"])
    units = plan_gated(model, fsdp_units=DropsTwice).sharding.units
    assert [unit.fqn for unit in units] == ["", "0.0", "0.1"]


def test_scalars_are_refused_as_fully_shard_does_not_take_them():
    model = nn.Sequential(Gated(nn.GELU(), ()), Gated(nn.GELU(), ()))
    with pytest.raises(autosac.UnsupportedError, match=r"`0.factor` is a scalar"):
        plan_gated(model)


def test_shared_parameters_stay_in_one_unit_and_names_of_dtypes_are_checked():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Embedding(64, 16)
            self.middle = nn.Linear(16, 16)
            self.head = nn.Linear(16, 64, bias=False)
            self.head.weight = self.token.weight

        def forward(self, x):
            return self.head(self.middle(self.token(x)))

    inputs = torch.zeros(4, 8, dtype=torch.int64)
    plan = autosac.plan_parallel(
        Tied(), inputs, cluster=on_cpu(2), memory_budget="1GiB", degrees=[2]
    )

    assert {unit.fqn for unit in plan.sharding.units} <= {"", "middle"}
    with pytest.raises(ValueError, match="float12"):
        autosac.plan_parallel(
            Tied(),
            inputs,
            cluster=on_cpu(2),
            memory_budget="1GiB",
            param_dtype="float12",
            reduce_dtype="float12",
        )
    with pytest.raises(ValueError, match="`degrees` has 3"):
        autosac.plan_parallel(
            Tied(), inputs, cluster=on_cpu(2), memory_budget="1GiB", degrees=[3]
        )


class _AddsBuffer(nn.Module):
    """Norms what it gets, with a buffer added, which FSDP2 leaves in its own type."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.register_buffer("positions", torch.ones(4))

    def forward(self, x):
        return self.norm(x + self.positions)


def test_a_step_that_fails_in_the_type_that_is_gathered_is_refused():
    model, types = _AddsBuffer(), ("bfloat16", "float32")
    with pytest.raises(RuntimeError, match="mixed dtype"):  # what the ranks would say
        half = copy.deepcopy(model)
        half.norm.bfloat16()
        half(torch.ones(2, 4, dtype=torch.bfloat16))

    says = r"native_layer_norm.*`norm`.*mixed.* or .* pass `autocast`=torch\.bfloat16\."
    with pytest.raises(autosac.TraceError, match=says):
        autosac.plan_parallel(
            model,
            torch.ones(2, 4),
            loss_fn=torch.sum,
            cluster=on_cpu(2),
            memory_budget="1MiB",
            param_dtype=types[0],
            reduce_dtype=types[1],
        )

    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("degrees", [[4], [2]], ids=["all", "replicas"])
def test_mixed_precision_and_replicas_keep_the_cap_too(degrees):
    spec = on_cpu(4)
    calibrated = autosac.calibrate(SMALL.profile())
    setting = Setting(param_dtype="bfloat16", reduce_dtype="float32")
    chooser = chooser_of(calibrated, setting)
    free = make_parallel_plan(chooser, spec, 2**30, degrees=degrees)
    cap = int(0.9 * free.highest_peak_bytes)

    plan = make_parallel_plan(chooser, spec, cap, degrees=degrees)

    assert plan.policy and plan.sharding.param_dtype == "bfloat16"
    with fake_group(4):  # its collectives copy nothing
        result = run_rank(SMALL, plan.sharding, plan=plan)
    assert 0.5 * cap < result.peak_bytes <= plan.peak_bytes
    assert plan.peak_bytes < plan.highest_peak_bytes <= cap


def test_degrees_are_parts_of_a_node_or_whole_nodes():
    assert shard_degrees(cluster_spec("hgx-h100", num_gpus=4)) == [4, 2, 1]
    degrees = shard_degrees(cluster_spec("hgx-h100", num_gpus=48))
    assert degrees == [48, 24, 16, 8, 4, 2, 1]


def test_every_degree_is_the_plan_or_has_a_reason(traced):
    spec = on_cpu(4)
    plan = autosac.plan_parallel(traced, cluster=spec, memory_budget="24MiB")

    seen = [plan.sharding.shard_degree, *(a.shard_degree for a in plan.alternatives)]
    assert sorted(seen) == [1, 2, 4]
    assert all(a.reason for a in plan.alternatives)
    assert plan.optimality_gap <= 5e-3 + 1e-9
    for other in plan.alternatives:
        assert other.step_ms is None or other.step_ms >= plan.step_ms


def test_a_sweep_has_the_plan_or_the_reason_of_every_pair(traced, lowest_bytes):
    caps = [lowest_bytes - 1, 2 * lowest_bytes]

    rows = autosac.sweep_parallel(
        traced, cluster=on_cpu(4), num_gpus=[2, 4], memory_budgets=caps
    )

    assert [(row.cell["num_gpus"], row.budget_bytes) for row in rows] == [
        (count, cap) for count in (2, 4) for cap in caps
    ]
    assert rows[0].plan is None and "lowest peak" in rows[0].reason
    for row in rows[1:]:
        alone = autosac.plan_parallel(
            traced,
            cluster=on_cpu(4),
            num_gpus=row.cell["num_gpus"],
            memory_budget=row.budget_bytes,
        )
        assert row.plan == alone and row.reason is None
    table = rows.to_dataframe()
    assert table.status.tolist() == ["infeasible"] + ["planned"] * 3
    assert table.num_gpus.tolist() == [2, 2, 4, 4]
    assert [None if pandas.isna(b) else b for b in table.peak_bytes] == [
        row.plan and row.plan.peak_bytes for row in rows
    ]


def test_a_sweep_takes_given_units(traced, lowest_bytes):
    name = next(u.fqn for u in traced.units.candidates if u.fqn)
    given = {"ac_units": [name], "fsdp_units": [name]}
    how = {"cluster": on_cpu(4)}

    (row,) = autosac.sweep_parallel(
        traced, num_gpus=[2], memory_budgets=[4 * lowest_bytes], **how, **given
    )

    alone = autosac.plan_parallel(
        traced, num_gpus=2, memory_budget=4 * lowest_bytes, **how, **given
    )
    assert row.plan == alone
    assert set(row.plan.policy) <= {name}


# --- against every choice -----------------------------------------------------


class Part(nn.Module):
    """Two products and what lies between, without modules inside."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(24, 96) / 8)
        self.down = nn.Parameter(torch.randn(96, 24) / 8)

    def forward(self, x):
        return x + functional.gelu(x @ self.up) @ self.down


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.head = nn.Linear(24, 500)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.head(x)


SMALL = Recipe(
    make_model=Stack,
    make_inputs=lambda: torch.randn(256, 24),
    loss_fn=lambda y: y.square().mean(),
)


def every_choice(form, problem):
    count = len(problem.modules)
    points = [[None, *range(len(unit.points))] for unit in problem.sac.units]
    for units in itertools.product([False, True], repeat=count - 1):
        flags = [[False, True] if unit else [False] for unit in units]
        for reshard in itertools.product(*flags):
            for chosen in itertools.product(*points):
                choice = FsdpChoice(
                    units=(True, *units), reshard=(False, *reshard), points=chosen
                )
                if not fsdp.broken_rules(problem, choice):
                    yield choice


def test_a_small_tree_gets_what_the_best_of_all_choices_has_by_simulation():
    at = chooser_for(SMALL.profile()).at(on_cpu(2), 2)
    form, problem = at.form, at.problem
    known = []
    for choice in every_choice(form, problem):
        sharding = form.sharding(choice, 2, 1)
        peak = form.ranks.peak_bytes(sharding, form.policies(choice))
        late = form.ranks.late_bytes(sharding)
        in_time = fsdp.live(replace(problem, late_copies=0), choice)
        assert set((fsdp.live(problem, choice) - in_time).tolist()) == {late}
        known.append((peak + late, linear(fsdp.schedule(problem, choice)).total_ms))
    options = SolveOptions(relative_gap=1e-6)
    peaks = sorted({peak for peak, _ in known})
    assert len(peaks) > 20

    least = at.lowest(options)

    assert least.highest_peak_bytes == peaks[0]
    for budget in peaks[:: len(peaks) // 6]:
        best = at.search(budget, options).best
        best_ms = min(ms for peak, ms in known if peak <= budget)
        assert best.highest_peak_bytes <= budget
        assert best.milp_ms == pytest.approx(best_ms, rel=1e-5)


def test_a_plan_with_replicas_makes_a_mesh_that_it_can_be_applied_on(
    traced, lowest_bytes
):
    cap = int(1.2 * lowest_bytes)
    plan = autosac.plan_parallel(traced, cluster=on_cpu(2), memory_budget=cap)
    sharding = replace(plan.sharding, replicate_degree=2)
    hybrid = replace(plan, sharding=sharding)
    with pytest.raises(ValueError, match="4 ranks, and this process is in no"):
        hybrid.make_mesh("cpu")
    with fake_group(4):
        model = GPT.model()
        with pytest.raises(ValueError, match="dimensions named None"):
            hybrid.apply(model, init_device_mesh("cpu", hybrid.mesh_shape))
        mesh = hybrid.make_mesh("cpu")
        assert mesh.mesh_dim_names == ("replicate", "shard")
        hybrid.apply(model, mesh)
        shards = {p.device_mesh for p in model.parameters()}
        assert [tuple(m.shape) for m in shards] == [(2, 2)]
