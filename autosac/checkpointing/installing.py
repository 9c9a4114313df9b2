"""Make modules of a model AC units, and undo it.

A unit runs as a `Frame` (`saved_tensors.py`), which records what it does and makes
again what its policy does not save. Blocks of a chain run as units too, but keep only
arguments from outside the chain (`chained_calls.py`, `nested_calls.py`).
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from autosac import _compat_dispatch
from autosac._compat_distributed import hide_propagation, local
from autosac.checkpointing import compiled_parts
from autosac.checkpointing.ambient_state import Present, thread
from autosac.checkpointing.call_arguments import Handed, Kept, Source, leaves
from autosac.checkpointing.chained_calls import RelayedCall
from autosac.checkpointing.departed_units import Code
from autosac.checkpointing.far_arguments import FarArguments
from autosac.checkpointing.module_attributes import Snapshots
from autosac.checkpointing.nested_calls import Nest, NestedCall
from autosac.checkpointing.op_programs import KnownMode, Program
from autosac.checkpointing.op_records import Record
from autosac.checkpointing.recording_mode import RecordingMode
from autosac.checkpointing.running_step import Step
from autosac.checkpointing.saved_tensors import Frame
from autosac.checkpointing.stand_ins import (
    Places,
    StandIn,
    warn_of_replaced,
    warn_of_transform,
)
from autosac.checkpointing.streamed_tensors import StreamedForward
from autosac.units.policies import OpPolicy

_Kind = tuple[int, tuple[bool, ...]]

_MOST_LOSSES = 3  # batches that differ have lost as often: look at every op then


class CheckpointedForward(StandIn):
    """Stands in for a module's ``forward`` and runs it as an AC unit.

    Args:
        module: The module.
        policies: What to do with its ops, for each call of a step that is planned.
        step: What is shared with the other units of the model.
    """

    is_unit = True

    def __init__(
        self,
        module: torch.nn.Module,
        policies: tuple[OpPolicy, ...],
        step: Step,
    ) -> None:
        super().__init__(module)
        self.fqn = policies[0].fqn
        self.training = policies[0].training
        self.num_calls = policies[0].num_calls
        self.policies = {policy.call_index: policy for policy in policies}
        self.step = step
        self.snapshots = Snapshots(module)
        self.parts: tuple[weakref.ref[torch.nn.Module], ...] = ()  # with parameters
        self.programs: dict[_Kind, tuple[Program, int]] = {}
        self.as_planned: set[_Kind] = set()  # which last did what their plan expects

    def __getstate__(self) -> dict[str, Any]:
        # A copy has learned nothing yet.
        return {**vars(self), "parts": (), "programs": {}, "as_planned": set()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        may_compile = torch.compiler.is_compiling() and torch.is_grad_enabled()
        if may_compile and self.step.is_of(self.module.training, self.training):
            compiled_parts.refuse(self.fqn)  # before all that Dynamo cannot follow
        forward = self.__wrapped__
        if self.step.onward is not None:
            return self.step.onward.meet(self.fqn, forward, args, kwargs)
        policy = None if thread.is_rerun else self._policy()
        if policy is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if _compat_dispatch.is_transformed():
            warn_of_transform(self.fqn)
            return forward(*args, **kwargs)

        tensors = leaves([*args, *kwargs.values()], torch.Tensor)
        kind = self._kind(policy, tensors)
        program, losses = self.programs.get(kind, (None, 0))
        if not losses == self.step.losses < _MOST_LOSSES:
            program = None
        if policy.chain or policy.far:
            source = self._source(policy, (args, kwargs))
        else:
            source = Kept((args, kwargs) if program is None else tensors)
        given = [local(tensor) for tensor in tensors]
        settings = self.step.settings_of(policy.settings)
        record = Record(policy, given, source.relayed(), settings)
        known = None if program is None else KnownMode(record, program)
        mode = known or self._recording(record, forward)
        if isinstance(source, (RelayedCall, NestedCall)):
            source.begin(record)
        run = functools.partial(Frame(source, mode).run, forward, args, kwargs)
        output = source.run(run, given) if isinstance(source, NestedCall) else run()
        if isinstance(source, RelayedCall):
            source.finish(output)
            self.step.latest[policy.chain] = source
        for handed in leaves(source.template, Handed):
            handed.cut_off()
        if isinstance(source, FarArguments) and record.is_exact:
            source.send([record.saved[place] for place in policy.far_ops])
            self.step.park(source, policy.far_until)
        if isinstance(mode, KnownMode):
            self.step.losses += mode.lost
        else:
            modules = self.module.modules()
            self.parts = tuple(weakref.ref(m) for m in modules if m._parameters)
            self._learn(mode, self._kind(policy, tensors))
        return output

    def _kind(self, policy: OpPolicy, tensors: list[torch.Tensor]) -> _Kind:
        """Which call it is, and which tensors and parameters it trains.

        Autograd saves nothing of the same ops where all of them are frozen.
        """
        parts = [part for ref in self.parts if (part := ref()) is not None]
        own = chain.from_iterable(part._parameters.values() for part in parts)
        trained = [t is not None and t.requires_grad for t in (*tensors, *own)]
        return policy.call_index, tuple(trained)

    def _recording(self, record: Record, forward: Callable[..., Any]) -> RecordingMode:
        """The dispatch mode that records all of a call."""
        mode = RecordingMode(record)
        attributes = self.snapshots.take()
        record.code = Code(forward, mode.history, attributes, Present())
        return mode

    def _learn(self, mode: RecordingMode, kind: _Kind) -> None:
        """Remember the ops of a call of a kind.

        It must have gone as planned to the end twice in a row: a model may change
        itself in its first step, and a layer that is dropped ends early. One that reads
        numbers of tensors may depart in any step: to run again whole then, it is seen
        whole each time.
        """
        if mode.record.code is not None or not mode.has_ended:
            self.as_planned.discard(kind)
        elif kind in self.as_planned and not mode.history.numbers:
            self.programs[kind] = (Program(mode), self.step.losses)
        else:
            self.as_planned.add(kind)

    def _source(self, policy: OpPolicy, arguments: Any) -> Source:
        """The source of a call's arguments that keeps few of them or none."""
        if not policy.chain:
            source = FarArguments(arguments, policy, self.step.memory)
            self.step.sources[self.fqn] = source
            return source
        nest = self.step.nests.get(policy.chain)
        departed = nest is not None and nest.departed
        if nest is not None and not departed and len(nest.calls) == policy.position:
            return NestedCall(nest, self.step, arguments)
        before, is_planned = None, departed
        if not policy.around:
            before = self.step.latest.get(policy.chain) if policy.position else None
            # Of blocks that are frozen up to here, nothing is kept that was planned.
            is_planned = before is None and not _is_trained(arguments)
            is_planned |= not policy.position
        if before is not None and before.position != policy.position - 1:
            before = None
        call = RelayedCall(before, arguments, policy.position)
        if not call.relayed() and not is_planned:
            warnings.warn(
                f"AC unit `{self.fqn}` does not get what the block before it made, as"
                " its plan expects; its arguments are kept, and the planned peak no"
                " longer holds. Plan again with inputs like these.",
                stacklevel=4,
            )
        return call

    def _policy(self) -> OpPolicy | None:
        """The policy of this call; a part of another unit has none, but counts."""
        if not self.step.is_of(self.module.training, self.training):
            return None
        if self.num_calls == 1:
            variants = self.step.variants
            if not (thread.is_inside or variants is None or variants.is_running):
                variants.warn_of_call(self.fqn)
            return None if thread.is_inside else self.policies[0]
        index = self.step.calls[self.fqn]
        self.step.calls[self.fqn] += 1
        if thread.is_inside:
            return None
        if index == self.num_calls:
            warnings.warn(
                f"AC unit `{self.fqn}` is called more often than the {self.num_calls}"
                " times its plan knows; what follows is saved, not recomputed, and the"
                " planned peak no longer holds. Plan again with inputs like these.",
                stacklevel=2,
            )
        return self.policies.get(index)


