"""What looks at a planned model after each step of an optimizer, while it lives."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_MOST_OTHERS = 1000  # steps of optimizers of other models


class PlannedForward(Protocol):
    """Stands in for the ``forward`` of a model that has a plan.

    Attributes:
        module: The model.
    """

    module: torch.nn.Module


_Forward = TypeVar("_Forward", bound=PlannedForward)


class AfterSteps(Generic[_Forward]):
    """Is called after each step of any optimizer, until it is closed.

    Args:
        forward: Stands in for the model's ``forward``. A copy of it is not looked for.

    Attributes:
        forward: A weak reference to it.
        is_done: Nothing is left to look for.
    """

    _all: ClassVar[list[Any]]  # of a kind

    def __init_subclass__(cls) -> None:
        cls._all = []

    def __init__(self, forward: _Forward) -> None:
        for other in [one for one in self._all if one.forward() is None]:
            other.close()
        self.forward: weakref.ref[_Forward] = weakref.ref(forward)
        self.is_done = False
        self._others_left = _MOST_OTHERS
        self._handle = register_optimizer_step_post_hook(self)
        self._all.append(self)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def close(self) -> None:
        """End it, where no optimizer goes through its hooks."""
        self._handle.remove()
        self._all.remove(self)

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer has stepped, of this model or of another one."""
        raise NotImplementedError

    def _others(self) -> list[Any]:
        """Those of a kind that look at other models, which still live."""
        return [one for one in self._all if one is not self and one.forward()]

    def _count_other(self) -> None:
        """It was that of another model; after many of them nothing is looked for."""
        self._others_left -= 1
        self.is_done = not self._others_left
