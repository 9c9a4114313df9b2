"""Dispatch modes under which an AC unit runs forward, is rerun, or runs onward.

Those of `torch.utils.checkpoint` know an op by its kind and a count; these know it by
its place in the unit and check the name. What they do beyond
`create_selective_checkpoint_contexts` of torch 2.15:
    - an op whose result nobody needs is not rerun: a shell without memory stands in;
    - in-place ops on a saved result are not repeated, on a rerun one they are;
    - every random op that is rerun gets its own random state back;
    - a rerun never touches what lies outside the unit, such as running statistics, and
      finds and leaves the attributes of its modules as forward did;
    - a forward pass that departs from the trace saves everything from there on.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from autosac import _compat
from autosac.applying.random_states import RandomState, random_state
from autosac.candidates.policies import DETACHED, RERUN, SAVE, SKIP, VIEW, OpPolicy
from autosac.pytrees import mapped, tensors_in
from autosac.tracing.attributes import Attributes
from autosac.tracing.shells import is_shell, layout_of, shell_of, view_of_shell


class _Rerunning(threading.local):
    """Whether this thread reruns a unit: modules in it run plainly then."""

    now = False


rerunning = _Rerunning()


@dataclass(slots=True)
class _Entry:
    """One op of a unit's forward pass, as its rerun must treat it."""

    func: Any
    action: str
    outputs: Any = None  # saved tensors, or layouts of shells
    random_state: bytes | None = None
    used: bool = False


@dataclass(slots=True)
class Run:
    """One forward pass of a unit.

    Attributes:
        policy: What to do with its ops.
        attributes: Those of its modules before it began.
        entries: Its ops so far.
        departed: It did something else than the plan expects.
        paused: What runs now does not belong to it.
    """

    policy: OpPolicy
    attributes: Attributes
    entries: list[_Entry] = field(default_factory=list)
    departed: bool = False
    paused: bool = False

    def action(self, func: Any) -> str:
        """What to do with the next op; saves it where the trace knows no answer."""
        place = len(self.entries)
        names, name = self.policy.names, _compat.op_name(func)
        if not self.departed and (place >= len(names) or names[place] != name):
            self.departed = True
            expected = names[place] if place < len(names) else "its end"
            warnings.warn(
                f"AC unit `{self.policy.fqn}` ran {func} where its plan expects"
                f" {expected}; what follows is saved, not recomputed, and the planned"
                " peak no longer holds. Plan again with inputs like these.",
                stacklevel=2,
            )
        return SAVE if self.departed else self.policy.actions[place]


class ForwardMode(_compat.PlainDispatchMode):
    """Keeps what the policy saves while a unit's forward runs."""

    def __init__(self, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _compat.DEVICE:
            return args[0].device
        if id(func) in _compat.IGNORED_IDS:
            return func(*args, **kwargs)
        entry = _Entry(func, self.run.action(func))
        if entry.action != SAVE and _compat.is_random(func):
            entry.random_state = random_state(args, kwargs)
        out = func(*args, **kwargs)
        if entry.action == SAVE:
            if self.run.departed and _compat.is_view(func):
                entry.action = VIEW
            elif not _compat.returned_arguments(func):
                entry.outputs = mapped(_detached, out)
        elif entry.action == SKIP:
            entry.outputs = mapped(layout_of, out)
        self.run.entries.append(entry)
        return out


class _ReplayMode(_compat.PlainDispatchMode):
    """Replays a unit's forward: loads what was saved, skips what nobody needs."""

    def __init__(self, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run
        self.place = 0

    def __enter__(self) -> _ReplayMode:
        self.place = 0
        self.rerunning = rerunning.now
        rerunning.now = True
        self.present = self.run.attributes.resume()
        # If backward runs under autocast, casts of the forward pass are still cached.
        torch.clear_autocast_cache()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        rerunning.now = self.rerunning
        self.present.restore()
        torch.clear_autocast_cache()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _compat.DEVICE:
            return args[0].device
        if self.run.paused:
            return func(*args, **kwargs)
        if id(func) in _compat.IGNORED_IDS:
            if args and is_shell(args[0]) and _compat.is_view(func):
                return view_of_shell(func, args, kwargs)
            return func(*args, **kwargs)
        entry = self._next(func)
        action = self._action(entry)
        if action == SKIP and self.run.departed:
            action = RERUN
        if action in (SAVE, SKIP, DETACHED):
            changed = _compat.returned_arguments(func)
            if changed or action == DETACHED:
                return _compat.pick_arguments(func, changed, args, kwargs)
            if action == SKIP:
                return mapped(shell_of, entry.outputs)
            return self._saved(entry)
        if any(is_shell(t) for t in tensors_in((args, kwargs))):
            return view_of_shell(func, args, kwargs, known=action == VIEW)
        args = _compat.without_running_statistics(func, args)
        if entry.random_state is None:
            return func(*args, **kwargs)
        with RandomState(entry.random_state, args, kwargs):
            return func(*args, **kwargs)

    def _next(self, func: Any) -> _Entry:
        entries = self.run.entries
        if self.place >= len(entries) or entries[self.place].func is not func:
            raise RuntimeError(
                f"AC unit `{self.run.policy.fqn}` runs {func} when it is rerun in"
                " backward, but did not in forward at that place: it depends on state"
                " that changed in between. Exclude it from the plan with `exclude`."
            )
        self.place += 1
        return entries[self.place - 1]

    def _action(self, entry: _Entry) -> str:
        raise NotImplementedError

    def _saved(self, entry: _Entry) -> Any:
        raise NotImplementedError


class RerunMode(_ReplayMode):
    """Makes again what backward reads; each result that was saved is handed out."""

    def _action(self, entry: _Entry) -> str:
        if entry.used:
            raise RuntimeError(
                f"AC unit `{self.run.policy.fqn}` goes backward a second time; what it"
                " saved is gone after the first. Use one backward per forward."
            )
        entry.used = True
        return entry.action

    def _saved(self, entry: _Entry) -> Any:
        outputs, entry.outputs = entry.outputs, None
        return outputs


class OnwardMode(_ReplayMode):
    """Makes a block's output again before its rerun, which needs the rest later."""

    def _action(self, entry: _Entry) -> str:
        place = self.place - 1
        is_planned = not self.run.departed and place < len(self.run.policy.onward)
        return self.run.policy.onward[place] if is_planned else entry.action

    def _saved(self, entry: _Entry) -> Any:
        return mapped(_detached, entry.outputs)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
