"""What autosac must know about a device, and the devices it knows.

Every rate is from the maker's data sheet, named beside its entry: dense rates
(half of what is printed "with sparsity"), matrix rates with float32 accumulation,
decimal gigabytes. Compute capabilities are those of NVIDIA's "CUDA GPUs" page,
multiprocessors those of whitepapers, of A10G and B200 what drivers report. Links
to the host are PCI Express of 16 lanes: 16, 32 and 64 GB/s each way in generations 3, 4
and 5, of which the data sheets name theirs. A process can allocate a few percent more
or less than `memory_bytes`: for a tight budget give bytes.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from autosac.devices.links import DISK, Link, symmetric
from autosac.devices.programs import CPU_PROGRAM, NO_PROGRAM, ProgramCosts
from autosac.errors import ArgumentError
from autosac.quantities import is_positive, is_whole, rounded_up, whole_number

_GB = 10**9
_TFLOPS = 1e12
# Of no data sheet: a tiny kernel takes 1.6 to 2.3 us on an H100
# (benchmarks/results/gpu_published.json, BERT of one sample); an op on the CPU costs
# its dispatch, which is a guess.
_GPU_LAUNCH_MS = 0.002
_CPU_LAUNCH_MS = 0.002
# Of published steps of a single sample, as `_Reached` is; hosts differ by a half.
_HOST_OP_MS = 0.028
# Heuristic: what an unknown name has in common with a known one that it may mean.
_LEAST_PART, _CLOSE = 3, 0.8
_DTYPE = re.compile(r"([bt]?float|u?int|complex)\d+\w*")
# kMinBlockSize in c10/cuda/CUDAAllocatorConfig.h; HIP builds share the allocator.
_GPU_GRANULARITY_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reached:
    """What matmuls and pointwise kernels reach of the rates of data sheets on one chip.

    Fitted to steps that others published, of models of matmuls, attention and kernels
    bound by memory: ``python -m benchmarks.published --parts time``, which names the
    sources. Heuristic: float8 reaches the share of the half types.

    Attributes:
        half: Share of the matmul rates of bfloat16 and float16,
        tfloat32: of TensorFloat-32,
        float32: of float32,
        memory: and of the memory's rate.
        error: See `DeviceSpec.time_error`.
    """

    half: float
    tfloat32: float
    float32: float
    memory: float
    error: float


_HOPPER = _Reached(half=0.62, tfloat32=0.52, float32=0.73, memory=0.89, error=0.20)
# The same chip reaches less of its faster memory's rate.
_H200 = replace(_HOPPER, memory=0.73, error=0.25)
_L40S = _Reached(half=0.70, tfloat32=0.47, float32=0.38, memory=1.0, error=0.40)
# MI325X ran TensorFloat-32 at float32's rate.
_CDNA3 = _Reached(half=0.12, tfloat32=0.08, float32=0.30, memory=0.38, error=1.50)
# Chips of which no step was published that could be rebuilt: geometric means of
# NVIDIA's others, and the worst error of a chip that is predicted with such means.
_OTHER = _Reached(half=0.69, tfloat32=0.50, float32=0.53, memory=0.88, error=0.95)
# One step, in bfloat16; the rest as above. The error is that without this step.
_A100_REACHED = replace(_OTHER, half=0.75, memory=0.95, error=0.15)
_REACHED: Mapping[str, _Reached] = MappingProxyType(
    {
        **dict.fromkeys(("h100", "h100-pcie", "gh200"), _HOPPER),
        "h200": _H200,
        **dict.fromkeys(("a100", "a100-40gb"), _A100_REACHED),
        **dict.fromkeys(("mi250x", "mi300x", "mi325x"), _CDNA3),
        "l40s": _L40S,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Size and speed of one device.

    Attributes:
        name: What users call it.
        type: "cpu", or "cuda" for CUDA and HIP.
        memory_bytes: Memory of the device.
        bandwidth_bytes_per_s: Peak rate of its memory.
        peak_flops: Dense flop/s of each dtype, by PyTorch's name without "torch."
            ("float32", "bfloat16"), and of "tfloat32" and "float8".
        launch_overhead_ms: Least time of one op.
        allocation_granularity_bytes: Allocations are multiples of it.
        vendor: "nvidia" or "amd".
        compute_capability: (major, minor) of an NVIDIA GPU; decides which kernels it
            has. Needed only to plan for one that is not present.
        multiprocessors: How many an NVIDIA GPU has; decides what sums allocate, of
            which nothing is predicted where it is None.
        matmul_efficiency: Share of `peak_flops` that matmuls reach, by its names; all
            of it for those that are missing. Other kernels of NVIDIA's GPUs reach less
            of it, and of the next (`autosac.costs.kernels`).
        bandwidth_efficiency: Share of `bandwidth_bytes_per_s` that pointwise kernels
            reach.
        host_op_ms: Time in which the host issues one op of an eager step, Python and
            autograd included; 0.0 where the host is the device.
        time_error: The worst error, as a share, of published steps bound by their
            kernels, predicted with parameters fitted without their model on such a
            GPU; None if it is not known.
        link: To far memory: of a GPU that of its host, of the CPU a file. None if it is
            not known; then nothing is offloaded.
        program: What units take of the program besides their ops: nothing of a GPU.

    Raises:
        ArgumentError: One of them cannot be meant.
    """

    name: str
    type: Literal["cpu", "cuda"]
    memory_bytes: int
    bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float]
    launch_overhead_ms: float
    allocation_granularity_bytes: int
    vendor: Literal["nvidia", "amd"] = "nvidia"
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    matmul_efficiency: Mapping[str, float] = field(default_factory=dict)
    bandwidth_efficiency: float = 1.0
    host_op_ms: float = 0.0
    time_error: float | None = None
    link: Link | None = None
    program: ProgramCosts = NO_PROGRAM

    def __post_init__(self) -> None:
        _check_one_of("type", self.type, ("cpu", "cuda"))
        _check_one_of("vendor", self.vendor, ("nvidia", "amd"))
        for name in ("memory_bytes", "allocation_granularity_bytes"):
            whole_number(getattr(self, name), name=name)
        if not is_positive(self.bandwidth_bytes_per_s):
            raise ArgumentError(
                "`bandwidth_bytes_per_s` must be a number above 0, got"
                f" {self.bandwidth_bytes_per_s!r}."
            )
        _check_by_dtype("peak_flops", self.peak_flops)
        _check_by_dtype("matmul_efficiency", self.matmul_efficiency)
        if "float32" not in self.peak_flops:
            raise ArgumentError(
                "`peak_flops` lacks 'float32', at whose rate types run that it does not"
                f" name, got {dict(self.peak_flops)!r}."
            )
        _check_capability(self.compute_capability)

    @property
    def threads_per_multiprocessor(self) -> int | None:
        """Most at a time, by compute capability (CUDA C++ Programming Guide)."""
        if self.compute_capability is None:
            return None
        if self.compute_capability == (7, 5):
            return 1024
        major, minor = self.compute_capability
        return 1536 if (major == 8 and minor > 0) or major == 12 else 2048

    def flops_per_s(self, dtype: str) -> float:
        """Peak rate of a dtype; one without its own figure runs at float32's."""
        return self.peak_flops.get(dtype, self.peak_flops["float32"])

    def achieved_flops_per_s(self, dtype: str) -> float:
        """What matmuls reach of the peak rate of a dtype."""
        dtype = dtype if dtype in self.peak_flops else "float32"
        return self.peak_flops[dtype] * self.matmul_efficiency.get(dtype, 1.0)

    @property
    def achieved_bytes_per_s(self) -> float:
        """What pointwise kernels reach of the peak rate of the memory."""
        return self.bandwidth_bytes_per_s * self.bandwidth_efficiency

    def allocated_bytes(self, num_bytes: int) -> int:
        """Size of the block that the allocator hands out for a request."""
        return rounded_up(num_bytes, self.allocation_granularity_bytes)


