"""The dispatch mode that records an AC unit's forward pass, op by op.

It knows an op by its place in the unit and checks the name. A unit that does something
else than its plan expects departs: from there on nothing of the plan is in force, and
all of it runs again as Python code (`checkpointing/departed_units.py`).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from autosac import _compat, _compat_autograd, _compat_dispatch
from autosac._compat_dispatch import Traits
from autosac._compat_distributed import are_distributed
from autosac.checkpointing.kept_results import KeptResult, results_to_keep
from autosac.checkpointing.op_records import (
    BACKWARD,
    ONWARD,
    Call,
    Record,
)
from autosac.checkpointing.tensor_parts import (
    copy_of,
    key_of,
    version_of,
)
from autosac.checkpointing.unneeded_ops import Passed
from autosac.pytrees import tensors_in
from autosac.units.policies import DETACHED, RERUN, SAVE, VIEW


class History:
    """What a unit did in forward, as Python code that runs again has to know it.

    Attributes:
        funcs: Its ops,
        actions: what becomes of each,
        num_packed: and how many tensors autograd had saved before it.
        copies: Arguments (by number) and tensors from elsewhere that it changed after
            it departed, each with a copy of what it was before, and its version then.
        packed: Shape, type and version of each tensor that autograd saved.
        kept: Results that it keeps as it departs, as it has changed what they are made
            of,
        departure: and the place of the op before which it did.
        numbers: What its ops returned that return numbers, by their places: a branch
            that depends on one is not decided twice.
        passed: Those that nobody was expected to need, likewise.
        departed: It did something else than its plan expects.
    """

    def __init__(self) -> None:
        self.funcs: list[Any] = []
        self.actions: list[str] = []
        self.num_packed: list[int] = []
        self.copies: list[tuple[int | torch.Tensor, torch.Tensor, int]] = []
        self.packed: list[tuple[torch.Size, torch.dtype, int]] = []
        self.kept: list[KeptResult] = []
        self.departure = -1
        self.numbers: dict[int, complex] = {}
        self.passed: dict[int, Passed] = {}
        self.departed = False


class RecordingMode(_compat.PlainDispatchMode):
    """Records a unit's forward and keeps what its policy saves.

    Args:
        record: Is filled.

    Attributes:
        history: What the unit did.
        packs: For each tensor that autograd saved: the place of the next op, or -1 if
            a mode must not begin or end there.
        paused: What runs now does not belong to the unit.
    """

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record
        self.history = History()
        self.packs: list[int] = []
        self.paused = False
        self._copied: set[int] = set()
        self._has_changed = False  # a tensor from outside
        self._next_node = -1  # number of the next autograd node at the latest op

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if types and are_distributed(types):
            self.record.leave(func, args, kwargs)
            return NotImplemented
        kwargs = kwargs or {}
        if id(func) in _compat.IGNORED_IDS:
            return _compat.run_ignored(func, args, kwargs)
        if self.paused:
            return func(*args, **kwargs)
        traits = _compat_dispatch.traits(func)
        if traits.is_wait:
            return func(*args, **kwargs)
        place = len(self.history.funcs)
        action = self._action(place, traits, args, kwargs)
        self.history.funcs.append(func)
        self.history.actions.append(action)
        self.history.num_packed.append(len(self.history.packed))
        self._next_node = _compat_dispatch.next_node_behind(func)
        record = self.record
        if action in (VIEW, DETACHED):
            passed = Passed(traits, args, kwargs) if action == DETACHED else None
            out = func(*args, **kwargs)
            if traits.is_hidden:
                record.note_views(out)
            if passed is not None:
                self.history.passed[place] = passed
                passed.note(traits, out)
            elif isinstance(out, (bool, int, float, complex)):
                self.history.numbers[place] = out
            return out
        if action == SAVE:
            out = func(*args, **kwargs)
            if not traits.returned:
                record.save(place, out)
            return out
        call = Call(place, func, self._runs(place, action, traits, args, kwargs))
        record.write_down(call, traits, args, kwargs)
        out = func(*args, **kwargs)
        record.add_results(call, traits, action, out)
        return out

    @property
    def has_ended(self) -> bool:
        """Whether all ops of the unit's plan have run."""
        return len(self.history.funcs) >= len(self.record.policy.names)

    def begin(self) -> None:
        """Called as the unit begins."""
        self.__enter__()

    def end(self) -> None:
        """Called as the unit ends, even by an error."""
        self.__exit__(None, None, None)

    def packed(self, tensor: torch.Tensor) -> None:
        """Called when autograd has saved a tensor."""
        entry = (tensor.shape, tensor.dtype, version_of(tensor))
        self.history.packed.append(entry)
        # It does so before the kernel of an op, which then has its node already, or
        # behind it. What begins before a kernel would see the ops inside.
        is_behind = _compat_autograd.next_sequence_nr() == self._next_node
        may_begin = is_behind and not _compat_dispatch.is_in_transform()
        self.packs.append(len(self.history.funcs) if may_begin else -1)

    def finish(self, output: Any) -> None:
        """Called when the unit has returned."""
        record = self.record
        if record.policy.chain and not self.history.departed:
            record.knows_memory &= record.note_output(output)
        is_lacking = any(
            missing & ONWARD or number < record.stop
            for number, missing in record.lacks()
        )
        if is_lacking and record.is_exact:
            self._depart("reads a result that its plan does not make again")
        if not record.is_exact:
            record.let_go_of_missed()

    def _runs(
        self, place: int, action: str, traits: Traits, args: Any, kwargs: Any
    ) -> int:
        """For which reruns an op runs again."""
        if traits.written and not self.history.departed:
            targets = tensors_in(traits.targets(args, kwargs))
            results = [
                r for t in targets if (r := self.record.result_of(t)) is not None
            ]
            if results:  # it is made again whenever the memory is that it changes
                return min(result.available for result in results)
        runs = BACKWARD if action == RERUN else 0
        policy = self.record.policy
        if policy.onward and not self.history.departed:
            is_planned = action == policy.actions[place]
            action = policy.onward[place] if is_planned else action
            runs |= ONWARD if action == RERUN else 0
        return runs

    def _action(self, place: int, traits: Traits, args: Any, kwargs: Any) -> str:
        """How an op is treated: as its plan says, or rerun if the unit departed."""
        policy, departed = self.record.policy, self.history.departed
        if not departed:
            expected = policy.names[place] if place < len(policy.names) else "its end"
            if expected != traits.name:
                self._depart(f"ran {traits.name} where its plan expects {expected}")
        if self.history.departed:
            action = VIEW if traits.is_view else RERUN
        else:
            action = policy.actions[place]
        if traits.is_literal and action == VIEW:
            action = RERUN  # Python code makes another tensor each time
        if traits.written:
            action = self._action_of_write(traits, args, kwargs, action)
        return action

    def _depart(self, what: str) -> None:
        history = self.history
        history.departed, history.departure = True, len(history.funcs)
        if self.record.code is not None:
            self.record.code.keep()  # before forward replaces a buffer
        if self._has_changed:
            history.kept = results_to_keep(self.record, history.passed)
        warnings.warn(
            f"AC unit `{self.record.policy.fqn}` {what}. All of it is recomputed in"
            " backward, as by plain checkpointing: that takes up to one more forward"
            " pass of it, and the planned peak no longer holds. Plan again with inputs"
            " like these and its parts as they are now (`train()` or `eval()`, the `p`"
            " of a dropout); if values decide what it runs, leave it out by `exclude`.",
            stacklevel=2,
        )

    # --- ops that change a tensor in place ----------------------------------------

    def _action_of_write(
        self, traits: Traits, args: Any, kwargs: Any, action: str
    ) -> str:
        """The action for a write, which is treated like the memory that it changes."""
        targets = list(tensors_in(traits.targets(args, kwargs)))
        plain = [t for t in targets if _compat_dispatch.is_plain(type(t))]
        results = [self.record.results.get(key_of(tensor)) for tensor in plain]
        if not self.history.departed:
            self._has_changed |= not all(results)
            kinds = {SAVE if result is None else result.action for result in results}
            if len(kinds) == 1 and kinds != {SAVE}:
                return kinds.pop()
            if not kinds or (kinds == {SAVE} and action in (SAVE, DETACHED)):
                return action
            if kinds == {SAVE}:  # it has been changed for good
                return DETACHED if traits.returned else SAVE
            self._depart(f"changes with {traits.name} what its plan treats differently")
        for tensor in plain:
            self._protect(tensor)
        return RERUN

    def _protect(self, tensor: torch.Tensor) -> None:
        """Copy what is changed now, but Python code that runs again must find as is."""
        key = key_of(tensor)
        for kept in self.history.kept:
            if kept.key == key:
                kept.protect()
        result = self.record.results.get(key)
        if result is not None:
            if result.tensor is not None and result.copied is None:
                result.copied = version_of(result.tensor)
                result.tensor = copy_of(result.tensor)
        elif key not in self._copied:
            self._copied.add(key)
            number = self.record.number_of(tensor)
            whole = _compat_dispatch.detached(tensor)
            source = whole if number is None else number
            self.history.copies.append((source, copy_of(whole), version_of(whole)))
