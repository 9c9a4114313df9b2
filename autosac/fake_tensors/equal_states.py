"""What an optimizer keeps over steps of a parameter, made after that of an equal one.

A large model has a thousand parameters and a dozen kinds of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from autosac import _compat_autograd, _compat_fakes
from autosac.fake_tensors.foreach import is_plain, made_like

_NUMBERS = (bool, int, float, type(None))


def keeps_state_only(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer keeps nothing but its state, all from its first step on.

    Only PyTorch's own are known to, and only without hooks.
    """
    is_ours = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    return is_ours and not _compat_autograd.has_hooks_of_others(optimizer)


class EqualStates:
    """States of parameters, by kind.

    Only numbers and tensors with memory of their own are made again.

    Args:
        mode: The fake tensor mode of the trace.
        note: Told of each tensor that is made, and of what it is like.
    """

    def __init__(
        self,
        mode: Any,
        note: Callable[[torch.Tensor, torch.Tensor], object] = lambda *_: None,
    ) -> None:
        self._mode = mode
        self._note = note
        self._known: dict[Hashable, dict[str, Any]] = {}

    def kind(
        self,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        parameter: torch.Tensor,
    ) -> Hashable:
        """A key, equal for parameters with like states; None if that is unsure.

        Args:
            optimizer: What keeps the state.
            group: The one of its `param_groups` that the parameter is in.
            parameter: The parameter.
        """
        if not keeps_state_only(optimizer) or _compat_autograd.has_hooks(optimizer):
            return None
        options = [(name, v) for name, v in group.items() if name != "params"]
        layouts = (_layout(parameter), _layout(parameter.grad))
        kind = (type(optimizer).__name__, *layouts, *options)
        try:
            hash(kind)
        except TypeError:
            return None
        return kind

    def learn(self, kind: Hashable, state: dict[str, Any]) -> None:
        """Remember the state of the first parameter of a kind."""
        tensors = [v for v in state.values() if isinstance(v, torch.Tensor)]
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        if (
            kind is not None
            and len(storages) == len(tensors)
            and all(isinstance(v, (torch.Tensor, *_NUMBERS)) for v in state.values())
            and all(_compat_fakes.has_layout_only(self._mode, t) for t in tensors)
            and all(map(is_plain, tensors))
        ):
            self._known[kind] = state

    def like(self, kind: Hashable) -> dict[str, Any] | None:
        """A new state of a kind; None if it is not known."""
        state = self._known.get(kind)
        if state is None:
            return None
        return {
            name: self._made_like(v) if isinstance(v, torch.Tensor) else v
            for name, v in state.items()
        }

    def _made_like(self, tensor: torch.Tensor) -> torch.Tensor:
        made = made_like(self._mode, tensor)
        self._note(made, tensor)
        return made


def _layout(tensor: torch.Tensor | None) -> Hashable:
    if tensor is None:
        return None
    layout = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return (*layout, type(tensor))  # what is divided may be as large as what is not
