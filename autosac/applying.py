"""Run modules under selective activation checkpointing by op policies.

The engine is `torch.utils.checkpoint` (non-reentrant). Its selective contexts know
an op by its kind and a count; these know it by its place in the unit and check the
name. What they do beyond `create_selective_checkpoint_contexts` of torch 2.15:
    - an op whose result nobody needs is not rerun: a shell without memory stands in;
    - in-place ops on a saved result are not repeated, on a rerun one they are;
    - every random op that is rerun gets its own random state back;
    - a rerun never touches what lies outside the unit, such as running statistics;
    - a forward pass that departs from the trace saves everything from there on.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from autosac import _compat
from autosac.policies import DETACHED, RERUN, SAVE, SKIP, VIEW, OpPolicy
from autosac.pytrees import tensors_in


class _Rerunning(threading.local):
    """Whether this thread reruns a unit: modules in it run plainly then."""

    now = False


_rerunning = _Rerunning()


class _StandIn:
    """Stands in for a module's ``forward``.

    Args:
        module: The module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.own_forward = module.__dict__.get("forward")

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        own: Callable[..., Any] | None = self.own_forward
        if own is not None:
            return own
        forward: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return forward


class CheckpointedForward(_StandIn):
    """Stands in for a module's ``forward`` and runs it as an AC unit.

    Args:
        module: The module.
        policies: What to do with its ops, for each call of a step that is planned.
        counts: How often modules were called in this step.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        policies: tuple[OpPolicy, ...],
        counts: Counter[str],
    ) -> None:
        super().__init__(module)
        self.fqn = policies[0].fqn
        self.training = policies[0].training
        self.num_calls = policies[0].num_calls
        self.policies = {policy.call_index: policy for policy in policies}
        self.counts = counts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.__wrapped__
        policy = None if _rerunning.now else self._policy()
        if policy is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)

        args, kwargs = _own_containers(args), _own_containers(kwargs)

        def run(*inputs: Any) -> Any:
            return forward(*inputs, **kwargs)

        def contexts() -> tuple[_ForwardMode, _RerunMode]:
            record = _Run(policy)
            return _ForwardMode(record), _RerunMode(record)

        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # random ops are given theirs one by one
            context_fn=contexts,
        )

    def _policy(self) -> OpPolicy | None:
        """The policy of this call."""
        if self.module.training != self.training:
            return None
        if self.num_calls == 1:
            return self.policies[0]
        index = self.counts[self.fqn]
        self.counts[self.fqn] += 1
        if index == self.num_calls:
            warnings.warn(
                f"AC unit `{self.fqn}` is called more often than the {self.num_calls}"
                " times its plan knows; what follows is saved, not recomputed, and the"
                " planned peak no longer holds. Plan again with inputs like these.",
                stacklevel=2,
            )
        return self.policies.get(index)


class _CountedForward(_StandIn):
    """Stands in for the whole model's ``forward``; every call begins a new count."""

    def __init__(self, module: torch.nn.Module, counts: Counter[str]) -> None:
        super().__init__(module)
        self.counts = counts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _rerunning.now:
            self.counts.clear()
        return self.__wrapped__(*args, **kwargs)


def _own_containers(value: Any) -> Any:
    """Copy lists and dicts, which the caller may change before the rerun."""
    if type(value) in (list, tuple):
        return type(value)(_own_containers(item) for item in value)
    if type(value) is dict:
        return {key: _own_containers(item) for key, item in value.items()}
    return value


def install(model: torch.nn.Module, policies: tuple[OpPolicy, ...]) -> None:
    """Make modules of a model AC units; names and state dict stay as they are."""
    counts: Counter[str] = Counter()
    by_fqn: dict[str, list[OpPolicy]] = {}
    for policy in policies:
        by_fqn.setdefault(policy.fqn, []).append(policy)
    for fqn, of_module in by_fqn.items():
        module = model.get_submodule(fqn)
        module.forward = CheckpointedForward(module, tuple(of_module), counts)
    if any(policy.num_calls > 1 for policy in policies):
        model.forward = _CountedForward(model, counts)


