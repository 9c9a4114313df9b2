"""What is private of compilers: whether code is compiled (torch 2.10 to 2.15)."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

compiled_call = attrgetter("_compiled_call_impl")  # None if `compile` was not called
_STANCE: Literal["fail_on_recompile"] = "fail_on_recompile"


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module is, or was, given to ``torch.compile``."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # loaded by what compiles
    return compiled_call(module) is not None or (
        compiler is not None and isinstance(module, compiler.OptimizedModule)
    )


_SEES = "has_torch_function"
_sees_any = torch.overrides.has_torch_function


def _is_overridden(tensors: Any) -> bool:
    """Whether tensors are of classes that override functions, whatever mode is open."""
    if not torch._C._len_torch_function_stack():  # a mode's own code runs
        return _sees_any(tensors)
    with torch.overrides._pop_mode_temporarily():
        return _sees_any(tensors)


class _NewGuards(TorchFunctionMode):
    """Does nothing, but compiled code was not made for calls under it.

    PyTorch's modules for attention leave their fast paths where they see a mode, so
    they see none.
    """

    def __enter__(self) -> Any:
        self._unseen = patch.object(torch.overrides, _SEES, _is_overridden)
        mode: Any = super()  # PyTorch's is not typed
        mode.__enter__()
        self._unseen.start()

    def __exit__(self, *error: Any) -> None:
        self._unseen.stop()
        mode: Any = super()
        mode.__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_compiled_code(*, on_fakes: bool) -> Iterator[None]:
    """Inside, a call of code that torch.compile made, or would make, raises.

    Args:
        on_fakes: Calls are on fake tensors, for which no code was made either way.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:  # nothing can be compiled
        yield
        return
    guards = contextlib.nullcontext() if on_fakes else _NewGuards()
    with torch.compiler.set_stance(_STANCE), guards:
        yield


@contextlib.contextmanager
def scripts_called() -> Iterator[set[str]]:
    """Names of the functions of TorchScript that are called inside, by any thread."""
    kind: Any = torch._C.ScriptFunction
    names = set[str]()
    call = kind.__call__

    def noted(function: Any, *args: Any, **kwargs: Any) -> Any:
        names.add(function.name)
        return call(function, *args, **kwargs)

    kind.__call__ = noted
    try:
        yield names
    finally:
        kind.__call__ = call


def is_of_compiled_code(error: BaseException) -> bool:
    """Whether an error was raised by `without_compiled_code`."""
    return _STANCE in str(error)


def higher_order_op(error: BaseException) -> str:
    """Name of the op such as `torch.cond` that an error passed through; '' if none."""
    frames = traceback.extract_tb(error.__traceback__)
    names = [f.name for f in frames if "_higher_order_ops" in f.filename]
    return names[0] if names else ""


def compute_intensive_ops() -> frozenset[Any]:
    """Ops that the partitioner of torch.compile does not run again."""
    from torch._functorch import partitioners  # loads what compiles

    ops: Any = partitioners.get_default_op_list().compute_intensive_ops
    return frozenset(op.default for op in ops)
