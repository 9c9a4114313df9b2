from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import autosac
from autosac import _compat, lens_choice
from autosac.demo import GPT, next_token_loss
from autosac.devices import DeviceSpec, device_spec
from autosac.errors import InfeasibleBudgetError
from autosac.lens import lens
from autosac.lens_autocast import Autocast
from autosac.planning import _confirm, floor, make_plan
from autosac.profiling import profile
from tests.fake_gpu import gpu_calls, lens_calls
from tests.models import CASES, op_policies, random_choice

A100, H100, MI300X = map(device_spec, ("a100", "h100", "mi300x"))
BFLOAT16, HALF, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
IDS = torch.zeros(4, 16, dtype=torch.long)
IMAGES = torch.zeros(2, 3, 16, 16)


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small are faster on one thread, by much on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def old_cudnn(monkeypatch):
    """Flash attention comes first on every GPU unless a test says otherwise."""
    monkeypatch.setattr(lens_choice, "cudnn_version", lambda: 91002)


def names(made, *phases):
    """Names of the ops of a profile that do some work."""
    chosen = phases or ("forward",)
    return [op.name for op in made.tape.ops if op.phase in chosen and not op.is_view]


# --- the ops are those of the GPU -------------------------------------------------


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(50, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.layer_norm, self.rms_norm = nn.LayerNorm(32), nn.RMSNorm(32)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.batch_norm, self.group_norm = nn.BatchNorm1d(16), nn.GroupNorm(4, 16)
        self.dropout, self.prelu = nn.Dropout(0.1), nn.PReLU()
        self.attention = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)

    def forward(self, ids):
        x = self.token(ids)
        x = self.dropout(self.down(functional.gelu(self.up(x))))
        x = self.rms_norm(self.layer_norm(x))
        x = x + self.batch_norm(self.group_norm(self.convolution(x)))
        x = self.attention(x, x, x, need_weights=False)[0]
        x = functional.softmax(x, -1) + functional.log_softmax(x, -1) + self.prelu(x)
        scores = torch.einsum("bij,bkj->bik", x, x) @ x
        y = torch.cat([scores, x], -1).cumsum(-1).exp().pow(2)
        loss = functional.cross_entropy(y[:, 0], ids[:, 0]) + y.norm()
        return loss + y.norm(dim=-1).sum() + y.prod(-1).mean()


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
        found = lens_calls(model, inputs, device=A100, autocast=autocast)

    assert found == expected


def test_dispatches_what_fake_gpu_tensors_dispatch_for_channels_last():
    last = torch.channels_last
    model, images = Vision().to(memory_format=last), IMAGES.to(memory_format=last)

    found = lens_calls(model, images, device=A100, autocast=HALF)

    assert found == gpu_calls(model, images, autocast=HALF)


@pytest.mark.parametrize("half", [HALF, BFLOAT16], ids=str)
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_softmax_that_widens_is_one_op_where_the_gpu_has_one(function, half):
    x = torch.zeros(4, 8, dtype=half)

    found = lens_calls(function, x, -1, FLOAT32, device=A100)

    assert found == gpu_calls(function, x, -1, FLOAT32)
    assert len(found) == (1 if half == HALF else 2)


