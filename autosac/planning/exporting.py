"""What other tools' own checkpointing can do under a plan's budget, traced.

A plan decides op by op; these tools take a few settings (`export_targets`). For each
setting that could help, the model is traced with the tool's checkpointing really
switched on, and the fastest setting that fits is the answer, with the peak that it
gives.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autosac.errors import ArgumentError, UnsupportedError
from autosac.planning import export_targets, selective_targets
from autosac.planning.export_targets import Family, Setting
from autosac.profiles.profile import Profile
from autosac.profiles.tracing_again import traced_again
from autosac.quantities import format_bytes, format_ms
from autosac.step.tape import Tape
from autosac.tracing.shared_handles import handles_shared

_TARGETS = {
    "transformers": export_targets.of_transformers,
    "torchtitan": export_targets.of_torchtitan,
    "megatron": export_targets.of_megatron,
    "axolotl": lambda model: [
        *selective_targets.axolotl_lists(model),
        *export_targets.of_axolotl(model),
    ],
    "automodel": selective_targets.of_automodel,
}
NOTHING = "nothing: the plain step fits"
_Outcome = tuple[Setting, Profile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Settings of another tool for a budget, and what they really give.

    Attributes:
        target: The tool.
        settings: What to write there.
        budget_bytes: Cap on the peak.
        peak_bytes: Peak of a step traced under these settings.
        step_ms: Its time, recomputation included.
        plan_peak_bytes: Peak of the plan itself,
        plan_step_ms: and its time.
    """

    target: str
    settings: str
    budget_bytes: int
    peak_bytes: int
    step_ms: float
    plan_peak_bytes: int
    plan_step_ms: float

    @property
    def fits(self) -> bool:
        """Whether the settings keep the budget; else they are those of least peak."""
        return self.peak_bytes <= self.budget_bytes

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit, and no setting does:"
        return "\n".join(
            [
                self.settings,
                f"{verdict} {format_bytes(self.budget_bytes)}:"
                f" {format_bytes(self.peak_bytes)}, {format_ms(self.step_ms)} a step",
                f"the plan itself: {format_bytes(self.plan_peak_bytes)},"
                f" {format_ms(self.plan_step_ms)} a step",
            ]
        )


def export(
    target: str, profile: Profile, *, budget_bytes: int, plan: tuple[int, float]
) -> Export:
    """The best settings of a tool for a step under a budget.

    Args:
        target: "transformers", "axolotl", "automodel", "torchtitan" or "megatron".
        profile: The step.
        budget_bytes: Cap on the peak.
        plan: Peak and step time of the plan itself.

    Raises:
        ArgumentError: The tool is none of these, or the model is not of its kind.
        UnsupportedError: What the tool does is not told by its setting.
    """
    setting, step = _best(_families(target, profile), profile, budget_bytes)
    return Export(
        target=target,
        settings=setting.words,
        budget_bytes=budget_bytes,
        peak_bytes=step.baseline_peak_bytes,
        step_ms=time_ms(step, profile),
        plan_peak_bytes=plan[0],
        plan_step_ms=plan[1],
    )


def time_ms(step: Profile, plain: Profile) -> float:
    """Time of a step that a tool makes of a plain one.

    What its reruns take of the program is that of a plan's units (`ProgramCosts`).
    """
    program = step.device.program
    num_ops = max(0, _num_kernels(step.tape) - _num_kernels(plain.tape))
    num_saved = max(0, len(plain.tape.saved) - len(step.tape.saved))
    followed_ms = num_saved * program.saved_ms + num_ops * program.op_ms
    rerun_ms = _num_reruns(step.tape) * program.unit_ms + num_ops * program.rerun_ms
    return step.baseline_ms + followed_ms + rerun_ms


def _num_kernels(tape: Tape) -> int:
    return sum(not op.is_view for op in tape.ops)


def _num_reruns(tape: Tape) -> int:
    """How many modules are called once more in backward, none inside another one."""
    number, last = 0, None
    for call in tape.calls:
        if call.phase == "backward":
            fqn = tape.modules[call.module].fqn
            if last is None or not fqn.startswith(f"{last}."):
                number, last = number + 1, fqn
    return number


def check_target(target: str) -> None:
    """Refuse a tool that has no settings to plan with.

    Raises:
        ArgumentError: It is none that is known.
        UnsupportedError: It is "compile": says why, and what to use.
    """
    if target == "compile":
        raise UnsupportedError(
            "`activation_memory_budget` of torch.compile is a share of what the"
            " partitioner may save, under which peaks rise as well as fall and"
            " gradients may change; use `autosac.compile(model, memory_budget=...)`,"
            " which takes bytes and keeps both."
        )
    if target not in _TARGETS:
        raise ArgumentError(
            f"`target`={target!r} must be one of {', '.join(map(repr, _TARGETS))};"
            " compiled models have `autosac.compile(model, memory_budget=...)`."
        )


def _families(target: str, profile: Profile) -> list[Family]:
    """What the tool can be set to for a model."""
    check_target(target)
    return _TARGETS[target](profile.step.model)


def _best(families: list[Family], profile: Profile, budget_bytes: int) -> _Outcome:
    """The fastest setting that fits, or the one of least peak if none does."""
    plain = Setting(words=NOTHING, switch=lambda model: None)
    if profile.baseline_peak_bytes <= budget_bytes:
        return plain, profile
    traced: list[_Outcome] = []
    for family in families:
        if family.is_last_resort and any(_fits(t, budget_bytes) for t in traced):
            continue
        traced += _tried(family, profile, budget_bytes)
    fitting = [t for t in traced if _fits(t, budget_bytes)]
    if fitting:
        return min(
            fitting, key=lambda t: (time_ms(t[1], profile), t[1].baseline_peak_bytes)
        )
    return min(traced, key=lambda t: t[1].baseline_peak_bytes)


def _fits(traced: _Outcome, budget_bytes: int) -> bool:
    return traced[1].baseline_peak_bytes <= budget_bytes


def _tried(family: Family, profile: Profile, budget_bytes: int) -> Iterator[_Outcome]:
    """Settings of a family with their steps, the first that fits among them."""
    if family.falls:
        yield from _halved(family.settings, profile, budget_bytes)
        return
    for setting in family.settings:
        tried = setting, _traced(setting, profile)
        yield tried
        if _fits(tried, budget_bytes):
            return


def _halved(
    settings: tuple[Setting, ...], profile: Profile, budget_bytes: int
) -> Iterator[_Outcome]:
    """The first that fits, by halving, as memory falls from one to the next."""
    if not settings:
        return
    low, high = 0, len(settings) - 1
    last = settings[high], _traced(settings[high], profile)
    yield last
    while low < high and _fits(last, budget_bytes):
        middle = (low + high) // 2
        tried = settings[middle], _traced(settings[middle], profile)
        yield tried
        if _fits(tried, budget_bytes):
            high = middle
        else:
            low = middle + 1


def _traced(setting: Setting, profile: Profile) -> Profile:
    """The step of a model whose tool is set so."""
    copied = _sharing(profile.step.model)
    setting.switch(copied)
    return traced_again(profile, model=copied, options={})


def _sharing(model: torch.nn.Module) -> Any:
    """A copy of a model's modules that has its very parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    with handles_shared():
        return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
