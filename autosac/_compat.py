"""Private PyTorch APIs (checked for torch 2.10 to 2.15).

These are about ops and dispatch; what is about one part of PyTorch is in a
`_compat_*.py` beside. No other file touches any.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import cache, reduce
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.library import _impls
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from autosac import _compat_autocast, _compat_products

__all__ = [
    "DEVICE",
    "FSDP_FREES_BEFORE_COPY_OUT",
    "FSDP_HOLDS_LAST_GRADIENT",
    "IGNORED_IDS",
    "IGNORED_OPS",
    "ITEM",
    "METADATA_IDS",
    "TORCH_VERSION",
    "TRACE_ERRORS",
    "is_foreign",
    "is_random",
    "may_draw",
    "python_kernels",
    "run_ignored",
    "runs_python",
    "written_arguments",
]

TRACE_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

# Ops whose number may differ between forward and recomputation: the ones that
# torch/utils/checkpoint.py ignores as well (SAC_IGNORED_OPS, torch 2.15); slow to hash.
_METADATA_OPS = {torch.ops.prim.device.default, *FunctionalTensor.metadata_fns}
IGNORED_OPS: set[Any] = _METADATA_OPS | {torch.ops.aten.detach.default}
METADATA_IDS = frozenset(map(id, _METADATA_OPS))
IGNORED_IDS = frozenset(map(id, IGNORED_OPS))

# Ops that update arguments which their schema does not mark as written
# (aten/src/ATen/native/native_functions.yaml, torch 2.15): name -> positions.
_HIDDEN_WRITES = {
    "aten.native_batch_norm.default": (3, 4),
    "aten.cudnn_batch_norm.default": (3, 4),
    "aten.miopen_batch_norm.default": (3, 4),
}

_OF_NO_DEVICE = ("Meta", "Autograd", "Functionalize", "ADInplaceOrView")
# Operators of PyTorch: those that draw random numbers have a tag that says so.
_TAGGED = frozenset(
    {
        *("aten", "prims", "prim", "inductor_prims", "rngprims", "higher_order"),
        *("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"),
        *("quantized", "_quantized", "onednn", "mkldnn", "mkldnn_prepacked", "mkl"),
        *("sparse", "inductor", "fsdp", "_dtensor", "profiler", "cuda", "_native"),
        *("quantized_decomposed", "c10d_functional", "prepacked", "streams"),
        *("flex_lib", "flex_gemm", "debugprims", "_native_aot", "mempool"),
    }
)

TORCH_VERSION = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])

# FSDP2 frees the buffer that one unit was gathered into before the next unit is copied
# out of its own; before torch 2.15 a local variable of `wait_for_unshard` kept it until
# that was done (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
FSDP_FREES_BEFORE_COPY_OUT = TORCH_VERSION >= (2, 15)
# Until then a variable in `foreach_reduce` keeps the last gradient that it packs.
FSDP_HOLDS_LAST_GRADIENT = TORCH_VERSION < (2, 15)

ITEM = torch.ops.aten._local_scalar_dense.default
DEVICE = torch.ops.prim.device.default


def run_ignored(func: Any, args: Any, kwargs: Any) -> Any:
    """Run one of `IGNORED_OPS`; a device is told without the dispatcher."""
    return args[0].device if func is DEVICE else func(*args, **kwargs)


# Views whose schema does not say so; each result counts its changes by itself.
HIDDEN_VIEWS = frozenset(
    (
        *("aten._unsafe_view.default", "aten._reshape_alias.default"),
        *("aten.unsafe_split.Tensor", "aten.unsafe_split_with_sizes.default"),
    )
)


def written_arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """Arguments that a call mutates, by its schema or by `_HIDDEN_WRITES`."""
    positions = _written_positions(func)
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in positions]


@cache
def _written_positions(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(_arguments(func))
        if i in hidden_writes(func)
        or (argument.alias_info is not None and argument.alias_info.is_write)
    )


def _arguments(func: Any) -> Any:
    """Arguments of an op by its schema; none for a function that has no schema."""
    schema = getattr(func, "_schema", None)
    return () if schema is None else schema.arguments


def _returns(func: Any) -> Any:
    schema = getattr(func, "_schema", None)
    return () if schema is None else schema.returns


_names: dict[int, tuple[Any, str]] = {}  # by address, as ops are slow to hash


def op_name(func: Any) -> str:
    """Name of an op, such as ``aten.mul.Tensor``; `str` builds it anew each time."""
    entry = _names.get(id(func))
    if entry is None:
        entry = _names[id(func)] = (func, str(func))
    return entry[1]


@cache
def op_of(name: str) -> Any:
    """The op of such a name, None if there is none."""
    start: Any = torch.ops
    return reduce(lambda of, word: getattr(of, word, None), name.split("."), start)


@cache
def returned_arguments(func: Any) -> tuple[int, ...]:
    """Positions of the arguments that an in-place or out= op returns."""
    written = {
        frozenset(argument.alias_info.before_set): i
        for i, argument in enumerate(_arguments(func))
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    return tuple(
        written[frozenset(result.alias_info.before_set)]
        for result in _returns(func)
        if result.alias_info is not None and result.alias_info.is_write
    )


def pick_arguments(
    func: Any, positions: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The arguments at some positions of a call, as the call would return them."""
    names = argument_names(func)
    picked = tuple(args[i] if i < len(args) else kwargs[names[i]] for i in positions)
    if not picked:
        return None
    return picked[0] if len(picked) == 1 else picked


