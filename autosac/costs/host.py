"""How long the host takes to issue the ops of an eager step, and how sure times are."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median
from typing import Any

import torch
from torch import nn

from autosac import _compat, _compat_dispatch
from autosac.devices.programs import ProgramCosts
from autosac.devices.specs import DeviceSpec
from autosac.quantities import format_ms
from autosac.step.tape import Tape
from autosac.units.policies import RERUN, OpPolicy

# Times of an eager op that ops of planned units take besides: each call in forward, of
# views too, as it is followed, and each that runs again. Of a Llama of 65 M parameters
# on an H100, whose host decided (docs/gpus.md): 59 ms without a plan, 92 with one that
# runs hardly anything again, 139 with one that runs all of it.
_FOLLOWED, _RERUN = 0.9, 1.2

_WIDTH, _ROWS, _BLOCKS = 64, 8, 8  # of what is run to measure the host
_WARM_UP, _TIMES = 5, 15


def host_program(device: DeviceSpec) -> ProgramCosts:
    """What units of eager steps take of a GPU's host."""
    op_ms = device.host_op_ms
    return ProgramCosts(call_ms=_FOLLOWED * op_ms, rerun_ms=_RERUN * op_ms)


def host_ms(
    tape: Tape, device: DeviceSpec, op_policies: Iterable[OpPolicy] = ()
) -> float:
    """Time in which the host issues a step's ops, in ms; 0.0 where it is the device.

    Host and device work side by side: a step takes at least as long as either.

    Args:
        tape: The step.
        device: Whose `host_op_ms` is the time of one op; views cost nothing.
        op_policies: Of the units of a plan.
    """
    if not device.host_op_ms:
        return 0.0
    program = host_program(device)
    num_ops = sum(not op.is_view for op in tape.ops)
    planned_ms = 0.0
    for one in op_policies:
        planned_ms += program.followed_ms(0, 0, len(one.names))
        planned_ms += program.rerun_ms * (one.actions + one.onward).count(RERUN)
    return num_ops * device.host_op_ms + planned_ms


def time_notes(
    step_ms: float, host_ms: float, device: DeviceSpec, calibrated: bool
) -> list[tuple[str, str]]:
    """Names and texts for people: the host's time, how sure the modelled time is.

    Args:
        step_ms: Time of the step's kernels, or of the host if that is longer.
        host_ms: That of the host, 0.0 where it is the device.
        device: What the times are for.
        calibrated: Kernels were measured.
    """
    lines = []
    if host_ms:
        slower = ", which decides how long an eager step takes"
        told = slower if host_ms >= step_ms else ""
        lines.append(("host", f"{format_ms(host_ms)} to issue its ops{told}"))
    if device.time_error is not None and not calibrated:
        error = f"within {device.time_error:.0%}"
        published = "so far off were published steps of other transformers at most"
        lines.append(("sure", f"{error}: {published}; convolutions are less sure"))
    return lines


# --- measuring ----------------------------------------------------------------------


def measured_host_op_ms(device: torch.device) -> float:
    """Time that the host of a GPU takes for one op of an eager step, in ms.

    Of a few small layers, forward and backward, whose kernels take next to nothing.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        layers = _layers(device)
        inputs = torch.ones(_ROWS, _WIDTH, device=device)

        def step() -> None:
            layers(inputs).sum().backward()
            layers.zero_grad()

        counter = _Counter()
        with counter:
            step()
        taken_ms: list[float] = []
        for number in range(-_WARM_UP, _TIMES):
            _finish(device)
            begin = time.perf_counter()
            step()
            _finish(device)
            if number >= 0:
                taken_ms.append(1e3 * (time.perf_counter() - begin))
    return median(taken_ms) / counter.num_ops


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        out: torch.Tensor = x + self.down(hidden)
        return out


def _layers(device: torch.device) -> nn.Sequential:
    """Layers of which nothing is drawn."""
    with torch.device("meta"):
        layers = nn.Sequential(*(_Block() for _ in range(_BLOCKS)))
    layers.to_empty(device=device)
    for parameter in layers.parameters():
        nn.init.constant_(parameter, 0.01)
    return layers


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Counter(_compat.PlainDispatchMode):
    """Counts ops as `host_ms` does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_ops: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _compat.IGNORED_OPS:
            self.num_ops += not _compat_dispatch.traits(func).is_view
        return func(*args, **(kwargs or {}))