@pytest.mark.parametrize("mask", [None, torch.bool, FLOAT32], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_math_attention_is_the_composite_of_the_gpu(mask, dropout_p):
    q = torch.zeros(2, 4, 16, 8, requires_grad=True)
    bias = None if mask is None else torch.zeros(16, 16).to(mask)
    arguments = (q, q, q, bias, dropout_p)

    with sdpa_kernel(SDPBackend.MATH):
        found = lens_calls(
            functional.scaled_dot_product_attention, *arguments, device=A100
        )
        expected = gpu_calls(functional.scaled_dot_product_attention, *arguments)

    assert found == expected


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
    bias = torch.zeros(lengths, dtype=dtype) if mask else None

    def call(*tensors):
        return functional.scaled_dot_product_attention(*tensors, **options)

    found = lens_calls(call, query, key, value, bias, device=device)
    return [name.removeprefix("aten.").partition(".")[0] for name, _ in found]


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
    found = attention(**options)

    assert "bmm" in found
    assert not {FLASH, EFFICIENT, CUDNN} & set(found)


@pytest.mark.parametrize(
    ("version", "options", "kernel"),
    [
        (91501, {"device": H100}, CUDNN),
        (91501, {"device": H100, "mask": True}, CUDNN),
        (91501, {"device": H100, "dropout_p": 0.1}, FLASH),  # not a multiple of 1/16
        (91501, {"device": H100, "widths": (256, 256)}, FLASH),
        (92300, {"device": H100, "widths": (256, 256)}, CUDNN),
        (92300, {"device": H100, "dtype": FLOAT32}, EFFICIENT),
        (92300, {"device": A100}, FLASH),
        (91500, {"device": H100}, FLASH),
    ],
    ids=str,
)
def test_prefers_cudnn_where_the_gpu_does(monkeypatch, version, options, kernel):
    monkeypatch.setattr(lens_choice, "cudnn_version", lambda: version)

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


class Attention(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.project, self.num_heads = nn.Linear(width, 3 * width), num_heads

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (self.num_heads, -1)).chunk(3, -1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v)


def test_attention_saves_what_flash_attention_saves():
    model = Attention(64, 4).bfloat16()
    made = profile(model, torch.zeros(2, 128, 64, dtype=BFLOAT16), device=A100)
    flash = next(i for i, op in enumerate(made.tape.ops) if FLASH in op.name)

    saved = {saved.storage for saved in made.tape.saved}
    sizes = [made.tape.storages[i].nbytes for i in made.tape.ops[flash].creates]
    kept = [i for i in made.tape.ops[flash].creates if i in saved]

    # Output of 2 x 128 x 64 elements, log-sum-exp of 2 x 4 x 128 float32 numbers, the
    # random state of 2 and 1 numbers in a block of 512 bytes each, an empty mask.
    assert sorted(sizes) == [0, 512, 512, 4 * 2 * 4 * 128, 2 * 2 * 128 * 64]
    assert sum(made.tape.storages[i].nbytes for i in kept) == sum(sizes)
    (project,) = (op for op in made.tape.ops if op.name == "aten.addmm.default")
    assert set(project.creates) <= saved  # query, key and value are views of it


# --- masks and statistics ---------------------------------------------------------


def test_a_dropout_mask_takes_one_byte_an_element():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64))
    made = profile(model, torch.zeros(32, 64), device=A100)
    (dropout,) = (op for op in made.tape.ops if "native_dropout.d" in op.name)

    saved = {saved.storage for saved in made.tape.saved}
    _, mask = dropout.creates

    assert made.tape.storages[mask].nbytes == 32 * 64
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

    found = lens_calls(model, torch.zeros(2, 8, 4, 4, dtype=dtype), device=device)
    (results,) = (results for name, results in found if kernel in name)

    assert [dtype for dtype, _, _ in results[1:3]] == [FLOAT32, FLOAT32]


def test_batch_norm_without_cudnn_is_atens_own():
    with torch.backends.cudnn.flags(enabled=False):
        found = lens_calls(nn.BatchNorm2d(8), torch.zeros(2, 8, 4, 4), device=A100)

    assert "aten.native_batch_norm.default" in dict(found)


# --- optimizers -------------------------------------------------------------------


def small(**options):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return model, torch.optim.AdamW(model.parameters(), **options)


def optimizer_bytes(made):
    storages = made.tape.storages
    return sum(s.nbytes for s in storages if s.category == "optimizer")


