import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autosac import _compat_gpu
from autosac.devices.specs import device_spec
from autosac.lens import attention_choice
from autosac.lens.autocast import Autocast
from autosac.profiles.profile import profile
from tests.fake_gpu import Attention, Language, gpu_calls, lens_calls

A100, H100, MI300X = map(device_spec, ("a100", "h100", "mi300x"))
BFLOAT16, HALF, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
IDS = torch.zeros(4, 16, dtype=torch.long)
IMAGES = torch.zeros(2, 3, 16, 16)


pytestmark = pytest.mark.usefixtures("one_thread")


# --- the ops are those of the GPU -------------------------------------------------


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.back = nn.ConvTranspose2d(8, 8, 2, 2)
        self.instance_norm, self.group_norm = nn.InstanceNorm2d(8), nn.GroupNorm(2, 8)
        self.dropout, self.alpha = nn.Dropout2d(0.2), nn.AlphaDropout(0.1)
        self.larger = nn.Upsample(scale_factor=2, mode="bilinear")
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.norm(self.convolution(x))), 2)
        x = self.larger(self.back(self.instance_norm(self.group_norm(x))))
        x = functional.adaptive_avg_pool2d(self.alpha(self.dropout(x)), 1)
        return self.head(x.flatten(1))


@pytest.mark.slow_but_first
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("autocast", [None, BFLOAT16, HALF], ids=str)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, HALF], ids=str)
@pytest.mark.parametrize("kind", [Language, Vision])
def test_dispatches_what_fake_gpu_tensors_dispatch(kind, dtype, autocast):
    model = kind().to(dtype)
    inputs = IDS if kind is Language else IMAGES.to(dtype)
    # Without a GPU nobody can ask PyTorch for its choice of another attention.
    with sdpa_kernel(SDPBackend.MATH):
        expected = gpu_calls(model, inputs, autocast=autocast)
        calls = lens_calls(model, inputs, device=A100, autocast=autocast)

    assert calls == expected


def test_dispatches_what_fake_gpu_tensors_dispatch_for_channels_last():
    last = torch.channels_last
    model, images = Vision().to(memory_format=last), IMAGES.to(memory_format=last)

    calls = lens_calls(model, images, device=A100, autocast=HALF)

    assert calls == gpu_calls(model, images, autocast=HALF)


@pytest.mark.parametrize("half", [HALF, BFLOAT16], ids=str)
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_softmax_that_widens_is_one_op_where_the_gpu_has_one(function, half):
    x = torch.zeros(4, 8, dtype=half)

    calls = lens_calls(function, x, -1, FLOAT32, device=A100)

    assert calls == gpu_calls(function, x, -1, FLOAT32)
    assert len(calls) == (1 if half == HALF else 2)


@pytest.mark.parametrize("mask", [None, torch.bool, FLOAT32], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_math_attention_is_the_composite_of_the_gpu(mask, dropout_p):
    q = torch.zeros(2, 4, 16, 8, requires_grad=True)
    bias = None if mask is None else torch.zeros(16, 16).to(mask)
    arguments = (q, q, q, bias, dropout_p)

    with sdpa_kernel(SDPBackend.MATH):
        calls = lens_calls(
            functional.scaled_dot_product_attention, *arguments, device=A100
        )
        expected = gpu_calls(functional.scaled_dot_product_attention, *arguments)

    assert calls == expected


# --- attention --------------------------------------------------------------------


def attention(
    device=A100,
    *,
    dtype=BFLOAT16,
    heads=(4, 4),
    lengths=(64, 64),
    widths=(32, 32),
    mask=False,
    **options,
):
    """Names of what the device runs for one attention call."""

    def make(num_heads, length, width):
        shape = (2, num_heads, length, width)
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    query = make(heads[0], lengths[0], widths[0])
    key = make(heads[1], lengths[1], widths[0])
    value = make(heads[1], lengths[1], widths[1])
    is_learned = mask == "learned"
    bias = torch.zeros(lengths, dtype=dtype, requires_grad=is_learned) if mask else None

    def call(*tensors):
        return functional.scaled_dot_product_attention(*tensors, **options)

    calls = lens_calls(call, query, key, value, bias, device=device)
    return [name.removeprefix("aten.").partition(".")[0] for name, _ in calls]


FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({}, FLASH),
        ({"is_causal": True}, FLASH),
        ({"dropout_p": 0.1}, FLASH),
        ({"dtype": FLOAT32}, EFFICIENT),
        ({"mask": True}, EFFICIENT),
        ({"is_causal": True, "lengths": (32, 64)}, EFFICIENT),
        ({"widths": (32, 64)}, EFFICIENT),
        ({"widths": (264, 264)}, EFFICIENT),
        ({"heads": (4, 2), "enable_gqa": True}, FLASH),
        ({"device": device_spec("v100"), "dtype": HALF}, EFFICIENT),
        ({"device": device_spec("l4"), "widths": (224, 224)}, EFFICIENT),
        ({"device": device_spec("l4"), "widths": (256, 256)}, FLASH),
        ({"device": MI300X}, FLASH),
        ({"device": H100}, FLASH),
    ],
    ids=str,
)
def test_picks_the_kernel_that_the_gpu_picks(options, kernel):
    assert attention(**options)[-1] == kernel


