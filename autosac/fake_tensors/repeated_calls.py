"""Results of ops on fake tensors: calls that are equal are worked out once.

The step of a large model makes the same few hundred calls over and over. What a fake
kernel returns depends on the layouts of its tensors, on its other arguments, and on the
default type. So the second of two equal calls gets what the first one got: new memory
of the same layout, a view at the same place, or the same argument. So does an
elementwise call of another size, if all its tensors have one contiguous layout. A call
that was run on real tensors, whose values a step may branch on, is run for real again.
Results of calls on fakes are kept for later traces (`kept_results`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autosac import _compat, _compat_autocast, _compat_dispatch, _compat_fakes
from autosac.fake_tensors.op_facts import Facts
from autosac.pytrees import tensors_in

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

_UNKNOWN, _IS_FAKE, _IS_REAL = 1, 2, 4  # kinds of arguments
_REAL = object()  # results of a call that is run on real tensors
_aten = torch.ops.aten
# Ops that, besides elementwise ones, give fakes and real tensors a result by layout.
_MIXED = frozenset(
    {
        _aten.embedding.default,
        _aten.embedding_dense_backward.default,
        _aten.gather.default,
        _aten.index_select.default,
        _aten.nll_loss_forward.default,
        _aten.nll_loss_backward.default,
        _aten.scatter.src,
        _aten.scatter.value,
    }
)


_MOST_KEPT = 20_000  # results of calls for later traces: some 20 MB
_LONGEST_KEY = 120  # parts of their keys: a dozen tensors


class _NotRepeatable(Exception):
    """A result that the layouts of its call do not determine in a simple way."""


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
    """What all calls that are equal share: results and facts.

    Attributes:
        results: Templates of their results.
        facts: What an op's record says about each of them, once somebody asked.
    """

    __slots__ = ("facts", "results")

    def __init__(self, results: Any = None) -> None:
        self.results = results
        self.facts: Facts | None = None


KnownCalls = dict[Hashable, Call]


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """Templates of results of calls on fakes, which all traces share.

    Attributes:
        of_calls: By key of the call.
        elementwise: By key of elementwise calls of any size.
    """

    of_calls: dict[Hashable, Any] = field(default_factory=dict)
    elementwise: dict[Hashable, Any] = field(default_factory=dict)

    def keep(self, key: Any, template: Any) -> None:
        """Keep the results of a call, unless a list makes its key long."""
        if len(key) <= _LONGEST_KEY:
            if len(self.of_calls) >= _MOST_KEPT:
                self.of_calls.clear()
                self.elementwise.clear()
            self.of_calls[key] = template


_kept: dict[Hashable, Results] = defaultdict(Results)


def kept_results(*, on_gpu: bool) -> Results:
    """Results that earlier traces of this process found, under the present settings.

    Args:
        on_gpu: The fakes stand for a GPU's tensors.
    """
    backends = torch.backends
    settings = (  # by which convolutions choose their kernels, and so their layouts
        backends.mkldnn.enabled,
        backends.cudnn.enabled,
        backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),  # see `cpu_convolutions`
    )
    return _kept[on_gpu, settings]


class RepeatedCalls:
    """The distinct calls of a trace.

    Args:
        mode: The fake tensor mode of the trace.
        calls: What other traces of the same device learned, and this one will.
        results: What all traces share; None for nothing.
    """

    def __init__(
        self,
        mode: Any,
        calls: KnownCalls | None = None,
        results: Results | None = None,
    ) -> None:
        self.mode = mode
        self._results = results or Results()
        self._known: KnownCalls = {} if calls is None else calls
        # By address, as ops are slow to hash; an op that is known here stays there.
        self._repeatable: dict[int, tuple[Any, bool]] = {}
        self._elementwise = self._results.elementwise

    def key(self, func: Any, args: Any, kwargs: Any, tensors: Tensors) -> Hashable:
        """A key, equal for calls with like results; None for a call that must be made.

        Args:
            func: The operator.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            tensors: The tensors in all of them are appended to this list.
        """
        parts = [id(func), torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        parts.append(_compat_autocast.open_types())  # inside of ops: see there
        kinds = self._collect(args, tensors, parts)
        if kwargs:
            parts += kwargs
            kinds |= self._collect(kwargs.values(), tensors, parts)
        if kinds & _UNKNOWN or not self._is_repeatable(func):
            return None
        if kinds == _IS_FAKE | _IS_REAL and not _is_mixed(func):
            return None
        return tuple(parts)

    def find(
        self, key: Hashable, func: Any, args: Any, kwargs: Any, tensors: Tensors
    ) -> Call | None:
        """What is known about a call."""
        if key is None:
            return None
        call = self._known.get(key)
        if call is None and (results := self._results.of_calls.get(key)) is not None:
            call = self._known[key] = Call(results)
        if call is None:
            of_any_size = _key_of_any_size(self.mode, func, args, kwargs, tensors)
            result = self._elementwise.get(of_any_size)
            if isinstance(result, torch.dtype):
                call = self._known[key] = Call(_new_like(tensors[0], result))
            elif result is not None:
                call = self._known[key] = Call(result)
        return call

    def learn(self, key: Hashable, func: Any, args: Any, kwargs: Any, out: Any) -> Call:
        """Remember the results of a call that was made."""
        call = Call()
        tensors: Tensors = []
        # A call that changed the layout of an argument is not remembered.
        if key is not None and key == self.key(func, args, kwargs, tensors):
            try:
                call.results = self._template(tensors, out)
            except _NotRepeatable:
                return call
            self._known[key] = call
            if call.results is not None and any(map(_compat_fakes.is_fake, tensors)):
                self._results.keep(key, call.results)
            of_any_size = _key_of_any_size(self.mode, func, args, kwargs, tensors)
            if of_any_size is not None:
                self._learn_elementwise(of_any_size, tensors[0], call.results)
        return call

    def _learn_elementwise(self, key: Hashable, first: torch.Tensor, out: Any) -> None:
        if isinstance(out, _Argument):
            self._elementwise[key] = out
        elif isinstance(out, _Made) and out == _new_like(first, out.dtype):
            self._elementwise[key] = out.dtype

    def repeat(
        self, call: Call, func: Any, args: Any, kwargs: Any, tensors: Tensors
    ) -> Any:
        """Results of a call that is equal to one that was made."""
        if call.results is _REAL:
            with _compat.no_modes():
                return func(*args, **kwargs)
        return self._make(call.results, tensors)

    def _template(self, inputs: Tensors, out: Any) -> Any:
        outputs = list(tensors_in((out,)))
        if outputs and not any(map(_compat_fakes.is_fake, inputs + outputs)):
            return _REAL
        return _Templates(self.mode, inputs).of(out)

    def _is_repeatable(self, func: Any) -> bool:
        """Whether the layouts of an op's arguments decide those of its results."""
        entry = self._repeatable.get(id(func))
        if entry is None:
            is_ours = getattr(func, "namespace", None) == "aten"
            is_repeatable = (
                is_ours
                and func is not _aten.lift_fresh.default  # of a number, see `Recorder`
                and _NOT_BY_LAYOUT.isdisjoint(func.tags)
                and not _compat_fakes.reads_memory_around(func)
            )
            entry = self._repeatable[id(func)] = (func, is_repeatable)
        return entry[1]

    def _collect(
        self, values: Iterable[Any], tensors: Tensors, parts: list[Any]
    ) -> int:
        """Collect tensors, and what results depend on; which kinds there are."""
        kinds = 0
        for value in values:
            kind = type(value)
            if kind in _PLAIN:
                parts += (kind, value)  # 1 and 1.0 are equal, but not to every op
            elif isinstance(value, torch.Tensor):
                tensors.append(value)
                if _compat_fakes.has_layout_only(self.mode, value):
                    kinds |= _IS_FAKE
                elif is_real(value):
                    kinds |= _IS_REAL
                else:
                    kinds |= _UNKNOWN
                    continue
                parts += (
                    kind,
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.dtype,
                    value.device,
                    value.requires_grad,
                )
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                kinds |= self._collect(value, tensors, parts)
            else:
                tensors.extend(tensors_in(value))
                kinds |= _UNKNOWN
        return kinds

    def _make(self, template: Any, tensors: Tensors) -> Any:
        kind = type(template)
        if kind is _Made:
            return _compat_fakes.new_fake(
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


def _key_of_any_size(
    mode: Any, func: Any, args: Any, kwargs: Any, tensors: Tensors
) -> Hashable:
    """A key, equal for elementwise calls that differ only in their tensors' layout.

    None for other ops, where there are no tensors, or some that are not contiguous or
    lie in a list, and where a call asks for another layout.
    """
    if not tensors or not _compat.is_elementwise(func) or _compat.is_random(func):
        return None
    shape, stride = tensors[0].shape, _contiguous_stride(tensors[0].shape)
    parts: list[Any] = [id(func), torch.get_default_dtype(), shape.numel() > 0]
    parts.append(len(shape) > 0)  # numbers of no dimension count less for result types
    for value in (*args, *kwargs, *kwargs.values()):
        if value is torch.channels_last or value is torch.channels_last_3d:
            return None
        if type(value) in _PLAIN:
            parts += (type(value), value)
            continue
        if not _compat_fakes.has_layout_only(mode, value):
            return None
        if value.shape != shape or value.stride() != stride:
            return None
        parts += (value.dtype, value.device, value.requires_grad)
    return tuple(parts)


def _new_like(tensor: torch.Tensor, dtype: torch.dtype) -> _Made:
    size = tuple(tensor.shape)
    return _Made(size, tensor.stride(), 0, dtype, tensor.device, None)


def is_real(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one with values."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.requires_grad
        and not tensor.is_complex()
        and not tensor.is_quantized
        and not tensor.is_neg()
    )


def _is_mixed(func: Any) -> bool:
    """Whether an op gives fakes and real tensors new results that layouts decide."""
    is_known = _compat.is_elementwise(func) or func in _MIXED
    return is_known and _compat_dispatch.makes_all_results(func)


class _Templates:
    """Makes the templates of a call's results.

    Args:
        mode: The fake tensor mode of the trace.
        tensors: The tensors in the call's arguments.
    """

    def __init__(self, mode: Any, tensors: Tensors) -> None:
        self.mode = mode
        self.reads_values = any(not _compat_fakes.is_fake(t) for t in tensors)
        self.are_simple = all(is_real(t) or self._is_simple(t) for t in tensors)
        self.positions: dict[int, list[int]] = defaultdict(list)
        self.bases: dict[int, list[int]] = defaultdict(list)
        for i, tensor in enumerate(tensors):
            self.positions[id(tensor)].append(i)
            self.bases[tensor.untyped_storage()._cdata].append(i)

    def of(self, out: Any) -> Any:
        """Template of a result, by which an equal one can be made.

        Raises:
            _NotRepeatable: It takes more than that.
        """
        if type(out) in _PLAIN and not self.reads_values:
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
        call_result = _Made(
            tuple(out.shape),
            out.stride(),
            int(out.storage_offset()),
            out.dtype,
            out.device,
            bases[0] if bases else None,
        )
        if not bases:
            self.bases[storage._cdata] += [-1, -1]  # no other result may share it
        taken = extent(call_result.size, call_result.stride) * out.itemsize
        is_new = not call_result.offset and storage.nbytes() == taken
        if len(bases) > 1 or not (bases or is_new) or out.requires_grad:
            raise _NotRepeatable
        return call_result

    def _is_simple(self, tensor: Any) -> bool:
        return (
            isinstance(tensor, torch.Tensor)
            and _compat_fakes.has_layout_only(self.mode, tensor)
            and not tensor.is_complex()
            and not tensor.is_quantized
        )


def extent(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements of the memory that a layout takes."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def _contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    stride = [1] * len(size)
    for i in range(len(size) - 1, 0, -1):
        stride[i - 1] = stride[i] * max(size[i], 1)
    return tuple(stride)
