"""What every model of the benchmarks comes with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from autosac import Profile, profile


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training step that can be built anew any number of times.

    Attributes:
        name: What tables call it.
        make_model: Builds the model in training mode.
        make_inputs: Makes the batch, the same at every call.
        loss_fn: Output -> scalar; None for the output's own loss.
        make_optimizer: Builds the optimizer of a model.
        blocks: FQNs of the blocks that people would checkpoint.
        loss_bytes: Memory that the loss function alone holds: targets.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_inputs: Callable[[], Any]
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    blocks: tuple[str, ...]
    loss_bytes: int = 0


def profile_of(work: Workload, **options: Any) -> Profile:
    """The step of a workload, always with the same parameters.

    Args:
        work: The step.
        options: As `autosac.profile` takes them.
    """
    torch.manual_seed(0)
    model = work.make_model()
    return profile(
        model,
        work.make_inputs(),
        loss_fn=work.loss_fn,
        optimizer=work.make_optimizer(model),
        **options,
    )


def on_device(work: Workload, device: str) -> Workload:
    """The same step, built on the CPU and moved elsewhere; losses move targets."""
    if device == "cpu":
        return work

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    return replace(
        work,
        make_model=lambda: work.make_model().to(device),
        make_inputs=lambda: tree_map_only(torch.Tensor, moved, work.make_inputs()),
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with its defaults."""
    return torch.optim.AdamW(model.parameters())


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def numbered(prefix: str, count: int) -> tuple[str, ...]:
    """FQNs of the members of a ``ModuleList``."""
    return tuple(f"{prefix}.{index}" for index in range(count))


def integers(high: int, *size: int) -> torch.Tensor:
    """Random integers that do not depend on the global generator."""
    return torch.randint(high, size, generator=torch.Generator().manual_seed(0))


def normal(*size: int) -> torch.Tensor:
    """Random numbers that do not depend on the global generator."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(0))


def labelled(vocabulary: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Token ids and labels as Transformers' language models take them."""
    tokens = integers(vocabulary, batch, length)
    return {"input_ids": tokens, "labels": tokens.clone()}


def classification(targets: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Cross entropy of logits, shape (..., classes), against class indices."""

    def loss_fn(logits: torch.Tensor) -> torch.Tensor:
        wanted = targets.to(logits.device).flatten()
        return functional.cross_entropy(logits.flatten(0, -2), wanted)

    return loss_fn


def regression(targets: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Mean squared error against targets of the output's shape."""

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output, targets.to(output.device))

    return loss_fn
