"""Equal peak: our plans and every rival's on all models of the zoo, simulated.

At each of evenly spaced budgets our plan stands against the cheapest setting of every
rival that fits; then at the peak of every setting that was the best of its rival once,
our plan with that peak as budget against the setting itself.
"""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import autosac
from autosac import Plan, Profile
from autosac.solving import solve_options
from benchmarks.comparing.profiles import budget_at, calibrated_profile
from benchmarks.environment import MIB
from benchmarks.models import zoo
from benchmarks.rivals import Rival, Setting, rivals
from benchmarks.rivals.blocks import find_blocks
from benchmarks.rivals.sac_milp import rival_of_step

_ROUNDING = 1e-9  # of sums of the same times in another order
GAP_MEDIAN, GAP_WORST, LEAST_SAVING = 0.01, 0.05, 0.10  # what is asked for
RELATIVE_GAP = 1e-5  # rivals are closer than what `plan` leaves unless told otherwise
_ON_OUR_CURVES = ("greedy", "uniform ratio")
Record = dict[str, Any]


def run(name: str, num_budgets: int) -> Record:
    """Everything about one model."""
    warnings.filterwarnings("ignore", message=".*functorch.*")
    work = zoo()[name]
    traced = calibrated_profile(work)
    systems = (
        *rivals(traced),
        rival_of_step(traced, work.make_model(), work.make_inputs(), work.loss_fn),
    )
    budgets = [budget_at(traced, k / (num_budgets - 1)) for k in range(num_budgets)]
    plans = _Plans(traced)
    return {
        "model": name,
        "floor_bytes": autosac.floor(traced),
        "baseline_bytes": traced.baseline_peak_bytes,
        "baseline_ms": traced.baseline_ms,
        "num_blocks": len(find_blocks(traced)),
        "least_bytes": {rival.name: rival.least_bytes for rival in systems},
        "notes": {rival.name: rival.note for rival in systems if rival.note},
        "cells": [_cell(plans, systems, budget) for budget in budgets],
        "equal": list(_at_equal_peaks(plans, systems, budgets)),
    }


class _Plans:
    """Plans of one profile, each budget once."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.known: dict[int, Plan] = {}

    def at(self, budget_bytes: int) -> Plan:
        if budget_bytes not in self.known:
            plan = autosac.plan(
                self.profile, memory_budget=budget_bytes, relative_gap=RELATIVE_GAP
            )
            self.known[budget_bytes] = plan
        return self.known[budget_bytes]


def _cell(plans: _Plans, systems: Iterable[Rival], budget_bytes: int) -> Record:
    plan = plans.at(budget_bytes)
    return {
        "budget_bytes": budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "recompute_ms": plan.recompute_ms,
        "gap": plan.optimality_gap,
        "rivals": {r.name: _shown(r.at(budget_bytes)) for r in systems},
    }


def _shown(setting: Setting | None) -> Record | None:
    if setting is None:
        return None
    return {
        "setting": setting.label,
        "peak_bytes": setting.peak_bytes,
        "recompute_ms": setting.recompute_ms,
    }


def _at_equal_peaks(
    plans: _Plans, systems: Iterable[Rival], budgets: list[int]
) -> Iterator[Record]:
    """Our plan under each rival's own peak."""
    for rival in systems:
        best = {id(s): s for budget in budgets if (s := rival.at(budget))}
        if rival.settings:
            lowest = min(rival.settings, key=lambda s: (s.peak_bytes, s.recompute_ms))
            best[id(lowest)] = lowest
        for setting in best.values():
            if not setting.choice:  # nothing is recomputed: neither do we
                continue
            record: Record = {"rival": rival.name, **(_shown(setting) or {})}
            try:
                plan = plans.at(setting.peak_bytes)
            except autosac.InfeasibleBudgetError:  # below what we call our floor
                yield {**record, "ours_ms": None, "gap": None}
            else:
                ours = {"ours_ms": plan.recompute_ms, "gap": plan.optimality_gap}
                yield {**record, **ours}


# --- what it says -------------------------------------------------------------


def best_ms(cell: Record) -> float | None:
    """Recompute time of the best rival at a budget; None if none fits."""
    fitting = [r["recompute_ms"] for r in cell["rivals"].values() if r is not None]
    return min(fitting, default=None)


def is_slower(ours_ms: float | None, rival_ms: float | None) -> bool:
    """Whether our plan recomputes longer; no plan at all counts as longer."""
    if rival_ms is None:
        return False
    return ours_ms is None or ours_ms > rival_ms * (1 + _ROUNDING)


