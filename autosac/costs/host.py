"""How long the host takes to issue the ops of an eager step, and how sure times are."""

from __future__ import annotations

from autosac.devices.specs import DeviceSpec
from autosac.quantities import format_ms
from autosac.step.tape import Tape

# Times of an eager op that ops of planned units take besides: each call in forward, of
# views too, as it is followed, and each that runs again. Of a Llama of 65 M parameters
# on an H100, whose host decided (docs/gpus.md): 59 ms without a plan, 92 with one that
# runs hardly anything again, 139 with one that runs all of it.
_FOLLOWED, _RERUN = 0.9, 1.2


def host_ms(
    tape: Tape, device: DeviceSpec, *, num_rerun: int = 0, num_followed: int = 0
) -> float:
    """Time in which the host issues a step's ops, in ms; 0.0 where it is the device.

    Host and device work side by side: a step takes at least as long as either.

    Args:
        tape: The step.
        device: Whose `host_op_ms` is the time of one op; views cost nothing.
        num_rerun: Ops that run again,
        num_followed: and all op calls of the units that run them.
    """
    if not device.host_op_ms:
        return 0.0
    num_ops = sum(not op.is_view for op in tape.ops)
    planned = _FOLLOWED * num_followed + _RERUN * num_rerun
    return (num_ops + planned) * device.host_op_ms


def time_notes(
    step_ms: float, host_ms: float, device: DeviceSpec, calibrated: bool
) -> list[tuple[str, str]]:
    """Names and texts for people: the host's time, how sure the modelled time is.

    Args:
        step_ms: Time of the step's kernels.
        host_ms: That of the host, 0.0 where it is the device.
        device: What the times are for.
        calibrated: Kernels were measured.
    """
    lines = []
    if host_ms:
        slower = ", which decides how long an eager step takes"
        told = slower if host_ms > step_ms else ""
        lines.append(("host", f"{format_ms(host_ms)} to issue its ops{told}"))
    if device.time_error is not None and not calibrated:
        error = f"within {device.time_error:.0%}"
        published = "so far off were published steps of other transformers at most"
        lines.append(("sure", f"{error}: {published}; convolutions are less sure"))
    return lines
