"""What a GPU's allocator has reached in the first steps, held against the budget.

That tells of all that a training keeps besides the planned step, whatever it is. Read
is the highest memory so far, as each step begins and after its optimizer's step, and
nothing is reset: only a step that rose above all before it tells.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from autosac import _compat_gpu
from autosac.checkpointing.after_steps import AfterSteps
from autosac.checkpointing.stand_ins import is_in
from autosac.quantities import format_bytes
from autosac.step.arguments import warn
from autosac.storages import storage_bytes

_MOST_LOOKS = 4  # at steps: the optimizer's state is there from the second on
_LITTLE = 0.01  # of the budget: so little is not said


class Capped(Protocol):
    """Stands in for the ``forward`` of a model that has a plan.

    Attributes:
        module: The model.
        budget_bytes: Of the plan that its latest step followed; None if none does.
    """

    module: torch.nn.Module

    @property
    def budget_bytes(self) -> int | None: ...


class ReachedMemory(AfterSteps[Capped]):
    """Looks at a GPU's memory in the first steps of a planned model; warns once.

    What was there as the plan was applied and is not the model's, as other models are,
    is not held against it. Where several models have plans, nothing is: each has a
    budget of its own, and the allocator counts them together.

    Args:
        forward: Stands in for the model's ``forward``. A copy of it is not looked for.
        device: The GPU that the model is on.
    """

    def __init__(self, forward: Capped, device: torch.device) -> None:
        super().__init__(forward)
        self._device = device
        own = [*forward.module.parameters(), *forward.module.buffers()]
        own += [one.grad for one in own if one.is_leaf and one.grad is not None]
        now_bytes, _ = _compat_gpu.allocated_bytes(device)
        own_bytes = storage_bytes(own, device=device)
        self._foreign_bytes = max(0, now_bytes - own_bytes)
        self._before_bytes: int | None = None
        self._looks_left = _MOST_LOOKS

    def begin(self, *_: Any) -> None:
        """A call of the model begins."""
        if self._before_bytes is None and not self.is_done:
            self._before_bytes = _compat_gpu.allocated_bytes(self._device)[1]

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer has stepped, of this model or of another one."""
        forward = self.forward()
        is_idle = self.is_done or torch.compiler.is_compiling()
        if is_idle or forward is None or self._before_bytes is None:
            return
        own = {id(parameter) for parameter in forward.module.parameters()}
        trained = (p for group in optimizer.param_groups for p in group["params"])
        if not is_in(forward) or not any(id(one) in own for one in trained):
            self._count_other()
            return
        self._looks_left -= 1
        self.is_done = not self._looks_left
        before_bytes, self._before_bytes = self._before_bytes, None
        most_bytes = _compat_gpu.allocated_bytes(self._device)[1]
        budget_bytes = forward.budget_bytes
        if most_bytes <= before_bytes or budget_bytes is None or self._has_others():
            return
        if most_bytes - self._foreign_bytes > (1 + _LITTLE) * budget_bytes:
            self.is_done = True
            self._say(most_bytes, budget_bytes)

    def _has_others(self) -> bool:
        """Whether other models with plans are on the device."""
        return any(other._device == self._device for other in self._others())

    def _say(self, most_bytes: int, budget_bytes: int) -> None:
        before = f", {format_bytes(self._foreign_bytes)} of it from before the plan"
        warn(
            f"A step has reached {format_bytes(most_bytes)} of memory on"
            f" `{self._device}`{before if self._foreign_bytes else ''}, and its budget"
            f" is {format_bytes(budget_bytes)}: something is there that the plan does"
            " not count, such as copies of weights, another model, or results that the"
            " loop keeps. Plan with the `loss_fn` and `optimizer` that the training"
            " has, let go of the rest, or lower the budget by it."
        )