@pytest.mark.parametrize(
    "options",
    [
        {"device": device_spec("v100")},  # no bfloat16 there
        {"dtype": torch.float64},
        {"dtype": FLOAT32, "widths": (30, 30)},
    ],
    ids=str,
)
def test_falls_back_to_math(options):
    calls = attention(**options)

    assert "bmm" in calls
    assert not {FLASH, EFFICIENT, CUDNN} & set(calls)


@pytest.mark.parametrize(
    ("version", "options", "kernel"),
    [
        (91501, {"device": H100}, CUDNN),
        (91501, {"device": H100, "mask": True}, CUDNN),
        (91501, {"device": H100, "mask": "learned"}, EFFICIENT),
        (91501, {"device": H100, "dropout_p": 0.125}, CUDNN),
        (
            91501,
            {"device": H100, "dropout_p": 0.1},
            FLASH if _compat_gpu.CUDNN_DROPOUT_IN_SIXTEENTHS else CUDNN,
        ),
        (91501, {"device": H100, "widths": (256, 256)}, FLASH),
        (92300, {"device": H100, "widths": (256, 256)}, CUDNN),
        (92300, {"device": H100, "dtype": FLOAT32}, EFFICIENT),
        (92300, {"device": A100}, FLASH),
        (91500, {"device": H100}, FLASH),
    ],
    ids=str,
)
def test_prefers_cudnn_where_the_gpu_does(monkeypatch, version, options, kernel):
    monkeypatch.setattr(attention_choice, "cudnn_version", lambda: version)

    assert attention(**options)[-1] == kernel


def test_honours_the_choice_of_the_user():
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert attention() == [EFFICIENT]
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        assert attention() == [FLASH]
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(RuntimeError, match="No attention kernel that is switched on"),
    ):
        attention(dtype=FLOAT32)


def test_pads_heads_for_flash_and_masks_for_efficient_attention():
    pads = ["constant_pad_nd"] * 3

    assert attention(widths=(12, 12)) == [*pads, FLASH, "slice"]
    assert attention(mask=True, lengths=(20, 20)) == [
        "constant_pad_nd",
        "slice",
        "expand",
        EFFICIENT,
    ]


def test_attention_saves_what_flash_attention_saves():
    model = Attention(64, 4).bfloat16()
    traced = profile(model, torch.zeros(2, 128, 64, dtype=BFLOAT16), device=A100)
    flash = next(i for i, op in enumerate(traced.tape.ops) if FLASH in op.name)

    saved = {saved.storage for saved in traced.tape.saved}
    sizes = [traced.tape.storages[i].nbytes for i in traced.tape.ops[flash].creates]
    kept = [i for i in traced.tape.ops[flash].creates if i in saved]

    # Output of 2 x 128 x 64 elements, log-sum-exp of 2 x 4 x 128 float32 numbers, the
    # random state of 2 and 1 numbers in a block of 512 bytes each, an empty mask.
    assert sorted(sizes) == [0, 512, 512, 4 * 2 * 4 * 128, 2 * 2 * 128 * 64]
    assert sum(traced.tape.storages[i].nbytes for i in kept) == sum(sizes)
    (project,) = (op for op in traced.tape.ops if op.name == "aten.addmm.default")
    assert set(project.creates) <= saved  # query, key and value are views of it


# --- masks and statistics ---------------------------------------------------------


def test_a_dropout_mask_takes_one_byte_an_element():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64))
    traced = profile(model, torch.zeros(32, 64), device=A100)
    (dropout,) = (op for op in traced.tape.ops if "native_dropout.d" in op.name)

    saved = {saved.storage for saved in traced.tape.saved}
    _, mask = dropout.creates

    assert traced.tape.storages[mask].nbytes == 32 * 64
    assert mask in saved
    assert dropout.random


@pytest.mark.parametrize(
    ("dtype", "device", "kernel"),
    [
        (FLOAT32, A100, "cudnn_batch_norm"),
        (BFLOAT16, A100, "native_batch_norm"),
        (FLOAT32, MI300X, "miopen_batch_norm"),
        (BFLOAT16, MI300X, "native_batch_norm"),
    ],
    ids=str,
)
def test_batch_norm_runs_in_the_vendors_library_where_it_can(dtype, device, kernel):
    model = nn.BatchNorm2d(8).to(dtype)

    calls = lens_calls(model, torch.zeros(2, 8, 4, 4, dtype=dtype), device=device)
    (results,) = (results for name, results in calls if kernel in name)

    assert [dtype for dtype, _, _ in results[1:3]] == [FLOAT32, FLOAT32]


