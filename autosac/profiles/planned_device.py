"""The device that a step is planned for, and the lens for one that is not present."""

from __future__ import annotations

from dataclasses import replace

import torch

from autosac.devices.free_memory import physical_bytes
from autosac.devices.specs import (
    DeviceSpec,
    device_of_product,
    device_spec,
    present_gpu,
)
from autosac.errors import ArgumentError, UnsupportedError


def spec_of(device: str | torch.device | DeviceSpec) -> DeviceSpec:
    """What is known of a device; of one that is here with the memory that it has.

    Raises:
        ArgumentError: No such device is known or present.
    """
    if isinstance(device, DeviceSpec):
        return device
    name = _name_of(device) if isinstance(device, torch.device) else device
    gpu = present_gpu(name) if isinstance(name, str) else None
    if gpu is not None:
        return _present_gpu(name, gpu[1])
    spec = device_spec(name)
    if spec.name == "cpu":
        return replace(spec, memory_bytes=physical_bytes())
    return spec


def _name_of(device: torch.device) -> str:
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(
            f"`device`={device!r} is none to plan for: pass one of type 'cpu' or"
            " 'cuda', a name such as 'h100', or a `DeviceSpec`."
        )
    return str(device) if device.type == "cuda" else "cpu"  # not "cpu:0"


def _present_gpu(name: str, index: str | None) -> DeviceSpec:
    """A GPU that is present, with the memory that it really has."""
    if not torch.cuda.is_available():
        raise ArgumentError(f"`device`={name!r}, but no GPU is present; name a device.")
    place = torch.cuda.current_device() if index is None else int(index)
    if place >= torch.cuda.device_count():
        raise ArgumentError(
            f"`device`={name!r}, but the GPUs that are present are"
            f" {torch.cuda.device_count()}, counted from 0; pass one of these."
        )
    spec = device_of_product(torch.cuda.get_device_name(place))
    properties = torch.cuda.get_device_properties(place)
    return replace(spec, memory_bytes=properties.total_memory)


def planned_device(
    model: torch.nn.Module, device: str | torch.device | DeviceSpec | None
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
    spec = spec_of(device)
    traced = own or "cpu"
    if spec.type == "cpu" and traced != "cpu":
        raise UnsupportedError(
            f"`device`={spec.name!r} runs other kernels than the {traced} device that"
            " the model is on; move the model to the CPU or the meta device."
        )
    return spec, spec if spec.type != traced else None
