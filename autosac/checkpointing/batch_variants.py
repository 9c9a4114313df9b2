"""Units of a model under the plans of several batches: each step follows its own.

The whole model's ``forward`` looks at what it is called with. That tells the plan in
most cases. Where batches of one signature take several branches, the ops before the
first unit tell which: a dispatch mode looks at them until they differ.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from autosac import _compat_dispatch
from autosac.checkpointing.ambient_state import thread
from autosac.checkpointing.held_memory import HeldMemory
from autosac.checkpointing.installing import CountedForward, install, remove
from autosac.checkpointing.opening_ops import Opening
from autosac.checkpointing.optimizer_states import OptimizerStates
from autosac.checkpointing.reached_memory import ReachedMemory
from autosac.checkpointing.running_step import Step
from autosac.checkpointing.stand_ins import Places, StandIn, is_in, warn_of_call
from autosac.checkpointing.training_habits import Planned, TrainingHabits
from autosac.step.arguments import warn
from autosac.step.batch_signatures import (
    BatchSignature,
    positional_names,
    signature_of,
)

_StandIns = dict[torch.nn.Module, StandIn]

_WORTH_COLLECTING = 16 * 2**20  # bytes of parameters; looking for them takes 0.5 s
_WORTH_LOOKING = 4 * 2**20  # bytes of a budget on the CPU; a look takes 0.1 s

_in_force: weakref.WeakSet[BatchForward] = weakref.WeakSet()  # also of dropped models


class Unseen(Protocol):
    """Says what becomes of a batch that no plan is for."""

    def __call__(
        self,
        model: torch.nn.Module | None,
        signature: BatchSignature,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        variants: Variants,
    ) -> int | Sequence[Planned]:
        """The number of the plan to follow, or further plans, one for each branch.

        Args:
            model: Without any plan; None if that cannot be had, as somebody replaced
                a ``forward``: then no further plan can be followed.
            signature: Of the batch.
            arguments: The batch.
            variants: What is planned for.
        """


class Variants:
    """The plans of a model, and which of them it follows now.

    Args:
        plans: The plans.
        names: Of the arguments that the model takes by position.
        unseen: As in `Unseen`.

    Attributes:
        training: The mode that the plans are for.
        current: Number of the plan that forward follows,
        rerun: and of the one that a rerun in backward follows, if one runs modules.
        num_running: In how many calls the model is, of all threads.
        is_step: The model runs forward for a step that is planned.
        by_hand: Steps begin by hand: see `steps_by_hand`.
        said: What was warned of,
        said_bytes: and the highest peak of a batch that no plan was made for.
    """

    def __init__(
        self, plans: Sequence[Planned], names: tuple[str, ...], unseen: Unseen
    ) -> None:
        self.plans = list(plans)
        self.names = names
        self.unseen = unseen
        policies = [policy for plan in plans for policy in plan.op_policies]
        self.training = policies[0].training if policies else True
        self.by_signature: dict[BatchSignature, tuple[int, ...]] = {}
        for number, plan in enumerate(plans):
            for signature in plan.signatures:
                earlier = self.by_signature.get(signature, ())
                self.by_signature[signature] = (*earlier, number)
        self.current = 0
        self.rerun: int | None = None
        self.num_running = 0
        self.is_step = self.by_hand = False
        self.said: set[str] = set()
        self.said_bytes = 0
        self._opening: Opening | None = None

    @property
    def is_running(self) -> bool:
        """The model runs forward."""
        return self.num_running > 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """The model runs forward inside."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    def warn_of_mode(self) -> None:
        """Warn, once, of a call with gradients in the mode that is not planned."""
        if "mode" in self.said or not any(plan.op_policies for plan in self.plans):
            return
        self.said.add("mode")
        planned, other = ("train", "eval") if self.training else ("eval", "train")
        fix = f"Plan with the model in that mode, after `model.{other}()`"
        if self.training:
            fix += "; evaluate under `torch.no_grad()`"
        warn(
            f"The model is called in {other} mode with gradients, and its plan is for"
            f" {planned} mode: nothing is recomputed, and the planned peak does not"
            f" hold. {fix}."
        )

    def warn_of_call(self, fqn: str) -> None:
        """Warn, once, of an AC unit that is called while the model is not."""
        if self.by_hand or "call" in self.said or not torch.is_grad_enabled():
            return
        self.said.add("call")
        warn_of_call(fqn)

    def open(self, numbers: tuple[int, ...]) -> None:
        """Follow one of some plans; the step's first ops will tell which."""
        self.current = numbers[0]
        if len(numbers) > 1:
            openings = {number: self.plans[number].opening for number in numbers}
            self._opening = Opening(openings)
            self._opening.__enter__()

    def settle(self, numbers: Container[int]) -> int:
        """The plan to follow where a module begins that is a unit under some plans."""
        opening = self._opening
        if opening is not None and any(n in numbers for n in opening.openings):
            opening.see("")
            self.current = opening.left[0]
            if _compat_dispatch.num_modes() == opening.depth + 1:  # ours is the last
                self.close()
        return self.current if self.rerun is None else self.rerun

    def close(self) -> None:
        """Stop comparing the step's first ops with those of plans."""
        if self._opening is not None:
            self._opening.__exit__(None, None, None)
            self._opening = None


