"""Does a real step run the ops that its trace shows?

A trace is made without values. A model may do something else on real tensors: ask
whether it is traced, or branch on what a fake kernel cannot know. So forward and loss
run once for real, and op by op their names must be those of the trace; what backward
does follows from these. Parameters are shared with the user's model and autograd saves
nothing, so that this takes hardly more memory than an evaluation of the model.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from autosac import _compat, _compat_dispatch
from autosac._compat_distributed import WAITS, are_distributed
from autosac.errors import AutosacError, TraceError
from autosac.pytrees import tensors_in
from autosac.step import copies_on_write, source_lines
from autosac.step.arguments import warn
from autosac.step.random_streams import seeded_streams
from autosac.step.tape import FORWARD_PHASES, Tape
from autosac.step.training_step import output_and_loss
from autosac.tracing.closures import own_functions
from autosac.tracing.copying import (
    AnyCopies,
    cast_arguments,
    copy_parameter_attributes,
    typed_parameters,
)
from autosac.tracing.failures import explanation, place_of
from autosac.tracing.learned import Learned, Retrace
from autosac.tracing.probing import Probe
from autosac.tracing.step import Step
from autosac.tracing.trace import trace

_IGNORED = frozenset(map(_compat.op_name, _compat.IGNORED_OPS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Where a real step begins to differ from its trace.

    Attributes:
        module: FQN of the module that the real op runs in; empty for the model itself.
        ran: Name of the op, None if the step ended.
        expected: Name of the op that the trace has there, None if it ended.
        source: ``file:line`` of the user's code, if that is known.
    """

    module: str
    ran: str | None
    expected: str | None
    source: str

    def __str__(self) -> str:
        where = f"module `{self.module}`" if self.module else "the model itself"
        line = f" at {self.source}" if self.source else ""
        ran = f"runs {self.ran}" if self.ran else "ends"
        expected = f"has {self.expected}" if self.expected else "ends"
        return f"in {where}{line} it {ran} where the trace {expected}"


def corrected(step: Step, tape: Tape) -> tuple[Step, Tape]:
    """Run forward and loss of a step for real if it can run here, as `first_departure`.

    Args:
        step: A step, on a device that is present.
        tape: Its trace.

    Returns:
        Both; or, where the real step does something else, one that is traced for real,
        and its trace. Warns if there is not the memory for that.

    Raises:
        TraceError: The real step fails, though its trace did not.
    """
    if step.learned.real or not step.can_run:
        return step, tape
    try:
        departure = first_departure(step, tape)
    except torch.OutOfMemoryError:  # that a plan may mend
        return step, tape
    if departure is None or not step.is_present:
        return step, tape
    real = replace(step, learned=Learned(real=True))
    try:
        return real, trace(real)
    except TraceError as error:
        warn(
            f"The real step is not what was traced: {departure}. A plan keeps neither"
            " its peak nor its time there; let the model do the same whether it is"
            f" traced or not, for it cannot be traced for real: {error}"
        )
    return step, tape


def first_departure(step: Step, tape: Tape) -> Departure | None:
    """Run forward and loss of a step for real, and compare their ops with a tape's.

    Nothing of the user's changes: modules, buffers and inputs are copied, random
    streams are put back.

    Args:
        step: On a device that is present.
        tape: Its trace.

    Returns:
        The first difference, or None.

    Raises:
        TraceError: The real step fails, though its trace did not.
    """
    expected = names_of_forward(tape)
    with contextlib.suppress(_NeedsMore):
        return _follow(_Follower(expected), step, frugal=True)
    follower = _Follower(expected)
    departure = _follow(follower, step, frugal=False)
    if follower.copies:  # in cycles, with their parameters
        gc.collect()
    return departure


def names_of_forward(tape: Tape, before: int | None = None) -> list[str]:
    """Names of the ops of forward and loss, as a real step shows them.

    Args:
        tape: A step.
        before: Only of ops that begin before this tick.
    """
    end = tape.num_ticks if before is None else before
    return [
        op.name
        for op in tape.ops
        if op.phase in FORWARD_PHASES
        and op.name not in _IGNORED
        and not is_mark(op.name)
        and op.start < end
    ]


def _own_parameters(step: Step, *, shared: bool) -> dict[int, Any]:
    """Parameters of the copied model by the addresses of the user's.

    They are of the type that the step computes in, or have the memory of the user's if
    they may share it, with attributes of their own. Others are left to be copied.
    """
    own: dict[int, Any] = {}
    if shared:
        own = {
            id(p): torch.nn.Parameter(p.detach(), p.requires_grad)
            for p in step.model.parameters()
        }
    return own | typed_parameters(step)


