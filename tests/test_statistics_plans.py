"""Plans from statistics, against PyTorch's own `sac_milp` and against trying all."""

import inspect
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed._tools.ilp_utils import (
    aggregate_stats,
    get_peak_memory_runtime_baseline,
    parse_module_info,
)
from torch.distributed._tools.sac_estimator import SACEstimator

import autosac
from autosac.cli.demo import GPT
from autosac.solvers.curves.lines import highest
from autosac.solving.statistics_problem import formulate
from benchmarks.rivals.sac_milp import chain_of_step
from tests.test_statistics import squared_error, watched


class ConvNet(nn.Module):
    """Nested blocks with residuals and batch norms."""

    def __init__(self):
        super().__init__()

        def block():
            return nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
            )

        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(block(), nn.Sequential(block(), block())) for _ in range(2)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = x + stage(x)
        return self.head(x.mean((2, 3)))


class Gated(nn.Module):
    """Blocks of unlike widths, one inside another, with dropout."""

    def __init__(self):
        super().__init__()
        self.up = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64))
        self.inner = nn.Sequential(
            nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Dropout(0.1)),
            nn.Sequential(
                nn.Linear(512, 96), nn.Tanh(), nn.Linear(96, 64), nn.Sigmoid()
            ),
        )
        self.out = nn.Linear(64, 8)

    def forward(self, x):
        return self.out(torch.sigmoid(self.up(x)) * self.inner(x))


STEPS = {
    "gpt": (
        lambda: GPT(num_layers=3, width=256, num_heads=4, length=128, dropout=0.0),
        lambda: (torch.zeros(4, 128, dtype=torch.long),),
    ),
    "conv": (ConvNet, lambda: (torch.zeros(8, 3, 64, 64),)),
    "gated": (Gated, lambda: (torch.zeros(4096, 64),)),
}


def roofline_of_an_absent_gpu():
    if "gpu_type" not in inspect.signature(SACEstimator).parameters:
        pytest.skip("this PyTorch's estimator asks for an accelerator")


@pytest.fixture(scope="module", params=STEPS)
def chain(request):
    roofline_of_an_absent_gpu()
    make_model, make_inputs = STEPS[request.param]
    return chain_of_step(make_model(), make_inputs(), squared_error)


def floor(chain):
    with pytest.raises(autosac.InfeasibleBudgetError) as error:
        autosac.plan(chain.statistics, memory_budget=1)
    return error.value.lowest_peak_bytes


