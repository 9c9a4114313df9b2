import pytest
import torch

from autosac.devices.cuda_workspaces import op_bytes
from autosac.devices.specs import device_spec

aten = torch.ops.aten
A100, MI300X, H100 = (device_spec(name) for name in ("a100", "mi300x", "h100"))
HALF, MIB = torch.float16, 2**20


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


# --- copies of what is not contiguous -----------------------------------------------


@pytest.mark.parametrize("device", [A100, MI300X], ids=lambda spec: spec.name)
def test_layer_norm_copies_what_is_not_contiguous(device):
    rows, moved = meta(4, 64, 32), meta(4, 32, 64).transpose(1, 2)
    nbytes = 4 * 64 * 32 * 4

    def forward(x):
        args = (x, [32], meta(32), meta(32), 1e-5)
        return op_bytes(aten.native_layer_norm.default, args, {}, device)

    def backward(grad, x):
        statistics = meta(4, 64, 1), meta(4, 64, 1)
        args = (grad, x, [32], *statistics, meta(32), meta(32), [True] * 3)
        return op_bytes(aten.native_layer_norm_backward.default, args, {}, device)

    assert forward(rows) == 0 == backward(rows, rows)
    assert forward(moved) == nbytes == backward(rows, moved) == backward(moved, rows)
    assert backward(moved, moved) == 2 * nbytes


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_copies_what_is_not_contiguous(name):
    rows, moved = meta(8, 16, 32), meta(8, 32, 16).transpose(1, 2)
    forward = getattr(aten, f"_{name}").default
    backward = getattr(aten, f"_{name}_backward_data").default
    nbytes = 8 * 16 * 32 * 4
    # The products of gradient and result come first, but for logarithms.
    products = nbytes if name == "softmax" else 0

    for x, copies in ((rows, 0), (moved, 1)):
        assert op_bytes(forward, (x, -1, False), {}, A100) == copies * nbytes
        args = (x, x, -1, torch.float32)
        assert op_bytes(backward, args, {}, A100) == 2 * copies * nbytes + products


# --- what the allocator of an H100 counted inside ops (torch 2.11, cuDNN 9.19) --------


def test_softmax_backward_takes_the_products_that_it_sums():
    scores = meta(8, 8, 1024, 1024)
    args = (scores, scores, -1, torch.float32)

    predicted = op_bytes(aten._softmax_backward_data.default, args, {}, H100)

    assert predicted == 256 * MIB  # T5, batch 8


@pytest.mark.parametrize(
    ("shape", "counted"),
    [
        ((48, 12, 512, 64), 76_677_632),
        ((104, 12, 512, 64), 166_134_272),
        ((56, 6, 1500, 64), 131_040_256),
        ((80, 6, 1500, 64), 187_200_512),
    ],
)
def test_cudnn_attention_sums_the_queries_gradient_in_float32(shape, counted):
    heads = meta(*shape, dtype=HALF)
    sums = meta(*shape[:3], 1)
    args = (heads, heads, heads, heads, heads, sums, None, None, None, None, None)
    args += (shape[2], shape[2], 0.0, False)

    name = aten._scaled_dot_product_cudnn_attention_backward.default
    assert counted - 512 <= op_bytes(name, args, {}, H100) <= counted


@pytest.mark.parametrize(
    ("rows", "width", "counted_mib"),
    [(200704, 192, 17.4), (84000, 384, 16.6), (120000, 384, 16.3), (32768, 768, 0)],
)
def test_norms_of_many_short_rows_sum_parts_of_their_weights_gradients(
    rows, width, counted_mib
):
    x, statistics = meta(rows, width), meta(rows, 1)
    weights = meta(width), meta(width)
    args = (x, x, [width], statistics, statistics, *weights, [True] * 3)

    predicted = op_bytes(aten.native_layer_norm_backward.default, args, {}, H100)

    assert counted_mib - 2 < predicted / MIB <= counted_mib
    # That of RMS norm, of one weight, is the same kernel.
    args = (x, x, [width], statistics, weights[0], [True] * 2)
    rms = op_bytes(aten._fused_rms_norm_backward.default, args, {}, H100)
    assert predicted / 2 <= rms <= predicted


