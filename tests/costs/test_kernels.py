import dataclasses
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch import nn
from torch.nn import functional

import autosac
from autosac.costs import kernels
from autosac.costs.kernels import MATMUL, POINTWISE, REACHED, Kernel
from autosac.costs.roofline import compute_ms, op_ms
from autosac.devices.specs import KNOWN_DEVICES, device_spec
from autosac.step.op_signatures import Layout, Signature

H100 = device_spec("h100")
PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_published.md"


def calls_of(run, *shapes, dtype=torch.float16):
    """Kernels of what a function does with leaves of some shapes, forward and back."""
    with torch.device("meta"):
        leaves = [
            x if isinstance(x, torch.Tensor) else torch.empty(*x, dtype=dtype)
            for x in shapes
        ]
        module = Calls(run, leaves)
    profile = autosac.profile(module, (), loss_fn=torch.sum, device="h100")
    return [
        (op.name.split(".")[1], kernels.kernel_of(op.name, op.signature, op.dtype))
        for op in profile.tape.ops
        if not op.is_view
    ]


class Calls(nn.Module):
    def __init__(self, run, leaves):
        super().__init__()
        self.run = run
        self.leaves = nn.ParameterList(nn.Parameter(leaf) for leaf in leaves)

    def forward(self):
        return self.run(*self.leaves)


def kinds_of(calls, name):
    return {kernel.kind for called, kernel in calls if called == name}


@pytest.mark.parametrize(
    ("columns", "dtype", "kind"),
    [
        (64, torch.float16, MATMUL),
        (62, torch.float16, "matmul, unaligned"),
        (62, torch.float32, "matmul, unaligned"),
        (60, torch.float32, MATMUL),  # rows of 240 bytes
        (60, torch.float16, "matmul, unaligned"),
    ],
)
def test_matmuls_of_rows_that_begin_unaligned_are_another_kind(columns, dtype, kind):
    calls = calls_of(torch.mm, (32, 128), (128, columns), dtype=dtype)

    assert kinds_of(calls, "mm") == {kind}


@pytest.mark.parametrize(
    ("channels", "groups", "kind"),
    [
        (16, 1, "convolution"),
        (12, 1, "convolution, unaligned"),
        (16, 4, "convolution, grouped"),
        (16, 16, "convolution, depthwise, half types"),
    ],
)
def test_convolutions_go_by_their_groups_and_channels(channels, groups, kind):
    calls = calls_of(
        lambda images, weight: functional.conv2d(images, weight, groups=groups),
        (2, channels, 8, 8),
        (channels, channels // groups, 3, 3),
    )

    assert kinds_of(calls, "convolution") == {kind}
    assert kinds_of(calls, "convolution_backward") == {f"{kind}, backward"}


def test_convolutions_of_channels_last_need_no_copies():
    images = torch.empty(2, 16, 8, 8, dtype=torch.float16, device="meta")
    calls = calls_of(
        functional.conv2d,
        images.to(memory_format=torch.channels_last),
        (16, 16, 3, 3),
    )

    assert kinds_of(calls, "convolution") == {"convolution, channels last"}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_goes_by_its_dropout_whichever_kernel_runs_it(dropout):
    for dtype in (torch.float16, torch.float32):
        calls = calls_of(
            lambda q, k, v: functional.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout
            ),
            *[(2, 4, 128, 64)] * 3,
            dtype=dtype,
        )

        kinds = {kernel.kind for _, kernel in calls if "attention" in kernel.kind}
        kind = "attention, dropout" if dropout else "attention"
        assert kinds == {kind, f"{kind}, backward"}


@pytest.mark.parametrize(
    ("run", "shapes", "kind"),
    [
        (torch.mul, [(4, 8), (4, 8)], POINTWISE),
        (torch.mul, [(4, 8), (8,)], "pointwise, broadcast, half types"),
        (lambda a: a.t().contiguous(), [(4, 8)], "pointwise, transposing"),
        (lambda a, b: a + b.t(), [(4, 8), (8, 4)], "pointwise, transposing"),
        (torch.Tensor.float, [(4, 8)], "pointwise, mixed types"),
        (lambda a: a[:, :4].mul(2), [(4, 8)], POINTWISE),
        (
            lambda a: a.contiguous(memory_format=torch.channels_last),
            [(2, 4, 8, 8)],
            "pointwise, transposing",
        ),
    ],
)
def test_pointwise_kernels_go_by_how_their_arguments_lie(run, shapes, kind):
    first, *_ = (
        kernel
        for name, kernel in calls_of(run, *shapes)
        if name in ("mul", "add", "clone", "_to_copy")
    )

    assert first.kind == kind