def savings(cells: Iterable[Record]) -> list[float]:
    """Share of the best rival's recompute time that our plan saves, where both fit."""
    return [
        1 - cell["recompute_ms"] / best
        for cell in cells
        if (best := best_ms(cell))  # not where nothing is recomputed
    ]


def gaps(model: Record) -> list[float]:
    """Optimality gap of every plan at the evenly spaced budgets."""
    return [cell["gap"] for cell in model["cells"]]


def gaps_at_rivals_peaks(model: Record) -> list[float]:
    """Optimality gap of every plan at a rival's peak."""
    return [cell["gap"] for cell in model["equal"] if cell["gap"] is not None]


def losses(model: Record) -> list[str]:
    """Cells in which a rival is faster, in words."""
    lost = []
    for cell in model["cells"]:
        for name, rival in cell["rivals"].items():
            if rival and is_slower(cell["recompute_ms"], rival["recompute_ms"]):
                lost.append(
                    f"{model['model']}, budget {cell['budget_bytes']}: {name}"
                    f" ({rival['setting']}) {rival['recompute_ms']:.4f} ms, autosac"
                    f" {cell['recompute_ms']:.4f} ms"
                )
    for cell in model["equal"]:
        if is_slower(cell["ours_ms"], cell["recompute_ms"]):
            ours = cell["ours_ms"]
            lost.append(
                f"{model['model']}, peak {cell['peak_bytes']} of {cell['rival']}"
                f" ({cell['setting']}): {cell['recompute_ms']:.4f} ms, autosac"
                f" {'does not fit' if ours is None else f'{ours:.4f} ms'}"
            )
    return lost


def ties(model: Record) -> Counter[str]:
    """Rival -> budgets at which it recomputes exactly as long as our plan."""
    return Counter(
        name
        for cell in model["cells"]
        for name, rival in cell["rivals"].items()
        if rival and rival["recompute_ms"] > 0
        if abs(rival["recompute_ms"] - cell["recompute_ms"])
        <= _ROUNDING * rival["recompute_ms"]
    )


def _num_compared(model: Record) -> int:
    pairs = sum(r is not None for c in model["cells"] for r in c["rivals"].values())
    return pairs + len(model["equal"])


def is_transformer(model: Record) -> bool:
    """Whether a model has attention to recompute."""
    return model["least_bytes"]["Megatron selective"] is not None


def summary(models: list[Record]) -> list[tuple[str, str, bool]]:
    """What is asked for, what was found, whether that is enough."""
    every_gap = [gap for model in models for gap in gaps(model)]
    saved = savings(cell for model in models for cell in model["cells"])
    lost = [text for model in models for text in losses(model)]
    compared = sum(map(_num_compared, models))
    rows = [
        (
            f"optimality gap: median at most {GAP_MEDIAN:.0%}",
            f"{statistics.median(every_gap):.3%}",
            statistics.median(every_gap) <= GAP_MEDIAN,
        ),
        (
            f"optimality gap: worst at most {GAP_WORST:.0%}",
            f"{max(every_gap):.2%}",
            max(every_gap) <= GAP_WORST,
        ),
        (
            "recompute time never above any rival's",
            f"{compared - len(lost)} of {compared} comparisons",
            not lost,
        ),
        (
            f"at least {LEAST_SAVING:.0%} below the best rival in the median",
            f"{statistics.median(saved):.1%}" if saved else "nothing to compare",
            bool(saved) and statistics.median(saved) >= LEAST_SAVING,
        ),
    ]
    for rival in ("every block", "sac_milp"):
        both = [m for m in models if is_transformer(m) and m["least_bytes"][rival]]
        lower = sum(m["floor_bytes"] < m["least_bytes"][rival] for m in both)
        rows.append(
            (
                f"floor lower than {rival}'s on every transformer",
                f"{lower} of {len(both)}",
                lower == len(both),
            )
        )
    return rows


