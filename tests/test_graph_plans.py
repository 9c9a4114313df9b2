import operator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import fx, nn

import autosac
from autosac import _compat
from autosac.errors import InfeasibleBudgetError, UnsupportedError
from autosac.graphs import known_plans
from autosac.graphs.joint_graphs import given_graph, joint_graph
from autosac.graphs.plans import GraphPlanner
from autosac.solvers.graph import least_peak, recomputation
from autosac.verification.measuring import measure_peak
from tests.models import ConvNet, Mlp
from tests.test_joint_graphs import Views

CASES = {
    "dropout": (Mlp, (64, 8)),
    "convolutions": (partial(ConvNet, 1), (4, 3, 16, 16)),
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


@pytest.mark.slow_but_first
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


@pytest.mark.slow_but_fifth
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


@torch.library.custom_op("autosac_tests::rustling", mutates_args=())
def rustling(x: torch.Tensor) -> torch.Tensor:
    """Noise without a tag that says so."""
    return x * torch.rand_like(x)


rustling.register_fake(torch.empty_like)
rustling.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Rustling(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = rustling(layer(x).tanh()).sin()
        return x


def test_ops_that_may_draw_run_once(one_thread):
    torch.manual_seed(0)
    graph = joint_graph(Rustling(), torch.randn(64, 16), loss_fn=mean_square)
    planner = GraphPlanner(graph)
    expected = run(planner.joint)

    plan = planner.plan(planner.lowest[0])

    assert plan.recomputed
    for wanted, got in zip(expected, run(plan.joint), strict=True):
        assert got is wanted is None or torch.equal(wanted, got)


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


@pytest.mark.slow_but_fifth
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


# --- plans that know of others -----------------------------------------------------


def budgets_between(planner, count):
    low, high = planner.lowest[0], planner.baseline_peak_bytes
    return [low + (high - low) * k // count for k in range(1, count)]


@pytest.mark.slow_but_first
def test_a_larger_budget_is_never_dearer_and_bounds_agree(planner):
    plans = [planner.plan(budget) for budget in budgets_between(planner, 6)]

    costs = [plan.recompute_ms for plan in plans]
    assert costs == sorted(costs, reverse=True)
    for plan, smaller in zip(plans[1:], plans, strict=False):
        assert plan.bound_ms <= plan.recompute_ms
        assert smaller.bound_ms <= smaller.recompute_ms


def test_a_plan_takes_no_more_than_one_that_was_made_for_less(planner):
    small, large = budgets_between(planner, 3)
    found = planner.plan(small, relative_gap=0.0)

    loose = GraphPlanner(planner.joint).plan(large, relative_gap=1.0)

    assert loose.recompute_ms <= found.recompute_ms


@pytest.mark.slow
def test_who_begins_anew_has_the_same_plan_whatever_was_planned_before(one_thread):
    # Else what is said to be the least real peak of fused graphs is so but once.
    make_model, size = CASES["convolutions"]
    graph = joint_graph(make_model(), torch.randn(size), loss_fn=torch.sum)
    usual, anew = GraphPlanner(graph), GraphPlanner(graph, begins_anew=True)
    times = tuple(float(1 + 7 * i % 11) for i in range(len(usual.problem.runtime_ms)))
    usual.problem = anew.problem = replace(usual.problem, runtime_ms=times)
    budgets = budgets_between(usual, 12)

    def loose(planner):
        plans = [planner.plan(budget, relative_gap=1.0) for budget in budgets]
        return [plan.recompute_ms for plan in plans]

    first = loose(anew)
    for budget in budgets:
        usual.plan(budget, relative_gap=0.0)

    assert loose(usual) != first
    assert loose(anew) == first


@pytest.mark.slow
@pytest.mark.parametrize("planner", KEYS[:2], indirect=True, scope="module")
def test_both_backends_prove_the_same_optimum(planner):
    (budget,) = budgets_between(planner, 2)
    other = GraphPlanner(planner.joint, backend="cbc")

    plans = [p.plan(budget, relative_gap=0.0) for p in (planner, other)]

    assert plans[0].recompute_ms == pytest.approx(plans[1].recompute_ms, rel=1e-3)


def test_an_unknown_backend_is_an_error(planner):
    with pytest.raises(ValueError, match="must be 'highs' or 'cbc', got 'glpk'"):
        GraphPlanner(planner.joint, backend="glpk")
    with pytest.raises(ValueError, match="`solver` must be 'highs' or 'cbc'"):
        autosac.compile(nn.Linear(2, 2), memory_budget="1GiB", solver="glpk")


class Loops(nn.Module):
    """Blocks, one of which is called twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())
            for _ in range(3)
        )

    def forward(self, x):
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        return x


def mean_square(output):
    return output.square().mean()


@pytest.mark.slow
def test_a_plan_of_modules_is_a_start_that_is_never_missed(one_thread):
    torch.manual_seed(0)
    model, x = Loops(), torch.randn(256, 32)
    planner = GraphPlanner(joint_graph(model, x, loss_fn=mean_square))
    profile = autosac.profile(model, x, loss_fn=mean_square)
    floor, high = autosac.floor(profile), profile.baseline_peak_bytes

    for share in (0.8, 0.5, 0.3):
        plan = autosac.plan(profile, memory_budget=int(floor + (high - floor) * share))
        kept = planner.kept_by(plan)
        peak = recomputation.peak_bytes(planner.problem, kept)
        own = recomputation.recompute_ms(planner.problem, kept)
        assert plan.policy and own > 0.0
        # It keeps what the units keep: in the graph the same choice is as high, but for
        # what eager steps do otherwise.
        assert peak == pytest.approx(plan.peak_bytes, rel=0.1)

        found = planner.plan(peak, modules=plan, relative_gap=1.0)
        assert found.recompute_ms <= own
        assert found.peak_bytes <= peak


@pytest.mark.slow
def test_what_never_runs_twice_is_kept_by_a_start_of_modules(one_thread):
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
    ]
    model, x = nn.Sequential(*blocks), torch.randn(256, 32)
    planner = GraphPlanner(joint_graph(model, x, loss_fn=mean_square))
    profile = autosac.profile(model, x, loss_fn=mean_square)

    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))

    kept = planner.kept_by(plan)
    assert planner.problem.pinned
    assert recomputation.recompute_ms(planner.problem, kept) > 0.0


# --- graphs of one's own -----------------------------------------------------------


def forward_and_backward(x, weight, bias):
    hidden = x @ weight
    active = torch.relu(hidden)
    wave = active.sin()
    loss = (wave * wave).sum() + bias.sum()
    gradient = 2 * wave * active.cos() * (hidden > 0)
    return loss, x.T @ gradient, torch.ones_like(bias)


def test_a_graph_of_the_users_own_is_planned_and_measured(one_thread):
    inputs = torch.randn(128, 64), torch.randn(64, 256), torch.randn(3)
    graph = given_graph(
        fx.symbolic_trace(forward_and_backward), inputs, num_forward_outputs=1
    )
    expected = forward_and_backward(*inputs)
    planner = GraphPlanner(graph)

    assert planner.lowest[0] < planner.baseline_peak_bytes
    for budget in (planner.baseline_peak_bytes, planner.lowest[0]):
        plan = planner.plan(budget)
        results, measured = measure_peak(
            plan.joint.run,
            device="cpu",
            persistent_bytes=plan.joint.persistent_bytes,
            warm_up=plan.joint.run,
        )
        assert measured == plan.peak_bytes <= budget
        assert all(map(torch.equal, results, expected))
    assert plan.recomputed


def test_modules_and_parameters_of_a_given_graph_are_inputs(one_thread):
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.inward, self.outward = nn.Linear(16, 64), nn.Linear(64, 4)

        def forward(self, x):
            hidden = torch.relu_(self.inward(x).sin())
            loss = self.outward(hidden).sum()
            return {"loss": loss}, hidden.sum(0).expand(4, 64)

    module, x = fx.symbolic_trace(Step()), torch.randn(64, 16)
    graph = given_graph(module, x, num_forward_outputs=1)

    with torch.no_grad():
        (loss, gradient) = module(x)
    assert torch.equal(graph.run()[0], loss["loss"])
    assert torch.equal(graph.run()[1], gradient)
    assert graph.persistent_bytes == sum(t.nbytes for t in (x, *module.parameters()))


def test_what_is_no_step_is_refused():
    x = torch.randn(4, 4)
    graph = fx.symbolic_trace(lambda x: (x.sin(), x.cos()))

    with pytest.raises(TypeError, match=r"must be an `fx.GraphModule`, got Linear"):
        given_graph(nn.Linear(4, 4), x, num_forward_outputs=1)
    with pytest.raises(TypeError, match="a tensor or a tuple of tensors"):
        given_graph(graph, (x, 2), num_forward_outputs=1)
    with pytest.raises(ValueError, match="`num_forward_outputs`=2 must be from 1 to 1"):
        given_graph(graph, x, num_forward_outputs=2)


# --- recurrent layers --------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.layer(x)[0])


@pytest.mark.slowest_but_first
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_captured_as_plain_ops(kind, one_thread):
    torch.manual_seed(0)
    model, x = Recurrent(kind), torch.randn(8, 2, 16)
    was_enabled = torch.backends.mkldnn.enabled
    graph = joint_graph(model, x, loss_fn=mean_square)
    assert torch.backends.mkldnn.enabled == was_enabled
    planner = GraphPlanner(graph)
    plan = planner.plan((planner.lowest[0] + planner.baseline_peak_bytes) // 2)

    results, planned = graph.run(), plan.joint.run()
    loss = mean_square(model(x))
    loss.backward()

    assert plan.recomputed
    for one, other in zip(results, planned, strict=True):
        assert one is other is None or torch.equal(one, other)
    torch.testing.assert_close(results[0], loss.detach())
    gradients = results[graph.num_forward_outputs :]
    parameters = dict(model.named_parameters())
    names = [name.removeprefix("parameter ") for name in graph.input_names]
    pairs = zip(names, gradients, strict=False)
    for name, gradient in pairs:
        if gradient is not None:
            torch.testing.assert_close(gradient, parameters[name].grad)


def test_compiling_a_recurrent_layer_is_refused_in_a_sentence():
    with pytest.raises(UnsupportedError, match=r"`layer` is an `nn\.GRU`, which"):
        autosac.compile(Recurrent(nn.GRU), memory_budget="1GiB")


@pytest.mark.slow
def test_a_budget_below_what_is_proven_is_refused_without_a_search(
    monkeypatch, one_thread
):
    torch.manual_seed(0)
    graph = joint_graph(ConvNet(), torch.randn(4, 3, 16, 16), loss_fn=mean_square)
    planner = GraphPlanner(graph)
    floor_bytes = planner.floor("milp")
    assert planner.floor_bound_bytes <= floor_bytes
    assert planner.plan(floor_bytes).peak_bytes == floor_bytes

    monkeypatch.delattr(known_plans, "solved")  # the search
    with pytest.raises(InfeasibleBudgetError, match=str(floor_bytes)) as refused:
        planner.plan(planner.floor_bound_bytes - 1)

    assert refused.value.lowest_peak_bytes == floor_bytes


@pytest.mark.slow
def test_a_budget_between_the_bound_and_the_floor_is_looked_for(
    monkeypatch, one_thread
):
    torch.manual_seed(0)
    make_model, size = CASES["convolutions"]
    graph = joint_graph(
        make_model(), torch.randn(size), loss_fn=lambda out: out.square().mean()
    )
    planner = GraphPlanner(graph)
    low_bytes, _ = planner.lowest
    known_plans.lowest.cache_clear()
    known_plans.known.cache_clear()
    for name in ("relax", "jump", "branch"):  # the floor of the greedy stays
        monkeypatch.setattr(least_peak.LeastPeakSearch, name, lambda *_, **__: None)
    planner = GraphPlanner(graph)
    assert planner.floor_bound_bytes <= low_bytes < planner.floor("milp")

    assert planner.plan(low_bytes).peak_bytes <= low_bytes
    known_plans.lowest.cache_clear()