def test_normalizations_reductions_and_softmax_have_kinds_of_their_own():
    calls = calls_of(
        lambda x: functional.layer_norm(functional.softmax(x, -1), (512,)).mean(0),
        (8, 512),
    )

    kinds = dict(calls)
    assert kinds["_softmax"].kind == "softmax"
    assert kinds["native_layer_norm"].kind == "layer norm"
    assert kinds["native_layer_norm_backward"].kind == "layer norm, backward"
    assert kinds["mean"].kind == "reduction"


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_float32_runs_at_the_precision_that_pytorch_is_set_to(precision):
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, convolution.fp32_precision
    try:
        matmul.fp32_precision = convolution.fp32_precision = precision
        calls = calls_of(torch.mm, (8, 8), (8, 8), dtype=torch.float32)
        calls += calls_of(
            functional.conv2d, (2, 8, 8, 8), (8, 8, 3, 3), dtype=torch.float32
        )
    finally:
        matmul.fp32_precision, convolution.fp32_precision = before

    rate = "tfloat32" if precision == "tf32" else "float32"
    rates = {kernel.rate for name, kernel in calls if name in ("mm", "convolution")}
    assert rates == {rate}


@pytest.mark.parametrize("kind", REACHED)
def test_every_kind_takes_time_on_every_gpu(kind):
    rates = ("float32", "tfloat32", "float16", "bfloat16", "float64", "")
    for spec in KNOWN_DEVICES.values():
        if spec.type == "cuda":
            for rate in rates:
                ms = kernels.kernel_ms(Kernel(kind, rate), 10**9, 10**6, spec)
                assert spec.launch_overhead_ms < ms < 1e4


def test_a_kernel_takes_as_long_as_the_slower_of_its_flops_and_bytes():
    device = dataclasses.replace(
        H100,
        peak_flops={"float32": 1e12, "float16": 4e12},
        matmul_efficiency={"float32": 0.5, "float16": 0.5},
        bandwidth_bytes_per_s=1e12,
        bandwidth_efficiency=0.25,
        launch_overhead_ms=0.005,
    )

    # 1e9 FLOPs at 5e11 a second are 2 ms; 1e9 bytes at 2.5e11 are 4 ms.
    matmul = Kernel(MATMUL, "float32")
    share = REACHED[MATMUL].memory / REACHED[POINTWISE].memory
    assert kernels.kernel_ms(matmul, 10**9, 0, device) == pytest.approx(2.005)
    assert kernels.kernel_ms(matmul, 1, 10**9, device) == pytest.approx(
        4 / share + 0.005
    )
    pointwise = Kernel(POINTWISE, "float32")
    assert kernels.kernel_ms(pointwise, 0, 10**9, device) == pytest.approx(4.005)
    # Of the rate of matmuls others reach what they reach of it on an H100.
    grouped = Kernel("convolution, grouped", "float16")
    share = REACHED[grouped.kind].half / REACHED[MATMUL].half
    assert kernels.kernel_ms(grouped, 10**9, 0, device) == pytest.approx(
        0.5 / share + 0.005
    )


def test_a_device_of_the_users_own_multiplies_at_its_full_rates():
    own = autosac.DeviceSpec(
        name="own",
        type="cuda",
        memory_bytes=10**9,
        bandwidth_bytes_per_s=1e12,
        peak_flops={"float32": 1e12},
        launch_overhead_ms=0.0,
        allocation_granularity_bytes=512,
    )

    for rate in ("float32", "float16", "tfloat32"):  # the others have no figure
        matmul = Kernel(MATMUL, rate)
        assert kernels.kernel_ms(matmul, 10**9, 0, own) == pytest.approx(1.0)


def test_what_is_not_picked_takes_no_time():
    def loss(scores, labels):
        return functional.nll_loss(scores, labels)

    with torch.device("meta"):
        labels = torch.empty(4096, dtype=torch.long)
        scores = nn.Parameter(torch.empty(4096, 50_000))
        table = nn.Embedding(1_000_000, 64)

    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores, self.table = scores, table

        def forward(self, labels):
            return loss(self.scores, labels) + self.table(labels).sum()

    profile = autosac.profile(Picks(), labels, loss_fn=torch.sum, device="h100")
    times = {op.name: op_ms(op, H100) for op in profile.tape.ops}
    of_scores_ms = 4096 * 50_000 * 4 / H100.achieved_bytes_per_s * 1e3

    assert times["aten.nll_loss_forward.default"] < of_scores_ms / 20
    assert times["aten.embedding.default"] < of_scores_ms / 20
    assert times["aten.nll_loss_backward.default"] > of_scores_ms  # it writes all