def installed(model: torch.nn.Module) -> tuple[str, ...]:
    """FQNs of the modules that `install` made AC units."""
    return tuple(
        fqn
        for fqn, module in model.named_modules()
        if isinstance(module.__dict__.get("forward"), CheckpointedForward)
    )


def remove(model: torch.nn.Module) -> None:
    """Undo `install`."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, _StandIn):
            del module.forward
            if forward.own_forward is not None:
                module.forward = forward.own_forward


@dataclass(slots=True)
class _Entry:
    """One op of a unit's forward pass, as its rerun must treat it."""

    func: Any
    action: str
    outputs: Any = None  # saved tensors, or layouts of shells
    random_state: bytes | None = None
    used: bool = False


@dataclass(slots=True)
class _Run:
    """One forward pass of a unit."""

    policy: OpPolicy
    entries: list[_Entry] = field(default_factory=list)
    departed: bool = False

    def action(self, func: Any) -> str:
        """What to do with the next op; saves it where the trace knows no answer."""
        place = len(self.entries)
        names = self.policy.names
        if not self.departed and (place >= len(names) or names[place] != str(func)):
            self.departed = True
            expected = names[place] if place < len(names) else "its end"
            warnings.warn(
                f"AC unit `{self.policy.fqn}` ran {func} where its plan expects"
                f" {expected}; what follows is saved, not recomputed, and the planned"
                " peak no longer holds. Plan again with inputs like these.",
                stacklevel=2,
            )
        return SAVE if self.departed else self.policy.actions[place]


