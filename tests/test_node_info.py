"""Figures of single nodes: of functions, of FX graphs and of joint graphs."""

import operator
from bisect import bisect_right
from collections import defaultdict

import pytest
import torch
from torch import fx, nn
from torch.nn import functional
from torch.profiler import record_function
from torch.utils.flop_counter import FlopCounterMode

import autosac
from autosac.devices.allocator_events import cpu_events, recorded_events
from autosac.graphs.joint_graphs import joint_graph
from autosac.pytrees import tensors_in
from tests.models import ConvNet
from tests.test_analyzing import GPT, measured, most_alive

FIGURES = ("fwd_flop", "bwd_flop", "fwd_mem_in", "fwd_mem_tmp")
FIGURES += ("bwd_mem_tmp", "bwd_mem_out")


def figures(info):
    return {name: getattr(info, name) for name in FIGURES}


class Residual(nn.Module):
    """Modules, functions, methods, a residual, a parameter, a norm called twice."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(16, 32)
        self.outward = nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        hidden = functional.gelu(self.inward(x))
        y = self.norm(x + self.outward(hidden)).relu() * self.scale
        return torch.softmax(self.norm(y) @ y.transpose(0, 1), -1)


def rows():
    return torch.randn(8, 16)


# --- functions --------------------------------------------------------------------


def test_a_function_counts_by_hand():
    # GELU saves its argument and makes one gradient: 8 * 16 floats each.
    info = autosac.graph_info(functional.gelu, rows()).total

    assert figures(info) == {
        "fwd_flop": 0,
        "bwd_flop": 0,
        "fwd_mem_in": 512,
        "fwd_mem_tmp": 0,
        "bwd_mem_tmp": 0,
        "bwd_mem_out": 512,
    }
    assert info.class_name == "gelu"


def attention(x):
    return torch.softmax(x @ x.transpose(0, 1), -1) @ x


FUNCTIONS = {
    "gelu": functional.gelu,
    "softmax": lambda x: torch.softmax(x, -1),
    "sigmoid": torch.sigmoid,
    "attention": attention,
    "residual": lambda x: x + functional.silu(x).square(),
}


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bytes_of_a_function_are_those_that_the_allocator_measures(name, one_thread):
    class Module(nn.Module):
        def forward(self, x):
            return FUNCTIONS[name](x)

    x = rows().requires_grad_()
    seeds = [torch.randn_like(t) for t in tensors_in(FUNCTIONS[name](x))]

    info = autosac.graph_info(FUNCTIONS[name], x, calibrate=True).total

    kept, left, peak, temporary = measured(Module(), (x,), seeds)
    actual = info.fwd_mem_tmp, info.bwd_mem_out, info.bwd_mem_peak, info.bwd_mem_tmp
    assert actual == (kept, left, peak, temporary)


def test_marked_inputs_of_a_function_alone_get_gradients():
    x, y = rows(), rows().requires_grad_()

    both = autosac.graph_info(torch.mul, (x, x.clone())).total
    one = autosac.graph_info(torch.mul, (x, y)).total

    assert both.bwd_mem_out == 2 * one.bwd_mem_out == 2 * x.nbytes


def test_what_is_no_module_function_or_graph_is_refused():
    with pytest.raises(TypeError, match="a module, a function or an FX graph, got str"):
        autosac.graph_info("gelu", rows())


# --- FX graphs --------------------------------------------------------------------


def test_every_call_of_a_graph_has_figures():
    graph = fx.symbolic_trace(Residual())
    info = autosac.graph_info(graph, rows())

    calls = [n.name for n in graph.graph.nodes if n.op.startswith("call")]
    assert {one.fqn for one in info.modules if one.depth <= 1} == {"", *calls}
    assert info["add"].bwd_mem_out == 0  # hands the gradient on as it is
    assert info["norm"].fwd_mem_in == info["norm_1"].fwd_mem_in == 512
    assert info["norm_1"].bwd_mem_out >= 512
    assert autosac.graph_info(graph.graph, rows()) == info


def test_a_graph_has_the_figures_of_its_module_in_all(one_thread):
    model = Residual()

    of_nodes = autosac.graph_info(fx.symbolic_trace(model), rows()).total

    assert figures(of_nodes) == figures(autosac.graph_info(model, rows()).total)


def test_a_function_has_the_same_figures_in_a_graph_and_alone(one_thread):
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return torch.softmax(functional.silu(functional.gelu(self.linear(x))), -1)

    info = autosac.graph_info(fx.symbolic_trace(Chain()), rows())

    for name in ("gelu", "silu"):
        alone = autosac.graph_info(getattr(functional, name), rows()).total
        assert figures(info[name]) == figures(alone)


def test_nodes_say_their_stage():
    info = autosac.graph_info(functional.gelu, rows())

    for node in info.nodes:
        predicates = {
            "placeholder": node.is_placeholder,
            "forward": node.is_forward,
            "loss": node.is_loss,
            "backward": node.is_backward,
        }
        assert [name for name, holds in predicates.items() if holds] == [node.stage]
    assert [node.name for node in info.nodes if node.is_saved] == ["input"]


# --- joint graphs -----------------------------------------------------------------


def small_gpt():
    return GPT(num_layers=2, width=32, num_heads=4, vocabulary=64, length=16)


STEPS = {
    "residual": (Residual, rows),
    "convolutions": (ConvNet, lambda: torch.randn(2, 3, 10, 10)),
    "gpt": (small_gpt, lambda: torch.randint(64, (2, 16))),
}


CASES = ["residual", "convolutions", pytest.param("gpt", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=CASES)
def step(request, one_thread_throughout):
    torch.manual_seed(0)
    make_model, make_inputs = STEPS[request.param]
    model, inputs = make_model(), make_inputs()
    graph = joint_graph(model, inputs, loss_fn=mean_square)
    return model, inputs, graph, graph.graph_info()


def mean_square(output):
    return output.square().mean()


@pytest.mark.slow_but_fifth
def test_flops_of_nodes_are_those_that_pytorch_counts(step):
    model, inputs, _, infos = step

    with FlopCounterMode(display=False) as forward:
        loss = mean_square(model(inputs))
    with FlopCounterMode(display=False) as backward:
        loss.backward()

    assert sum(one.fwd_flop for one in infos) == forward.get_total_flops() > 0
    assert sum(one.bwd_flop for one in infos) == backward.get_total_flops() > 0


class Saving(fx.Interpreter):
    """Runs forward nodes under autograd: which saves what of its arguments, or made?

    Attributes:
        saved: Node -> bytes of arguments and of results that autograd saves for it.
    """

    def __init__(self, graph):
        super().__init__(graph.module)
        self.saved = {}
        self.stages = graph.stages
        self.names = dict(
            zip(
                graph.module.graph.find_nodes(op="placeholder"),
                graph.input_names,
                strict=True,
            )
        )
        self.differentiable = set()
        self.own = set()

    def run_node(self, n):
        self.node = n
        out = super().run_node(n)
        name = self.names.get(n, "")
        if name.startswith("parameter"):
            self.differentiable.add(n)
        if name.startswith(("parameter", "buffer")):
            self.own.add(out.untyped_storage()._cdata)
        return out

    def call_function(self, target, args, kwargs):
        node = self.node
        wanted = {a for a in node.all_input_nodes if a in self.differentiable}
        is_forward = self.stages.get(node) in ("forward", "loss")
        if not (wanted and is_forward) or target is operator.getitem:
            if wanted:
                self.differentiable.add(node)
            return super().call_function(target, args, kwargs)
        marked = {a: self.env[a] for a in node.all_input_nodes}
        for argument in wanted:
            if isinstance(marked[argument], torch.Tensor) and (
                marked[argument].is_floating_point()
            ):
                marked[argument] = marked[argument].detach().requires_grad_()
        known = {t.untyped_storage()._cdata for t in tensors_in(list(marked.values()))}
        before, made = {}, {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            is_number = tensor.dim() == 0 and storage.nbytes() == 8
            if storage._cdata not in self.own and not is_number:
                kind = before if storage._cdata in known else made
                kind[storage._cdata] = tensor
            return tensor

        arguments, keywords = fx.map_arg((node.args, node.kwargs), marked.__getitem__)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with torch.enable_grad(), hooks:
            out = target(*arguments, **keywords)
        if any(t.requires_grad for t in tensors_in(out)):
            self.differentiable.add(node)
        self.saved[node.name] = tuple(
            sum(t.untyped_storage().nbytes() for t in kind.values())
            for kind in (before, made)
        )
        return torch.utils._pytree.tree_map(
            lambda t: t.detach() if isinstance(t, torch.Tensor) else t, out
        )


@pytest.mark.slow_but_fifth
def test_saved_bytes_of_nodes_are_those_that_autograd_saves(step):
    *_, graph, infos = step
    run = Saving(graph)
    with torch.no_grad():
        run.run(*graph.inputs)

    compared = 0
    for one in infos:
        if one.fwd_mem_in or one.fwd_mem_tmp:
            before, made = run.saved[one.name]
            if "batch_norm" in one.op:  # captured backward is given the new statistics
                made *= 2  # of this batch and running ones: as many
            assert (one.fwd_mem_in, one.fwd_mem_tmp) == (before, made), one.name
            compared += 1
    assert compared > 3


class Marked(fx.Interpreter):
    def run_node(self, n):
        with record_function(f"test::{n.name}"):
            return super().run_node(n)


def allocations(graph):
    """Node -> birth, death and size of all that is allocated while it runs."""
    with torch.no_grad():
        Marked(graph.module).run(*graph.inputs)
        with cpu_events() as recording:
            Marked(graph.module).run(*graph.inputs)
    marks, events = [], []
    for event in recorded_events(recording):
        kind, fields = event.typed
        if kind.name == "Allocation":
            events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name.startswith("test::"):
            name = event.name.removeprefix("test::")
            marks.append((event.start_time_ns, event.end_time_ns, name))
    marks.sort()
    starts = [start for start, _, _ in marks]
    spans, live = defaultdict(list), {}
    for time, address, size in sorted(events):
        if size > 0:
            live[address] = (time, size)
        elif address in live:
            born, size = live.pop(address)
            place = bisect_right(starts, born) - 1
            if place >= 0 and born <= marks[place][1]:
                spans[marks[place][2]].append((born, time, size))
    for born, size in live.values():
        place = bisect_right(starts, born) - 1
        if place >= 0:
            spans[marks[place][2]].append((born, float("inf"), size))
    next_start = dict(
        zip((name for *_, name in marks), [*starts[1:], float("inf")], strict=True)
    )
    return spans, next_start


# Inside, they make and drop things before their results are there: workspaces, which
# count beside the results, say less.
KERNELS = ("convolution", "native_dropout")


def test_bytes_of_nodes_are_those_that_the_allocator_measures(step):
    *_, graph, infos = step
    spans, next_start = allocations(graph)
    belonging = defaultdict(list)
    for one in infos:
        belonging[one.differentiates].append(one.name)

    compared = 0
    for one in infos:
        if one.is_placeholder or one.op == str(operator.getitem):
            continue
        after = next_start[one.name]
        own = [s for s in spans[one.name] if s[1] > after or one.made_bytes == 0]
        if one.made_bytes:
            assert sum(size for *_, size in own) == one.made_bytes, one.name
        names = belonging[one.name]
        if not (one.is_forward or one.is_loss) or not names:
            continue
        end = max(next_start[name] for name in names)
        made = [span for name in names for span in spans[name]]
        left = [span for span in made if span[1] > end]
        stayed = [span for span in made if span[1] <= end]
        assert sum(size for *_, size in left) == one.bwd_mem_out, one.name
        assert most_alive(made) == one.bwd_mem_peak, one.name
        if one.name.startswith(KERNELS):
            assert one.bwd_mem_tmp <= most_alive(stayed), one.name
        else:
            assert one.bwd_mem_tmp == most_alive(stayed), one.name
        compared += 1
    assert compared > 3


def test_a_backward_node_names_what_it_differentiates(step):
    *_, graph, infos = step
    stage = {one.name: one.stage for one in infos}

    named = [one for one in infos if one.differentiates]
    assert named
    for one in named:
        assert one.is_backward and stage[one.differentiates] in ("forward", "loss")
    assert all(figures(one) == figures(named[0]) for one in named)  # zeros
    products = {one.name for one in infos if one.fwd_flop}
    assert {
        one.differentiates for one in infos if one.is_backward and one.flop
    } == products
    assert len(infos) == len(graph.stages)
