"""When in a step the hooks of FSDP2 run, read off the tape.

Forward hooks run around a module's call. The hook before backward is one of the
module's outputs: it runs just before the first autograd node inside the module does.
The hook after backward is an autograd node of its own, made as the module is entered
and due when all nodes inside are done; where no argument of the module requires a
gradient, there is no such node, and what it does is done when backward is over.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_state.py and _fsdp_param_group.py of
torch 2.15 (`_register_pre_backward_hook`, `RegisterPostBackwardFunction`,
`_root_post_backward_final_callback`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from autosac.errors import UnsupportedError
from autosac.parallel.parameter_reads import ParameterReads
from autosac.step.tape import FORWARD_PHASES, IntArray, ModuleCall, Op, Tape

_SUMS = ("aten.add.Tensor", "aten.add_.Tensor")  # how autograd sums gradients
_NEVER = np.iinfo(np.int64).max


class Hook(IntEnum):
    """Kinds of FSDP2 hooks, and what a loop does; at a tick they run in this order."""

    POST_FORWARD = 0
    PRE_FORWARD = 1
    POST_BACKWARD = 2
    PRE_BACKWARD = 3
    FINAL = 4
    ZERO_GRADIENTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Ticks after which the hooks of one module run.

    Attributes:
        pre_forward: Before its forward.
        post_forward: After it.
        pre_backward: Before its backward; None if its output gets no gradient.
        post_backward: After it; None if that waits for the end of backward.
        last_op: Number of ops of the step until its forward ends. Modules that have it
            in common pass one output on.
        late_bytes: Gradients of arguments that other modules take as well and that it
            sums up itself first: FSDP2's node keeps them apart until it is done.
    """

    pre_forward: int
    post_forward: int
    pre_backward: int | None
    post_backward: int | None
    last_op: int
    late_bytes: int