def _follow(follower: _Follower, step: Step, *, frugal: bool) -> Departure | None:
    memo = _own_parameters(step, shared=frugal)
    originals = (step.model, step.args, step.kwargs)
    with AnyCopies():
        model, args, kwargs = copy.deepcopy(originals, memo)
        copy_parameter_attributes(step.model, memo)
        loss_fn, puts_back = own_functions(
            *(model, step.model, step.loss_fn, memo),
            is_real=True,
            learned=step.learned,
        )
    hooks: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if frugal:
        follower.shared = {p.untyped_storage()._cdata for p in model.parameters()}
        hooks = torch.autograd.graph.saved_tensors_hooks(_drop, _miss)
    run = partial(
        output_and_loss,
        model,
        args,
        kwargs,
        loss_fn=loss_fn,
        autocast=step.autocast,
        accumulate=step.accumulate,
        mark=follower.mark,
    )
    try:
        streams = seeded_streams(step.learned.seed)
        with puts_back, streams, _compat_dispatch.as_a_step_begins(), hooks:
            cast_arguments(model, step.compute_dtype)
            with follower:
                for _ in range(step.learned.earlier):
                    run()
            follower.probe(model)
            follower.copies.update(model.modules())
            with follower:
                run()
        follower.end()
        step.learned.largest_write = step.learned.largest_write or 0
    except _Departed:
        pass
    except Retrace:  # what its trace did not do
        return _follow(_Follower(follower.expected), step, frugal=frugal)
    except AutosacError:
        raise
    except Exception as error:  # whatever a forward pass raises
        if isinstance(follower.stopped_by, _NeedsMore):
            raise follower.stopped_by from None
        if follower.stopped_by is not None:
            return follower.departure
        place = place_of(follower.fqns[follower.failed_in], follower.phase)
        if follower.running:
            place = f"{follower.running} of {place}"
        raise TraceError(
            f"{explanation(error, place, step.compute_dtype)} Its trace does not fail:"
            " that looks at no data, and takes some types and devices that the real op"
            " refuses."
        ) from error
    return follower.departure


class _Departed(BaseException):
    """The step does something else than its trace: no need to go on."""


class _NeedsMore(BaseException):
    """The model writes to a parameter in forward, or goes backward in it."""


def _drop(tensor: torch.Tensor) -> None:
    """Keep nothing of a tensor that autograd wants to save."""


def _miss(nothing: None) -> torch.Tensor:
    raise _NeedsMore


class _Follower(_compat.PlainDispatchMode):
    """Compares the ops of a real step with those of its trace as they run.

    Those of the steps before it are only kept from writing to what is shared.

    Args:
        expected: Names of the ops of the trace.

    Attributes:
        shared: Storages that the step must not write to.
        copies: Those of the model's modules.
        departure: The first difference so far.
        phase: Of the step.
        fqns: FQN of every module, once the step begins.
        follows: The step has begun.
        failed_in: Index of the innermost module that raised an exception.
        running: Name of the op that runs; of the last one if that failed.
        stopped_by: What this has raised to end the step. TorchScript's interpreter
            makes a `RuntimeError` of it.
    """

    def __init__(self, expected: list[str]) -> None:
        super().__init__()
        self.expected = expected
        self.place = 0
        self.shared: set[int] = set()
        self.copies: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.departure: Departure | None = None
        self.phase = "forward"
        self.fqns = [""]
        self.follows = False
        self.stack = [0]
        self.failed_in = 0
        self.running = ""
        self.stopped_by: BaseException | None = None

    def probe(self, model: torch.nn.Module) -> None:
        """The step begins: learn from a model which of its modules runs."""
        self.follows = True
        self.fqns = [fqn for fqn, _ in model.named_modules()]
        for index, module in enumerate(model.modules()):
            if not isinstance(module, torch.jit.ScriptModule):
                module.forward = Probe(self, index, module.forward)

    def enter(self, module: int, args: Any, kwargs: Any) -> None:
        """A module's ``forward`` begins."""
        self.stack.append(module)

    def leave(self, call: None, args: Any, kwargs: Any, output: Any) -> None:
        """A module's ``forward`` ends."""
        self.stack.pop()

    def mark(self, phase: str) -> None:
        """Begin a phase of the step."""
        self.phase = phase

    def end(self) -> None:
        """The step is over."""
        if self.place < len(self.expected):
            self._depart(None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if types and are_distributed(types):
            return NotImplemented
        kwargs = kwargs or {}
        name = _compat.op_name(func)
        if id(func) in _compat.IGNORED_IDS or is_mark(name) or name in WAITS:
            return func(*args, **kwargs)
        if self.follows:
            self._compare(name)
        for tensor in tensors_in(_compat.written_arguments(func, args, kwargs)):
            if tensor.untyped_storage()._cdata in self.shared:
                self.stopped_by = _NeedsMore()
                raise self.stopped_by
        copies_on_write.before_op(func, args, kwargs)
        self.running = name
        out = func(*args, **kwargs)
        self.running = ""
        return out

    def _compare(self, name: str) -> None:
        if self.place >= len(self.expected) or self.expected[self.place] != name:
            self._depart(name)
        self.place += 1

    def _depart(self, name: str | None) -> None:
        self.departure = self.departure or Departure(
            module=self.fqns[self.stack[-1]],
            ran=name,
            expected=[*self.expected, None][self.place],
            source=source_lines.running(self.phase),
        )
        self.stopped_by = _Departed()
        raise self.stopped_by


def is_mark(name: str) -> bool:
    """Whether an op only tells a profiler where a stretch begins or ends."""
    return name.startswith("profiler.")
