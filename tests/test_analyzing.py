import gc
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import autosac
from autosac.cli.demo import GPT
from autosac.devices.allocator_events import (
    cpu_events,
    recorded_events,
)
from autosac.errors import TraceError
from autosac.profiles.module_graph import ModuleInfo
from autosac.pytrees import tensors_in
from autosac.step.training_step import default_loss, normalize_inputs
from tests.models import CASES, ConvNet

BACKWARD = "test::backward"


def two_layers():
    return nn.Sequential(
        nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False)
    )


def test_two_linear_layers_count_by_hand():
    # Batch 8, widths 16 -> 32 -> 4, float32: input 512, hidden 1024, output 128 bytes;
    # weights 2048 and 512 bytes; products of 8192 and 2048 FLOPs.
    info = autosac.graph_info(two_layers(), torch.randn(8, 16))

    # The gradients of the hidden layer, after and before ReLU, live together while ReLU
    # goes backward. At the peak one of them lives, with the weights' gradients.
    assert info.modules == (
        ModuleInfo(
            fqn="",
            class_name="Sequential",
            depth=0,
            is_leaf=False,
            calls=1,
            fwd_flop=8192 + 2048,
            bwd_flop=8192 + 2 * 2048,
            fwd_mem_in=512,
            fwd_mem_tmp=1024,
            bwd_mem_tmp=1024 + 1024,
            bwd_mem_out=2048 + 512,
            bwd_mem_peak=2048 + 1024 + 512,
        ),
        ModuleInfo(
            fqn="0",
            class_name="Linear",
            depth=1,
            is_leaf=True,
            calls=1,
            fwd_flop=8192,
            bwd_flop=8192,
            fwd_mem_in=512,
            fwd_mem_tmp=0,
            bwd_mem_tmp=0,
            bwd_mem_out=2048,
            bwd_mem_peak=2048,
        ),
        ModuleInfo(
            fqn="1",
            class_name="ReLU",
            depth=1,
            is_leaf=True,
            calls=1,
            fwd_mem_in=0,
            fwd_mem_tmp=1024,
            bwd_mem_tmp=0,
            bwd_mem_out=1024,
            bwd_mem_peak=1024,
        ),
        ModuleInfo(
            fqn="2",
            class_name="Linear",
            depth=1,
            is_leaf=True,
            calls=1,
            fwd_flop=2048,
            bwd_flop=2 * 2048,
            fwd_mem_in=1024,
            fwd_mem_tmp=0,
            bwd_mem_tmp=0,
            bwd_mem_out=512 + 1024,
            bwd_mem_peak=512 + 1024,
        ),
    )


def test_gradients_of_inputs_leave_the_module():
    x = torch.randn(8, 16, requires_grad=True)

    without = autosac.graph_info(two_layers(), x.detach()).total
    with_gradient = autosac.graph_info(two_layers(), x).total

    assert with_gradient.bwd_mem_out == without.bwd_mem_out + x.nbytes
    assert with_gradient.bwd_flop == without.bwd_flop + 8192


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        x = self.inner(x)
        return x + self.norm(x)


def test_a_gradient_that_is_added_into_another_one_leaves_its_module():
    info = autosac.graph_info(Branch(), torch.randn(8, 16))

    parameters = 2 * 16 * 4
    assert info["norm"].bwd_mem_out == parameters + 8 * 16 * 4
    assert info["norm"].bwd_mem_tmp == 0


def test_the_nodes_of_each_stage_add_up_to_the_figures():
    info = autosac.graph_info(two_layers(), torch.randn(8, 16))

    stages = [node.stage for node in info.nodes]
    assert list(dict.fromkeys(stages)) == ["placeholder", "forward", "loss", "backward"]
    forward = [node for node in info.nodes if node.stage == "forward"]
    backward = [node for node in info.nodes if node.stage == "backward"]
    inputs = [node for node in info.nodes if node.name == "input"]
    assert sum(node.flop for node in forward) == info.total.fwd_flop
    assert sum(node.flop for node in backward) == info.total.bwd_flop
    assert sum(node.saved_bytes for node in forward) == info.total.fwd_mem_tmp
    assert sum(node.saved_bytes for node in inputs) == info.total.fwd_mem_in
    assert {node.fqn for node in info.nodes if node.stage == "loss"} == {None}


def test_the_table_names_every_module_and_its_figures():
    info = autosac.graph_info(two_layers(), torch.randn(8, 16))
    frame = info.to_dataframe()

    lines = str(info).splitlines()
    assert len(lines) == 1 + len(info.modules)
    figures = "1.02e+04 1.23e+04 512 B 1.0 KiB 2.0 KiB 2.5 KiB 3.5 KiB"
    assert " ".join(lines[1].split()) == f"(all) (Sequential) {figures}"
    assert list(frame.fqn) == ["", "0", "1", "2"]
    assert frame.fwd_mem_in.sum() == sum(one.fwd_mem_in for one in info.modules)
    assert [one.fqn for one in info.leaves] == ["0", "1", "2"]