@pytest.mark.parametrize(
    ("run", "shapes", "kind"),
    [
        (lambda x: functional.layer_norm(x, (512,)), [(512,)], "layer norm"),
        (
            lambda x: functional.layer_norm(x, (4, 8)),
            [(2, 4, 8)],
            "layer norm, short rows",
        ),
        (
            lambda x, w: torch.ops.aten._convolution(
                x, w, None, [1], [0], [1], False, [0], 1, False, False, True, True
            ),
            [(2, 16, 8), (16, 16, 3)],
            "convolution",
        ),
    ],
)
def test_calls_of_unusual_shape_have_a_kind(run, shapes, kind):
    assert kind in {kernel.kind for _, kernel in calls_of(run, *shapes)}


def test_a_convolution_that_is_called_by_its_backend_has_a_kind():
    images = Layout((2, 16, 8, 8), (1024, 64, 8, 1), torch.float16)
    weight = Layout((16, 16, 3, 3), (144, 9, 3, 1), torch.float16)
    func = torch.ops.aten.cudnn_convolution.default
    call = Signature(func, (images, weight, (1, 1), (1, 1), (1, 1), 1), ())

    kernel = kernels.kernel_of("aten.cudnn_convolution.default", call, "float16")
    assert kernel == Kernel("convolution", "float16")


@pytest.mark.parametrize("name", ["my_attention", "convolution_of_mine", "pool"])
def test_ops_of_other_libraries_are_timed_by_their_names(name):
    with torch.library._scoped_library("autosac_kernels_test", "FRAGMENT") as library:
        library.define(f"{name}(Tensor x, int groups) -> Tensor")
        library.impl(name, lambda x, groups: x.clone(), "CompositeExplicitAutograd")
        call = getattr(torch.ops.autosac_kernels_test, name)
        profile = autosac.profile(
            nn.Linear(4, 4).to("meta"),
            torch.empty(2, 4, device="meta"),
            loss_fn=lambda out: call(out.detach(), 3).sum() + out.sum(),
            device="h100",
        )

    (op,) = (op for op in profile.tape.ops if name in op.name)
    assert op_ms(op, H100) > 0


def test_the_shares_are_those_that_were_measured():
    rows = re.findall(
        r"^\| ([a-z, ]+) \| (\w*) \| ([\d.]+) \| \S+ \| ([\d.]*) \| ([\d.]*) \|",
        PAGE.read_text(),
        re.MULTILINE,
    )
    assert {kind for kind, *_ in rows} <= set(REACHED)
    of_memory = defaultdict(list)
    compared = 0
    for kind, rate, _, flops, memory in rows:
        taken = getattr(REACHED[kind], rate) if rate else None
        if flops and taken is not None:
            assert taken == pytest.approx(float(flops), rel=0.08), (kind, rate)
            compared += 1
        if memory:
            of_memory[kind].append(float(memory))
    for kind, measured in of_memory.items():  # of several types: their mean
        assert REACHED[kind].memory == pytest.approx(mean(measured), rel=0.08), kind
    assert compared + len(of_memory) > 30


@pytest.mark.parametrize(
    ("queries", "keys"), [(64, 64), (1000, 1000), (300, 1000), (1000, 300), (4096, 1)]
)
def test_a_causal_mask_spares_the_blocks_that_it_hides(queries, keys):
    made = 0
    for start in range(0, queries, 128):
        last = min(start + 128, queries) - 1
        rows = last + 1 - start
        made += rows * sum(key <= last for key in range(keys))
    whole = attention_ms(queries, keys)
    causal = attention_ms(queries, keys, is_causal=True)

    share = made / (queries * keys)
    assert causal == pytest.approx([share * ms for ms in whole], rel=1e-6)


def test_attention_under_a_mask_that_is_given_is_whole():
    mask = torch.ones(256, 256, dtype=torch.bool)

    assert attention_ms(256, 256, mask=mask) == attention_ms(256, 256)


def attention_ms(queries, keys, *, mask=None, is_causal=False):
    """Times of attention's FLOPs, forward and back, on a GPU."""

    def run(q, k, v):
        return functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal
        )

    leaves = [torch.empty(2, 4, n, 64) for n in (queries, keys, keys)]
    profile = autosac.profile(Calls(run, leaves), (), loss_fn=torch.sum, device="h100")
    times = [compute_ms(op, H100) for op in profile.tape.ops if "attention" in op.name]
    assert len(times) == 2
    return times
