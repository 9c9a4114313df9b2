"""How long the host takes to issue the ops of an eager step, and how sure times are."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from autosac import _compat, _compat_dispatch
from autosac.devices.programs import ProgramCosts
from autosac.devices.specs import DeviceSpec
from autosac.quantities import format_ms
from autosac.step.tape import Op, Tape

# Times of an eager op: of one in forward, with the modules around it, and of one in
# backward; then what the ops of planned units take besides: each unit, each call in
# forward, of views too, as it is followed, and each op that runs again. Of ResNet-50,
# BERT and GPT-2 on an H200 (`benchmarks.gpu_rivals`) and a Llama of 65 M parameters on
# an H100 (docs/gpus.md), whose hosts decided.
_FORWARD, _BACKWARD = 1.15, 0.8
_UNIT, _FOLLOWED, _RERUN = 2.8, 0.8, 1.5

# Layers so small that the host decides, and how many times as long an op of models
# takes as one of theirs: 54 us of ResNet-50's in bfloat16, 30 us of these.
_WIDTH, _ROWS, _BLOCKS, _OF_MODELS = 64, 8, 8, 1.8
_WARM_UP, _TIMES = 5, 15

_MOSTLY = 0.9  # of a step: the host decides both passes, or nearly


def host_program(device: DeviceSpec) -> ProgramCosts:
    """What units of eager steps take of a GPU's host: in forward, but for reruns."""
    op_ms = device.host_op_ms
    return ProgramCosts(
        unit_ms=_UNIT * op_ms, call_ms=_FOLLOWED * op_ms, rerun_ms=_RERUN * op_ms
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """How long the host takes in an eager step, in ms; nothing where it is the device.

    Attributes:
        forward_ms: To issue the ops of forward and loss,
        backward_ms: and those of backward and the optimizer.
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0

    @property
    def step_ms(self) -> float:
        """In all of it."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What the host follows of a plan's units.

    Attributes:
        units: Their calls,
        calls: op calls in these,
        reruns: and ops that run again.
    """

    units: int = 0
    calls: int = 0
    reruns: int = 0


NOTHING = Followed()  # without a plan


def host_times(
    tape: Tape, device: DeviceSpec, followed: Followed = NOTHING
) -> HostTimes:
    """How long the host takes to issue a step's ops.

    Host and device work side by side: a pass takes at least as long as either.

    Args:
        tape: The step.
        device: Whose `host_op_ms` is the time of one op; views cost nothing.
        followed: Of a plan.
    """
    program = host_program(device)
    num_ops = Counter(in_forward(op) for op in tape.ops if not op.is_view)
    forward_ms = _FORWARD * num_ops[True] * device.host_op_ms
    backward_ms = _BACKWARD * num_ops[False] * device.host_op_ms
    forward_ms += program.unit_ms * followed.units + program.call_ms * followed.calls
    backward_ms += program.rerun_ms * followed.reruns
    return HostTimes(forward_ms=forward_ms, backward_ms=backward_ms)


def in_forward(op: Op) -> bool:
    """Whether an op is of forward or the loss."""
    return op.phase in ("forward", "loss")


def time_notes(
    step_ms: float, host_ms: float, device: DeviceSpec, calibrated: bool
) -> list[tuple[str, str]]:
    """Names and texts for people: the host's time, how sure the modelled time is.

    Args:
        step_ms: Time of the step: of its kernels, or of the host where that is longer.
        host_ms: That of the host alone, 0.0 where it is the device.
        device: What the times are for.
        calibrated: Kernels were measured.
    """
    lines = []
    if host_ms:
        slower = ", which decides how long an eager step takes"
        least_ms = _MOSTLY * step_ms if calibrated else step_ms  # which has it in it
        told = slower if host_ms > least_ms else ""
        lines.append(("host", f"{format_ms(host_ms)} to issue its ops{told}"))
    if device.time_error is not None and not calibrated:
        error = f"within {device.time_error:.0%}"
        published = "so far off were published steps of other transformers at most"
        lines.append(("sure", f"{error}: {published}; convolutions are less sure"))
    return lines


# --- measuring ----------------------------------------------------------------------


def measured_host_op_ms(device: torch.device) -> float:
    """Time that the host of a GPU takes for one op of an eager step, in ms.

    By a few small layers, forward and backward, whose kernels take next to nothing.
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
    return _OF_MODELS * median(taken_ms) / counter.num_ops


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
    """Counts ops as `host_times` does."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ops: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _compat.IGNORED_OPS:
            self.num_ops += not _compat_dispatch.traits(func).is_view
        return func(*args, **(kwargs or {}))