def budgets(chain, num=12):
    lowest = floor(chain)
    baseline = autosac.plan(chain.statistics, memory_budget="1TiB").baseline_peak_bytes
    return [lowest + (baseline - lowest) * (i + 1) // num for i in range(num)]


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(
    "backend", ["highs", pytest.param("cbc", marks=pytest.mark.slow)]
)
def test_the_optimum_is_that_of_pytorchs_milp_at_every_budget(chain, backend):
    recomputed = 0
    for budget in budgets(chain, num=6):
        plan = autosac.plan(chain.statistics, memory_budget=budget, backend=backend)

        assert plan.recompute_ms == pytest.approx(chain.optimum_ms(budget), abs=1e-4)
        assert plan.peak_bytes <= budget
        assert plan.bound_ms <= plan.recompute_ms
        recomputed += plan.recompute_ms > 1e-3
    assert recomputed > 3


@pytest.mark.slow_but_first
def test_what_pytorchs_milp_cannot_fit_is_infeasible(chain):
    lowest = floor(chain)

    assert chain.optimum_ms(int(0.999 * lowest) - 1024) is None
    with pytest.raises(autosac.InfeasibleBudgetError, match="by these statistics") as e:
        autosac.plan(chain.statistics, memory_budget=int(0.999 * lowest))
    assert sum(e.value.composition.values()) == e.value.lowest_peak_bytes
    met = autosac.plan(chain.statistics, memory_budget=e.value.lowest_peak_bytes)
    assert met.peak_bytes == e.value.lowest_peak_bytes


@pytest.mark.slow
def test_given_units_and_ranks_count_as_in_pytorchs_milp(chain):
    statistics, root = chain.statistics, chain.graph.nodes[0]["fqn"]
    inner = [m.fqn for m in statistics.modules if m.n_segments and m.fqn.count(".") > 1]
    options = [
        {"ac_units": inner[::2]},
        {"fsdp_units": inner[:2]},
        {"fsdp_units": inner[1:3], "ac_units": inner},
    ]
    for given, world_size in zip(options, (1, 4, 4), strict=True):
        named = {k: [f"{root}.{fqn}" for fqn in fqns] for k, fqns in given.items()}
        for budget in budgets(chain, num=3):
            budget -= int(0.3 * statistics.modules[0].parameter_bytes)
            expected = chain.optimum_ms(budget, world_size=world_size, **named)
            if expected is None:
                continue

            plan = autosac.plan(
                statistics, memory_budget=budget, world_size=world_size, **given
            )

            assert plan.recompute_ms == pytest.approx(expected, abs=1e-4)
            if "ac_units" in given:
                assert set(plan.policy) <= set(given["ac_units"])


@pytest.mark.slow_but_fifth
def test_the_baseline_is_that_of_pytorch(chain):
    peak, compute_ms = get_peak_memory_runtime_baseline(chain.graph)
    plan = autosac.plan(chain.statistics, memory_budget="1TiB")

    assert plan.baseline_peak_bytes == peak == plan.peak_bytes
    assert plan.baseline_ms == plan.step_ms == pytest.approx(compute_ms)
    assert plan.policy == {} == autosac.policy(chain.statistics, memory_budget="1TiB")


def test_statistics_hold_all_of_pytorchs_module_info():
    model, *trackers = watched(*STEPS["conv"])
    info = aggregate_stats(model, *trackers, torch.device("cpu"))
    statistics = autosac.from_trackers(model, *trackers)

    names = {
        "act_fw_per_module": "activation_bytes",
        "act_bw_per_module": "backward_activation_bytes",
        "act_grad_per_module": "backward_temporary_bytes",
        "act_total": "total_activation_bytes",
        "grad_total": "total_gradient_bytes",
        "input_per_module": "input_bytes",
        "output_per_module": "output_bytes",
        "param_per_module": "parameter_bytes",
        "fw_runtime_per_module": "forward_ms",
    } | {
        name: name
        for name in ("sac_memory", "sac_runtime", "n_segments", "slopes", "intercepts")
    }
    assert len(info["mod_stats"]) > 10
    for theirs in info["mod_stats"]:
        own = statistics[theirs["fqn"].partition(".")[2]]
        for name, figure in names.items():
            expected = theirs[name]
            expected = tuple(expected) if isinstance(expected, list) else expected
            assert getattr(own, figure) == expected, (own.fqn, name)
        assert own.breakpoints == tuple(theirs["breakpoints"])
        assert own.tradeoff_curve == tuple(theirs["tradeoff_curve"].items())
    graph = parse_module_info(info)
    called = [statistics.tree.index[f] for f in statistics.forward_pre_order]
    matrix = statistics.ad_matrix[np.ix_(called, called)]
    np.testing.assert_array_equal(matrix, graph.ad_matrix)


@pytest.mark.slow
def test_fits_that_the_estimator_lacks_are_those_of_pytorch():
    model, *trackers = watched(*STEPS["gated"])
    np.random.seed(3)
    expected = np.random.random()
    np.random.seed(3)

    statistics = autosac.from_trackers(model, *trackers)

    assert np.random.random() == expected  # its generator is put back
    estimator = trackers[-1]
    for name, stats in estimator.sac_mod_stats.items():
        np.random.seed(0)  # its fits differ from run to run
        order = estimator.sac_mod_greedy_order_meta[name]
        theirs = estimator._get_sac_tradeoff_pwlf_stats(stats, order)
        own = statistics[name.partition(".")[2]]
        assert own.slopes == tuple(theirs.slopes)
        assert own.breakpoints == tuple(theirs.fit_breaks)


class Short(nn.Module):
    """One block whose curve has too few points for PyTorch's fit."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(64, 512), nn.Tanh())
        self.out = nn.Sequential(nn.GELU(), nn.Linear(512, 64), nn.GELU())

    def forward(self, x):
        return self.out(self.block(x))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_where_pytorch_cannot_fit_a_curve_discarding_takes_the_whole_forward():
    model, *trackers = watched(Short, lambda: (torch.zeros(256, 64),))
    fresh = autosac.from_trackers(model, *trackers)
    info = aggregate_stats(model, *trackers, torch.device("cpu"))
    after = autosac.from_trackers(model, *trackers)

    theirs = next(m for m in info["mod_stats"] if m["fqn"].endswith(".block"))
    assert not np.isfinite(theirs["slopes"]).all()
    for statistics in (fresh, after):
        own = statistics["block"]
        assert (own.slopes, own.intercepts) == ((0.0,), (1.0,))
        assert (own.sac_memory, own.sac_runtime) == (
            theirs["sac_memory"],
            theirs["sac_runtime"],
        )
        assert autosac.plan(statistics, memory_budget="1GiB").policy == {}


def test_a_module_of_views_has_no_curve_where_pytorch_raises():
    def make_model():
        views = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (8, 8)))
        return nn.Sequential(nn.Linear(8, 8), views, nn.GELU())

    model, *trackers = watched(make_model, lambda: (torch.zeros(4, 8, 8),))

    statistics = autosac.from_trackers(model, *trackers)

    assert statistics["1"].n_segments == 0
    assert autosac.policy(statistics, memory_budget="1GiB") == {}
    with pytest.raises(ZeroDivisionError):
        aggregate_stats(model, *trackers, torch.device("cpu"))


def best_by_trying(form, grid):
    """Least time of all choices of units, each at one of some ratios."""
    problem = form.problem
    options = []
    for module in form.modules:
        least = 1 - module.activation_bytes / module.sac_memory
        options.append([None, *np.linspace(least, module.max_ratio, grid).tolist()])
    best = None
    for ratios in itertools.product(*options):
        live, time_ms = list(problem.base_bytes), 0.0
        for unit, module, ratio in zip(
            problem.units, form.modules, ratios, strict=True
        ):
            if ratio is None:
                continue
            freed = module.activation_bytes - (1 - ratio) * module.sac_memory
            for q in range(unit.freed_from, unit.freed_until):
                live[q] -= freed
            lines = zip(module.slopes, module.intercepts, strict=True)
            share = max(0.0, *(slope * ratio + start for slope, start in lines))
            time_ms += share * module.sac_runtime
        chosen = [m.fqn for m, r in zip(form.modules, ratios, strict=True) if r]
        nested = any(b.startswith(f"{a}.") for a in chosen for b in chosen)
        if not nested and max(live) <= problem.budget_bytes + 1:
            best = time_ms if best is None else min(best, time_ms)
    return best


@pytest.mark.slow_but_fifth
def test_no_choice_of_units_and_ratios_is_cheaper_than_a_plan(chain):
    statistics = chain.statistics
    names = [m.fqn for m in statistics.modules if m.n_segments and m.activation_bytes]
    few = names[1:5]
    tried = 0
    for budget in budgets(chain, num=5):
        allowed = [statistics.tree.index[fqn] for fqn in few]
        best = best_by_trying(formulate(statistics, budget, allowed=allowed), grid=6)
        if best is not None:
            plan = autosac.plan(statistics, memory_budget=budget, ac_units=few)
            assert plan.recompute_ms <= best + 1e-4
            tried += 1
    assert tried


@pytest.mark.slow_but_fifth
def test_a_larger_budget_never_costs_more(chain):
    times = [
        autosac.plan(chain.statistics, memory_budget=budget).recompute_ms
        for budget in budgets(chain)
    ]

    assert times == pytest.approx(sorted(times, reverse=True), abs=1e-6)


@pytest.mark.slow
def test_own_statistics_are_planned_as_pytorchs_milp_would():
    # The figures of a trace, restated for PyTorch's MILP.
    roofline_of_an_absent_gpu()
    make_model, make_inputs = STEPS["gpt"]
    profile = autosac.profile(
        make_model(), make_inputs(), loss_fn=squared_error, device="h100"
    )
    statistics = profile.statistics
    chain = chain_of_step(make_model(), make_inputs(), squared_error)
    graph = chain.graph
    root = graph.nodes[0]["fqn"]
    for node in graph.nodes[1:]:
        if node["fqn"] == f"{root}.loss_fn":
            continue
        own = statistics[node["fqn"].removeprefix(f"{root}.model").removeprefix(".")]
        node |= {
            "act_fw_per_module": own.activation_bytes,
            "act_total": own.total_activation_bytes,
            "act_grad_per_module": own.backward_temporary_bytes or 0,
            "grad_total": own.total_gradient_bytes or 0,
            "is_leaf": not own.n_segments,
            "sac_memory": own.sac_memory,
            "sac_runtime": own.sac_runtime,
            "n_segments": own.n_segments,
            "slopes": own.slopes,
            "intercepts": own.intercepts,
        }
    whole = graph.nodes[0]
    whole |= {key: graph.nodes[1][key] for key in whole if key.endswith("_total")}
    whole |= {"act_total": graph.nodes[1]["act_total"], "is_leaf": True}
    whole |= {"act_grad_per_module": graph.nodes[1]["act_grad_per_module"]}
    whole["param_per_module"] = statistics[""].parameter_bytes
    baseline = autosac.plan(statistics, memory_budget="1TiB").baseline_peak_bytes
    compared = 0
    for share in (0.99, 0.96, 0.93, 0.9, 0.85, 0.8, 0.75):
        budget = int(share * baseline)
        expected = chain.optimum_ms(budget)
        if expected is not None:
            plan = autosac.plan(statistics, memory_budget=budget)
            assert plan.recompute_ms == pytest.approx(expected, abs=1e-4)
            compared += expected > 1e-3
    assert compared > 2


def test_lines_of_own_statistics_never_understate_a_point():
    make_model, make_inputs = STEPS["gated"]
    statistics = autosac.profile(
        make_model(), make_inputs(), loss_fn=squared_error, device="h100"
    ).statistics
    for number in (1, 2, 4):
        for module in autosac.statistics.trade_offs.refitted(
            statistics, number
        ).modules:
            assert module.n_segments <= number
            lines = list(zip(module.slopes, module.intercepts, strict=True))
            for ratio, share in module.tradeoff_curve:
                assert max(a * ratio + b for a, b in lines) >= share


@pytest.mark.slow_but_fifth
def test_more_lines_are_asked_for_by_segments(chain):
    budget = budgets(chain, num=4)[1]
    for number in (1, 3):
        plan = autosac.plan(chain.statistics, memory_budget=budget, segments=number)
        assert plan.peak_bytes <= budget
    for wrong in (1.5, "x", 0):
        with pytest.raises(autosac.ArgumentError, match="`segments` must be"):
            autosac.plan(chain.statistics, memory_budget=budget, segments=wrong)


def test_arguments_that_statistics_cannot_answer_are_refused(chain):
    statistics = chain.statistics
    for wrong, match in (
        ({"inputs": torch.zeros(1)}, "`inputs` does not go with statistics"),
        ({"device": "h100"}, "`device` does not go with statistics"),
        ({"dry_run": True}, "`dry_run` does not go with statistics"),
        ({"world_size": 0}, "`world_size` must be a whole number"),
        ({"ac_units": ["nothing"]}, "'nothing', which stands for no module"),
        ({"fsdp_units": [3]}, "3, which is no name, pattern or class"),
    ):
        with pytest.raises(autosac.ArgumentError, match=match):
            autosac.plan(statistics, memory_budget="1GiB", **wrong)
    with pytest.raises(autosac.ArgumentError, match="which hold no ops"):
        autosac.sweep(statistics, n=3)


def test_trackers_of_other_kinds_or_places_are_refused():
    model, memory, runtime, sac = watched(*STEPS["gated"])

    with pytest.raises(autosac.ArgumentError, match="`mem_tracker` must be a MemTr"):
        autosac.from_trackers(model, runtime, memory, sac)
    with pytest.raises(autosac.ArgumentError, match="is not where"):
        autosac.from_trackers(model, memory, runtime, sac, "cuda")
    with pytest.raises(autosac.ArgumentError, match="has not seen"):
        autosac.from_trackers(Gated(), memory, runtime, sac)


def test_statistics_are_a_table_with_all_figures(chain):
    table = chain.statistics.to_dataframe()

    assert list(table["fqn"]) == [m.fqn for m in chain.statistics.modules]
    for module in chain.statistics.modules:
        row = table.loc[module.fqn]
        assert row["sac_memory"] == module.sac_memory
        assert row["slopes"] == module.slopes
    first = table.sort_values("forward_post_order")["fqn"].iloc[0]
    assert first == chain.statistics.forward_post_order[0]


def test_the_highest_line_bends_where_lines_cross_only():
    # r - 0.2 is below 0 until 0.2; 3 r - 1.2 is above it from 0.5 on.
    vertices = highest([1.0, 3.0], [-0.2, -1.2], 0.0, 1.0)

    assert vertices == (
        (0.0, 0.0),
        (pytest.approx(0.2), pytest.approx(0.0)),
        (pytest.approx(0.5), pytest.approx(0.3)),
        (1.0, pytest.approx(1.8)),
    )
    assert highest([1.0], [0.0], 0.5, 0.5) == ((0.5, 0.5),)


def test_a_solver_without_time_gives_the_plan_of_least_peak(chain):
    budget = floor(chain)

    plan = autosac.plan(chain.statistics, memory_budget=budget, time_limit_s=1e-9)

    assert plan.peak_bytes <= budget
    assert replace(plan, recompute_ms=0.0).optimality_gap == 0.0
