"""Tensors that a training loop on the CPU holds all along its first steps.

No allocator tells there what a training keeps besides the planned step, but Python
knows all tensors that its objects hold. Those that are there as forward begins, and
still after the optimizer's step, are there at the step's peak. As the next step begins
it is known what optimizers keep for themselves.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from autosac import _compat_dispatch, _compat_fakes
from autosac._compat_distributed import sharded_types
from autosac.checkpointing.after_steps import AfterSteps
from autosac.checkpointing.stand_ins import is_in
from autosac.checkpointing.training_habits import Planned
from autosac.pytrees import held_tensors, module_tensors
from autosac.quantities import format_bytes
from autosac.step.arguments import warn
from autosac.step.optimizer_state import hook_tensors, optimizer_tensors
from autosac.storages import addresses_of, storage_bytes

_MOST_STEPS = 4  # are looked at,
_MOST_CALLS = 2  # and calls of the model in each of them
_MOST_OBJECTS = 2_000_000  # of Python, which takes a second
_LITTLE = 0.01  # of the budget: so little is not said


class Follows(Protocol):
    """Stands in for the ``forward`` of a model that has a plan.

    Attributes:
        module: The model.
        followed: The plan of its latest step; None if none is for steps like it.
    """

    module: torch.nn.Module

    @property
    def followed(self) -> Planned | None: ...


class _Held(NamedTuple):
    """A tensor that was there as forward began.

    Attributes:
        storage: Weak reference to its memory,
        nbytes: and the size of that.
        shape: Its shape.
        is_result: Of a step, as it has a graph.
    """

    storage: Any
    nbytes: int
    shape: torch.Size
    is_result: bool


class HeldMemory(AfterSteps[Follows]):
    """Looks for such tensors in the first steps of a planned model; warns once.

    What was there as the plan was applied is not held against it, nor are tensors like
    the model's inputs: data that waits. Where several models have plans, nothing is:
    each has a budget of its own; nor where ranks divide a model.

    Args:
        forward: Stands in for the model's ``forward``. A copy of it is not looked for.
    """

    def __init__(self, forward: Follows) -> None:
        super().__init__(forward)
        self._foreign = {one.storage.cdata: one for one in _all_tensors() or ()}
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._held: list[_Held] = []  # as the model was called last,
        self._left: list[_Held] = []  # and after the step
        self._num_steps = self._num_calls = 0

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of the model begins."""
        forward = self.forward()
        if self.is_done or forward is None:
            return
        if _is_divided(forward.module):
            self.is_done = True
            return
        self._num_calls += 1
        looks = self._num_calls <= _MOST_CALLS and self._num_steps < _MOST_STEPS
        self.is_done = self._num_steps == _MOST_STEPS
        if not (looks or self._left):
            return
        inputs = held_tensors([args, kwargs], in_objects=False)
        own = module_tensors(forward.module)
        own += [one.grad for one in own if one.is_leaf and one.grad is not None]
        known = [*inputs, *own, *self._of_optimizers()]
        if self._left:
            self._compare(forward, inputs, addresses_of(known))
            self._left = []
        if self.is_done or not looks:
            return
        held = _all_tensors(known)
        if held is None:
            self.is_done = True
            return
        weights = {one.shape for one in own}
        self._held = [
            one
            for one in held
            if one.storage.cdata not in self._foreign
            and not _is_data(one, inputs, weights)
        ]

    def _of_optimizers(self) -> Iterator[torch.Tensor]:
        """What the optimizers of the model keep."""
        for optimizer in self._optimizers:
            yield from optimizer_tensors(optimizer)
            yield from hook_tensors(optimizer)

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer has stepped, of this model or of another one."""
        forward = self.forward()
        is_idle = self.is_done or torch.compiler.is_compiling()
        if is_idle or forward is None:
            return
        own = {id(parameter) for parameter in forward.module.parameters()}
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        if not is_in(forward) or not any(id(one) in own for one in trained):
            self._count_other()
            return
        self._optimizers.add(optimizer)
        self._num_steps += bool(self._num_calls)  # others of the same step may follow
        self._num_calls = 0
        self._left = [one for one in self._held if not one.storage.expired()]

    def _compare(
        self, forward: Follows, inputs: list[torch.Tensor], known: set[int]
    ) -> None:
        """Warn if the budget has no room for what was there all along the last step.

        Args:
            forward: Stands in for the model's ``forward``.
            inputs: Of the model.
            known: Addresses of memory that is the model's or its optimizers'.
        """
        plan = forward.followed
        if plan is None or plan.offloads or plan.reserved_bytes is not None:
            return  # it has far memory here, or is for a GPU
        if self._others():
            return
        held = [one for one in self._left if one.storage.cdata not in known]
        held_bytes = sum(one.nbytes for one in held)
        # What the planned loss reads is an input of the step, too.
        read_bytes = plan.composition.get("input", 0) - storage_bytes(inputs)
        over_bytes = held_bytes - max(0, read_bytes)
        if plan.peak_bytes + over_bytes > (1 + _LITTLE) * plan.budget_bytes:
            self.is_done = True
            self._say(held, held_bytes, plan)

    def _say(self, held: list[_Held], held_bytes: int, plan: Planned) -> None:
        sizes: Counter[torch.Size] = Counter()
        for one in held:
            sizes[one.shape] += one.nbytes
        ((shape, _),) = sizes.most_common(1)
        number = sum(one.shape == shape for one in held)
        most = f"{number} of shape {list(shape)}" if number > 1 else f"{list(shape)}"
        which = f"{len(held)} tensors" if len(held) > 1 else "A tensor"
        warn(
            f"{which} ({format_bytes(held_bytes)}; {most}) that the plan does not"
            " count stayed from the model's call to the end of the optimizer's step:"
            f" its peak of {format_bytes(plan.peak_bytes)} is higher by as much, and"
            f" the budget is {format_bytes(plan.budget_bytes)}. Copies of weights or"
            " gradients, another model, activations that the loop keeps or data may"
            " be: let go of them, or lower the budget by them."
        )


def _is_divided(model: torch.nn.Module) -> bool:
    """Whether ranks share its parameters, of which they hold more than modules do."""
    kinds = {type(parameter) for parameter in model.parameters()}
    return not all(map(_compat_dispatch.is_plain, kinds)) or bool(sharded_types(model))


def _is_data(one: _Held, inputs: list[torch.Tensor], weights: set[torch.Size]) -> bool:
    """Whether a tensor is like an input: a batch that waits, or a part of all data.

    Args:
        one: The tensor.
        inputs: Of the model.
        weights: Shapes of what it holds; a copy of these may look like data.
    """
    if one.is_result:
        return False
    if any(one.shape == other.shape for other in inputs):
        return True
    parts = {other.shape[:1] for other in inputs} | {o.shape[1:] for o in inputs}
    is_like = one.shape[:1] in parts or one.shape[1:] in parts
    return is_like and one.shape not in weights


def _all_tensors(known: Iterable[torch.Tensor] = ()) -> list[_Held] | None:
    """Floating-point tensors of the CPU that Python's objects hold, each memory once.

    None where there are too many objects to look at.

    Args:
        known: These and what shares their memory are left out.
    """
    kinds = {id(kind) for kind in _kinds(torch.Tensor)}  # others may have no hash
    met = addresses_of(known)
    held = []
    objects = gc.get_objects()
    if len(objects) > _MOST_OBJECTS:
        return None
    tensors: list[torch.Tensor] = [item for item in objects if id(type(item)) in kinds]
    for one in tensors:
        if not _is_counted(one):
            continue
        storage = one.untyped_storage()
        if storage._cdata not in met and storage.resizable():  # NumPy's is not
            met.add(storage._cdata)
            weak = _compat_dispatch.weak_storage(one)
            has_graph = one.grad_fn is not None
            held.append(_Held(weak, storage.nbytes(), one.shape, has_graph))
    return held


def _kinds(kind: type) -> set[type]:
    """A type and all that are derived from it, of which tensors are plain."""
    kinds = {kind} if _compat_dispatch.is_plain(kind) else set()
    return kinds.union(*map(_kinds, kind.__subclasses__()))


def _is_counted(tensor: torch.Tensor) -> bool:
    return (
        not torch.nn.parameter.is_lazy(tensor)
        and not tensor.is_nested
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and (tensor.is_floating_point() or tensor.is_complex())
        and not _compat_fakes.is_fake(tensor)
    )