def page(record: Record) -> Iterator[str]:
    """The part as Markdown."""
    models = record["models"]
    yield "## Equal peak: the zoo, simulated\n"
    yield (
        f"{record['num_budgets']} budgets from the floor to the plain step's peak for"
        f" each of {len(models)} models, on one calibrated profile each. Of every rival"
        " the cheapest setting that fits counts. Solves go on to a gap of"
        f" {RELATIVE_GAP:.3%} or ten seconds (`relative_gap`; by default they stop at"
        f" {solve_options.RELATIVE_GAP:.1%}).\n"
    )
    yield "| asked for | found | |"
    yield "| --- | --- | --- |"
    for wanted, figure, kept in summary(models):
        yield f"| {wanted} | {figure} | {'PASS' if kept else '**FAIL**'} |"
    others = [gap for model in models for gap in gaps_at_rivals_peaks(model)]
    if others:
        yield (
            f"\nAt the peaks of rivals' settings, {len(others)} more budgets, the gap"
            f" is {statistics.median(others):.3%} in the median and {max(others):.2%}"
            " at worst."
        )
    yield (
        "\nBy model: gap of our plans; comparisons (at equal budget and at the rival's"
        " own peak) in which no rival is faster; recompute time saved against the best"
        " rival that fits; budgets that no rival but autosac meets.\n"
    )
    yield "| model | gap median | worst | never slower | saved, median | only autosac |"
    yield "| --- |" + " ---: |" * 5
    for model in models:
        yield row(model)
    yield from _by_rival(models)
    cells = [_without_our_curves(cell) for model in models for cell in model["cells"]]
    saved = savings(cells)
    if saved:
        yield (
            "\nGreedy and uniform ratio take points of autosac's own exact curves, that"
            f" nobody else has. Without these two: {statistics.median(saved):.1%} below"
            f" the best rival in the median, at {len(saved)} budgets where one fits;"
            f" none fits at {sum(best_ms(c) is None for c in cells)} of {len(cells)}.\n"
        )
    yield "\nLeast feasible budget in MiB, of the same step.\n"
    names = list(models[0]["least_bytes"]) if models else []
    yield f"| model | plain step | autosac | {' | '.join(names[1:])} |"
    yield f"| --- |{' ---: |' * (len(names) + 1)}"
    for model in models:
        least = (_mib(model["least_bytes"][name]) for name in names[1:])
        head = f"{_mib(model['baseline_bytes'])} | {_mib(model['floor_bytes'])}"
        yield f"| {model['model']} | {head} | {' | '.join(least)} |"
    yield from _remarks(models)


def _without_our_curves(cell: Record) -> Record:
    known = cell["rivals"].items()
    return {**cell, "rivals": {n: r for n, r in known if n not in _ON_OUR_CURVES}}


def _by_rival(models: list[Record]) -> Iterator[str]:
    """How far every rival alone is from our plans."""
    yield "\nBy rival: budgets that it meets, and recompute time saved against it.\n"
    yield "| rival | meets | saved, median | least |"
    yield "| --- | ---: | ---: | ---: |"
    cells = [cell for model in models for cell in model["cells"]]
    for name in models[0]["least_bytes"] if models else ():
        own = [cell["rivals"][name] for cell in cells]
        saved = savings(
            {**cell, "rivals": {name: rival}}
            for cell, rival in zip(cells, own, strict=True)
        )
        met = sum(rival is not None for rival in own)
        least = f"{min(saved):.1%}" if saved else "-"
        median = f"{statistics.median(saved):.1%}" if saved else "-"
        yield f"| {name} | {met}/{len(cells)} | {median} | {least} |"


def _remarks(models: list[Record]) -> Iterator[str]:
    notes = [(m["model"], n, why) for m in models for n, why in m["notes"].items()]
    if notes:
        yield "\nWhere a rival has no setting:\n"
        yield from (f"- {model}: {name} {why}" for model, name, why in notes)
    tied = [
        f"{model['model']}: {name} at {count}"
        for model in models
        for name, count in ties(model).items()
    ]
    if tied:
        yield (
            "\nBudgets at which a rival ties autosac. Close below the plain step's"
            " peak one cheap result has to go, and greedy finds it; where nearly all"
            " memory belongs to few ops, there is little to choose.\n"
        )
        yield from (f"- {text}" for text in tied)
    lost = [text for model in models for text in losses(model)]
    if lost:
        yield "\nWhere a rival is faster:\n"
        yield from (f"- {text}" for text in lost)


def _mib(nbytes: int | None) -> str:
    return "none" if nbytes is None else f"{nbytes / MIB:.2f}"


def row(model: Record) -> str:
    """One model as a line of the table."""
    own = [*gaps(model), *gaps_at_rivals_peaks(model)]
    saved = savings(model["cells"])
    compared = _num_compared(model)
    alone = sum(best_ms(cell) is None for cell in model["cells"])
    return (
        f"| {model['model']} | {statistics.median(own):.3%} | {max(own):.2%} |"
        f" {compared - len(losses(model))}/{compared} |"
        f" {f'{statistics.median(saved):.1%}' if saved else '-'} | {alone} |"
    )
