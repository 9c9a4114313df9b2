"""Where a recorder learns which module runs: stand-ins for every ``forward``."""

from __future__ import annotations

import copy
import random
import sys
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

import torch

from autosac import _compat_autograd
from autosac._compat_distributed import local
from autosac.pytrees import first_function, opaque_type
from autosac.step.marks import Marks, marked, marks_of
from autosac.step.modules import ModuleNode, ModuleTree
from autosac.step.tape import OTHER_HOOKS, ModuleCall


def module_tree(model: torch.nn.Module) -> ModuleTree:
    """The module tree of a model, in the pre-order of ``named_modules()``."""
    names = dict(model.named_modules())
    index = {fqn: i for i, fqn in enumerate(names)}
    nodes: list[ModuleNode] = []
    for fqn, module in names.items():
        parent = index[fqn.rpartition(".")[0]] if fqn else -1
        nodes.append(
            ModuleNode(
                fqn=fqn,
                class_name=type(module).__name__,
                parent=parent,
                depth=nodes[parent].depth + 1 if fqn else 0,
                is_leaf=next(module.children(), None) is None,
                parameter_bytes=sum(local(p).nbytes for p in module.parameters()),
                buffer_bytes=sum(local(b).nbytes for b in module.buffers()),
            )
        )
    return ModuleTree(tuple(nodes))


def marked_modules(
    marks: Marks, model: torch.nn.Module, *, name: str, inside: bool = True
) -> frozenset[str]:
    """FQNs of the modules of a model that marks stand for.

    Args:
        marks: As `autosac.step.marks.marked` takes them.
        model: The model.
        name: The argument's name, for error messages.
        inside: The model itself cannot be meant.
    """
    if not (marks := marks_of(marks)):
        return frozenset()
    tree = module_tree(model)
    return frozenset(tree[i].fqn for i in marked(marks, tree, name=name, inside=inside))


def random_numbers() -> int:
    """Hash that changes when any thread draws from Python's or NumPy's generator."""
    _, numpy_keys, numpy_place, *_ = sys.modules["numpy"].random.get_state()
    return hash((random.getstate(), numpy_keys.tobytes(), numpy_place))


class Follower(Protocol):
    """An observer that is told which module runs."""

    failed_in: int

    def enter(self, module: int, args: Any, kwargs: Any) -> Any:
        """A module's ``forward`` begins."""

    def leave(self, call: Any, args: Any, kwargs: Any, output: Any) -> None:
        """A module's ``forward`` ends; ``call`` is what `enter` returned."""


DRAWS = "it draws from Python's or NumPy's random numbers"


class Probe:
    """Stands in for a module's ``forward`` and reports entering and leaving."""

    def __init__(
        self, recorder: Follower, index: int, forward: Callable[..., Any]
    ) -> None:
        self.recorder = recorder
        self.index = index
        self.forward = forward
        self.__wrapped__ = forward  # for `inspect.signature`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.recorder.enter(self.index, args, kwargs)
        try:
            output = self.forward(*args, **kwargs)
        except BaseException:
            self.recorder.failed_in = self.recorder.failed_in or self.index
            raise
        self.recorder.leave(call, args, kwargs, output)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A module that the model copies as it runs is no module of the model."""
        return _own_forward(self.forward, memo)


_Forward = Callable[..., Any]


class _OwnForward:
    """The ``forward`` of a copied module, which dies with the last who holds it."""

    def __init__(self, method: Callable[..., Any], module: torch.nn.Module) -> None:
        self.method = method
        self.module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(self.module(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return _own_forward(self.method.__get__(self.module()), memo)


def _own_forward(forward: Callable[..., Any], memo: dict[int, Any]) -> _Forward:
    """What stands in for a ``forward`` whose module is copied."""
    module = memo.get(id(getattr(forward, "__self__", None)))
    if isinstance(forward, MethodType) and isinstance(module, torch.nn.Module):
        return _OwnForward(forward.__func__, module)
    copied: _Forward = copy.deepcopy(forward, memo)  # one that the user set
    return copied


class Call:
    """A `ModuleCall` that is still being written."""

    __slots__ = (
        "backward",
        "enter",
        "exit",
        "gives_gradients",
        "input_dtypes",
        "inputs",
        "module",
        "once",
        "outputs",
        "phase",
        "random",
        "repeats_inputs",
        "settings",
        "takes_gradients",
    )

    def __init__(self, module: int, phase: str, enter: int) -> None:
        self.module = module
        self.phase = phase
        self.enter = enter
        self.exit = enter
        self.backward: int | None = None
        self.inputs: tuple[torch.Tensor | int, ...] = ()
        self.outputs: tuple[int, ...] = ()
        self.once: str | None = None
        self.random: int | None = None
        self.input_dtypes: tuple[str, ...] = ()
        self.takes_gradients = self.gives_gradients = False
        self.repeats_inputs = False
        self.settings = 0

    def look_at_arguments(
        self, arguments: Any, tensors: list[torch.Tensor], pack: Any
    ) -> None:
        """Note what forbids a second call, and what FSDP2 asks of the tensors.

        Args:
            arguments: Of the call.
            tensors: In them.
            pack: The recorder's own hook on what autograd saves.
        """
        if _compat_autograd.saves_through_others(pack):
            self.once = OTHER_HOOKS
        if opaque := opaque_type(arguments):
            self.once = f"its input holds a {opaque}, so it may not be called twice"
            if opaque.endswith("Cache"):  # of Transformers
                self.once += " (set `model.config.use_cache` to False)"
        floating = {t.dtype for t in tensors if t.is_floating_point()}
        self.input_dtypes = tuple(sorted(dtype_name(dtype) for dtype in floating))
        trained = [id(t) for t in tensors if t.requires_grad]
        self.takes_gradients = bool(trained)
        self.repeats_inputs = len(set(trained)) < len(trained)

    def finish(self, output: Any, tick: Callable[[], int], *, is_leaf: bool) -> None:
        """Note the end of the call, and when backward first comes to it."""
        self.exit = tick()
        if is_leaf:
            return

        def comes(_: Any) -> None:
            if self.backward is None:
                self.backward = tick()

        if (function := first_function(output)) is not None:
            function.register_prehook(comes)

    def finished(self) -> ModuleCall:
        """The call as plain data."""
        return ModuleCall(
            module=self.module,
            phase=self.phase,
            enter=self.enter,
            exit=self.exit,
            backward=self.backward,
            inputs=tuple(i for i in self.inputs if isinstance(i, int)),
            outputs=self.outputs,
            once=self.once,
            input_dtypes=self.input_dtypes,
            takes_gradients=self.takes_gradients,
            repeats_inputs=self.repeats_inputs,
            gives_gradients=self.gives_gradients,
            settings=self.settings,
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a type, such as ``float32``."""
    return str(dtype).removeprefix("torch.")
