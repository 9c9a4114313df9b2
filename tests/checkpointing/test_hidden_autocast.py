"""Ops whose kernels run others do under a plan what they do without, in autocast."""

import pytest
import torch
import torch._dynamo  # so that code may have been compiled
from torch import nn
from torch.nn import functional

import autosac
from tests.real_ops import real_ops, traced_ops

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH, SIDE = 256, 16, 4


@torch.library.custom_op("autosac_tests::twice", mutates_args=())
def twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Two products, which autocast rounds."""
    return (x @ weight @ weight).to(x.dtype)


@twice.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient):
    x, weight = ctx.saved_tensors
    return gradient @ weight.t() @ weight.t(), (x.t() @ gradient) @ weight.t()


twice.register_autograd(_backward, setup_context=_keep)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(twice(self.linear(x).float().exp(), self.weight)) + x


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.bilinear(x, x.sin())) + x


class Transforms(nn.Module):
    """A spatial transformer."""

    def __init__(self):
        super().__init__()
        self.angles = nn.Linear(WIDTH, 6)
        self.out = nn.Linear(SIDE * SIDE, WIDTH)

    def forward(self, x):
        angles = self.angles(x).float().view(-1, 2, 3)
        image = x[:, :1, None, None].sin().expand(-1, 1, SIDE, SIDE)
        grid = functional.affine_grid(angles, list(image.shape), align_corners=False)
        moved = functional.grid_sample(image.exp(), grid, align_corners=False)
        return torch.tanh(self.out(moved.flatten(1))).float() + x


class Looks(nn.Module):
    """Has a frozen part in evaluation, where attention takes a fast path."""

    def __init__(self, part):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.part = part.requires_grad_(False).eval()

    def train(self, mode=True):
        super().train(mode)
        self.part.eval()
        return self

    def forward(self, x):
        seen = self.look(x.detach().view(8, -1, WIDTH)).flatten(0, 1)
        return x + self.down(self.up(x + seen).tanh().exp())

    def look(self, rows):
        return self.part(rows)


class LooksByLayer(Looks):
    def __init__(self):
        super().__init__(nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True))


class LooksByAttention(Looks):
    def __init__(self):
        super().__init__(nn.MultiheadAttention(WIDTH, 4, batch_first=True))

    def look(self, rows):
        return self.part(rows, rows, rows)[0]


class LooksBack(Looks):
    """In inference mode, where a mode sees what autograd takes apart elsewhere."""

    def __init__(self):
        super().__init__(nn.LSTM(WIDTH, WIDTH, batch_first=True))

    def look(self, rows):
        with torch.inference_mode():
            seen = self.part(rows)[0]
        return seen.clone()


FAST = {
    LooksByLayer: "aten._transformer_encoder_layer_fwd.default",
    LooksByAttention: "aten._native_multi_head_attention.default",
}


def inputs():
    return torch.randn(ROWS, WIDTH)


def loss(output):
    return output.float().square().mean()


# What a kernel takes inside is measured without autocast, and what differs is said.
@pytest.mark.slow_but_first
@pytest.mark.filterwarnings("ignore:A real step takes")
@pytest.mark.parametrize("kind", [Custom, Bilinear, Transforms, LooksBack, *FAST])
def test_a_plan_keeps_every_bit_of_an_op_that_autocast_changes_inside(kind):
    def make_model():
        return nn.Sequential(*(kind() for _ in range(3)))

    profile = autosac.profile(
        make_model(), inputs(), loss_fn=loss, autocast=torch.bfloat16
    )
    profile = autosac.calibrate(profile, progress=False)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    assert plan.recompute_ms > 0

    done = autosac.verify(
        plan, make_model, inputs, loss_fn=loss, autocast="bf16", timing_rounds=0
    )

    assert done.identical, done.differences


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", FAST)
def test_the_trace_of_a_fast_path_is_what_the_real_step_runs(kind, dtype):
    made = {"loss_fn": loss, "autocast": dtype}
    profile = autosac.profile(kind(), inputs(), **made)

    found = real_ops(profile.step)
    assert traced_ops(profile.tape) == found
    assert ("forward", FAST[kind]) in found


@pytest.mark.parametrize("kind", FAST)
def test_a_fast_path_makes_tensors_of_the_type_that_autocast_gives_them(kind):
    model = kind()
    profile = autosac.profile(model, inputs(), loss_fn=loss, autocast=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model.look(inputs().view(8, -1, WIDTH))

    [op] = (op for op in profile.tape.ops if op.name == FAST[kind])
    assert profile.tape.storages[op.creates[0]].nbytes == expected.nbytes


@pytest.mark.parametrize("is_nested", [False, True])
def test_padding_of_a_frozen_encoder_is_traced_on_its_fast_path_or_refused(is_nested):
    """Also while compiled code is looked for, which takes a function mode."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
    is_padding = torch.arange(ROWS // 8).expand(8, -1) > 20

    class LooksPadded(Looks):
        def look(self, rows):
            assert is_padding.any()  # values decide, so that it is traced for real
            seen = self.part(rows, src_key_padding_mask=is_padding)
            return functional.pad(seen, (0, 0, 0, rows.shape[1] - seen.shape[1]))

    model = LooksPadded(nn.TransformerEncoder(layer, 2, enable_nested_tensor=is_nested))
    if is_nested:
        with pytest.raises(autosac.TraceError, match="enable_nested_tensor=False"):
            autosac.profile(model, inputs(), loss_fn=loss)
        return
    profile = autosac.profile(model, inputs(), loss_fn=loss)
    assert traced_ops(profile.tape) == real_ops(profile.step)
    assert ("forward", FAST[LooksByLayer]) in traced_ops(profile.tape)
