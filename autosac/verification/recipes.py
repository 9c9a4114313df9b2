"""How to train models for a comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autosac.errors import ArgumentError
from autosac.quantities import is_whole, whole_number
from autosac.step.training_step import AnyOptimizer, LossFn

MakeOptimizer = Callable[[Any], AnyOptimizer | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to train a model for a comparison; the arguments of `verify`.

    And what is found out: `largest_write`, see `Learned`.
    """

    make_model: Callable[[], torch.nn.Module]
    make_inputs: Callable[[], Any]
    make_optimizer: MakeOptimizer | str | None = None
    loss_fn: LossFn | None = None
    steps: int = 2
    seed: int = 0
    timing_rounds: int = 3
    extra_bytes: int | None = None
    autocast: torch.dtype | None = None
    accumulate: int = 1
    clip_grad_norm: float | None = None
    gradients_in_forward: bool = False
    keeps_gradients: bool = False
    largest_write: int | None = None

    def __post_init__(self) -> None:
        numbers = [("steps", 1), ("timing_rounds", 0)]
        if self.extra_bytes is not None:
            numbers.append(("extra_bytes", 0))
        for name, least in numbers:
            whole_number(getattr(self, name), name=name, least=least)
        if not is_whole(self.seed):
            raise ArgumentError(f"`seed` must be a whole number, got {self.seed!r}.")
