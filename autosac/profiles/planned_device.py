"""The device that a step is planned for, and the lens for one that is not present."""

from __future__ import annotations

from dataclasses import replace

import torch

from autosac.devices.free_memory import physical_bytes
from autosac.devices.specs import DeviceSpec, device_of_product, device_spec
from autosac.errors import ArgumentError, UnsupportedError


def _present_gpu() -> DeviceSpec:
    """The GPU that is present, with the memory that it really has."""
    if not torch.cuda.is_available():
        raise ArgumentError("`device`='cuda', but no GPU is present; name a device.")
    spec = device_of_product(torch.cuda.get_device_name())
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return replace(spec, memory_bytes=properties.total_memory)


def planned_device(
    model: torch.nn.Module, device: str | DeviceSpec | None
) -> tuple[DeviceSpec, DeviceSpec | None]:
    """The device to plan for, and the lens for it: None if the model is on it."""
    tensors = [*model.parameters(), *model.buffers()]
    types = {tensor.device.type for tensor in tensors} - {"meta"}
    if len(types) > 1:
        raise ArgumentError(
            f"`model` lies on several devices ({', '.join(sorted(types))}); move it to"
            " one."
        )
    own = types.pop() if types else None
    if device is None:
        device = own or "cpu"
    if device == "cuda":
        device = _present_gpu()
    spec = device if isinstance(device, DeviceSpec) else device_spec(device)
    if device == "cpu":
        spec = replace(spec, memory_bytes=physical_bytes())
    traced = own or "cpu"
    if spec.type == "cpu" and traced != "cpu":
        raise UnsupportedError(
            f"`device`={spec.name!r} runs other kernels than the {traced} device that"
            " the model is on; move the model to the CPU or the meta device."
        )
    return spec, spec if spec.type != traced else None
