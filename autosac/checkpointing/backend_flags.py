"""Settings of PyTorch's backends that decide how much memory kernels take."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

from autosac.step.arguments import warn

# By type of device; under `torch.backends`.
_NAMES = {
    "cpu": ("mkldnn.enabled",),
    "cuda": ("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic"),
}
_TAKE = {kind: attrgetter(*names) for kind, names in _NAMES.items()}


def flags_of(device_type: str) -> Any:
    """The settings that kernels of a device depend on, to be compared with earlier."""
    return _TAKE[device_type](torch.backends)


def backend_flags(device_type: str) -> dict[str, bool]:
    """The settings that kernels of a device depend on, as they are now."""
    names = _NAMES.get(device_type, ())
    return {name: bool(attrgetter(name)(torch.backends)) for name in names}


class BackendFlags:
    """Compares settings of backends with those of the planned step; warns once.

    Args:
        planned: Those; None if they are not known.
    """

    def __init__(self, planned: dict[str, bool] | None) -> None:
        self._planned = planned

    def look(self, device_type: str) -> None:
        """A step begins."""
        planned = self._planned
        if planned is None:
            return
        present = backend_flags(device_type)
        for name in planned.keys() & present.keys():
            if planned[name] != present[name]:
                self._planned = None
                warn(
                    f"`torch.backends.{name}` is {present[name]}, and it was"
                    f" {planned[name]} when the step was planned: kernels may take"
                    " other memory, and the planned peak may not hold. Plan again with"
                    " the setting that the training has."
                )
                return
