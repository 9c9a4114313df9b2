"""State that an optimizer keeps and a plan does not count."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, Protocol

import torch

from autosac.checkpointing.after_steps import AfterSteps
from autosac.checkpointing.stand_ins import is_in
from autosac.pytrees import held_tensors
from autosac.quantities import format_bytes
from autosac.step.arguments import warn
from autosac.storages import storage_bytes

_MOST_LOOKS = 2  # at an optimizer, which makes its state in its first step
_LITTLE = 0.01  # of the parameters: so little is not said


class Counts(Protocol):
    """Stands in for the ``forward`` of a model that has a plan.

    Attributes:
        module: The model.
        state_bytes: What its plan counts of an optimizer's state; None if it does not.
    """

    module: torch.nn.Module

    @property
    def state_bytes(self) -> int | None: ...


class OptimizerStates(AfterSteps[Counts]):
    """Looks at the state of a model's optimizers after their first steps; warns once.

    Args:
        forward: Stands in for the model's ``forward``. A copy of it is not looked for.
    """

    def __init__(self, forward: Counts) -> None:
        super().__init__(forward)
        self._looks: Counter[int] = Counter()
        self._states: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer has stepped, of this model or of another one."""
        forward = self.forward()
        is_idle = self.is_done or torch.compiler.is_compiling()
        if is_idle or forward is None or not is_in(forward):
            return
        planned_bytes = forward.state_bytes
        if planned_bytes is None:
            self.is_done = True
            return
        parameters = {id(p): p for p in forward.module.parameters()}
        states = [s for p, s in optimizer.state.items() if id(p) in parameters]
        if not states:
            self._count_other()
            return
        self._looks[id(optimizer)] += 1
        device = next(iter(parameters.values())).device
        kept = held_tensors(states, dict(parameters), in_objects=False)
        others = [t for p in parameters.values() for t in (p, p.grad) if t is not None]
        self._states[optimizer] = storage_bytes(
            [*others, *kept], device=device
        ) - storage_bytes(others, device=device)
        kept_bytes = sum(self._states.values())
        little_bytes = _LITTLE * storage_bytes(parameters.values())
        self.is_done = self._looks[id(optimizer)] == _MOST_LOOKS
        if kept_bytes - planned_bytes > little_bytes:
            self.is_done = True
            warn(
                f"{type(optimizer).__name__} keeps {format_bytes(kept_bytes)} of state,"
                f" and the plan counts {format_bytes(planned_bytes)}: the peak is"
                " higher by the difference. Plan again with the `optimizer` that is"
                " used."
            )