class _ForwardMode(_compat.TorchDispatchMode):
    """Keeps what the policy saves while a unit's forward runs."""

    def __init__(self, run: _Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _compat.IGNORED_OPS:
            return func(*args, **kwargs)
        entry = _Entry(func, self.run.action(func))
        if entry.action != SAVE and _compat.is_random(func):
            entry.random_state = _random_state(args, kwargs)
        out = func(*args, **kwargs)
        if entry.action == SAVE:
            if self.run.departed and _compat.is_view(func):
                entry.action = VIEW
            elif not _compat.returned_arguments(func):
                entry.outputs = tree_map(_detached, out)
        elif entry.action == SKIP:
            entry.outputs = tree_map(_layout, out)
        self.run.entries.append(entry)
        return out


class _RerunMode(_compat.TorchDispatchMode):
    """Replays a unit's forward: loads what was saved, skips what nobody needs."""

    def __init__(self, run: _Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run
        self.place = 0

    def __enter__(self) -> _RerunMode:
        self.place = 0
        self.rerunning = _rerunning.now
        _rerunning.now = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _rerunning.now = self.rerunning
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _compat.IGNORED_OPS:
            if args and _is_shell(args[0]) and _compat.is_view(func):
                return _view_of_shell(func, args, kwargs)
            return func(*args, **kwargs)
        entry = self._next(func)
        action = entry.action
        if action == SKIP and self.run.departed:
            action = RERUN
        if action in (SAVE, SKIP, DETACHED):
            changed = _compat.returned_arguments(func)
            if changed or action == DETACHED:
                return _compat.pick_arguments(func, changed, args, kwargs)
            if action == SKIP:
                return tree_map(_shell, entry.outputs)
            outputs, entry.outputs = entry.outputs, None
            return outputs
        if any(_is_shell(t) for t in tensors_in((args, kwargs))):
            return _view_of_shell(func, args, kwargs, known=action == VIEW)
        args = _compat.without_running_statistics(func, args)
        if entry.random_state is None:
            return func(*args, **kwargs)
        with _RandomState(entry.random_state, args, kwargs):
            return func(*args, **kwargs)

    def _next(self, func: Any) -> _Entry:
        entries, fqn = self.run.entries, self.run.policy.fqn
        if self.place >= len(entries) or entries[self.place].func is not func:
            raise RuntimeError(
                f"AC unit `{fqn}` runs {func} when it is rerun in backward, but did"
                " not in forward at that place: it depends on state that changed in"
                " between. Exclude it from the plan with `exclude`."
            )
        entry = entries[self.place]
        self.place += 1
        if entry.used:
            raise RuntimeError(
                f"AC unit `{fqn}` goes backward a second time; what it saved is gone"
                " after the first. Use one backward per forward."
            )
        entry.used = True
        return entry


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


# --- shells: results that nobody needs --------------------------------------


@dataclass(frozen=True, slots=True)
class _Layout:
    """Shape of a tensor without the tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    fake_mode: Any


class _Shell(torch.Tensor):
    """A tensor with a layout and no memory, which no op may read."""

    __torch_function__ = _compat.no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} reads a result that the plan did not recompute.")


def _is_shell(value: Any) -> bool:
    return isinstance(value, _Shell) or hasattr(value, "autosac_shell")


def _layout(value: Any, like: Any = None) -> Any:
    """Layout of a tensor; one on the meta device takes its device from ``like``."""
    if not isinstance(value, torch.Tensor):
        return value
    like = value if like is None else like
    return _Layout(
        tuple(value.shape),
        value.stride(),
        int(value.storage_offset()),
        value.dtype,
        like.device,
        _compat.fake_mode_of(like),
    )


def _shell(value: Any) -> Any:
    """A tensor of some layout that holds no memory; a fake one in a dry run."""
    if not isinstance(value, _Layout):
        return value
    if value.fake_mode is None:
        return _compat.wrapper_subclass(
            _Shell,
            value.size,
            strides=value.stride,
            storage_offset=value.offset,
            dtype=value.dtype,
            device=value.device,
        )
    with _compat.no_modes():
        fake = _compat.as_fake(value.fake_mode, _on_meta(value), value.device)
    fake.autosac_shell = True  # type: ignore[attr-defined]
    return fake


def _on_meta(layout: _Layout) -> torch.Tensor:
    whole = torch.empty(0, dtype=layout.dtype, device="meta")
    return whole.as_strided(layout.size, layout.stride, layout.offset)


def _view_of_shell(func: Any, args: Any, kwargs: Any, *, known: bool = False) -> Any:
    """A view of a shell, found on the meta device.

    Some views (`unsafe_split`) do not say so in their schema, but the tape knows.
    """
    if not known and not _compat.is_view(func):
        raise RuntimeError(f"{func} reads a result that the plan did not recompute.")
    shell = next(t for t in tensors_in((args, kwargs)) if _is_shell(t))

    def to_meta(value: Any) -> Any:
        return _on_meta(_layout(value)) if _is_shell(value) else value

    with _compat.no_modes():
        out = func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
    return tree_map(lambda value: _shell(_layout(value, like=shell)), out)


# --- random states ------------------------------------------------------------


def _generator(args: Any, kwargs: Any) -> torch.Generator | None:
    """The generator that an op draws from; None for fake tensors."""
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator):
        return generator
    tensor = next(tensors_in((args, kwargs)), None)
    if tensor is not None and _compat.is_fake(tensor):
        return None
    device = torch.device(kwargs.get("device") or "cpu")
    if tensor is not None:
        device = tensor.device
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]  # type: ignore[no-any-return]


def _random_state(args: Any, kwargs: Any) -> bytes | None:
    generator = _generator(args, kwargs)
    if generator is None:
        return None
    state = generator.get_state()
    # Not a tensor: the random state must not count as the model's memory.
    return ctypes.string_at(state.data_ptr(), state.nbytes)


class _RandomState:
    """Gives an op an earlier random state and restores the present one."""

    def __init__(self, state: bytes, args: Any, kwargs: Any) -> None:
        self.generator = _generator(args, kwargs)
        self.state = state

    def __enter__(self) -> None:
        assert self.generator is not None
        self.present = self.generator.get_state()
        earlier = torch.frombuffer(bytearray(self.state), dtype=torch.uint8)
        self.generator.set_state(earlier)

    def __exit__(self, *_: object) -> None:
        assert self.generator is not None
        self.generator.set_state(self.present)
