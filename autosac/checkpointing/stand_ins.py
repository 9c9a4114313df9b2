"""What stands in for a module's ``forward``."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Container, Iterator
from itertools import accumulate
from typing import Any

import torch

from autosac import _compat_autograd
from autosac.checkpointing import compiled_parts
from autosac.checkpointing.changed_models import Outline
from autosac.pytrees import contents
from autosac.step.arguments import warn

_MOST_PARTS = 1000  # of what took the place of a stand-in, looked at for it


class StandIn:
    """Stands in for a module's ``forward``.

    Args:
        module: The module.

    Attributes:
        is_unit: The module is an AC unit, or parts of it are.
    """

    is_unit = False

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.own_forward = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    @property
    def __code__(self) -> types.CodeType:
        """For torch.export, which looks at a signature before it calls anything."""
        code: types.CodeType = inspect.unwrap(self).__code__
        return code

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        own: Callable[..., Any] | None = self.own_forward
        if own is not None:
            return own
        forward: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return forward


_Place = tuple[torch.nn.Module, str, torch.nn.Module, str]  # parent, name, module, FQN


class Places:
    """Where modules of a model are, those that they lie in, and all others.

    Args:
        model: The model.
        modules: The modules.
        outline: All of the model as it was planned; None for as it is.

    Attributes:
        forwards: Names of the modules, they, and what stands in for their ``forward``.
        outline: All of the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        modules: Container[torch.nn.Module],
        outline: Outline | None = None,
    ) -> None:
        self.places = list(_places(model, modules))
        own = ((fqn, module, _forward(module)) for *_, module, fqn in self.places)
        self.forwards = [(fqn, m, f) for fqn, m, f in own if isinstance(f, StandIn)]
        self.outline = Outline(model) if outline is None else outline
        self._said: set[str] = set()
        self._lost: list[str] = []  # modules that are not in their places
        self._is_replaced = False  # some ``forward``

    @property
    def differs(self) -> bool:
        """The model is not as planned, of which something was said."""
        return bool(self._lost or self._is_replaced or self.outline.differs)

    def check(self) -> None:
        """Warn of what changed in the model since the last step; of each once.

        Raises:
            UnsupportedError: The model is compiled, or a part of it.
        """
        outline = self.outline
        if torch.compiler.is_compiling() or outline.may_have_changed():
            compiled_parts.check(outline.model)
            self._lost = [
                fqn
                for parent, name, module, fqn in self.places
                if parent._modules.get(name) is not module
            ]
            new = [fqn for fqn in self._lost if fqn not in self._said]
            if new:
                warn_of_replaced(f"`{new[0]}`")
                self._said.update(new)
            outline.check(is_said=bool(new))
        self._is_replaced = False
        for index, (fqn, module, stand_in) in enumerate(self.forwards):
            if _forward(module) is stand_in:
                continue
            which = f"`forward` of `{fqn}`"
            if which in self._said:
                self._is_replaced = True
            elif _is_kept(module, stand_in):
                del self.forwards[index]  # somebody wrapped it
                break
            else:
                self._is_replaced = True
                self._said.add(which)
                warn_of_replaced(which)
                break


def _forward(module: torch.nn.Module) -> Any:
    return module.__dict__.get("forward")


def is_in(stand_in: Any) -> bool:
    """Whether its module still calls a stand-in, or something around it."""
    module = stand_in.module
    return _forward(module) is stand_in or _is_kept(module, stand_in)


def _is_kept(module: torch.nn.Module, stand_in: StandIn) -> bool:
    """Whether what took the place of a stand-in may call it: it, or its module, has it.

    Wrappers keep it in closures, arguments, attributes or containers.
    """
    left = [_forward(module), *vars(module).values()]
    seen: dict[int, Any] = {}
    while left and len(seen) < _MOST_PARTS:
        value = left.pop(0)
        if value is stand_in:
            return True
        if id(value) in seen or isinstance(value, (torch.nn.Module, torch.Tensor)):
            continue
        seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            cells = value.__closure__ or ()
            left += [cell.cell_contents for cell in cells if _is_filled(cell)]
            left += value.__defaults__ or ()
            left += (value.__kwdefaults__ or {}).values()
        elif isinstance(value, types.MethodType):
            left += [value.__func__, value.__self__]
        elif isinstance(value, functools.partial):
            left += [value.func, *value.args, *value.keywords.values()]
        left += contents(value)
        left += getattr(value, "__dict__", {}).values() if callable(value) else ()
    return False


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _places(
    model: torch.nn.Module, modules: Container[torch.nn.Module]
) -> Iterator[_Place]:
    fqns = [fqn for fqn, module in model.named_modules() if module in modules]
    paths = (
        path for fqn in fqns for path in accumulate(fqn.split("."), "{}.{}".format)
    )
    for path in dict.fromkeys(paths):
        parent, _, name = path.rpartition(".")
        if path:
            yield model.get_submodule(parent), name, model.get_submodule(path), path


def warn_of_transform(fqn: str) -> None:
    """Warn of a unit that runs where nothing can be made again.

    Args:
        fqn: Name of the unit.
    """
    warnings.warn(
        f"AC unit `{fqn}` runs under a transform of `torch.func`, `torch.vmap` or"
        " forward-mode autograd, which no rerun can follow: all of it is saved, not"
        " recomputed, and the planned peak does not hold for this call.",
        stacklevel=3,
    )


def warn_of_call(fqn: str) -> None:
    """Warn of an AC unit that is called while the model does not run forward."""
    if _compat_autograd.current_node() is not None:
        message = (
            f"AC unit `{fqn}` runs again in backward: checkpointing that is not its"
            " plan's was switched on after planning, and the peak may be above the"
            " budget. Switch it off, in Transformers by"
            " `model.gradient_checkpointing_disable()`."
        )
    else:
        message = (
            f"AC unit `{fqn}` is called outside of the planned model's `forward`: what"
            " that takes is not in the plan, and the peak may be above the budget. Let"
            " the model's `forward` make the call, too, and plan that; or call it under"
            " `torch.no_grad()`. Where another model has this module now, call"
            " `plan.unapply(model)` and plan that one."
        )
    warn(message)


def warn_of_replaced(which: str) -> None:
    """Warn of a module that is another one than the plan was applied to.

    Args:
        which: Its name, or those of the first and last of several, in backquotes.
    """
    warnings.warn(
        f"{which} was replaced after a plan was applied: nothing of it is"
        " recomputed, and the planned peak no longer holds. Call `plan.unapply(model)`"
        " (of a model that ranks divide: make it anew), replace it, and plan again.",
        stacklevel=3,
    )