@pytest.mark.parametrize("warm", [False, True])
def test_optimizers_step_with_foreach_kernels(warm):
    model, optimizer = small()
    if warm:
        model(torch.zeros(2, 64)).sum().backward()
        optimizer.step()
    before = [dict(group) for group in optimizer.param_groups]

    made = profile(model, torch.zeros(2, 64), optimizer=optimizer, device=A100)

    assert "aten._foreach_addcdiv_.ScalarList" in names(made, "optimizer")
    assert [dict(group) for group in optimizer.param_groups] == before
    # Two moments of 64 x 64 and 64 float32 numbers; the steps lie on the CPU.
    assert optimizer_bytes(made) == 2 * 2 * 4 * (64 * 64 + 128)


def test_options_of_an_optimizer_are_honoured():
    model, optimizer = small(foreach=False)
    looped = profile(model, torch.zeros(2, 64), optimizer=optimizer, device=A100)
    model, optimizer = small(fused=True)
    fused = profile(model, torch.zeros(2, 64), optimizer=optimizer, device=A100)

    assert not any("_foreach" in name for name in names(looped, "optimizer"))
    assert "aten._fused_adamw_.default" in names(fused, "optimizer")
    # A block of 512 bytes for each of four steps, as these lie on the GPU.
    assert optimizer_bytes(fused) == optimizer_bytes(looped) + 4 * 512


def test_gradients_are_clipped_with_foreach_kernels():
    model, _ = small()

    made = profile(model, torch.zeros(2, 64), clip_grad_norm=1.0, device=A100)

    norms = [op for op in made.tape.ops if op.name == "aten._foreach_norm.Scalar"]
    # One float32 number for each chunk of each of four gradients, in one block.
    assert [op.workspace_bytes for op in norms] == [512]


@pytest.mark.parametrize("kind", ["SGD", "NAdam", "RAdam", "Adagrad", "RMSprop"])
def test_other_optimizers_step_too(kind):
    make = getattr(torch.optim, kind)
    model = CASES["mlp"].model()

    made = profile(model, CASES["mlp"].inputs(), optimizer=make, device=A100)
    chosen = random_choice(made, 0)

    assert any("_foreach" in name for name in names(made, "optimizer"))
    _confirm(made, chosen, op_policies(made, chosen))


def test_optimizers_in_backward_keep_their_steps_on_the_cpu():
    model, _ = small()
    optimizer = autosac.OptimizerInBackward(model.parameters(), torch.optim.AdamW)

    made = profile(model, torch.zeros(2, 64), optimizer=optimizer, device=A100)

    assert optimizer_bytes(made) == 2 * 2 * 4 * (64 * 64 + 128)


# --- autocast ---------------------------------------------------------------------


def test_knows_every_op_that_autocasts():
    known = Autocast().kernels()
    unknown = {
        name for name, kernel in known.items() if kernel.func.__name__ == "_refuse"
    }

    assert set(known) == _compat.autocast_ops()
    assert unknown <= {"binary_cross_entropy", "_cudnn_rnn", "linalg_matrix_sqrth"}


def _numbers(*shape, dtype=FLOAT32):
    return torch.zeros(*shape, dtype=dtype)


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
    found = lens_calls(function, *arguments, device=A100, autocast=HALF)

    assert found == gpu_calls(function, *arguments, autocast=HALF)


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

    found = lens_calls(nested, _numbers(8, 8), device=A100)
    types = [results[0][0] for name, results in found if name == "aten.mm.default"]

    assert types == [HALF, FLOAT32, HALF]  # float16 is the default on a GPU


# --- the account ------------------------------------------------------------------


def test_blocks_are_multiples_of_512_bytes():
    made = CASES["gpt"].profile()
    on_gpu = profile(CASES["gpt"].model(), CASES["gpt"].inputs(), device=A100)

    assert all(s.nbytes % 512 == 0 for s in on_gpu.tape.storages)
    assert any(s.nbytes % 512 for s in made.tape.storages)


