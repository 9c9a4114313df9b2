"""Settings of PyTorch's backends that decide how much memory kernels take."""

from __future__ import annotations

from operator import attrgetter

import torch

from autosac.step.arguments import warn

# By type of device; under `torch.backends`.
_NAMES = {
    "cpu": ("mkldnn.enabled",),
    "cuda": ("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic"),
}
_TAKE = {kind: attrgetter(*names, *names[:1]) for kind, names in _NAMES.items()}


def backend_flags(device_type: str) -> dict[str, bool]:
    """The settings that kernels of a device depend on, as they are now."""
    if device_type not in _NAMES:
        return {}
    flags = _TAKE[device_type](torch.backends)  # the first of them twice: a tuple
    return dict(zip(_NAMES[device_type], flags, strict=False))


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
        if present == planned:
            return
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