class VariedForward(StandIn):
    """Stands in for a module's ``forward`` that is a unit under some of the plans.

    Args:
        module: The module.
        variants: Know which plan to follow.
        stand_ins: Number of a plan -> what stands in under it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        variants: Variants,
        stand_ins: Mapping[int, StandIn],
    ) -> None:
        super().__init__(module)
        self.variants = variants
        self.stand_ins = dict(stand_ins)
        self.is_unit = any(one.is_unit for one in stand_ins.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stand_in = self.stand_ins.get(self.variants.settle(self.stand_ins))
        forward = self.__wrapped__ if stand_in is None else stand_in
        return forward(*args, **kwargs)


class BatchForward(StandIn):
    """Stands in for the whole model's ``forward``, where every step begins.

    Args:
        model: The model, without a plan.
        variants: Its plans.
        frozen: Names of the parameters that these do not train.
        num_calls: How often a step calls the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        variants: Variants,
        frozen: Sequence[str],
        num_calls: int,
    ) -> None:
        super().__init__(model)
        self.variants = variants
        self.frozen = [(name, *_place(model, name)) for name in frozen]
        self.habits = TrainingHabits(
            model,
            variants.plans[0],
            finds_gradients=any(plan.finds_gradients for plan in variants.plans),
            trains_all=not self.frozen,
            is_wrapped=self.own_forward is not None,
            num_calls=num_calls,
        )
        self.signature = next(iter(variants.plans[0].signatures), None)
        self.is_alike = False  # batch of this step and of the one before
        self.differs = False  # the model of this step from the planned one
        self.states: OptimizerStates | None = None
        self.memory: ReachedMemory | HeldMemory | None = None
        self.steps: list[Step] = []
        self.stand_ins: list[_StandIns] = []
        self.put: _StandIns = {}
        for plan in variants.plans:
            self._add(plan)
        self._combine()
        self._put_on()
        self.places = Places(self.module, self.put)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        variants = self.variants
        if thread.is_inside or variants.by_hand:
            return self._forward()(*args, **kwargs)
        if variants.is_running:  # in itself, or in another thread
            with variants.running():
                return self._forward()(*args, **kwargs)
        is_planned = self.module.training == variants.training
        has_grad = torch.is_grad_enabled()
        is_step = has_grad and is_planned
        is_compiling = torch.compiler.is_compiling()  # `begin` refuses that
        if is_step and not is_compiling and _compat_dispatch.is_transformed():
            is_step = False
            self.habits.note_transform()
        if has_grad and not is_planned:
            variants.warn_of_mode()
        if is_step:
            self.begin(args, kwargs)
        else:
            self.steps[variants.current].begin()
        variants.is_step = is_step
        try:
            with variants.running():
                if is_step:
                    device_type = self.places.outline.device_type
                    return self.habits.run(
                        self._forward(),
                        args,
                        kwargs,
                        device_type,
                        lambda: self.followed,
                    )
                return self._forward()(*args, **kwargs)
        finally:
            variants.is_step = False
            variants.close()
            if is_step:
                self.places.outline.renew(is_alike=self.is_alike)

    @property
    def followed(self) -> Planned | None:
        """The plan of the latest step.

        None if it is for smaller batches, or if the model itself was another then.
        """
        plan = self.variants.plans[self.variants.current]
        now = self.signature
        is_covered = now is not None and any(s.covers(now) for s in plan.signatures)
        return None if self.differs or not is_covered else plan

    @property
    def budget_bytes(self) -> int | None:
        """Of the plan of the latest step, if it is for this kind of device."""
        plan = self.followed
        if plan is None or plan.reserved_bytes is None:
            return None
        return plan.budget_bytes

    @property
    def state_bytes(self) -> int | None:
        """What its plans count of an optimizer's state; None if one does not say."""
        each = [plan.composition.get("optimizer") for plan in self.variants.plans]
        known = [nbytes for nbytes in each if nbytes is not None]
        return max(known) if len(known) == len(each) else None

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step begins: follow the plan for its batch.

        Raises:
            UnsupportedError: The model is compiled, or a part of it.
        """
        self.places.check()
        if self.states is not None and self.states.is_done:
            self.states.close()
            self.states = None
        if self.memory is not None:
            if self.memory.is_done:
                self.memory.close()
                self.memory = None
            else:
                self.memory.begin(args, kwargs)  # asks what the step before followed
        variants = self.variants
        signature = signature_of(args, kwargs, variants.names)
        if self.frozen:
            now = ((name, owner.get(own)) for name, owner, own in self.frozen)
            thawed = tuple(n for n, p in now if p is not None and p.requires_grad)
            signature = replace(signature, thawed=thawed)
        is_alike, self.signature = signature == self.signature, signature
        numbers = variants.by_signature.get(signature)
        if numbers is None:
            numbers = self._meet(signature, args, kwargs)
            variants.by_signature[signature] = numbers
        self.is_alike = is_alike and len(numbers) == 1
        for number in numbers:
            self.steps[number].begin()
        self.differs = self.places.differs
        variants.open(numbers)

    def begin_by_hand(self, *args: Any, **kwargs: Any) -> None:
        """A step begins that does not begin with a call of the model.

        Args:
            args: What the plans take for the model's arguments,
            kwargs: and for those by name.
        """
        self.begin(args, kwargs)
        self.variants.close()

    def _forward(self) -> Callable[..., Any]:
        stand_in = self.stand_ins[self.variants.current].get(self.module)
        if stand_in is None:
            return self.__wrapped__
        self.variants.settle((self.variants.current,))
        return stand_in

    def _meet(
        self, signature: BatchSignature, args: Any, kwargs: Any
    ) -> tuple[int, ...]:
        """Numbers of the plans for a batch that none was made for."""
        variants = self.variants
        with self._put_off() as model:
            answer = variants.unseen(model, signature, (args, kwargs), variants)
            if isinstance(answer, int):
                planned = variants.plans[answer].signatures
                known = variants.by_signature
                return known.get(planned[0], (answer,)) if planned else (answer,)
            first = len(variants.plans)
            variants.plans.extend(answer)
            for plan in answer:
                self._add(plan)
            self._combine()
        is_planned = any(plan.num_batches for plan in answer)  # as the model is now
        outline = None if is_planned else self.places.outline
        self.places = Places(self.module, self.put, outline)
        return tuple(range(first, len(variants.plans)))

    def _add(self, plan: Planned) -> None:
        """Make the stand-ins of a plan of the model, which has none now."""
        model = self.module
        step = Step(self.variants, len(self.steps), plan.offload_dir)
        install(model, plan.op_policies, step)
        own = {module: module.__dict__.get("forward") for module in model.modules()}
        remove(model)
        if isinstance(counted := own[model], CountedForward):
            own[model] = counted.own_forward  # `begin` counts
        self.steps.append(step)
        self.stand_ins.append({m: f for m, f in own.items() if isinstance(f, StandIn)})

    def _combine(self) -> None:
        """Find one stand-in for each module out of those of all plans."""
        modules = dict.fromkeys(module for one in self.stand_ins for module in one)
        modules.pop(self.module, None)
        self.put = {self.module: self}
        for module in modules:
            stand_ins = {
                n: s[module] for n, s in enumerate(self.stand_ins) if module in s
            }
            is_only = len(self.stand_ins) == 1
            self.put[module] = (
                stand_ins[0]
                if is_only
                else VariedForward(module, self.variants, stand_ins)
            )

    def _put_on(self) -> None:
        for module, stand_in in self.put.items():
            module.__dict__["forward"] = stand_in

    def let_go(self) -> None:
        """The plans are off: let go of the model's modules, which would be a cycle.

        Who has kept this ``forward`` then calls the model's own.
        """
        if not self.variants.is_running:
            self.variants.by_hand = True
            self.put, self.stand_ins = {}, [{} for _ in self.stand_ins]

    @contextmanager
    def _put_off(self) -> Iterator[torch.nn.Module | None]:
        """Take the plans off the model inside; None if somebody replaced a stand-in."""
        pairs = self.put.items()
        if any(module.__dict__.get("forward") is not own for module, own in pairs):
            yield None
            return
        remove(self.module)
        try:
            yield self.module
        finally:
            self._put_on()


def _place(
    model: torch.nn.Module, name: str
) -> tuple[dict[str, torch.nn.Parameter | None], str]:
    """Where a model keeps a parameter, in whose place others come, as of FSDP2."""
    fqn, _, own = name.rpartition(".")
    return model.get_submodule(fqn)._parameters, own


def install_plans(
    model: torch.nn.Module,
    plans: Sequence[Planned],
    unseen: Unseen,
    frozen: Sequence[str] = (),
    num_calls: int = 1,
) -> None:
    """Let every step of a model follow the plan for its batch.

    Args:
        model: Without a plan.
        plans: The plans; the first one is followed where no batch tells.
        unseen: As in `Unseen`.
        frozen: Names of the parameters that the plans do not train.
        num_calls: How often a step calls the model, as each of its micro-batches does.
    """
    _collect_dropped()
    variants = Variants(plans, positional_names(model), unseen)
    forward = BatchForward(model, variants, frozen, num_calls)
    _in_force.add(forward)
    if not any(plan.far_state_bytes for plan in plans):
        forward.states = OptimizerStates(forward)
    tensor = next(model.parameters(), None)
    if tensor is not None and tensor.device.type == "cuda":
        forward.memory = ReachedMemory(forward, tensor.device)
    elif max(plan.budget_bytes for plan in plans) >= _WORTH_LOOKING:
        forward.memory = HeldMemory(forward)


def _collect_dropped() -> None:
    """Free earlier models with plans that nobody holds any more.

    Modules and what stands in for their ``forward`` hold each other, so that Python
    frees these only when it looks for cycles: as rarely as not in a whole run.
    """
    earlier = (forward.module for forward in list(_in_force) if is_in(forward))
    nbytes = sum(p.nbytes for model in earlier for p in model.parameters())
    if nbytes >= _WORTH_COLLECTING:
        gc.collect()


def remove_plans(model: torch.nn.Module) -> None:
    """Undo `install_plans`; a model without a plan stays as it is."""
    forward = vars(model).get("forward")
    remove(model)
    if isinstance(forward, BatchForward):
        forward.let_go()


def steps_by_hand(model: torch.nn.Module) -> Callable[..., None]:
    """Return a function that begins a step, where not every call of the model does.

    Calls of modules are counted from one step to the next, and a step's batch tells its
    plan. After `install_plans` a call of the whole model begins a step; after this,
    nothing does but the function returned, which takes what the plans were made for.
    """
    forward = model.__dict__.get("forward")
    assert isinstance(forward, BatchForward)
    forward.variants.by_hand = True
    return forward.begin_by_hand
