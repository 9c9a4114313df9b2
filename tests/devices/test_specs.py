import dataclasses

import pytest

from autosac.devices.specs import (
    KNOWN_DEVICES,
    device_of_product,
    device_spec,
)
from autosac.errors import ArgumentError


def test_knows_devices_by_name_in_any_case():
    assert device_spec("H100").memory_bytes == 80 * 10**9
    assert device_spec("cpu").type == "cpu"


def test_names_the_known_devices_when_asked_for_another():
    with pytest.raises(ValueError, match=r"'tpu' is not a known device.*h100.*mi300x"):
        device_spec("tpu")


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA L4", "l4"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_knows_what_drivers_call_a_device(product, name):
    assert device_of_product(product).name == name


@pytest.mark.parametrize("product", ["NVIDIA L40", "NVIDIA GB200", "CPU"])
def test_a_similar_name_is_another_device(product):
    with pytest.raises(ValueError, match=f"'{product}' has no entry"):
        device_of_product(product)


@pytest.mark.parametrize("spec", KNOWN_DEVICES.values(), ids=lambda spec: spec.name)
def test_figures_are_of_the_right_order(spec):
    is_gpu = spec.type == "cuda"
    rates = spec.peak_flops

    assert 10 * 10**9 <= spec.memory_bytes <= 300 * 10**9
    assert 1e10 <= spec.bandwidth_bytes_per_s <= 1e13
    assert 0 < spec.launch_overhead_ms < 0.1
    assert spec.allocation_granularity_bytes == (512 if is_gpu else 1)
    assert rates["float64"] <= rates["float32"] <= rates.get("tfloat32", 1e18)
    assert spec.flops_per_s("float16") <= spec.flops_per_s("float32") * 30
    assert all(1e10 <= rate <= 1e16 for rate in rates.values())


@pytest.mark.parametrize("spec", KNOWN_DEVICES.values(), ids=lambda spec: spec.name)
def test_every_gpu_of_nvidia_has_a_compute_capability(spec):
    of_nvidia = spec.type == "cuda" and not spec.name.startswith("mi")

    assert (spec.compute_capability is not None) == of_nvidia
    assert (spec.vendor == "amd") == spec.name.startswith("mi")


def test_rates_are_dense():
    # The H100 data sheet prints 1,979 TFLOPS for bfloat16 with sparsity.
    assert device_spec("h100").flops_per_s("bfloat16") == 989.5e12


def test_a_dtype_without_a_figure_runs_at_the_rate_of_float32():
    assert device_spec("v100").flops_per_s("bfloat16") == 15.7e12


@pytest.mark.parametrize(
    ("asked", "given"), [(0, 0), (1, 512), (512, 512), (513, 1024)]
)
def test_gpu_allocations_are_rounded_up(asked, given):
    assert device_spec("a100").allocated_bytes(asked) == given
    assert device_spec("cpu").allocated_bytes(asked) == asked


def test_specs_do_not_change():
    spec = device_spec("h100")

    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.memory_bytes = 0
    with pytest.raises(TypeError):
        spec.peak_flops["float32"] = 0.0


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("A100-80GB", "a100"),
        ("a100-sxm4-40gb", "a100-40gb"),
        ("H100PCIE", "h100-pcie"),
        ("4090", "rtx4090"),
        ("h1000", "h100"),
    ],
)
def test_an_unknown_name_suggests_a_near_one(name, meant):
    with pytest.raises(ValueError, match=rf"\(did you mean '{meant}'\?\).* 'cuda' for"):
        device_spec(name)


@pytest.mark.parametrize("name", ["gpu", "tpu", "5", ""])
def test_a_name_that_is_near_no_other_suggests_none(name):
    with pytest.raises(ValueError, match="is not a known device; name one of cpu,"):
        device_spec(name)


@pytest.mark.parametrize("device", [5, None, ["h100"]])
def test_a_device_is_a_name_or_a_spec(device):
    with pytest.raises(ValueError, match=r"`device`=.* must be a name .* a `torch"):
        device_spec(device)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("memory_bytes", "80GiB", "whole number of at least 1, got '80GiB'"),
        ("memory_bytes", -1, "whole number of at least 1, got -1"),
        ("bandwidth_bytes_per_s", "2TB", "number above 0, got '2TB'"),
        ("peak_flops", 1e13, "a figure for each dtype, such as"),
        ("peak_flops", {"torch.float32": 1e13}, "the key 'torch.float32'"),
        ("peak_flops", {"fp32": 1e13}, "the key 'fp32'"),
        ("peak_flops", {"bfloat16": 1e13}, "lacks 'float32'"),
        ("peak_flops", {"float32": "1e13"}, "'1e13' for 'float32'"),
        ("matmul_efficiency", 0.7, "a figure for each dtype"),
        ("compute_capability", 9.0, r"a pair \(major, minor\)"),
        ("compute_capability", (9,), r"a pair \(major, minor\)"),
        ("type", "gpu", "'gpu' must be 'cpu' or 'cuda'"),
        ("vendor", "intel", "'intel' must be 'nvidia' or 'amd'"),
    ],
)
def test_a_spec_refuses_what_cannot_be_meant(field, value, sentence):
    with pytest.raises(ArgumentError, match=f"`{field}`.*{sentence}"):
        dataclasses.replace(device_spec("h100"), **{field: value})
