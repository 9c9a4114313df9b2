"""What other tools' own checkpointing can do under a plan's budget, traced.

A plan decides op by op; these tools take a few settings. For each setting that could
help, the model is traced with the tool's checkpointing really switched on, and the
cheapest setting that fits is the answer, with the peak that it gives.

- ``"transformers"``: `PreTrainedModel.activation_checkpointing_enable` with
  `every_n_layers` (transformers 5.24, modeling_utils.py).
- ``"torchtitan"``: layer-wise selective checkpointing, every k-th child of `layers` in
  PyTorch's `checkpoint_wrapper` (torchtitan/distributed/activation_checkpoint.py at
  01db32e97, `_apply_layer_sac`); "full" is every child.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as of_torch

from autosac.errors import ArgumentError, UnsupportedError
from autosac.profiles.profile import Profile
from autosac.profiles.tracing_again import traced_again
from autosac.quantities import format_bytes, format_ms

Switch = Callable[[torch.nn.Module, int], None]


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
        target: "transformers" or "torchtitan".
        profile: The step.
        budget_bytes: Cap on the peak.
        plan: Peak and step time of the plan itself.

    Raises:
        ArgumentError: The tool is none of these, or the model is not of its kind.
    """
    if target not in _TARGETS:
        raise ArgumentError(
            f"`target`={target!r} must be one of {', '.join(map(repr, _TARGETS))};"
            " compiled models have `autosac.compile(model, memory_budget=...)`."
        )
    count, switch, words = _TARGETS[target]
    model = profile.step.model
    num_layers = count(model)
    best: tuple[int, Profile] | None = None
    for every in _frequencies(num_layers):
        copied = _sharing(model)
        switch(copied, every)
        step = traced_again(profile, model=copied, options={})
        if best is None or step.baseline_peak_bytes < best[1].baseline_peak_bytes:
            best = every, step
        if step.baseline_peak_bytes <= budget_bytes:
            break
    assert best is not None
    every, step = best
    return Export(
        target=target,
        settings=words(every),
        budget_bytes=budget_bytes,
        peak_bytes=step.baseline_peak_bytes,
        step_ms=step.baseline_ms,
        plan_peak_bytes=plan[0],
        plan_step_ms=plan[1],
    )


def _sharing(model: torch.nn.Module) -> Any:
    """A copy of a model's modules that has its very parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _frequencies(num_layers: int) -> list[int]:
    """Every how many layers, fewest layers first; one for each number of layers.

    Tools count from the first layer (the number is rounded up) or from the k-th (down).
    """
    by_count = {
        (num_layers // k, -(-num_layers // k)): k for k in range(1, num_layers + 1)
    }
    return sorted(by_count.values(), reverse=True)


# --- transformers -------------------------------------------------------------


def _transformers_layers(model: torch.nn.Module) -> int:
    if not hasattr(model, "activation_checkpointing_enable"):
        raise ArgumentError(
            f"`model` is a {type(model).__name__} without"
            " `activation_checkpointing_enable`: exports for 'transformers' take its"
            " models, from transformers 5.24 on."
        )
    layers = [m for m in model.modules() if hasattr(m, "_can_checkpoint_with_cache")]
    if not layers:
        raise UnsupportedError(
            f"{type(model).__name__} has no `GradientCheckpointingLayer`, so that"
            " `every_n_layers` means nothing; apply the plan itself."
        )
    if any(vars(layer).get("gradient_checkpointing") for layer in layers):
        raise ArgumentError(
            "The model has gradient checkpointing already: disable it, the export says"
            " what to enable."
        )
    return len(layers)


def _transformers(model: Any, every: int) -> None:
    model.activation_checkpointing_enable(every_n_layers=every)


def _transformers_words(every: int) -> str:
    return f"model.activation_checkpointing_enable(every_n_layers={every})"


# --- torchtitan ---------------------------------------------------------------


def _titan_layers(model: torch.nn.Module) -> int:
    layers = getattr(model, "layers", None)
    if not isinstance(layers, torch.nn.Module) or not list(layers.children()):
        raise ArgumentError(
            f"`model` is a {type(model).__name__} without `layers`: exports for"
            " 'torchtitan' take models of its kind, whose `layers` hold the blocks."
        )
    return len(list(layers.children()))


def _titan(model: Any, every: int) -> None:
    for number, (name, layer) in enumerate(list(model.layers.named_children()), 1):
        if number % every == 0:
            model.layers.register_module(name, of_torch.checkpoint_wrapper(layer))


def _titan_words(every: int) -> str:
    if every == 1:
        return 'activation_checkpoint.mode = "full"'
    return (
        'activation_checkpoint.mode = "selective",'
        f' activation_checkpoint.selective_ac_option = "{every}"'
    )


_TARGETS: dict[
    str, tuple[Callable[[torch.nn.Module], int], Switch, Callable[[int], str]]
] = {
    "transformers": (_transformers_layers, _transformers, _transformers_words),
    "torchtitan": (_titan_layers, _titan, _titan_words),
}