def _is_trained(arguments: Any) -> bool:
    """Whether anything that made the arguments of a call needs a gradient."""
    return any(tensor.requires_grad for tensor in leaves(arguments, torch.Tensor))


class _NestForward(StandIn):
    """Stands in for the ``forward`` of the module of a nest.

    Args:
        module: The module.
        parts: Op policies of its parts, in the order of their calls.
        step: What is shared with the units of the model.
    """

    def __init__(
        self, module: torch.nn.Module, parts: tuple[OpPolicy, ...], step: Step
    ) -> None:
        super().__init__(module)
        self.fqn = parts[0].around
        self.chain = parts[0].chain
        self.training = parts[0].training
        self.fqns = tuple(part.fqn for part in parts)
        self.step = step
        self.snapshots = Snapshots(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.__wrapped__
        is_planned = self.step.is_of(self.module.training, self.training)
        is_planned &= torch.is_grad_enabled()
        if thread.is_inside or not is_planned or _compat_dispatch.is_transformed():
            return forward(*args, **kwargs)
        nest = Nest(self.fqn, forward, self.snapshots, self.fqns, (args, kwargs))
        self.step.nests[self.chain] = nest
        try:
            return nest.run(args, kwargs)
        finally:
            self.step.nests.pop(self.chain, None)


class _SlicedForward(StandIn):
    """Stands in for an `nn.Sequential`'s ``forward`` and runs slices of it as units.

    Args:
        module: The `nn.Sequential`.
        policies: One for each slice.
        step: What is shared with the other units of the model.
    """

    is_unit = True

    def __init__(
        self,
        module: torch.nn.Module,
        policies: tuple[OpPolicy, ...],
        step: Step,
    ) -> None:
        super().__init__(module)
        names, layers = list(module._modules), _layers(module)
        self.slices: dict[int, tuple[int, CheckpointedForward]] = {}
        for policy in policies:
            first = names.index(policy.fqn.rpartition(".")[2])
            end = names.index(policy.until.rpartition(".")[2]) + 1
            part = torch.nn.Sequential(*layers[first:end])
            self.slices[first] = (end, CheckpointedForward(part, (policy,), step))

    def __call__(self, value: Any) -> Any:
        layers = _layers(self.module)
        position = 0
        while position < len(layers):
            if self._has(position, layers):
                position, run = self.slices[position]
                run.module.training = self.module.training
                value = run(value)
            else:
                value = layers[position](value)
                position += 1
        return value

    def _has(self, position: int, layers: list[torch.nn.Module]) -> bool:
        """Whether a slice begins at a layer, and has the layers that it had."""
        if position not in self.slices:
            return False
        end, run = self.slices[position]
        if _layers(run.module) == layers[position:end]:
            return True
        warn_of_replaced(f"`{run.fqn}` to `{run.policies[0].until}`")
        del self.slices[position]
        return False


def _layers(sequence: torch.nn.Module) -> list[torch.nn.Module]:
    return [sequence.get_submodule(name) for name in sequence._modules]


class _ParkingForward(StandIn):
    """Stands in for the ``forward`` of a module at whose end arguments of others go.

    Args:
        module: The module, which may be a unit itself.
        fqn: Its name.
        step: What is shared with the units of the model.
    """

    def __init__(self, module: torch.nn.Module, fqn: str, step: Step) -> None:
        super().__init__(module)
        self.is_unit = isinstance(self.own_forward, StandIn) and (
            self.own_forward.is_unit
        )
        self.fqn = fqn
        self.step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.__wrapped__(*args, **kwargs)
        self.step.let_go(self.fqn, output)
        return output


class CountedForward(StandIn):
    """Stands in for the whole model's ``forward``, where every step begins.

    Args:
        module: The model, whose other modules have their stand-ins.
        step: What is shared with the units of the model.
    """

    def __init__(self, module: torch.nn.Module, step: Step) -> None:
        super().__init__(module)
        self.is_unit = getattr(self.own_forward, "is_unit", False)
        self.step = step
        own = ((m, m.__dict__.get("forward")) for m in module.modules())
        self.places = Places(module, {m for m, f in own if isinstance(f, StandIn)})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if thread.is_inside:
            return self.__wrapped__(*args, **kwargs)
        self.step.begin()
        is_step = torch.is_grad_enabled()
        if is_step:
            self.places.check()
        output = self.__wrapped__(*args, **kwargs)
        if is_step:
            self.places.outline.renew()
        return output


def install(
    model: torch.nn.Module, policies: tuple[OpPolicy, ...], step: Step | None = None
) -> None:
    """Make modules of a model AC units; names and state dict stay as they are.

    Args:
        model: The model.
        policies: What its units do.
        step: What they share; None makes one.
    """
    hide_propagation()
    step = Step() if step is None else step
    step.model = weakref.ref(model)
    by_fqn: dict[str, list[OpPolicy]] = {}
    sliced: dict[str, list[OpPolicy]] = {}
    for policy in policies:
        if policy.streamed:
            model.forward = StreamedForward(model, policy, step)
        elif policy.until:
            sliced.setdefault(policy.fqn.rpartition(".")[0], []).append(policy)
        else:
            by_fqn.setdefault(policy.fqn, []).append(policy)
    for fqn, of_module in by_fqn.items():
        module = model.get_submodule(fqn)
        module.forward = CheckpointedForward(module, tuple(of_module), step)
    for fqn, slices in sliced.items():
        module = model.get_submodule(fqn)
        module.forward = _SlicedForward(module, tuple(slices), step)
    nests: dict[str, list[OpPolicy]] = {}
    for policy in policies:
        if policy.around:
            nests.setdefault(policy.around, []).append(policy)
    for fqn, parts in nests.items():
        module = model.get_submodule(fqn)
        parts.sort(key=lambda part: part.position)
        module.forward = _NestForward(module, tuple(parts), step)
    for fqn in dict.fromkeys(policy.far_until for policy in policies if policy.far):
        module = model.get_submodule(fqn)
        module.forward = _ParkingForward(module, fqn, step)
    if policies:
        model.forward = CountedForward(model, step)


def installed(model: torch.nn.Module) -> tuple[str, ...]:
    """FQNs of the modules that `install` made AC units."""
    return tuple(
        fqn
        for fqn, module in model.named_modules()
        if isinstance(stand_in := module.__dict__.get("forward"), StandIn)
        and stand_in.is_unit
    )


def remove(model: torch.nn.Module) -> None:
    """Undo `install`."""
    for module in model.modules():
        # A whole model that is a sequence may have two, one around the other.
        while isinstance(forward := module.__dict__.get("forward"), StandIn):
            del module.forward
            if forward.own_forward is not None:
                module.forward = forward.own_forward
