"""Graphs that move what forward keeps to far memory: peaks, bits, and what is left."""

import gc
import re
import time
from functools import partial

import pytest
import torch
from torch import nn

import autosac
from autosac import far_memory
from autosac.devices.links import Link
from autosac.errors import ArgumentError, InfeasibleBudgetError, UnsupportedError
from autosac.graphs import far_nodes
from autosac.graphs.joint_graphs import joint_graph
from autosac.graphs.plans import GraphPlanner
from autosac.verification.measuring import differences, measure_peak
from tests.models import ConvNet, Mlp
from tests.test_compiling import fresh_compiler, limits, made, step, trained, unplanned
from tests.test_graph_plans import mean_square, run

__all__ = ["fresh_compiler"]
pytestmark = pytest.mark.usefixtures("one_thread_throughout")
RATES = (None, 1e8)  # bytes per second
FAST = Link(out_bytes_per_s=1e12, back_bytes_per_s=1e12)  # moves what it may


class ManyViews(nn.Module):
    """Backward reads transposed, split and flattened views of what forward makes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        for layer in self.layers:
            query, key, value = layer(x).split(16, -1)
            mixed = (query @ key.transpose(-1, -2)).softmax(-1) @ value
            x = torch.tanh(mixed.flatten(1)).view(mixed.shape) + x
            x = torch.relu_(x)
        return x


CASES = {
    "dropout": (Mlp, (64, 8)),
    "views": (ManyViews, (32, 8, 16)),
    "convolutions": (partial(ConvNet, 1), (4, 3, 16, 16)),
}
KEYS = ["dropout"]
KEYS += [pytest.param(k, marks=pytest.mark.slow) for k in ("views", "convolutions")]


@pytest.fixture(scope="module", params=KEYS)
def planner(request, one_thread_throughout):
    torch.manual_seed(0)
    make_model, size = CASES[request.param]
    graph = joint_graph(make_model(), torch.randn(size), loss_fn=mean_square)
    return GraphPlanner(graph, link=FAST)


@pytest.fixture(scope="module")
def budgets(planner):
    """From the floor with offload over that without up to the peak."""
    low, floor = (planner.floor("milp", offload=flag) for flag in (True, False))
    high = planner.baseline_peak_bytes
    assert low < floor < high
    return [low, (low + floor) // 2, floor, (floor + high) // 2, high - 1, high]


def peaks(plan):
    """Real peaks, with copies as fast as can be, and held up."""
    found = []
    for rate in RATES:
        plan.far_memory.bytes_per_s = rate
        _, peak = measure_peak(
            plan.joint.run,
            device="cpu",
            persistent_bytes=plan.joint.persistent_bytes,
            warm_up=plan.joint.run,
        )
        found.append(peak)
    plan.far_memory.bytes_per_s = None
    return found


def assert_empties(memory):
    """Nothing is in use once the copies that still run have ended."""
    gc.collect()
    deadline = time.monotonic() + 60
    while memory.in_use_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert memory.in_use_bytes == 0


@pytest.mark.slow
def test_real_peaks_are_the_predicted_ones_at_any_rate_and_bits_are_equal(
    planner, budgets
):
    for budget in budgets[:-1]:
        expected = run(planner.joint)
        plan = planner.plan(budget, offload=True)
        assert plan.offloaded_bytes > 0
        for wanted, got in zip(expected, run(plan.joint), strict=True):
            assert got is wanted is None or torch.equal(wanted, got)
        assert peaks(plan) == [plan.peak_bytes] * len(RATES)
        assert plan.peak_bytes <= budget
        # Storages move once, however many views of them backward reads.
        assert plan.far_memory.peak_bytes == plan.offloaded_bytes
        assert_empties(plan.far_memory)


@pytest.mark.slowest_but_first
def test_no_plan_is_dearer_than_without_or_for_less_memory(planner, budgets):
    before_ms = float("inf")
    for budget in budgets:
        far = planner.plan(budget, offload=True)
        assert far.bound_ms <= far.recompute_ms <= before_ms
        assert 0.0 <= far.exposed_ms <= far.recompute_ms
        before_ms = far.recompute_ms
        if budget >= budgets[2]:
            plain = planner.plan(budget)
            assert far.recompute_ms <= plain.recompute_ms
            assert plain.far_memory is None and not plain.offloaded_bytes
    assert far.offloaded == () and far.far_memory is None  # with an ample budget


def test_a_budget_below_the_floor_with_offload_names_one_that_fits(planner, budgets):
    with pytest.raises(InfeasibleBudgetError) as raised:
        planner.plan(budgets[0] // 2, offload=True)

    assert raised.value.lowest_peak_bytes == budgets[0]


def test_who_does_not_offload_is_told_what_it_would_reach(planner, budgets):
    with pytest.raises(InfeasibleBudgetError, match="With `offload`=True") as raised:
        planner.plan(budgets[0] // 2)

    (said,) = re.findall(r"`offload`=True (\d+) bytes", str(raised.value))
    assert budgets[0] <= int(said) < raised.value.lowest_peak_bytes
    assert planner.plan(int(said), offload=True).peak_bytes <= int(said)


@pytest.mark.slow
def test_far_memory_holds_no_more_than_the_host_budget(planner, budgets):
    floor = budgets[2]
    free = planner.plan(floor, offload=True)
    capped = planner.plan(floor, offload=True, host_budget=free.offloaded_bytes // 2)
    none = planner.plan(floor, offload=True, host_budget=1)

    assert 2 * capped.offloaded_bytes <= free.offloaded_bytes
    assert free.recompute_ms <= capped.recompute_ms <= none.recompute_ms
    assert none.offloaded_bytes == 0
    assert planner.floor("milp", offload=True, host_budget=1) == floor


def test_a_slow_link_makes_plans_dearer(planner, budgets):
    times = []
    for gb_per_s in (0.001, 1000):
        rate = 1e9 * gb_per_s
        link = Link(out_bytes_per_s=rate, back_bytes_per_s=rate)
        other = GraphPlanner(planner.joint, link=link)
        times.append(other.plan(budgets[2], offload=True).recompute_ms)
    assert times[0] > times[1]


def nodes_of(plan, target):
    return [n for n in plan.joint.module.graph.nodes if n.target is target]


def test_what_has_time_to_come_back_is_fetched_before_it_is_read(planner, budgets):
    plan = planner.plan(budgets[3], offload=True)
    arrivals = nodes_of(plan, far_nodes.arrive)

    assert len(arrivals) == len(plan.offloaded)
    assert any(node.args[1].next is not node for node in arrivals)


@pytest.mark.slow
def test_a_step_with_its_optimizer_is_the_same_with_values_moved(one_thread):
    def captured():
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
        model = nn.Sequential(*layers)
        return joint_graph(
            model,
            torch.randn(512, 32),
            loss_fn=mean_square,
            optimizer=torch.optim.AdamW,
        )

    plain = captured()
    plain.run()
    planner = GraphPlanner(captured(), link=FAST)
    plan = planner.plan(planner.floor("milp", offload=True), offload=True)
    plan.joint.run()

    assert plan.offloaded_bytes > 0 and plan.peak_bytes < planner.floor("milp")
    pairs = zip(plain.inputs, plan.joint.inputs, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert peaks(plan) == [plan.peak_bytes] * len(RATES)


@pytest.mark.slow
def test_results_and_inputs_are_not_moved():
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    model, x = Returns(), torch.randn(64, 32)
    graph = joint_graph(model, x, loss_fn=mean_square)
    planner = GraphPlanner(graph)
    plan = planner.plan(planner.floor("milp", offload=True), offload=True)
    sent = [n for n in plan.joint.module.graph.nodes if n.op == "call_function"
            and isinstance(n.target, far_nodes.Send)]  # fmt: skip

    results = plan.joint.module.graph.output_node().args[0]
    assert sent
    assert all(n.args[0].op == "call_function" for n in sent)
    assert not {n.args[0] for n in sent} & set(results)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "auto"}, "`offload` must be True or False, got 'auto'"),
        ({"offload": True, "strategy": "capuchin"}, "needs `strategy`='milp'"),
        ({"offload": True, "offload_dir": "/no/such"}, "is no directory"),
        ({"offload": True, "host_budget": "much"}, "`host_budget`"),
        ({"host_budget": "1MiB"}, "caps what is offloaded, and nothing is"),
    ],
)
def test_wrong_arguments_are_errors(options, message):
    with pytest.raises(ArgumentError, match=message):
        autosac.compile(nn.Linear(2, 2), memory_budget="1GiB", **options)


def test_a_graph_that_offloads_already_is_not_planned_again(planner, budgets):
    plan = planner.plan(budgets[0], offload=True)

    with pytest.raises(ArgumentError, match="offloads already"):
        GraphPlanner(plan.joint)


def test_a_backend_that_orders_ops_anew_is_refused():
    with pytest.raises(UnsupportedError, match="needs `backend`='aot_eager'"):
        autosac.compile(
            nn.Linear(2, 2), memory_budget="1GiB", backend="inductor", offload=True
        )


# --- compiled models --------------------------------------------------------------


def compiled_at_floor(kind="dropout"):
    low, _ = limits(kind, "aot_eager", offload=True)
    torch.compiler.reset()
    model, inputs = made(kind)
    return autosac.compile(model, memory_budget=low, offload=True), model, inputs


def memory_of(compiled):
    (plan,) = autosac.compiled_plans(compiled)
    return plan.graph.far_memory


@pytest.mark.slowest_but_first
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", ["dropout", "convolutions"])
def test_compiled_steps_keep_budgets_below_the_floor_with_every_bit(kind):
    expected = unplanned(kind)
    low, _ = limits(kind, "aot_eager", offload=True)
    floor, _ = limits(kind, "aot_eager")
    assert low < floor
    for budget in (low, (low + floor) // 2)[: 1 if kind == "convolutions" else 2]:
        torch.compiler.reset()
        model, inputs = made(kind)
        compiled = autosac.compile(model, memory_budget=budget, offload=True)
        found = []
        for rate in RATES:
            if rate is not None:
                memory_of(compiled).bytes_per_s = rate
                memory_of(compiled).at_once_bytes = 0  # threads copy
                model.load_state_dict(made(kind)[0].state_dict())
            state, peak = trained(compiled, model, inputs)
            (plan,) = autosac.compiled_plans(compiled)
            assert peak == plan.peak_bytes <= budget
            assert differences(expected, state) == ()
            assert plan.graph.offloaded_bytes == memory_of(compiled).peak_bytes > 0
            found.append(peak)
        assert len(set(found)) == 1


def no_backward(compiled, model, inputs):
    compiled(inputs)


def evaluates(compiled, model, inputs):
    with torch.no_grad():
        compiled(inputs)


def fails_in_forward(compiled, model, inputs):
    memory = memory_of(compiled)
    memory.send, send = None, memory.send
    try:
        with pytest.raises(TypeError):
            compiled(inputs)
    finally:
        memory.send = send


def fails_in_backward(compiled, model, inputs):
    def fail(self, target):
        raise ZeroDivisionError

    loss = compiled(inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(far_memory.Sent, "fetch", fail)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    # PyTorch itself holds a part of the graph that failed until the next backward pass.
    torch.ones(1, requires_grad=True).sum().backward()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_nothing_stays_in_far_memory_and_the_next_step_is_as_ever():
    compiled, model, inputs = compiled_at_floor()
    first = step(compiled, model, inputs)
    gradients = [p.grad.clone() for p in model.parameters()]
    memory = memory_of(compiled)
    assert_empties(memory)

    for leave in (no_backward, evaluates, fails_in_forward, fails_in_backward):
        model.zero_grad()
        leave(compiled, model, inputs)
        assert_empties(memory)

        again = step(compiled, model, inputs)
        assert torch.equal(first, again)
        pairs = zip(gradients, model.parameters(), strict=True)
        assert all(torch.equal(one, other.grad) for one, other in pairs)
        assert_empties(memory)
        assert memory.pooled_bytes == memory.peak_bytes  # buffers are used again


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@torch._functorch.config.patch(donated_buffer=False)  # else PyTorch refuses the second
def test_two_backward_passes_get_the_same_values_twice():
    compiled, model, inputs = compiled_at_floor()
    step(compiled, model, inputs)
    once = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)

    loss = compiled(inputs)
    loss.backward(retain_graph=True)
    loss.backward()

    pairs = zip(once, model.parameters(), strict=True)
    assert all(torch.equal(2 * one, other.grad) for one, other in pairs)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_hooks_that_replace_what_is_saved_are_refused_in_a_sentence():
    compiled, _, inputs = compiled_at_floor()

    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        loss = compiled(inputs)
        with pytest.raises(UnsupportedError, match="hooks on saved tensors"):
            loss.backward()
