"""Every module that PyTorch's own tests know, as a training step.

The list is `torch.testing._internal.common_modules.module_db`. Many of its modules have
no parameters: each is called a few times, on inputs that are multiplied by numbers to
be learned.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.models.drawn.running import copied, first_that_runs, optimizer_by_size
from benchmarks.models.workload import Workload

_CALLS = 3


def names() -> list[str]:
    """All modules of the list."""
    return sorted(_infos())


def build(name: str) -> Workload:
    """A step of a module, on the first of its sample inputs that trains.

    Args:
        name: One of `names`.

    Raises:
        NotBuiltError: Nothing that was tried runs.
    """
    info = _infos()[name]

    def tries() -> Iterator[Callable[[], Workload]]:
        for sample in _samples(info):
            yield lambda sample=sample: _workload(name, info, sample)

    return first_that_runs(tries())


def _infos() -> dict[str, Any]:
    from torch.testing._internal import common_modules  # takes seconds; expecttest

    return {info.name: info for info in common_modules.module_db}


def _samples(info: Any) -> list[Any]:
    torch.manual_seed(0)
    random.seed(0)
    samples = info.module_inputs_func(
        info,
        device=torch.device("cpu"),
        dtype=torch.float32,
        requires_grad=False,
        training=True,
    )
    return [sample for sample in samples if sample.forward_input is not None]


def _workload(name: str, info: Any, sample: Any) -> Workload:
    built, called = sample.constructor_input, sample.forward_input
    inputs = (tuple(called.args), dict(called.kwargs))

    def make_model() -> nn.Module:
        modules = [info.module_cls(*built.args, **built.kwargs) for _ in range(_CALLS)]
        if info.is_lazy:  # a user runs these once, too
            for module in modules:
                args, kwargs = copied(inputs)
                module(*args, **kwargs)
        return Calls(modules).train()

    return Workload(
        name=name,
        make_model=make_model,
        make_inputs=lambda: copied(inputs),
        loss_fn=squares,
        make_optimizer=optimizer_by_size,
        blocks=(),
    )


class Calls(nn.Module):
    """Calls modules on the same inputs, each multiplied by a number of its own.

    Args:
        modules: They.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.called = nn.ModuleList(modules)
        self.factors = nn.ParameterList(torch.ones(()) for _ in modules)

    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        outputs = []
        for module, factor in zip(self.called, self.factors, strict=True):
            scaled = partial(_scaled, factor=factor)
            some, named = tree_map(scaled, (args, kwargs))
            outputs.append(module(*some, **named))
        return outputs


def _scaled(leaf: Any, factor: torch.Tensor) -> Any:
    is_scaled = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf * factor if is_scaled else leaf


def squares(output: Any) -> torch.Tensor:
    """Mean of the squares of each output that requires a gradient, summed."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return torch.stack([x.square().mean() for x in leaves if x.requires_grad]).sum()
