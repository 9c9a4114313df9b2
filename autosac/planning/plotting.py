"""The pictures of a step and its plans.

Each function gives a `Picture`: ``.save("x.png")`` (or .svg, .pdf, .html), or
``.matplotlib()`` and ``.plotly()`` for the figure itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from autosac.errors import ArgumentError
from autosac.kinds import check_kind, check_profile
from autosac.pictures.panels import Grid, Layer, Line, Note, Panel
from autosac.pictures.pictures import Picture
from autosac.planning.checking import chosen
from autosac.planning.plan_data import PlanData
from autosac.profiles.memory_history import History, history
from autosac.profiles.traced_step import TracedStep
from autosac.quantities import byte_unit, format_bytes, format_ms, whole_number
from autosac.solvers.curves import knapsack
from autosac.step.tape import IntArray
from autosac.units import curves
from autosac.units.policies import Policy
from autosac.units.unit import Unit

_NUM_TIMES = 240  # of a history in a picture; each shows the most within its time
_ORDER = (
    "parameter", "buffer", "optimizer", "gradient", "input", "activation", "temporary",
    "workspace",
)  # fmt: skip
_NO_CHOICE = 2  # points of a kind of modules: all or nothing
_SEEN_FRACTION = 0.004  # of the height of a panel: thinner layers are in no legend
_NAMED_FRACTION = 0.08  # of a step: a shorter phase has no room for its name


def memory(plan: PlanData, profile: TracedStep | None = None) -> Picture:
    """Memory over a step by category, without the plan and with it.

    Args:
        plan: The plan.
        profile: The step it is for; None if the plan was made in this process.

    Raises:
        ArgumentError: The plan comes from a file, and `profile` is missing.
        PlanMismatchError: The profile is of another step.
    """
    traced = step_of(plan, profile)
    before, after = history(traced, {}), history(traced, chosen(plan, traced))
    unit, size = byte_unit(before.peak_bytes)
    y_max = 1.3 * max(before.peak_bytes, after.peak_bytes, plan.budget_bytes) / size
    end_ms = max(before.end_ms, after.end_ms)
    cap = Line(
        label=f"budget, {format_bytes(plan.budget_bytes)}",
        x=(0.0, end_ms),
        y=(plan.budget_bytes / size,) * 2,
        dash="dashed",
    )
    panels = [
        _memory_panel(step_history, title, cap, unit, size, y_max)
        for step_history, title in (
            (before, "without the plan"),
            (after, "with the plan"),
        )
    ]
    saved_bytes = before.peak_bytes - after.peak_bytes
    return Picture(
        title=f"Memory over one training step on {plan.device}: the plan takes"
        f" {format_bytes(saved_bytes)} off the peak for {format_ms(plan.recompute_ms)}",
        panels=tuple(panels),
    )


def trade_offs(
    plan: PlanData,
    profile: TracedStep | None = None,
    *,
    segments: int | None = None,
    most: int = 6,
) -> Picture:
    """What freeing memory costs in each kind of module, and what the plan chose.

    Modules that behave alike share a panel; those that free most come first. Kinds that
    leave no choice but all or nothing are left out, unless the plan uses them.

    Args:
        plan: The plan.
        profile: As in `memory`.
        segments: Linear segments of a fitted curve (pwlf, lifted so that it never
            understates a point); None for the points alone, which plans use.
        most: Panels at most.

    Raises:
        ArgumentError: As in `memory`; or no module can free memory.
    """
    traced = step_of(plan, profile)
    if segments is not None:
        whole_number(segments, name="segments")
    whole_number(most, name="most")
    picked = chosen(plan, traced)
    alike: dict[int, list[Unit]] = {}
    curve_of = {}
    for unit, its_curve in zip(
        traced.formulation.units, traced.formulation.curves, strict=True
    ):
        if len(unit.calls) == 1:
            alike.setdefault(id(its_curve), []).append(unit)
            curve_of[id(its_curve)] = its_curve
    if not alike:
        raise ArgumentError("No module of the step can free memory by recomputation.")

    def weight(key: int) -> tuple[bool, int]:
        units = alike[key]
        is_chosen = any(unit in picked for unit in units)
        return is_chosen, curve_of[key].points.max_freed_bytes * len(units)

    def leaves_a_choice(key: int) -> bool:
        front = curve_of[key].front
        return weight(key)[0] or (
            front is not None and len(front.saved_bytes) > _NO_CHOICE
        )

    kinds = sorted(alike, key=weight, reverse=True)
    shown = (list(filter(leaves_a_choice, kinds)) or kinds)[:most]
    panels = [
        _trade_off_panel(curve_of[key], alike[key], picked, segments) for key in shown
    ]
    return Picture(
        title=f"What freed memory costs: {len(shown)} of {len(alike)} kinds of modules",
        panels=tuple(panels),
        num_columns=min(3, len(panels)),
    )


def ratios(plan: PlanData) -> Picture:
    """What share of its activation memory every AC unit recomputes, layer by layer.

    Rows are kinds of modules, columns their places among equal ones. A dot is a module
    that is no AC unit.

    Raises:
        ArgumentError: The plan recomputes nothing.
    """
    check_kind(plan, PlanData, name="plan", wanted="what `autosac.plan` returns")
    if not plan.policy:
        raise ArgumentError("The plan recomputes nothing: there is nothing to draw.")
    places = [_place_in_layers(fqn) for fqn in plan.policy]
    kinds = tuple(dict.fromkeys(kind for kind, _ in places))
    existing = {_place_in_layers(fqn) for fqn, _, _ in plan.model}
    numbers = {number for kind, number in existing if kind in kinds and number != ""}
    columns = tuple(sorted(numbers, key=int)) or ("",)
    value = dict(zip(places, plan.policy.values(), strict=True))
    if any(number == "" for _, number in places) and columns[0] != "":
        columns = ("", *columns)
    grid = Grid(
        title=f"{len(plan.policy)} AC units under {format_bytes(plan.budget_bytes)}",
        x_label="layer (* in the name)",
        rows=kinds,
        columns=columns,
        values=tuple(tuple(value.get((k, n)) for n in columns) for k in kinds),
        legend="share of activation memory that is recomputed [%];"
        " dot or empty: no AC unit",
    )
    return Picture(title="Recomputed share of every module", panels=(grid,))


def step_of(plan: PlanData, profile: TracedStep | None) -> TracedStep:
    """The step of a plan: the one that was passed, or that it was made for."""
    check_kind(plan, PlanData, name="plan", wanted="what `autosac.plan` returns")
    if profile is not None:
        check_profile(profile, TracedStep)
    traced = profile if profile is not None else plan.traced
    if traced is None:
        raise ArgumentError(
            "A plan from a file knows no ops and times; pass `profile`, the profile of"
            " the model it is for."
        )
    return traced


def _memory_panel(
    step_history: History, title: str, cap: Line, unit: str, size: int, y_max: float
) -> Panel:
    times, live = _thinned(step_history)
    rows = dict(zip(step_history.categories, live, strict=True))
    peak = (
        float(step_history.times_ms[step_history.peak_index]),
        step_history.peak_bytes / size,
    )
    mark = Line(label="peak", x=(peak[0],), y=(peak[1],), dash="none", marker="v")
    begins = sorted(step_history.phases_ms.items(), key=lambda item: item[1])
    ends = [*(ms for _, ms in begins[1:]), step_history.end_ms]
    return Panel(
        title=f"{title}: {format_bytes(step_history.peak_bytes)} in"
        f" {step_history.place}",
        x_label="time in the step [ms]",
        y_label=f"live memory [{unit}]",
        lines=(cap, mark),
        stack_x=tuple(times.tolist()),
        stack=tuple(
            Layer(
                label=name if rows[name].max() > _SEEN_FRACTION * y_max * size else "",
                y=tuple((rows[name] / size).tolist()),
                style=style,
            )
            for style, name in enumerate(_ORDER)
            if rows[name].any()
        ),
        stretches=tuple(
            (ms, phase if end - ms > _NAMED_FRACTION * step_history.end_ms else "")
            for (phase, ms), end in zip(begins, ends, strict=True)
        ),
        notes=(
            Note(
                x=peak[0],
                y=peak[1],
                text=f"peak {format_bytes(step_history.peak_bytes)}",
            ),
        ),
        x_max=cap.x[-1],
        y_max=y_max,
    )


def _thinned(step_history: History) -> tuple[npt.NDArray[np.float64], IntArray]:
    """Corners of a history: in each short time the instant of most memory."""
    total = step_history.live_bytes.sum(axis=0)
    width = step_history.end_ms / _NUM_TIMES
    bins = np.minimum((step_history.times_ms / width).astype(int), _NUM_TIMES - 1)
    picked, begins, carried = [], [], 0
    for b in range(_NUM_TIMES):
        first, last = np.searchsorted(bins, [b, b + 1])
        inside = [carried, *range(first, last)]
        picked.append(max(inside, key=lambda i: total[i]))
        begins.append(b * width)
        carried = inside[-1]
    edges = np.array([*begins, step_history.end_ms])
    return np.repeat(edges, 2)[1:-1], np.repeat(
        step_history.live_bytes[:, picked], 2, axis=1
    )


def _trade_off_panel(
    unit_curve: curves.UnitCurve,
    units: Sequence[Unit],
    picked: Mapping[Unit, Policy],
    segments: int | None,
) -> Panel:
    most = max(units[0].activation_bytes, units[0].sole_bytes, 1)
    unit, size = byte_unit(most)
    own = [(u, picked[u]) for u in units if u in picked]

    def line(label: str, points: Iterable[tuple[int, float]], **style: Any) -> Line:
        ordered_points = sorted(set(points))
        x = tuple(nbytes / size for nbytes, _ in ordered_points)
        return Line(label=label, x=x, y=tuple(ms for _, ms in ordered_points), **style)

    pareto: list[tuple[int, float]] = []
    if unit_curve.front is not None:
        front = unit_curve.front
        freed_bytes = (most - front.saved_bytes).tolist()
        times = (knapsack.recompute_ms(front.problem, again) for again in front.rerun)
        pareto = list(zip(freed_bytes, times, strict=True))
    points = [
        (most - curves.kept(u, policy), curves.recompute_ms(u, policy))
        for u, policy in own
    ]
    lines = [
        line("Pareto points", pareto, dash="none", marker="o", grey=0.55, size=3.0),
    ]
    fitted = None if segments is None else unit_curve.fit(segments)
    if fitted is not None and fitted.num_segments:
        fit = zip(fitted.freed_bytes, fitted.recompute_ms, strict=True)
        lines.append(line(f"fit, {segments} segments at most", fit, grey=0.3))
    if points:
        lines.append(line("chosen", points, dash="none", marker="X", size=8.0))
    name = units[0].fqn
    if len(units) > 1:
        name += f" and {len(units) - 1} alike"
    return Panel(
        title=f"{name}\n{len(own)} of {len(units)} chosen",
        x_label=f"memory freed in each [{unit}]",
        y_label="recomputation of each [ms]",
        lines=tuple(lines),
        x_min=0.0,
    )


def _place_in_layers(fqn: str) -> tuple[str, str]:
    """A module's name without the number of its layer, and that number.

    The first number in a name is taken for the layer's.
    """
    parts = fqn.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join([*parts[:i], "*", *parts[i + 1 :]]), part
    return fqn, ""