def test_batch_norm_without_cudnn_is_atens_own():
    with torch.backends.cudnn.flags(enabled=False):
        calls = lens_calls(nn.BatchNorm2d(8), torch.zeros(2, 8, 4, 4), device=A100)

    assert "aten.native_batch_norm.default" in dict(calls)


# --- autocast ---------------------------------------------------------------------


def test_knows_every_op_that_autocasts():
    known = Autocast().kernels()
    unknown = {
        name for name, kernel in known.items() if kernel.func.__name__ == "_refuse"
    }

    assert set(known) == _compat_gpu.autocast_ops()
    assert unknown <= {"binary_cross_entropy", "_cudnn_rnn", "linalg_matrix_sqrth"}


def _numbers(*shape, dtype=FLOAT32):
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (torch.mm, (_numbers(8, 8), _numbers(8, 8))),
        (torch.baddbmm, (_numbers(2, 8, 8), _numbers(2, 8, 8), _numbers(2, 8, 8))),
        (torch.einsum, ("ij,jk", _numbers(8, 8), _numbers(8, 8))),
        (torch.linalg.multi_dot, ([_numbers(8, 8), _numbers(8, 8), _numbers(8, 8)],)),
        (torch.exp, (_numbers(8, dtype=HALF),)),
        (torch.pow, (2.0, _numbers(8, dtype=HALF))),
        (torch.sum, (_numbers(8, dtype=HALF),)),
        (torch.sum, (_numbers(8, dtype=HALF), 0, True)),
        (torch.cumsum, (_numbers(8, dtype=HALF), 0)),
        (torch.norm, (_numbers(8, 8, dtype=HALF),)),
        (torch.norm, (_numbers(8, 8, dtype=HALF), 1, [0])),
        (torch.linalg.vector_norm, (_numbers(8, dtype=HALF),)),
        (functional.mse_loss, (_numbers(8, dtype=HALF), _numbers(8))),
        (functional.interpolate, (_numbers(1, 1, 4, 4, dtype=HALF), None, 2)),
        (torch.addcmul, (_numbers(8), _numbers(8, dtype=HALF), _numbers(8))),
        (torch.atan2, (_numbers(8, dtype=HALF), _numbers(8, dtype=HALF))),
        (torch.cat, ([_numbers(8), _numbers(8, dtype=HALF)],)),
        (torch.mm, (_numbers(8, 8, dtype=torch.float64),) * 2),
    ],
    ids=lambda value: getattr(value, "__name__", "on"),
)
def test_casts_as_the_gpu_does(function, arguments):
    calls = lens_calls(function, *arguments, device=A100, autocast=HALF)

    assert calls == gpu_calls(function, *arguments, autocast=HALF)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 16)

    def forward(self, x, targets):
        return functional.cross_entropy(self.head(x), targets)


@pytest.mark.parametrize("half", [HALF, BFLOAT16], ids=str)
def test_known_targets_do_not_bring_the_autocast_of_the_cpu(half):
    # The CPU's casts scores to float32 before `cross_entropy`, a GPU's casts the
    # result of `log_softmax`. Targets stay real tensors of the CPU in a trace.
    inputs = torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)

    traced = profile(Classifier(), inputs, device=H100, autocast=half)

    on_gpu = [name for name, _ in gpu_calls(Classifier(), *inputs, autocast=half)]
    calls = [op.name for op in traced.tape.ops if op.phase in ("forward", "loss")]
    assert calls == on_gpu
    (log_softmax,) = (
        op for op in traced.tape.ops if op.name.endswith("log_softmax.default")
    )
    assert log_softmax.dtype == str(half).removeprefix("torch.")


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.linear(self.linear(x))


def test_a_weight_is_cast_once_in_each_autocast_region():
    model = Twice()

    def two_regions(x, weight):
        for _ in range(2):
            with torch.autocast("cuda", dtype=BFLOAT16):
                x = functional.linear(functional.linear(x, weight), weight)
        return x

    once = lens_calls(model, _numbers(4, 8), device=A100, autocast=BFLOAT16)
    twice = lens_calls(two_regions, _numbers(4, 8), model.linear.weight, device=A100)

    assert [name for name, _ in once].count("aten._to_copy.default") == 2
    assert [name for name, _ in twice].count("aten._to_copy.default") == 3
    assert once == gpu_calls(model, _numbers(4, 8), autocast=BFLOAT16)


def test_regions_nest_and_can_be_switched_off():
    def nested(x):
        with torch.autocast("cuda"):
            y = x @ x
            with torch.autocast(x.device.type, enabled=False):
                z = y.float() @ x
            return y, z, z @ x

    calls = lens_calls(nested, _numbers(8, 8), device=A100)
    types = [results[0][0] for name, results in calls if name == "aten.mm.default"]

    assert types == [HALF, FLOAT32, HALF]  # float16 is the default on a GPU