@pytest.mark.parametrize(
    ("shape", "kernel", "has_bias", "moves_gradient", "counted_mib"),
    [
        # ConvNeXt-L, batches of 64 and 256
        ((64, 1536, 7, 7), 7, True, False, 148.0),
        ((64, 768, 14, 14), 7, True, False, 74.5),
        ((64, 384, 28, 28), 7, True, False, 132.1),
        ((256, 1536, 7, 7), 7, True, False, 588.0),
        ((256, 768, 14, 14), 7, True, False, 294.0),
        ((256, 384, 28, 28), 7, True, False, 148.0),
        # FocalNet
        ((64, 1024, 7, 7), 7, False, True, 104.2),
        ((64, 512, 14, 14), 7, False, True, 61.3),
        ((64, 1024, 7, 7), 5, False, False, 50.0),
        ((64, 128, 56, 56), 3, False, True, 52.2),
    ],
)
def test_depthwise_gradients_of_channels_last_are_summed_in_parts(
    shape, kernel, has_bias, moves_gradient, counted_mib
):
    images = meta(*shape, dtype=HALF).to(memory_format=torch.channels_last)
    grad = images.contiguous() if moves_gradient else images
    channels = shape[1]
    tail = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], channels)
    args = (grad, images, meta(channels, 1, kernel, kernel, dtype=HALF), [channels])
    mask = [True, True, has_bias]

    name = aten.convolution_backward.default
    predicted = op_bytes(name, (*args, *tail, mask), {}, H100)

    assert counted_mib - 1.1 < predicted / MIB <= counted_mib


@pytest.mark.parametrize("device", [H100, MI300X], ids=lambda spec: spec.name)
def test_images_of_three_colours_that_lie_channels_last_are_padded(device):
    images = meta(248, 3, 224, 224, dtype=HALF).to(memory_format=torch.channels_last)
    weight = meta(64, 3, 7, 7, dtype=HALF).to(memory_format=torch.channels_last)
    tail = ([2, 2], [3, 3], [1, 1], False, [0, 0], 1)

    name = aten.convolution.default
    predicted = op_bytes(name, (images, weight, None, *tail), {}, device)

    counted_mib = 95.0 if device is H100 else 0  # ResNet-50; MIOpen is not modelled
    assert predicted / MIB == pytest.approx(counted_mib, abs=0.1)


# --- convolutions -------------------------------------------------------------------


def convolution(images, weight, device=A100, stride=1, groups=1):
    tail = ([stride] * 2, [1] * 2, [1] * 2, False, [0] * 2, groups)
    return op_bytes(aten.convolution.default, (images, weight, None, *tail), {}, device)


def gradients(grad, images, weight):
    tail = ([1] * 2, [1] * 2, [1] * 2, False, [0] * 2, 1, [True, True, False])
    args = (grad, images, weight, None, *tail)
    return op_bytes(aten.convolution_backward.default, args, {}, A100)


def test_half_convolutions_that_lie_channels_first_take_copies_in_the_workspace():
    images, weight = meta(2, 3, 16, 16, dtype=HALF), meta(32, 3, 3, 3, dtype=HALF)
    # Three channels count as eight: 2 x 8 x 16 x 16, 2 x 32 x 8 x 8, 32 x 8 x 3 x 3.
    elements = 4096 + 4096 + 2304

    assert convolution(images, weight, stride=2) == 2 * elements
    # Nothing is known of the kernels of AMD's GPUs, nor of those in full precision.
    assert convolution(images, weight, device=MI300X) == 0
    assert convolution(images.float(), weight.float()) == 0


def test_depthwise_convolutions_take_none():
    images, weight = meta(2, 32, 16, 16, dtype=HALF), meta(32, 1, 3, 3, dtype=HALF)

    assert convolution(images, weight, groups=32) == 0


def test_convolutions_copy_only_what_lies_in_another_format():
    last = torch.channels_last
    images, weight = meta(2, 32, 16, 16, dtype=HALF), meta(32, 32, 3, 3, dtype=HALF)
    lasting = images.contiguous(memory_format=last)
    weight_last = weight.contiguous(memory_format=last)

    assert convolution(lasting, weight_last) == 0
    assert convolution(lasting, weight) == weight.nbytes
    assert gradients(lasting, lasting, weight_last) == 0
    assert gradients(images, lasting, weight_last) == images.nbytes


def test_sequences_are_convolved_like_images():
    rows, weight = meta(2, 80, 100, dtype=HALF), meta(384, 80, 3, dtype=HALF)
    args = (rows, weight, None, [2], [1], [1], False, [0], 1)

    workspace_bytes = op_bytes(aten.convolution.default, args, {}, A100)

    # Of 100 steps 50 are left at a stride of 2.
    elements = 2 * 80 * 100 + 2 * 384 * 50 + 384 * 80 * 3
    assert workspace_bytes == A100.allocated_bytes(2 * elements)
