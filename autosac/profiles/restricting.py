"""A profile whose AC units the user has given; all that is traced is shared."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypeVar

from autosac.devices.allocator_settings import Cap
from autosac.errors import ArgumentError, UnsupportedError
from autosac.profiles.traced_step import TracedStep
from autosac.step.marks import Marks, marked
from autosac.units.given_units import GivenUnits

_Step = TypeVar("_Step", bound=TracedStep)
# What is worked out of a step whatever its units are,
_OF_ANY_UNITS = ("left_out", "calibration", "figures", "baseline_ms", "dry_runs")
_OF_ANY_CAP = (  # and whatever budgets cap.
    *_OF_ANY_UNITS,
    *("units", "chains", "slices", "candidates", "formulation", "fronts", "rules"),
)


def restricted(
    step: _Step,
    ac_units: Marks | None = None,
    fsdp_units: Marks | None = None,
    cap: Cap = "allocated",
    offload: bool | None = None,
    host_bytes: int | None = None,
) -> _Step:
    """The step with given units, the same one each time; itself if none are given.

    Args:
        step: The traced step.
        ac_units: The only modules that may be AC units: names, patterns or classes.
        fsdp_units: FSDP units, around which no module may be an AC unit.
        cap: What budgets cap.
        offload: Whether units may keep anything in far memory, None for as it is,
        host_bytes: and most bytes there; None for as many as one likes.

    Raises:
        ArgumentError: The device has no known link to far memory. One of the others
            stands for no module; or none of `ac_units` can be an AC unit.
    """
    if step.plain is not None:
        if offload is None:
            offload, host_bytes = True, step.host_bytes
        plain: _Step = step.plain  # type: ignore[assignment]
        return restricted(plain, ac_units, fsdp_units, cap, offload, host_bytes)
    if cap != step.cap and step.device.type == "cuda":
        step = _capped(step, cap)
    step = _given(step, ac_units, fsdp_units)
    return _offloading(step, host_bytes) if offload else step


def with_own_units(step: _Step) -> _Step:
    """The step with units of its own, for two of them on one device."""
    new = replace(step)
    _ = step.left_out, step.simulator, step.fronts
    _share(step, new, (*_OF_ANY_UNITS, "simulator", "fronts"))
    return new


def _given(step: _Step, ac_units: Marks | None, fsdp_units: Marks | None) -> _Step:
    """The step with given units, the same one each time."""
    if ac_units is None and fsdp_units is None:
        return step
    tree = step.tape.modules
    given = GivenUnits(
        ac_units=None
        if ac_units is None
        else frozenset(tree[i].fqn for i in marked(ac_units, tree, name="ac_units")),
        fsdp_units=frozenset(
            tree[i].fqn for i in marked(fsdp_units or (), tree, name="fsdp_units")
        ),
    )
    known = step.with_given_units
    if given not in known:
        new = replace(step, given=given)
        may = partial(given.may_be_unit, tree=tree)
        vars(new).update(
            units=given.of(step.units, tree),
            chains=tuple(filter(may, step.chains)),
            slices=tuple(filter(may, step.slices)),
            fronts=step.fronts,  # of more units than are left
        )
        _ = step.left_out  # shared: what one leaves out, the other does
        _share(step, new, _OF_ANY_UNITS)
        vars(new)["simulator"] = step.simulator
        _check_some_left(step, new)
        known[given] = new
    return known[given]  # type: ignore[return-value]


def _offloading(step: _Step, host_bytes: int | None) -> _Step:
    """The step whose units may use far memory, the same one each time."""
    check_far_memory(step)
    known = step.with_offload
    if host_bytes not in known:
        redrawn = tuple(_offloading(other, host_bytes) for other in step.redrawn)
        new = replace(step, plain=step, host_bytes=host_bytes, redrawn=redrawn)
        _ = step.left_out, step.units, step.chains, step.slices, step.fronts, step.rules
        _ = step.dry_runs
        shared = ("units", "chains", "slices", "fronts", "rules")
        _share(step, new, (*_OF_ANY_UNITS, *shared))
        vars(new)["simulator"] = step.simulator
        known[host_bytes] = new
    return known[host_bytes]  # type: ignore[return-value]


def check_far_memory(step: TracedStep) -> None:
    """Refuse a step whose units cannot use far memory.

    Raises:
        ArgumentError: The device has no known link to it.
        UnsupportedError: The step has collectives, which may hold what is moved.
    """
    if step.device.link is None:
        raise ArgumentError(
            f"`offload` takes the rates between {step.device.name} and its far memory,"
            " which are not known: pass a `DeviceSpec` with a `link` as `device`."
        )
    if step.has_collectives:
        raise UnsupportedError(
            "`offload` is not planned for a step with collectives, such as those of"
            " tensor parallelism, which may hold what is moved: leave it out."
        )


def _capped(step: _Step, cap: Cap) -> _Step:
    """The step for budgets that cap something else, the same one each time."""
    known = step.with_other_caps
    if cap not in known:
        new = replace(step, cap=cap)
        _ = step.candidates, step.formulation, step.rules
        _share(step, new, _OF_ANY_CAP)
        vars(new)["simulator"] = step.simulator.capped(cap)
        known[cap] = new
    return known[cap]  # type: ignore[return-value]


def _share(step: TracedStep, new: TracedStep, names: tuple[str, ...]) -> None:
    known = vars(step)
    vars(new).update({name: known[name] for name in names if name in known})


def _check_some_left(step: TracedStep, new: TracedStep) -> None:
    wanted = new.given.ac_units
    if not wanted or new.candidates:
        return
    refused = step.units.refused
    why = next((f"`{fqn}`: {refused[fqn]}" for fqn in wanted if fqn in refused), None)
    because = "" if why is None else f" ({why})"
    able = ", ".join(f"`{unit.fqn}`" for unit in step.units.candidates[:3])
    kept = "keep" if why is None else "can be rerun and keep"
    advice = f": name modules that {kept} activation memory, such as {able}."
    if not able:
        advice = ", nor can any other module of this model: leave `ac_units` out."
    raise ArgumentError(
        f"None of the modules in `ac_units` can be an AC unit{because}{advice}"
    )
