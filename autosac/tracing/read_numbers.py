"""Numbers that an optimizer reads from tensors, as by ``.item()``.

They may decide what it does, and fakes have no values. Known is what it was given, sets
to a number, as `ASGD` does, or works out from such tensors. What it changes in place in
another way is taken for a count, which is read as that of a long training. Of anything
else, such as a norm of gradients, only a real step knows where it may decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from autosac import _compat, _compat_fakes
from autosac.pytrees import tensors_in
from autosac.step.training_step import AnyOptimizer, OptimizerInBackward

_aten = torch.ops.aten
_SET = frozenset({_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor})
_ZERO = _aten.zero_.default

# No size depends on step counts but that RAdam does more after the first few, and ASGD
# after `t0` of them, by default a million. Others do more in every k-th: this is the
# least multiple of all k up to 16. At 1, NAdam would divide by zero.
_MANY = 720_720


class ReadNumbers:
    """What tensors of one element hold while an optimizer steps."""

    def __init__(self) -> None:
        self._numbers = WeakIdKeyDictionary()  # storage -> number
        self._only_scales = False

    def run(self, run: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op, and follow the numbers that it sets."""
        out = run(func, args, kwargs)
        written = _compat.written_arguments(func, args, kwargs)
        for tensor in tensors_in(written):
            if tensor.numel() == 1:
                self._note(tensor, self._set_by(func, args))
        if not written and _compat_fakes.is_fake(out) and not out.dim():
            self._note(out, self._made_by(func, args, kwargs))
        return out

    def of(self, tensor: torch.Tensor, condition: bool | None) -> Any:
        """What is read from a tensor.

        Args:
            tensor: Of one element.
            condition: What conditions are in a step that cannot run; None if it can.

        Returns:
            The number; None if the tensor itself must say.
        """
        number = self._numbers.get(tensor.untyped_storage())
        is_fake = _compat_fakes.is_fake(tensor)
        if tensor.dtype is torch.bool:
            return condition
        if number is None and is_fake and (self._only_scales or condition is not None):
            number = 0 if condition is False else _MANY
        if number is None or (not is_fake and number != _MANY):
            return None
        with _compat.no_modes():
            return _tensor(number, tensor.dtype).item()

    def begin(self, original: Any, copied: AnyOptimizer | None) -> None:
        """Take over what options and state hold that an optimizer was given.

        Args:
            original: The user's optimizer, or a function that makes the other one.
            copied: The one that steps.
        """
        # PyTorch's own take norms of tensors, as `Adafactor` does, but do not branch.
        optimizers: list[Any] = [copied]
        if isinstance(copied, OptimizerInBackward):
            optimizers = [*copied.optimizers.values()]
        modules = (f"{type(one).__module__}." for one in optimizers)
        self._only_scales = all(m.startswith("torch.optim.") for m in modules)
        copies = _options_and_state(copied)
        originals = _options_and_state(original) or copies
        for own, copy in zip(originals, copies, strict=False):
            if own.numel() == copy.numel() == 1 and not own.is_meta:
                self._note(copy, self._held_by(own))

    def note_like(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """A tensor holds what another one does."""
        self._note(tensor, self._numbers.get(other.untyped_storage()))

    def _note(self, tensor: torch.Tensor, number: Any) -> None:
        storage = tensor.untyped_storage()
        self._numbers.pop(storage, None)
        if number is not None and storage.nbytes() == tensor.itemsize:
            self._numbers[storage] = number

    def _made_by(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an op makes of numbers that are all known."""
        if _compat.is_random(func):
            return None
        leaves, spec = tree_flatten((args, kwargs))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                number = self._held_by(leaf) if not leaf.dim() else None
                if number is None:
                    return None
                leaves[i] = _tensor(number, leaf.dtype)
            elif isinstance(leaf, torch.device):
                leaves[i] = torch.device("cpu")
        args, kwargs = tree_unflatten(leaves, spec)
        with _compat.no_modes():
            return self._held_by(func(*args, **kwargs))

    def _set_by(self, func: Any, args: Any) -> Any:
        if func is _ZERO:
            return 0.0
        return self._held_by(args[1]) if func in _SET else _MANY

    def _held_by(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        number = self._numbers.get(value.untyped_storage())
        real = _compat_fakes.value_of(value)
        if number is None and real is not None and real.numel() == 1:
            with _compat.no_modes():
                return real.item()
        return number


def _tensor(number: Any, dtype: torch.dtype) -> torch.Tensor:
    with _compat.no_modes():
        return torch.tensor(number, dtype=dtype, device="cpu")


def _options_and_state(optimizer: Any) -> list[torch.Tensor]:
    """Tensors of an optimizer by their order, without those that it trains."""
    if not isinstance(optimizer, (torch.optim.Optimizer, OptimizerInBackward)):
        return []
    options = [
        [value for name, value in group.items() if name != "params"]
        for group in optimizer.param_groups
    ]
    return list(tensors_in((options, list(optimizer.state.values()))))