@pytest.mark.parametrize(
    ("device", "nbytes"), [(H100, 2**25), (A100, 8519680), (MI300X, 2**27)], ids=str
)
def test_forward_and_backward_hold_a_workspace_for_matrix_products(device, nbytes):
    model = nn.Linear(64, 64)
    with_products = profile(model, torch.zeros(2, 64), device=device)
    without = profile(nn.LayerNorm(64), torch.zeros(2, 64), device=device)

    held = [s for s in with_products.tape.storages if s.nbytes == nbytes]

    assert len(held) == 2
    assert all((s.born, s.died) == (0, with_products.tape.num_ticks) for s in held)
    assert all(s.nbytes < 2**20 for s in without.tape.storages)


def test_counts_what_backward_kernels_allocate():
    model = nn.Sequential(nn.Embedding(1000, 64), Attention(64, 4)).bfloat16()
    made = profile(model, torch.zeros(2, 2048, dtype=torch.long), device=A100)
    work = {op.name: op.workspace_bytes for op in made.tape.ops if op.workspace_bytes}

    # Flash attention, 2 x 4 heads of 2048 rows and 16 columns that become 32: their
    # gradient and the sums of their rows, in float32; the gradient of a sum is expanded
    # from one number, so that it is copied.
    flash = 4 * 2 * 4 * 2048 * 32 + 4 * 2 * 4 * 2048 + 2 * 2 * 4 * 2048 * 16
    # Embedding, 4096 indices: three times the indices, at most 1000 segments twice, and
    # 409 more partial ones, with 64 float32 numbers each. In blocks of 512 bytes.
    rows = 4096 // 10 + 1000
    embedding = 3 * 8 * 4096 + 2 * 8192 + -(-8 * rows // 512) * 512
    embedding += -(-rows * 64 * 4 // 512) * 512
    assert work == {
        "aten._scaled_dot_product_flash_attention_backward.default": flash,
        "aten.embedding_dense_backward.default": embedding,
    }


def test_backward_reaches_every_parameter():
    model = CASES["gpt"].model()

    made = profile(model, CASES["gpt"].inputs(), device=A100, autocast=BFLOAT16)

    gradients = [s for s in made.tape.storages if s.category == "gradient"]
    assert len(gradients) == len(list(model.parameters()))


# --- plans ------------------------------------------------------------------------

each_model = pytest.mark.parametrize("name", ["gpt", "convolutions", "llama"])


@each_model
@pytest.mark.parametrize("autocast", [None, BFLOAT16], ids=str)
@pytest.mark.parametrize("device", [A100, H100], ids=lambda device: device.name)
def test_a_dry_run_confirms_random_plans(name, device, autocast):
    case = CASES[name]
    made = profile(
        case.model(),
        case.inputs(),
        loss_fn=case.loss_fn,
        optimizer=torch.optim.AdamW,
        device=device,
        autocast=autocast,
    )

    for seed in range(3):
        chosen = random_choice(made, seed)
        _confirm(made, chosen, op_policies(made, chosen))


def meta_gpt():
    with torch.device("meta"):
        return GPT(num_layers=2, vocabulary=512, length=128)


def test_plans_for_a_gpu_that_is_not_present():
    tokens = torch.zeros(8, 128, dtype=torch.long)
    model = meta_gpt()
    options = {"optimizer": torch.optim.AdamW, "loss_fn": next_token_loss(tokens)}

    ample = autosac.plan(model, tokens, memory_budget="80%", device="h100", **options)
    made = profile(model, tokens, device="h100", **options)
    tight = make_plan(made, (floor(made) + made.baseline_peak_bytes) // 2)

    assert (ample.budget_bytes, ample.device) == (64 * 10**9, "h100")
    assert not ample.policy
    assert not ample.calibrated
    assert floor(made) <= tight.peak_bytes <= tight.budget_bytes
    assert any("native_dropout" in name for p in tight.op_policies for name in p.names)
    with pytest.raises(InfeasibleBudgetError):
        make_plan(made, floor(made) - 1)


def test_does_not_calibrate_what_is_not_present():
    model = nn.Linear(8, 8)
    made = profile(model, torch.zeros(2, 8), device="a100")

    assert not autosac.plan(made, memory_budget="1GiB").calibrated
    assert not autosac.plan(
        model, torch.zeros(2, 8), memory_budget="1GiB", device="a100"
    ).calibrated
    with pytest.raises(ValueError, match="The profile is for a100"):
        autosac.calibrate(made)


# --- nothing is changed, some things are refused ----------------------------------


def _outside():
    optimizers = _compat.importlib.import_module("torch.optim.optimizer")
    return (
        _compat.FakeTensor.__new__,
        torch.autocast.__init__,
        torch.autocast.__enter__,
        torch.autocast.__exit__,
        optimizers._get_foreach_kernels_supported_devices(),
        list(optimizers._foreach_supported_types),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch._C._dispatch_dump("aten::dropout"),
        torch._C._dispatch_dump_table("aten::mm"),
    )


def test_leaves_nothing_behind():
    before = _outside()

    profile(Language(), IDS, device=A100, autocast=BFLOAT16)
    assert _outside() == before
    with pytest.raises(NotImplementedError):
        profile(nn.LSTM(8, 8), torch.zeros(4, 2, 8), device=A100, autocast=BFLOAT16)
    assert _outside() == before


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell])
def test_refuses_recurrent_layers(kind):
    shape = (2, 8) if "Cell" in kind.__name__ else (4, 2, 8)

    with pytest.raises(NotImplementedError, match="reserves for recurrent layers"):
        profile(kind(8, 8), torch.zeros(shape), device=A100)


def test_refuses_other_ops_whose_kernel_is_unknown():
    class Sampled(nn.Module):
        def __init__(self):
            super().__init__()
            self.grid = nn.Parameter(torch.zeros(1, 4, 4, 2))

        def forward(self, x):
            return functional.grid_sample(x, self.grid, align_corners=True)

    with pytest.raises(NotImplementedError, match="grid_sampler cannot be planned"):
        profile(Sampled(), torch.zeros(1, 1, 4, 4), device=A100)


def test_asks_for_the_compute_capability():
    spec = replace(A100, name="mine", compute_capability=None)

    with pytest.raises(ValueError, match="`device`='mine' has no `compute_cap"):
        profile(nn.Linear(8, 8), torch.zeros(2, 8), device=spec)


def test_a_spec_needs_no_capability():
    spec = DeviceSpec(
        name="mine",
        type="cuda",
        memory_bytes=1,
        bandwidth_bytes_per_s=1.0,
        peak_flops={"float32": 1.0},
        launch_overhead_ms=0.0,
        allocation_granularity_bytes=512,
    )

    assert spec.vendor == "nvidia"


def test_a_lens_without_a_device_only_tells_optimizers_what_is_fake():
    before = _outside()

    with lens(_compat.FakeTensorMode(), None):
        within = _outside()

    assert [a == b for a, b in zip(before, within, strict=True)].count(False) == 1
    assert _outside() == before


# --- on a GPU, the truth ----------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("autocast", [None, BFLOAT16], ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt", "convolutions"])
def test_agrees_with_a_trace_on_the_gpu(monkeypatch, name, autocast):
    monkeypatch.undo()  # the cuDNN that is installed
    case = CASES[name]
    model, inputs = case.model(), case.inputs()
    options = {"optimizer": torch.optim.AdamW, "autocast": autocast, "device": "cuda"}

    absent = profile(model, inputs, **options)
    present = profile(model.cuda(), inputs.cuda(), **options)

    for phase in ("forward", "backward", "optimizer"):
        assert names(absent, phase) == names(present, phase)
    # But for what kernels allocate, which the true trace leaves to calibration.
    held = [s for s in absent.tape.storages if s.born or s.category != "temporary"]
    assert [s.nbytes for s in held] == [s.nbytes for s in present.tape.storages]
