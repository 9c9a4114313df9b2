import operator

import pytest
import torch

from autosac import _compat
from autosac.errors import InfeasibleBudgetError
from autosac.graphs.joint_graphs import joint_graph
from autosac.graphs.plans import GraphPlanner
from autosac.solvers.graph import recomputation
from autosac.verification.measuring import measure_peak
from tests.models import ConvNet, Mlp
from tests.test_joint_graphs import Views

CASES = {
    "dropout": (Mlp, (64, 8)),
    "convolutions": (ConvNet, (4, 3, 16, 16)),
    "views": (Views, (4, 8, 16)),
}
KEYS = ["dropout", "views", pytest.param("convolutions", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=KEYS)
def planner(request, one_thread_throughout):
    torch.manual_seed(0)
    make_model, size = CASES[request.param]
    graph = joint_graph(
        make_model(), torch.randn(size), loss_fn=lambda out: out.square().mean()
    )
    return GraphPlanner(graph)


def budgets(planner, count):
    # The greedy's least peak follows from measured times: it may be above the MILP's.
    low = max(planner.floor(strategy) for strategy in ("milp", "capuchin"))
    high = planner.baseline_peak_bytes
    return [high - (high - low) * k // (count - 1) for k in range(count)]


def run(graph):
    """Results, updated inputs and random state of a run that changes nothing."""
    before = [tensor.detach().clone() for tensor in graph.inputs]
    torch.manual_seed(1)
    results = graph.run()
    after = [tensor.detach().clone() for tensor in graph.inputs]
    with torch.no_grad():
        for tensor, value in zip(graph.inputs, before, strict=True):
            tensor.copy_(value)
    return [*results, *after, torch.get_rng_state()]


@pytest.mark.slow
def test_numbers_of_a_graph_have_its_peak(planner):
    problem = planner.problem

    plain = recomputation.peak_bytes(problem, problem.kept_plainly)

    assert plain == planner.baseline_peak_bytes


@pytest.mark.parametrize("strategy", ["milp", "capuchin"])
def test_real_peak_is_the_predicted_one_and_within_the_budget(planner, strategy):
    peaks = []
    for budget in budgets(planner, 4)[1:-1]:
        plan = planner.plan(budget, strategy=strategy)
        graph = plan.joint
        assert plan.peak_bytes <= budget
        _, measured = measure_peak(
            graph.run,
            device="cpu",
            persistent_bytes=graph.persistent_bytes,
            warm_up=graph.run,
        )
        assert measured == plan.peak_bytes
        peaks.append(measured)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] < planner.baseline_peak_bytes


@pytest.mark.parametrize("strategy", ["milp", "capuchin"])
def test_results_updates_and_random_states_are_bit_identical(planner, strategy):
    expected = run(planner.joint)

    for budget in budgets(planner, 4)[1:-1]:
        plan = planner.plan(budget, strategy=strategy)
        actual = run(plan.joint)
        assert plan.recomputed
        for wanted, got in zip(expected, actual, strict=True):
            assert got is wanted is None or torch.equal(wanted, got)


def test_random_ops_and_updates_run_once(planner):
    plan = planner.plan(planner.lowest[0])

    def once(graph):
        nodes = graph.module.graph.nodes
        return [
            node.target
            for node in nodes
            if node.op == "call_function"
            and (_compat.is_random(node.target) or node.is_impure())
        ]

    assert once(plan.joint) == once(planner.joint)


def test_copies_run_just_before_their_first_use(planner):
    plan = planner.plan(budgets(planner, 3)[1])
    copies = [n for n in plan.joint.module.graph.nodes if n.name.endswith("_again")]

    assert len(copies) >= len(plan.recomputed) > 0
    for node in copies:
        if node.target is operator.getitem:  # may be for later: its op ran for another
            continue
        between = node.next
        while between not in node.users:  # only what is recomputed along with it
            assert "_again" in between.name
            between = between.next


def test_the_milp_is_no_slower_than_the_greedy_and_proves_a_bound(planner):
    for budget in budgets(planner, 4)[1:-1]:
        best = planner.plan(budget, relative_gap=0.0)
        greedy = planner.plan(budget, strategy="capuchin")
        assert best.bound_ms <= best.recompute_ms <= greedy.recompute_ms
        assert 0.0 <= best.optimality_gap <= 0.01  # of kept bytes, which break ties
        assert greedy.optimality_gap is None


def test_an_ample_budget_changes_nothing(planner):
    plan = planner.plan(planner.baseline_peak_bytes)

    assert plan.recomputed == ()
    assert plan.recompute_ms == 0.0
    assert plan.peak_bytes == planner.baseline_peak_bytes


@pytest.mark.parametrize("strategy", ["milp", "capuchin"])
def test_a_budget_that_no_plan_fits_names_one_that_does(planner, strategy):
    with pytest.raises(InfeasibleBudgetError, match="Raise the budget") as raised:
        planner.plan(1000, strategy=strategy)

    lowest = raised.value.lowest_peak_bytes
    assert sum(raised.value.composition.values()) == lowest
    assert planner.plan(lowest, strategy=strategy).peak_bytes <= lowest


def test_an_unknown_strategy_is_an_error(planner):
    with pytest.raises(ValueError, match="must be 'milp' or 'capuchin', got 'best'"):
        planner.plan("1GiB", strategy="best")