def _check_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ArgumentError(
            f"`{name}`={value!r} must be {' or '.join(map(repr, choices))}."
        )


def _check_by_dtype(name: str, figures: object) -> None:
    if not isinstance(figures, Mapping):
        raise ArgumentError(
            f"`{name}`={figures!r} must be a figure for each dtype, such as"
            " {'float32': 67e12, 'bfloat16': 989.5e12}."
        )
    for dtype, figure in figures.items():
        if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
            raise ArgumentError(
                f"`{name}` has the key {dtype!r}: name dtypes as PyTorch does without"
                " 'torch.', such as 'float32' or 'bfloat16', or 'tfloat32' and"
                " 'float8'."
            )
        if not is_positive(figure):
            raise ArgumentError(
                f"`{name}` has {figure!r} for {dtype!r}, and it must be a number"
                " above 0."
            )


def _check_capability(capability: object) -> None:
    is_pair = (
        isinstance(capability, tuple)
        and len(capability) == 2
        and all(map(is_whole, capability))
    )
    if capability is not None and not is_pair:
        raise ArgumentError(
            f"`compute_capability`={capability!r} must be a pair (major, minor) of"
            " whole numbers, such as (9, 0), or None."
        )


def _gpu(
    name: str,
    capability: tuple[int, int] | None,
    multiprocessors: int | None,
    memory_gb: int,
    gb_per_s: float,
    link: float | None,
    *,
    half: float | None = None,
    **tflops: float,
) -> DeviceSpec:
    """A GPU; one without a compute capability is AMD's.

    Args:
        name: What users call it.
        capability: Its compute capability.
        multiprocessors: How many it has; None for AMD's.
        memory_gb: Its memory,
        gb_per_s: and the rate of that.
        link: Gigabytes per second each way to its host; None if that is not known.
        half: Rate of bfloat16 and float16, if they are equally fast.
        tflops: Rates of further types.
    """
    if half is not None:
        tflops |= {"bfloat16": half, "float16": half}
    rates = {dtype: rate * _TFLOPS for dtype, rate in tflops.items()}
    reached = _REACHED.get(name, _OTHER)
    shares = {dtype: reached.half for dtype in ("bfloat16", "float16", "float8")}
    shares |= {"tfloat32": reached.tfloat32, "float32": reached.float32}
    return DeviceSpec(
        name=name,
        type="cuda",
        memory_bytes=memory_gb * _GB,
        bandwidth_bytes_per_s=gb_per_s * _GB,
        peak_flops=MappingProxyType(rates),
        launch_overhead_ms=_GPU_LAUNCH_MS,
        allocation_granularity_bytes=_GPU_GRANULARITY_BYTES,
        vendor="amd" if capability is None else "nvidia",
        compute_capability=capability,
        multiprocessors=multiprocessors,
        matmul_efficiency=MappingProxyType(shares),
        bandwidth_efficiency=reached.memory,
        host_op_ms=_HOST_OP_MS,
        time_error=reached.error,
        link=None if link is None else symmetric(link),
    )