# --- a real run as the truth ----------------------------------------------------


class Watch(TorchDispatchMode):
    """Watches a real forward pass: which module makes and which saves a storage.

    Tensors are kept, so that no address is used twice.
    """

    def __init__(self, model):
        super().__init__()
        self.names = {module: fqn for fqn, module in model.named_modules()}
        own = [*model.parameters(), *model.buffers()]
        self.own = {t.untyped_storage()._cdata for t in own}
        self.known = {}
        self.open = []
        self.saved = {fqn: ({}, {}) for fqn in self.names.values()}
        self.hooks = []
        for module in self.names:
            self.hooks.append(module.register_forward_pre_hook(self._enter))
            self.hooks.append(module.register_forward_hook(self._leave))

    def _enter(self, module, args):
        self.open.append((self.names[module], len(self.known)))

    def _leave(self, module, args, output):
        self.open.pop()

    def know(self, tensors):
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            self.known.setdefault(key, (len(self.known), tensor.detach()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.know(tensors_in((args, kwargs or {})))  # it may come from outside
        out = func(*args, **(kwargs or {}))
        self.know(tensors_in((out,)))
        return out

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        is_number = tensor.dim() == 0 and storage.nbytes() == 8
        if storage._cdata not in self.own and not is_number:
            self.know([tensor])
            for fqn, entered in self.open:
                made_inside = self.known[storage._cdata][0] >= entered
                self.saved[fqn][made_inside][storage._cdata] = storage.nbytes()
        return tensor


def really_saved(model, inputs):
    """FQN -> bytes that a real forward saves: from before the module's calls, made
    in them (where a storage is both, it was made in one of the calls)."""
    args, kwargs = normalize_inputs(inputs)
    watch = Watch(model)
    watch.know(tensors_in((args, kwargs)))
    watch.know([*model.parameters(), *model.buffers()])
    with watch, torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda t: t):
        model(*args, **kwargs)
    for hook in watch.hooks:
        hook.remove()
    return {
        fqn: (
            sum(size for key, size in before.items() if key not in inside),
            sum(inside.values()),
        )
        for fqn, (before, inside) in watch.saved.items()
    }


WATCHED = ("mlp", "gpt", "convolutions", "dict outputs", "called twice", "gpt2")


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", WATCHED)
def test_saved_bytes_are_those_of_a_real_forward_pass(name, one_thread):
    model, inputs = CASES[name].make_model().train(), CASES[name].make_inputs()

    info = autosac.graph_info(model, inputs)

    truth = really_saved(model, inputs)
    observed = {one.fqn: (one.fwd_mem_in, one.fwd_mem_tmp) for one in info.modules}
    assert observed == {fqn: truth[fqn] for fqn in observed}
    assert sum(map(sum, observed.values())) > 0


def test_a_leaf_has_the_same_figures_inside_a_model_and_alone(one_thread):
    leaves = [nn.Linear(24, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 24)]
    x = rows()
    inside = autosac.graph_info(nn.Sequential(*leaves), x)

    for place, leaf in enumerate(leaves):
        alone = autosac.graph_info(leaf, x).total
        x = leaf(x).detach().requires_grad_()
        named = replace(alone, fqn=f"{place}", depth=1)
        assert inside[f"{place}"] == named


def test_flops_are_those_that_pytorch_counts_in_a_real_step(one_thread):
    model = GPT(num_layers=2, width=32, num_heads=4, vocabulary=64, length=16)
    tokens = torch.randint(64, (2, 16))

    info = autosac.graph_info(model, tokens)

    with FlopCounterMode(display=False) as forward:
        loss = default_loss(model(tokens))
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert info.total.fwd_flop == forward.get_total_flops() > 0
    assert info.total.bwd_flop == backward.get_total_flops()
    counts = forward.get_flop_counts()
    for one in info.modules[1:]:
        assert one.fwd_flop == sum(counts.get(f"GPT.{one.fqn}", {}).values()), one.fqn


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", WATCHED)
def test_parts_are_never_larger_than_the_whole(name, one_thread):
    info = autosac.graph_info(CASES[name].make_model(), CASES[name].make_inputs())

    for figure in ("fwd_flop", "bwd_flop"):
        total = getattr(info.total, figure)
        assert sum(getattr(one, figure) for one in info.leaves) <= total
    for one in info.modules:
        assert one.bwd_mem_peak <= one.bwd_mem_tmp + one.bwd_mem_out
        assert one.bwd_mem_peak <= info.total.bwd_mem_peak


def test_figures_agree_with_the_statistics_of_the_same_step(one_thread):
    model = GPT(num_layers=2, width=32, num_heads=4, vocabulary=64, length=16)
    tokens = torch.randint(64, (2, 16))

    info = autosac.graph_info(model, tokens, loss_fn=lambda out: out.square().sum())
    traced = autosac.profile(model, tokens, loss_fn=lambda out: out.square().sum())

    statistics = traced.statistics
    for one in info.modules:
        other = statistics[one.fqn]
        assert one.calls == other.calls
        # The statistics leave the output out; autograd may save it or not.
        most = other.activation_bytes + other.output_bytes
        assert other.activation_bytes <= one.fwd_mem_tmp <= most
        assert one.bwd_mem_out >= other.gradient_bytes
    ops = traced.tape.ops
    assert info.total.fwd_flop == sum(o.flops for o in ops if o.phase == "forward")
    assert info.total.bwd_flop == sum(o.flops for o in ops if o.phase == "backward")


def measured(model, inputs, gradients):
    """Bytes of a real forward and backward: kept between them, left, peak, temporary.

    From the allocator's events, on this thread.
    """
    args, kwargs = normalize_inputs(inputs)

    def run(recorded):
        outputs = [t for t in tensors_in(model(*args, **kwargs)) if t.requires_grad]
        edges = [torch.autograd.graph.get_gradient_edge(t) for t in outputs]
        del outputs  # what autograd does not save is gone now
        with record_function(BACKWARD if recorded else "warm-up"):
            torch.autograd.backward(edges, gradients)

    with cpu_events() as observed:
        run(recorded=False)
        model.zero_grad()
        for tensor in tensors_in(args):
            tensor.grad = None
        gc.collect()
        with record_function("test::begin"):
            pass
        run(recorded=True)
    return read(observed)


def read(recording):
    marks, events = {}, []
    for event in recorded_events(recording):
        kind, fields = event.typed
        if kind.name == "Allocation":
            events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name.startswith("test::"):
            marks[event.name] = (event.start_time_ns, event.end_time_ns)
    begin, (backward, end) = marks["test::begin"][0], marks[BACKWARD]
    kept, spans, live = 0, [], {}
    for time, address, size in sorted(events):
        if not begin <= time <= end:
            continue
        if size > 0:
            live[address] = (time, size)
        elif address in live:
            born, size = live.pop(address)
            spans.append((born, time, size))
    spans += [(born, end + 1, size) for born, size in live.values()]
    kept = sum(size for born, died, size in spans if born < backward <= died)
    observed = [span for span in spans if span[0] >= backward]
    temporary = [span for span in observed if span[1] <= end]
    left = sum(size for _, died, size in observed if died > end)
    return kept, left, most_alive(observed), most_alive(temporary)


def most_alive(spans):
    return max(
        (sum(s for b, d, s in spans if b <= born < d) for born, _, _ in spans),
        default=0,
    )


def rows():
    return torch.randn(32, 24, requires_grad=True)


def images():
    return torch.randn(2, 3, 10, 10)


MEASURED = {
    "linear": (lambda: nn.Linear(24, 40), rows),
    "layer norm": (lambda: nn.LayerNorm(24), rows),
    "softmax": (lambda: nn.Softmax(-1), rows),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 24)),
        rows,
    ),
    "branches": (
        lambda: nn.Sequential(nn.Linear(24, 16), Branch(), nn.Linear(16, 8)),
        rows,
    ),
    "convolutions": (ConvNet, images),
    "gpt": (
        lambda: GPT(num_layers=2, width=32, num_heads=4, vocabulary=64, length=16),
        lambda: torch.randint(64, (2, 16)),
    ),
}


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", MEASURED)
def test_bytes_are_those_that_the_allocator_measures(name, one_thread):
    make_model, make_inputs = MEASURED[name]
    model, inputs = make_model(), make_inputs()
    gradients = [
        torch.randn_like(t) for t in tensors_in(model(inputs)) if t.requires_grad
    ]

    info = autosac.graph_info(model, inputs, calibrate=True).total

    kept, left, peak, temporary = measured(model, (inputs,), gradients)
    observed = (info.fwd_mem_tmp, info.bwd_mem_out, info.bwd_mem_peak)
    assert observed == (kept, left, peak)
    assert left > 0
    if name == "convolutions":
        # These kernels make each gradient twice; the first one is gone at the end.
        assert info.bwd_mem_tmp <= temporary
    else:
        assert info.bwd_mem_tmp == temporary


def test_nothing_of_the_module_changes(one_thread):
    model = ConvNet()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = images()
    state = torch.get_rng_state()

    autosac.graph_info(model, inputs)

    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_module_without_a_backward_pass_is_refused():
    with pytest.raises(TraceError, match="no tensor that requires a gradient"):
        autosac.graph_info(nn.ReLU(), torch.randn(4))


def test_a_gpu_that_is_not_present_can_be_asked_about():
    with torch.device("meta"):
        model = two_layers()

    info = autosac.graph_info(model, torch.randn(8, 16), device="h100").total

    assert (info.fwd_mem_in, info.fwd_mem_tmp) == (512, 1024)
