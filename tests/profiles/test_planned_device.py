import dataclasses

import pytest
import torch
from torch import nn

from autosac.devices.specs import device_spec
from autosac.errors import ArgumentError
from autosac.profiles.planned_device import planned_device, spec_of


@pytest.mark.parametrize(
    "device", [torch.device("cpu"), torch.device("cpu", 0), "CPU", "cpu"]
)
def test_the_cpu_that_is_here_has_several_names(device):
    assert planned_device(nn.Linear(2, 2), device) == planned_device(
        nn.Linear(2, 2), None
    )


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda:0")])
def test_the_gpu_that_is_here_has_several_names(device, monkeypatch):
    properties = dataclasses.make_dataclass("P", ["total_memory"])(2**30)
    for name, value in {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_properties": properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)

    expected = dataclasses.replace(device_spec("h100"), memory_bytes=2**30)
    assert spec_of(device) == expected
    with pytest.raises(ArgumentError, match="'cuda:1', but the GPUs that are present"):
        spec_of("cuda:1")


def test_without_a_gpu_that_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ArgumentError, match="`device`='cuda:0', but no GPU is present"):
        spec_of(torch.device("cuda:0"))