_H100_SXM = {
    "float64": 67, "float32": 67, "tfloat32": 494.5, "half": 989.5, "float8": 1979
}  # fmt: skip
_A100 = {"float64": 19.5, "float32": 19.5, "tfloat32": 156, "half": 312}

_SPECS = (
    # A nominal default, on no data sheet: two cores with AVX2, dual-channel DDR4.
    # float16 and bfloat16 are emulated there and run no faster than float32.
    DeviceSpec(
        name="cpu",
        type="cpu",
        memory_bytes=16 * _GB,
        bandwidth_bytes_per_s=20.0 * _GB,
        peak_flops=MappingProxyType({"float64": 5e10, "float32": 1e11}),
        launch_overhead_ms=_CPU_LAUNCH_MS,
        allocation_granularity_bytes=1,
        link=DISK,
        program=CPU_PROGRAM,
    ),
    # NVIDIA H100 Tensor Core GPU data sheet: SXM and PCIe columns.
    _gpu("h100", (9, 0), 132, 80, 3350, 64, **_H100_SXM),
    _gpu("h100-pcie", (9, 0), 114, 80, 2000, 64,
         float64=51, float32=51, tfloat32=378, half=756, float8=1513),
    # NVIDIA GH200 Grace Hopper Superchip data sheet, 96GB HBM3; its host is reached by
    # NVLink-C2C, 900 GB/s both ways together.
    _gpu("gh200", (9, 0), 132, 96, 4000, 450, **_H100_SXM),
    # NVIDIA H200 Tensor Core GPU data sheet: SXM column.
    _gpu("h200", (9, 0), 132, 141, 4800, 64, **_H100_SXM),
    # NVIDIA A100 Tensor Core GPU data sheet: 80GB SXM and 40GB SXM columns.
    _gpu("a100", (8, 0), 108, 80, 2039, 32, **_A100),
    _gpu("a100-40gb", (8, 0), 108, 40, 1555, 32, **_A100),
    # NVIDIA Blackwell data sheet, individual specifications, HGX B200 column.
    _gpu("b200", (10, 0), 148, 180, 7700, 64,
         float64=37, float32=75, tfloat32=1125, half=2250, float8=4500),
    # NVIDIA L40S data sheet; float64 is 1/64 of float32 (Ada GPU architecture).
    _gpu("l40s", (8, 9), 142, 48, 864, 32,
         float64=1.43, float32=91.6, tfloat32=183, half=362, float8=733),
    # NVIDIA L4 data sheet; float64 is 1/64 of float32 (Ada GPU architecture).
    _gpu("l4", (8, 9), 58, 24, 300, 32,
         float64=0.473, float32=30.3, tfloat32=60, half=121, float8=242.5),
    # NVIDIA A10G data sheet; float64 is 1/64 of float32 (GA102 whitepaper).
    _gpu("a10g", (8, 6), 80, 24, 600, 32,
         float64=0.547, float32=35, tfloat32=35, half=70),
    # NVIDIA V100 data sheet: SXM2, 32GB. No bfloat16 on its tensor cores.
    _gpu("v100", (7, 0), 80, 32, 900, 16, float64=7.8, float32=15.7, float16=125),
    # NVIDIA T4 data sheet; float64 is 1/32 of float32 (Turing whitepaper, TU104).
    _gpu("t4", (7, 5), 40, 16, 320, 16, float64=0.253, float32=8.1, float16=65),
    # NVIDIA GA102 GPU architecture whitepaper, GeForce RTX 3090.
    _gpu("rtx3090", (8, 6), 82, 24, 936, 32,
         float64=0.556, float32=35.6, tfloat32=35.6, half=71),
    # NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090.
    _gpu("rtx4090", (8, 9), 128, 24, 1008, 32,
         float64=1.29, float32=82.6, tfloat32=82.6, half=165.2, float8=330.3),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, GeForce RTX 5090.
    _gpu("rtx5090", (12, 0), 170, 32, 1792, 64,
         float64=1.64, float32=104.8, tfloat32=104.8, half=209.5, float8=419),
    # AMD Instinct MI250X data sheet, halved: PyTorch sees each GCD as a device.
    _gpu("mi250x", None, None, 64, 1638.4, None,
         float64=47.85, float32=47.85, half=191.5),
    # AMD Instinct MI300X data sheet.
    _gpu("mi300x", None, None, 192, 5300, 64,
         float64=163.4, float32=163.4, tfloat32=653.7, half=1307.4, float8=2614.9),
    # AMD Instinct MI325X data sheet: MI300X with more and faster memory.
    _gpu("mi325x", None, None, 256, 6000, 64,
         float64=163.4, float32=163.4, tfloat32=653.7, half=1307.4, float8=2614.9),
)  # fmt: skip

