"""Real steps of every rival and of autosac on a few models.

Rivals are applied as our plans are, so that all pay the same for the Python that runs
around every op of a unit. On models as small as the zoo's that is most of the added
time; these are larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import autosac
from autosac.verification.recipes import Recipe
from autosac.verification.verifying import AppliesToModel
from benchmarks.comparing.profiles import budget_at, calibrated_profile
from benchmarks.comparing.timing import measure
from benchmarks.environment import MIB
from benchmarks.models import workloads
from benchmarks.rivals import Rival, rivals
from benchmarks.rivals.sac_milp import rival_of_step
from benchmarks.rivals.settings import as_plan

MODELS = ("gpt2", "bert", "resnet50")  # of `benchmarks.models.workloads`
_SHARE = 0.4  # of the way from the floor to the plain step's peak
Record = dict[str, Any]


def run(name: str, rounds: int) -> Record:
    """Every rival at one budget, autosac there and at the best rival's peak.

    A rival that does not fit the budget runs at its least peak.
    """
    work = workloads()[name]
    traced = calibrated_profile(work)
    budget_bytes = budget_at(traced, _SHARE)
    systems = (
        *rivals(traced),
        rival_of_step(traced, work.make_model(), work.make_inputs(), work.loss_fn),
    )
    pairs = [*_of_rivals(traced, systems, budget_bytes)]
    pairs += [*_of_autosac(traced, pairs, budget_bytes)]
    recipe = Recipe(
        make_model=work.make_model,
        make_inputs=work.make_inputs,
        make_optimizer=work.make_optimizer,
        loss_fn=work.loss_fn,
        extra_bytes=work.loss_bytes,
    )
    measured = measure([plan for _, plan in pairs], recipe, rounds)
    return {
        "model": name,
        "budget_bytes": budget_bytes,
        "step_ms": traced.baseline_ms,
        "rows": [
            {
                **row,
                "predicted_bytes": plan.peak_bytes,
                "measured_bytes": seen.measured_peak_bytes,
                "identical": seen.identical,
                "time_ratio": ratio,
            }
            for (row, plan), (seen, ratio) in zip(pairs, measured, strict=True)
        ],
        "missing": [f"{r.name}: {r.note}" for r in systems if not r.settings],
    }


def _of_rivals(
    profile: autosac.Profile, systems: Iterable[Rival], budget_bytes: int
) -> Iterator[tuple[Record, AppliesToModel]]:
    for rival in systems:
        if rival.settings:
            fitting = rival.at(budget_bytes)
            setting = fitting or min(rival.settings, key=lambda s: s.peak_bytes)
            row = {
                "system": rival.name,
                "setting": setting.label,
                "fits": fitting is not None,
                "recompute_ms": setting.recompute_ms,
            }
            yield row, as_plan(profile, setting, budget_bytes)


def _of_autosac(
    profile: autosac.Profile,
    others: Iterable[tuple[Record, AppliesToModel]],
    budget_bytes: int,
) -> Iterator[tuple[Record, AppliesToModel]]:
    plan = autosac.plan(profile, memory_budget=budget_bytes)
    yield _ours(plan, "at the budget"), plan
    fitting = [pair for pair in others if pair[0]["fits"]]
    if fitting:
        row, best = min(fitting, key=lambda pair: pair[0]["recompute_ms"])
        plan = autosac.plan(profile, memory_budget=best.peak_bytes)
        yield _ours(plan, f"at the peak of {row['system']}"), plan


def _ours(plan: autosac.Plan, where: str) -> Record:
    return {
        "system": "autosac",
        "setting": where,
        "fits": True,
        "recompute_ms": plan.recompute_ms,
    }


def page(record: Record) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Real steps of every rival\n"
    yield (
        f"Budget: {_SHARE:.0%} of the way from the floor to the plain step's peak."
        " Peaks by the allocator's events; time is CPU time over the plain step's,"
        f" medians of {record['rounds']} rounds in turn. A rival that does not fit runs"
        " at its least peak.\n"
    )
    for model in record["models"]:
        yield f"\n### {model['model']}, budget {model['budget_bytes'] / MIB:.2f} MiB\n"
        yield (
            "| system | setting | fits | predicted MiB | real MiB |"
            " recompute, predicted | real time | bits |"
        )
        yield "| --- | --- | --- |" + " ---: |" * 5
        for row in model["rows"]:
            yield (
                f"| {row['system']} | {row['setting']} |"
                f" {'yes' if row['fits'] else '**no**'} |"
                f" {row['predicted_bytes'] / MIB:.2f} |"
                f" {row['measured_bytes'] / MIB:.2f} |"
                f" {row['recompute_ms'] / model['step_ms']:+.1%} |"
                f" x{row['time_ratio']:.2f} |"
                f" {'identical' if row['identical'] else '**differ**'} |"
            )
        yield from (f"\n{text}" for text in model["missing"])
