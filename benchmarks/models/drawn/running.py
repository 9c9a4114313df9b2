"""Does a step that was built run at all?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from autosac.step.training_step import normalize_inputs, training_step
from benchmarks.models.drawn.errors import NotBuiltError
from benchmarks.models.workload import Workload

LARGE_BYTES = 2**26  # parameters of a model that trains without Adam's two moments


def optimizer_by_size(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, or SGD with momentum for a model that is large for a CPU."""
    if sum(parameter.nbytes for parameter in model.parameters()) <= LARGE_BYTES:
        return torch.optim.AdamW(model.parameters())
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def copied(inputs: Any) -> Any:
    """Inputs with tensors of their own: some models write to theirs."""
    return tree_map_only(torch.Tensor, torch.clone, inputs)


def first_that_runs(tries: Iterable[Callable[[], Workload]]) -> Workload:
    """The first of several steps that runs on the CPU and trains something.

    Raises:
        NotBuiltError: None does; says what the first one said.
    """
    failures = []
    for make in tries:
        try:
            work = make()
            _run(work)
        except Exception as error:  # whatever a library raises, it is not built
            failures.append(error)
        else:
            return work
    first = failures[0] if failures else None
    raise NotBuiltError(f"{type(first).__name__}: {first}") from first


def _run(work: Workload) -> None:
    torch.manual_seed(0)
    model = work.make_model()
    args, kwargs = normalize_inputs(work.make_inputs())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training_step(model, args, kwargs, loss_fn=work.loss_fn, optimizer=None)
    if all(parameter.grad is None for parameter in model.parameters()):
        raise NotBuiltError("no parameter has a gradient")