class Schedule:
    """Places of hooks on a tape.

    Args:
        tape: The traced step.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.final = _end_of_backward(tape)
        self._calls: dict[int, list[ModuleCall]] = {}
        for call in tape.calls:
            self._calls.setdefault(call.module, []).append(call)
        self._op_ends = [op.end for op in tape.ops]
        self._packed = [saved.packed for saved in tape.saved]
        self._unpacked: IntArray = np.array(
            [_NEVER if s.unpacked is None else s.unpacked for s in tape.saved],
            dtype=np.int64,
        )
        starts = [op.start for op in tape.ops if op.phase == "backward"]
        read = self._unpacked[self._unpacked < _NEVER].tolist()
        self._events = sorted({*starts, *read})
        self._first, self._last, self._ending = self._backward_spans()
        self._found: dict[int, Hooks | None] = {}

    def hooks(self, module: int) -> Hooks | None:
        """Where the hooks of a module run, None if it is never called.

        Raises:
            UnsupportedError: It is called several times or in backward, or one
                tensor is several of its arguments; or a module in it runs outside.
        """
        if module not in self._found:
            self._found[module] = self._find(module)
        return self._found[module]

    def call(self, module: int) -> ModuleCall | None:
        """The only call of a module, None if there is none."""
        calls = self._calls.get(module, [])
        if not calls:
            return None
        fqn = self.tape.modules[module].fqn
        if len(calls) > 1:
            raise UnsupportedError(
                f"FSDP unit `{fqn}` is called {len(calls)} times in a step, which is"
                " not modelled; make a module around all its calls the unit."
            )
        if calls[0].phase != "forward":
            raise UnsupportedError(
                f"FSDP unit `{fqn}` runs in {calls[0].phase}, which is not modelled;"
                " make a module around it the unit."
            )
        if calls[0].repeats_inputs:
            raise UnsupportedError(
                f"FSDP unit `{fqn}` gets one tensor as several arguments, which FSDP2"
                " hands on as different ones, so that the module may take another path;"
                " that is not modelled. Make a module around it the unit."
            )
        return calls[0]

    def _find(self, module: int) -> Hooks | None:
        call = self.call(module)
        if call is None:
            return None
        if module in self._left:
            raise UnsupportedError(
                f"FSDP unit `{self.tape.modules[module].fqn}` has a module that others"
                f" call, too (`{self.tape.modules[self._left[module]].fqn}`), so that"
                " backward comes to it before the unit's own; that is not modelled."
                " Make a module around all these calls the unit."
            )
        inside = slice(
            bisect_left(self._packed, call.enter),
            bisect_right(self._packed, call.exit),
        )
        read = self._unpacked[inside]
        read = read[read < _NEVER]
        first, last = int(self._first[module]), int(self._last[module])
        if len(read):
            first, last = min(first, int(read.min())), max(last, int(read.max()))
        shared = self._shared_inputs(call)
        ending = int(self._ending[module])
        if shared and ending >= 0 and self.tape.ops[ending].name in _SUMS:
            # The sum with the gradient from elsewhere comes after FSDP2's node.
            last = self.tape.ops[ending].start - 1
        before = after = None
        if call.gives_gradients and first < _NEVER:
            before = first - 1
        if call.takes_gradients and last > 0:
            place = bisect_right(self._events, last)
            following = [*self._events[place : place + 1], self.final]
            after = following[0] - 1
        return Hooks(
            pre_forward=call.enter - 1,
            post_forward=call.exit,
            pre_backward=before,
            post_backward=after,
            last_op=bisect_left(self._op_ends, call.exit),
            late_bytes=sum(
                self.tape.storages[s].nbytes for s, inside in shared if inside > 1
            ),
        )

    def why_gathered(self, module: int) -> str | None:
        """Says why a module must not free its parameters after forward, if so.

        Its output is a view that is changed in place once forward has ended: autograd
        then makes the view's node anew, and FSDP2's hook, which gathers them for
        backward, is on the old one (`FSDPState._register_pre_backward_hook`).
        """
        call = self.call(module)
        if call is None:
            return None
        for storage in call.outputs:
            writes = self._writes.get(storage, [])
            op = next((op for op in writes if op.start > call.exit), None)
            if op is not None and self._is_view(storage, call):
                fqn = self.tape.modules[module].fqn
                source = f" ({op.source})" if op.source else ""
                return (
                    f"the output of `{fqn}` is a view that `{op.name}`{source} changes"
                    " in place, which drops FSDP2's hook that gathers its parameters"
                    " for backward: make a new tensor there, as `y = y + x` does"
                )
        return None

    def _is_view(self, storage: int, call: ModuleCall) -> bool:
        """Whether a module's forward makes a view of a storage that autograd knows."""
        begin, end = (
            bisect_left(self._op_ends, tick) for tick in (call.enter, call.exit)
        )
        return any(
            op.is_view
            and storage in op.reads
            and op.name != "aten._unsafe_view.default"
            for op in self.tape.ops[begin:end]
        )

    @cached_property
    def _writes(self) -> dict[int, list[Op]]:
        """Storage -> ops of forward and loss that change it in place."""
        writes: dict[int, list[Op]] = {}
        for op in self.tape.ops:
            for storage in op.writes if op.phase in FORWARD_PHASES else ():
                writes.setdefault(storage, []).append(op)
        return writes

    @cached_property
    def reads(self) -> ParameterReads:
        """Where forward reads parameters."""
        return ParameterReads(self.tape)

    @cached_property
    def _left(self) -> dict[int, int]:
        """Module that is called once -> one in it that runs outside of that, too."""
        left: dict[int, int] = {}
        for module, calls in self._calls.items():
            for around in self.tape.modules.ancestors(module):
                outer = self._calls.get(around, [])
                if len(outer) == 1 and any(
                    call.phase == "forward"
                    and not outer[0].enter < call.enter < outer[0].exit
                    for call in calls
                ):
                    left[around] = module
        return left

    def _shared_inputs(self, call: ModuleCall) -> list[tuple[int, int]]:
        """Arguments that ops outside of a call read too, and how many inside do."""
        shared = []
        for storage in call.inputs:
            readers = self._readers.get(storage, [])
            inside = sum(call.enter < start < call.exit for start in readers)
            if 0 < inside < len(readers):
                shared.append((storage, inside))
        return shared

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        """Storage of an argument of some module -> starts of forward ops that read it.

        Ops that only look at it in another shape or change it in place do not count.
        """
        wanted = {s for calls in self._calls.values() for c in calls for s in c.inputs}
        readers: dict[int, list[int]] = {}
        for op in self.tape.ops:
            if op.phase in ("forward", "loss") and not op.is_view:
                for storage in op.reads:
                    if storage in wanted and storage not in op.writes:
                        readers.setdefault(storage, []).append(op.start)
        return readers

    def _backward_spans(self) -> tuple[IntArray, IntArray, IntArray]:
        """For each module: its first backward op's start and its last one's end.

        The third array has the index of its last one that is no view, or -1.
        """
        modules = self.tape.modules
        first = np.full(len(modules), _NEVER, dtype=np.int64)
        last = np.zeros(len(modules), dtype=np.int64)
        ending = np.full(len(modules), -1, dtype=np.int64)
        of_model = self.tape.phases.get("model backward", _NEVER)
        for i, op in enumerate(self.tape.ops):
            if op.phase == "backward" and op.made >= of_model:
                first[op.module] = min(first[op.module], op.start)
                last[op.module] = max(last[op.module], op.end)
                if not op.is_view:
                    ending[op.module] = i
        for module in reversed(range(1, len(modules))):
            parent = modules[module].parent
            first[parent] = min(first[parent], first[module])
            last[parent] = max(last[parent], last[module])
            ending[parent] = max(ending[parent], ending[module])
        return first, last, ending


def _end_of_backward(tape: Tape) -> int:
    """Tick after which the callbacks of the autograd engine run.

    Its caller then still holds the gradient that backward began with.
    """
    ops = [op for op in tape.ops if op.phase == "backward" and not op.is_view]
    last = max(op.end for op in ops)
    gone = max((tape.storages[s].died for s in ops[0].creates), default=0)
    return (gone if last < gone < tape.phases["finish"] else tape.phases["finish"]) - 1
