"""State that an optimizer keeps and a plan does not count."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Mapping
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
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

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
        if not any(id(p) in parameters for p in optimizer.state):
            self._count_other()
            return
        self._looks[id(optimizer)] += 1
        self._stepped.add(optimizer)
        keeping = self._keeping(parameters)
        kept_bytes = sum(keeping.values())
        little_bytes = _LITTLE * storage_bytes(parameters.values())
        self.is_done = self._looks[id(optimizer)] == _MOST_LOOKS
        if kept_bytes - planned_bytes > little_bytes:
            self.is_done = True
            names = " and ".join(keeping)
            warn(
                f"{names} keep{'s' * (len(keeping) == 1)} {format_bytes(kept_bytes)} of"
                f" state, and the plan counts {format_bytes(planned_bytes)}: the peak"
                " is higher by the difference. Plan again with the `optimizer` that is"
                " used, or lower `memory_budget` by it."
            )

    def _keeping(self, parameters: dict[int, torch.nn.Parameter]) -> dict[str, int]:
        """Class of each optimizer that keeps state of parameters -> its bytes.

        An optimizer around another one has state of its own, and may never step. It may
        also hand its copy of a parameter back as the parameter, as SAM does before the
        other one steps: there nothing but the parameter is left of two.
        """
        device = next(iter(parameters.values())).device
        counted = [t for p in parameters.values() for t in (p, p.grad) if t is not None]
        copies: list[torch.Tensor] = []
        keeping: dict[str, int] = {}
        # What has stepped comes first, and has no copy of a parameter.
        for optimizer in sorted(_optimizers(), key=lambda o: o not in self._stepped):
            states = [s for p, s in _state(optimizer).items() if id(p) in parameters]
            kept = held_tensors(states, dict(parameters), in_objects=False)
            seen = counted if optimizer in self._stepped else copies
            kept_bytes = storage_bytes([*seen, *kept], device=device) - storage_bytes(
                seen, device=device
            )
            if kept_bytes:
                name = type(optimizer).__name__
                keeping[name] = keeping.get(name, 0) + kept_bytes
            counted += kept
            copies += kept
        return keeping


def _optimizers() -> list[torch.optim.Optimizer]:
    """All that live."""
    kind = torch.optim.Optimizer
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def _state(optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
    """Its own; not that of another one inside of it, which a property may hand on."""
    state = getattr(optimizer, "__dict__", {}).get("state")
    return state if isinstance(state, Mapping) else {}