KNOWN_DEVICES: Mapping[str, DeviceSpec] = MappingProxyType(
    {spec.name: spec for spec in _SPECS}
)

# Variants: all these words are in the product name.
_PRODUCT_WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "h100-pcie": ("h100", "pcie"),
        "a100-40gb": ("a100", "40gb"),
    }
)


def device_spec(name: str) -> DeviceSpec:
    """Look up a known device; case does not matter.

    Raises:
        ArgumentError: No device of that name is known; suggests one.
    """
    spec = KNOWN_DEVICES.get(name.lower()) if isinstance(name, str) else None
    if spec is None:
        raise _unknown(name)
    return spec


def present_gpu(name: str) -> re.Match[str] | None:
    """Matches a name of the GPU that is here, "cuda" or "cuda:0"; its index, if any."""
    return re.fullmatch(r"cuda(?::(\d+))?", name, re.IGNORECASE)


def _unknown(device: object) -> ArgumentError:
    if not isinstance(device, str):
        return ArgumentError(
            f"`device`={device!r} must be a name such as 'cpu', 'cuda' or 'h100', a"
            " `torch.device` or a `DeviceSpec`."
        )
    return ArgumentError(
        f"`device`={device!r} is not a known device{_likely(device)}; name one of"
        f" {', '.join(KNOWN_DEVICES)}, or 'cuda' for the GPU that is here, or pass a"
        " `DeviceSpec`."
    )


def _likely(name: str) -> str:
    """Hint at the device that an unknown name probably means, '' if there is none."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    product = _of_product(name)
    close = [] if product is None else [product.name]
    if len(letters) >= _LEAST_PART:
        close += [full_name for full_name in KNOWN_DEVICES if letters in full_name]
    close += difflib.get_close_matches(letters, KNOWN_DEVICES, n=1, cutoff=_CLOSE)
    return f" (did you mean {close[0]!r}?)" if close else ""


def device_of_product(product: str) -> DeviceSpec:
    """Look up a GPU by what its driver calls it, such as "NVIDIA H100 80GB HBM3".

    Raises:
        ArgumentError: No such device is known.
    """
    spec = _of_product(product)
    if spec is None:
        raise ArgumentError(
            f"The GPU {product!r} has no entry in autosac.devices; pass a `DeviceSpec`"
            " as `device`."
        )
    return spec


def _of_product(product: str) -> DeviceSpec | None:
    words = re.findall(r"[a-z0-9]+", product.lower())
    # GeForce cards are two words: "NVIDIA GeForce RTX 4090".
    words += [a + b for a, b in itertools.pairwise(words)]
    for name, needed in _PRODUCT_WORDS.items():
        if all(word in words for word in needed):
            return KNOWN_DEVICES[name]
    for name, spec in KNOWN_DEVICES.items():
        if spec.type == "cuda" and name in words:
            return spec
    return None
