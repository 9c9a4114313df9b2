"""Rivals with all their settings, priced and simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from autosac.checkpointing import installing
from autosac.planning.spelling import spell_out
from autosac.profiles.profile import Profile
from autosac.solving.rules_of_thumb import Choice
from autosac.units import curves
from autosac.units.policies import OpPolicy
from benchmarks.rivals import checkpointing, op_lists
from benchmarks.rivals.greedy import greedy_path

_KTH = (1, 2, 3, 4)


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """One choice that a rival can make.

    Attributes:
        label: Its parameter, for tables.
        choice: The units and their policies.
        peak_bytes: Simulated peak of a step.
        recompute_ms: What a step recomputes.
    """

    label: str
    choice: Choice
    peak_bytes: int
    recompute_ms: float


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A way to choose what is recomputed.

    Attributes:
        name: For tables.
        settings: All that it can choose; empty if it does not apply.
        note: Why it does not apply, or "".
    """

    name: str
    settings: tuple[Setting, ...]
    note: str = ""

    def at(self, budget_bytes: int) -> Setting | None:
        """The cheapest setting whose simulated peak fits; None if none fits."""
        fitting = [s for s in self.settings if s.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda s: (s.recompute_ms, s.peak_bytes), default=None)

    @property
    def least_bytes(self) -> int | None:
        """Least feasible budget."""
        return min((s.peak_bytes for s in self.settings), default=None)


@dataclass(frozen=True, kw_only=True)
class RivalPlan:
    """A setting as `autosac.verification.verifying` takes plans.

    Attributes:
        op_policies: What happens to every op of each unit.
        peak_bytes: Simulated peak.
        budget_bytes: The cap it was chosen for.
    """

    op_policies: tuple[OpPolicy, ...]
    peak_bytes: int
    budget_bytes: int

    def apply(self, model: torch.nn.Module) -> object:
        """Make the model train so, in place."""
        installing.install(model, self.op_policies)
        return model


def as_plan(profile: Profile, setting: Setting, budget_bytes: int) -> RivalPlan:
    """A setting of a rival that can be applied to a model."""
    return RivalPlan(
        op_policies=spell_out(profile, setting.choice),
        peak_bytes=setting.peak_bytes,
        budget_bytes=budget_bytes,
    )


def priced(profile: Profile, label: str, choice: Choice) -> Setting:
    """A choice with its simulated peak and its recompute time."""
    return Setting(
        label=label,
        choice=choice,
        peak_bytes=profile.peak_bytes(choice),
        recompute_ms=sum(curves.recompute_ms(*item) for item in choice.items()),
    )


def rivals(profile: Profile) -> tuple[Rival, ...]:
    """All rivals but PyTorch's chain, which needs the model: see `sac_milp`."""
    return tuple(
        _rival(profile, name, choices(profile)) for name, choices in _FAMILIES.items()
    )


def _rival(profile: Profile, name: str, choices: Iterable[tuple[str, Choice]]) -> Rival:
    settings = [
        priced(profile, label, choice)
        for label, choice in choices
        if choice or name in _STARTS_EMPTY
    ]
    note = "" if settings else "does not apply: the model has no such modules"
    return Rival(name=name, settings=tuple(settings), note=note)


def _none(profile: Profile) -> Iterable[tuple[str, Choice]]:
    yield "", checkpointing.no_checkpointing(profile)


def _full(profile: Profile) -> Iterable[tuple[str, Choice]]:
    yield "", checkpointing.every_block(profile)


def _kth(profile: Profile) -> Iterable[tuple[str, Choice]]:
    for k in _KTH:
        yield f"k={k}", checkpointing.every_kth_block(profile, k)


def _megatron(profile: Profile) -> Iterable[tuple[str, Choice]]:
    yield "", op_lists.megatron_selective(profile)


def _matmuls(profile: Profile) -> Iterable[tuple[str, Choice]]:
    yield "all", op_lists.save_matmuls(profile)
    yield "every second", op_lists.save_matmuls(profile, every_second=True)


def _greedy(profile: Profile) -> Iterable[tuple[str, Choice]]:
    for step, choice in enumerate(greedy_path(profile)):
        yield f"move {step}", choice


def _uniform(profile: Profile) -> Iterable[tuple[str, Choice]]:
    for ratio in checkpointing.uniform_ratios(profile):
        yield f"{ratio:.3f}", checkpointing.uniform_ratio(profile, ratio)


_FAMILIES: Mapping[str, Callable[[Profile], Iterable[tuple[str, Choice]]]] = {
    "no checkpointing": _none,
    "every block": _full,
    "every k-th block": _kth,
    "Megatron selective": _megatron,
    "save matmuls": _matmuls,
    "greedy": _greedy,
    "uniform ratio": _uniform,
}
_STARTS_EMPTY = ("no checkpointing", "greedy")