def argument_names(func: Any) -> list[str]:
    """Names of an op's arguments in order."""
    return [argument.name for argument in func._schema.arguments]


@cache
def is_view(func: Any) -> bool:
    """Whether all results of an operator alias its arguments without writing."""
    returns = _returns(func)
    by_schema = bool(returns) and all(
        result.alias_info is not None and not result.alias_info.is_write
        for result in returns
    )
    return by_schema or str(func) in HIDDEN_VIEWS


def hidden_writes(func: Any) -> tuple[int, ...]:
    """Positions of arguments that an op updates though its schema does not say so."""
    return _HIDDEN_WRITES.get(str(func), ())


def without_running_statistics(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a batch norm in training mode with no statistics to update."""
    positions = _HIDDEN_WRITES.get(str(func))
    if positions is None or not args[5]:
        return args
    return tuple(None if i in positions else arg for i, arg in enumerate(args))


def with_types_of_statistics(
    func: Any, args: tuple[Any, ...], without: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Arguments of a batch norm, with copies of its statistics if it needs their type.

    One of a lower type without a weight computes in float32 for their sake on the CPU
    (`aten/src/ATen/native/cpu/mixed_data_type.h`).
    """
    if without is args or args[1] is not None or args[3] is None:
        return without
    if args[0].device.type != "cpu" or args[0].dtype == args[3].dtype:
        return without
    return (*args[:3], args[3].clone(), args[4].clone(), *args[5:])


CachedWeights = tuple[int, dict[Any, Any]]


def cached_weights() -> CachedWeights:
    """What `torch.nn.utils.parametrize.cached` keeps at the moment."""
    return parametrize._cache_enabled, dict(parametrize._cache)


def caches_weights() -> bool:
    """Whether one is inside of `torch.nn.utils.parametrize.cached`."""
    return bool(parametrize._cache_enabled)


@contextlib.contextmanager
def with_cached_weights(weights: CachedWeights) -> Iterator[None]:
    """Inside, parametrized modules find the weights that were cached at a moment."""
    present = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = weights[0], dict(weights[1])
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = present


class DispatchMode(TorchDispatchMode):
    """A dispatch mode under which products are those without one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products = _compat_products.PlainProducts()

    def __enter__(self) -> Any:
        self._products.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._products.__exit__()


class PlainDispatchMode(TorchDispatchMode):
    """A dispatch mode whose calls take no detour through torch.compile's switch.

    The detour keeps calls from being compiled. Under this mode nothing is compiled:
    `ignore_compile_internals` is False, so `torch.compile` runs eagerly.

    Ops whose kernels run others see the autocast that they were called in. A class that
    `sees_autocast` cares for that itself.
    """

    def __init_subclass__(cls, *, sees_autocast: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        dispatch = vars(cls).get("__torch_dispatch__")
        if dispatch is not None and not sees_autocast:
            kept: Any = _compat_autocast.runners_under_autocast(dispatch)
            cls.__torch_dispatch__ = kept  # type: ignore[method-assign]

    def __init__(self) -> None:
        self._outer: list[tuple[bool, bool, bool]] = []
        self._products = _compat_products.PlainProducts()

    # As those of `TorchDispatchMode`, of torch 2.10 to 2.15, without further calls.
    def __enter__(self) -> PlainDispatchMode:
        here: Any = _python_dispatch
        self._outer.append(
            (
                here._is_in_torch_dispatch_mode,
                here._is_in_non_infra_torch_dispatch_mode,
                here._is_in_any_mode_without_ignore_compile_internals,
            )
        )
        _set_flags(True, True, True)
        self._products.__enter__()
        torch._C._push_on_torch_dispatch_stack(self)
        return self

    def __exit__(self, *error: object) -> None:
        _set_flags(*self._outer.pop())
        self._products.__exit__()
        torch._C._pop_torch_dispatch_stack(None)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def _set_flags(is_in_mode: bool, is_in_own: bool, is_seen: bool) -> None:
    """Note whether a mode is active, and one that sees ops of compiled code."""
    here: Any = _python_dispatch
    here._is_in_torch_dispatch_mode = is_in_mode
    here._is_in_non_infra_torch_dispatch_mode = is_in_own
    here._is_in_any_mode_without_ignore_compile_internals = is_seen
    here.set_is_in_mode_without_ignore_compile_internals(is_seen)


_NOTHING = contextlib.nullcontext()


def no_modes() -> contextlib.AbstractContextManager[Any]:
    """Suspend all dispatch modes."""
    num_modes = torch._C._len_torch_dispatch_stack()
    if num_modes or _len_torch_dispatch_stack_pre_dispatch():
        return _disable_current_modes()
    return _NOTHING  # the other one takes as long as a small copy


def has_own_modes() -> bool:
    """Whether a dispatch mode of autosac is active."""
    return any(
        type(mode).__module__.startswith("autosac.")
        for mode in _get_current_dispatch_mode_stack()
    )


def no_dispatch() -> contextlib.AbstractContextManager[Any]:
    """Run ops as they are, past modes and subclasses."""
    return torch._C._DisableTorchDispatch()


def is_profiling(func: Any) -> bool:
    """Whether an op only tells a profiler where a stretch begins or ends."""
    return getattr(func, "namespace", None) == "profiler"


def wrapped_numbers(func: Any, args: tuple[Any, ...]) -> list[complex]:
    """Positional arguments that are numbers where the schema says tensor."""
    given = (args[i] for i in _tensor_positions(func) if i < len(args))
    return [number for number in given if isinstance(number, (int, float, complex))]


@cache
def _tensor_positions(func: Any) -> tuple[int, ...]:
    kinds = (str(argument.type) for argument in _arguments(func))
    return tuple(i for i, kind in enumerate(kinds) if kind == "Tensor")


@cache
def item_lists(func: Any) -> tuple[int, ...]:
    """Positions of the lists that an op goes through item by item, none for others."""
    is_list_op = str(func).startswith(("aten._foreach_", "aten._fused_"))
    kinds = ("List[Tensor]", "List[number]")
    return tuple(
        i
        for i, argument in enumerate(func._schema.arguments if is_list_op else ())
        if str(argument.type) in kinds
    )


def is_random(func: Any) -> bool:
    """Whether an operator draws from a random generator."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def is_foreign(func: Any) -> bool:
    """Whether an operator is not PyTorch's own, so that tags may be missing."""
    return getattr(func, "namespace", "aten") not in _TAGGED


def may_draw(func: Any) -> bool:
    """Whether an operator draws random numbers, or may for all that it says."""
    return is_random(func) or is_foreign(func)


def _qualified_name(func: Any) -> str:
    """Such as ``aten::mul``; a higher-order operator has none."""
    schema = getattr(func, "_schema", None)
    return "" if schema is None else str(schema.name)


def runs_python(func: Any) -> bool:
    """Whether an operator's kernel, or one for some device, is a function in Python."""
    start = _qualified_name(func).replace("::", "/")
    own = (name for name in _impls if name.startswith((f"{start}/", f"{start}.")))
    # Those of no device make no numbers.
    return any(not key.startswith(_OF_NO_DEVICE) for key in map(_key_of, own))


def _key_of(name: str) -> str:
    """The dispatch key in a name such as ``mine/op.default/CPU``."""
    return name.rpartition("/")[2]


def python_kernels(func: Any) -> list[Any]:
    """Functions in Python that `torch.library.custom_op` made an operator of."""
    definition = OPDEFS.get(_qualified_name(func))
    if definition is None:
        return []
    return [definition._init_fn, *definition._backend_fns.values()]


def is_elementwise(func: Any) -> bool:
    """Whether an operator computes each element of its result by itself."""
    return torch.Tag.pointwise in getattr(func, "tags", ())


def is_reduction(func: Any) -> bool:
    """Whether an operator sums up, or the like, elements of its argument."""
    return torch.Tag.reduction in getattr(func, "tags", ())


def clear_blas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps; the next matrix product makes a new one.

    There is one per thread and stream (aten/src/ATen/cuda/CublasHandlePool.cpp).
    """
    torch._C._cuda_clearCublasWorkspaces()


def memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """ATen's `suggest_memory_format`: channels last if the strides say so."""
    return torch._prims_common.suggest_memory_format(tensor)


def read_as(tensor: torch.Tensor, *, is_conj: bool, is_neg: bool) -> torch.Tensor:
    """A view of the same memory that is a conjugate or negative one, or is not."""
    if is_conj != tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if is_neg != tensor.is_neg() else tensor
