"""Results of ops on fake tensors: calls that are equal are worked out once.

The step of a large model makes the same few hundred calls over and over. What a fake
kernel returns depends on the layouts of its tensors, on its other arguments, and on the
default type. So the second of two equal calls gets what the first one got: new memory
of the same layout, a view at the same place, or the same argument.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from autosac import _compat
from autosac.pytrees import tensors_in
from autosac.tracing.op_facts import Facts

Tensors = list[torch.Tensor]

_PLAIN = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)

# Of ops whose results depend on values, or that change the layout of an argument.
_NOT_BY_LAYOUT = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
    }
)


class _NotRepeatable(Exception):
    """A result that its call's layouts do not determine, or not as simply."""


@dataclass(frozen=True, slots=True)
class _Argument:
    """A result that is the argument at a position."""

    position: int


@dataclass(frozen=True, slots=True)
class _Made:
    """A result with new memory, or with that of the argument at a position."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    position: int | None


@dataclass(frozen=True, slots=True)
class _Several:
    """A list or tuple of results."""

    kind: type
    items: tuple[Any, ...]


class Call:
    """All calls that are equal.

    Attributes:
        results: Templates of their results.
        facts: What an op's record says about each of them, once somebody asked.
    """

    __slots__ = ("facts", "results")

    def __init__(self) -> None:
        self.results: Any = None
        self.facts: Facts | None = None


KnownCalls = dict[Hashable, Call]


class RepeatedCalls:
    """The distinct calls of a trace.

    Args:
        mode: The fake tensor mode of the trace.
        known: What other traces of the same device learned, and this one will.
    """

    def __init__(self, mode: Any, known: KnownCalls | None = None) -> None:
        self.mode = mode
        self._known: KnownCalls = {} if known is None else known
        # By address, as ops are slow to hash; an op that is known here stays there.
        self._repeatable: dict[int, tuple[Any, bool]] = {}

    def key(self, func: Any, args: Any, kwargs: Any, tensors: Tensors) -> Hashable:
        """Equal for calls with like results; None for a call that must be made.

        Args:
            func: The operator.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            tensors: The tensors in all of them are appended to this list.
        """
        parts = [id(func), torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        known = self._collect(args, tensors, parts)
        if kwargs:
            parts += kwargs
            known = self._collect(kwargs.values(), tensors, parts) and known
        if not known or not tensors or not self._is_repeatable(func):
            return None
        return tuple(parts)

    def find(self, key: Hashable) -> Call | None:
        """What is known about a call."""
        return None if key is None else self._known.get(key)

    def learn(self, key: Hashable, func: Any, args: Any, kwargs: Any, out: Any) -> Call:
        """Remember the results of a call that was made."""
        call = Call()
        tensors: Tensors = []
        # A call that changed the layout of an argument is not remembered.
        if key is not None and key == self.key(func, args, kwargs, tensors):
            try:
                call.results = _Templates(self.mode, tensors).of(out)
            except _NotRepeatable:
                return call
            self._known[key] = call
        return call

    def repeat(self, call: Call, tensors: Tensors) -> Any:
        """Results of a call that is equal to one that was made."""
        return self._make(call.results, tensors)

    def _is_repeatable(self, func: Any) -> bool:
        """Whether the layouts of an op's arguments decide those of its results."""
        found = self._repeatable.get(id(func))
        if found is None:
            is_ours = getattr(func, "namespace", None) == "aten"
            is_repeatable = is_ours and _NOT_BY_LAYOUT.isdisjoint(func.tags)
            found = self._repeatable[id(func)] = (func, is_repeatable)
        return found[1]

    def _collect(
        self, values: Iterable[Any], tensors: Tensors, parts: list[Any]
    ) -> bool:
        """Collect tensors, and what results depend on; whether that is all of it."""
        known = True
        for value in values:
            kind = type(value)
            if kind in _PLAIN:
                parts += (kind, value)  # 1 and 1.0 are equal, but not to every op
            elif isinstance(value, torch.Tensor):
                tensors.append(value)
                if _compat.has_layout_only(self.mode, value):
                    parts += (
                        value.shape,
                        value.stride(),
                        value.storage_offset(),
                        value.dtype,
                        value.device,
                        value.requires_grad,
                    )
                else:
                    known = False
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                known = self._collect(value, tensors, parts) and known
            else:
                tensors.extend(tensors_in(value))
                known = False
        return known

    def _make(self, template: Any, tensors: Tensors) -> Any:
        kind = type(template)
        if kind is _Made:
            return _compat.new_fake(
                self.mode,
                template.size,
                template.stride,
                template.dtype,
                template.device,
                base=None if template.position is None else tensors[template.position],
                offset=template.offset,
            )
        if kind is _Argument:
            return tensors[template.position]
        if kind is _Several:
            return template.kind([self._make(t, tensors) for t in template.items])
        return template


class _Templates:
    """Makes the templates of a call's results.

    Args:
        mode: The fake tensor mode of the trace.
        tensors: The tensors in the call's arguments.
    """

    def __init__(self, mode: Any, tensors: Tensors) -> None:
        self.mode = mode
        self.are_simple = all(map(self._is_simple, tensors))
        self.positions: dict[int, list[int]] = defaultdict(list)
        self.bases: dict[int, list[int]] = defaultdict(list)
        for i, tensor in enumerate(tensors):
            self.positions[id(tensor)].append(i)
            self.bases[tensor.untyped_storage()._cdata].append(i)

    def of(self, out: Any) -> Any:
        """How to make a result like this one.

        Raises:
            _NotRepeatable: It takes more than that.
        """
        if type(out) in _PLAIN:
            return out
        if type(out) in (list, tuple):
            return _Several(type(out), tuple(map(self.of, out)))
        same = self.positions.get(id(out), ())
        if len(same) == 1:
            return _Argument(same[0])
        if same or not self.are_simple or not self._is_simple(out):
            raise _NotRepeatable
        storage = out.untyped_storage()
        bases = self.bases.get(storage._cdata, ())
        made = _Made(
            tuple(out.shape),
            out.stride(),
            int(out.storage_offset()),
            out.dtype,
            out.device,
            bases[0] if bases else None,
        )
        if not bases:
            self.bases[storage._cdata] += [-1, -1]  # no other result may share it
        taken = extent(made.size, made.stride) * out.itemsize
        is_new = not made.offset and storage.nbytes() == taken
        if len(bases) > 1 or not (bases or is_new) or out.requires_grad:
            raise _NotRepeatable
        return made

    def _is_simple(self, tensor: Any) -> bool:
        return (
            isinstance(tensor, torch.Tensor)
            and _compat.has_layout_only(self.mode, tensor)
            and not tensor.is_complex()
            and not tensor.is_quantized
        )


def extent(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements of the memory that a layout takes."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
