"""Private PyTorch APIs that AC units need below autograd (torch 2.10 to 2.15)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._functorch import pyfunctorch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autosac import _compat, _compat_alone, _compat_autograd
from autosac._compat_distributed import WAITS


class Traits:
    """What an operator does, looked up by its address, as ops are slow to hash.

    Attributes:
        func: The operator.
        name: Such as ``aten.mul.Tensor``.
        is_view: All its results alias its arguments without writing,
        is_hidden: and its schema does not say so.
        is_random: It draws from a random generator.
        is_foreign: It is not PyTorch's own,
        runs_python: and has a kernel in Python.
        may_draw: It draws random numbers, or may for all that it says.
        statistics: Positions of running statistics, which it may update as well.
        written: Positions and names of the arguments that it mutates, by its schema.
        returned: Positions of the mutated arguments that it returns.
        only_makes: It returns new tensors only.
        is_literal: It takes a tensor that Python made of numbers.
        is_wait: It waits for a collective.
    """

    __slots__ = (
        *("func", "is_foreign", "is_hidden", "is_literal", "is_random", "is_view"),
        *("is_wait", "may_draw", "name", "only_makes", "returned"),
        *("runs_python", "statistics", "written"),
    )

    def __init__(self, func: Any) -> None:
        self.func = func  # kept, so that no address is used twice
        self.name = _compat.op_name(func)
        self.is_view = _compat.is_view(func)
        self.is_hidden = str(func) in _compat.HIDDEN_VIEWS
        self.is_random = _compat.is_random(func)
        self.is_foreign = _compat.is_foreign(func)
        self.runs_python = self.is_foreign and _compat.runs_python(func)
        self.may_draw = _compat.may_draw(func)
        self.statistics = _compat.hidden_writes(func)
        schema = getattr(func, "_schema", None)
        self.written = tuple(
            (i, argument.name)
            for i, argument in enumerate(() if schema is None else schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        self.returned = _compat.returned_arguments(func)
        self.only_makes = makes_all_results(func)
        self.is_literal = func is torch.ops.aten.lift_fresh.default
        self.is_wait = self.name in WAITS

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments of a call that it mutates.

        A resize to the same size is none, and autograd counts none. Of a record, whose
        arguments are parts and have no shape, every resize is one.
        """
        resized = args[0] if self.func is _RESIZE else None
        if isinstance(resized, torch.Tensor) and resized.shape == torch.Size(args[1]):
            return []
        return [
            args[i] if i < len(args) else kwargs.get(name) for i, name in self.written
        ]


def makes_all_results(func: Any) -> bool:
    """Whether an op returns new tensors only, by its schema."""
    schema = getattr(func, "_schema", None)
    returns = () if schema is None else schema.returns
    return bool(returns) and all(result.alias_info is None for result in returns)


def next_node_behind(func: Any) -> int:
    """Number that the autograd node after the running op's own one will get.

    -1 for a copy: autograd makes one to save what an op is about to change, behind the
    node of that op and before its kernel (`clone` itself saves nothing).
    """
    if func is torch.ops.aten.clone.default:
        return -1
    return _compat_autograd.next_sequence_nr()


_RESIZE = torch.ops.aten.resize_.default
_traits: dict[int, Traits] = {}
_NOTHING = contextlib.nullcontext()


def traits(func: Any) -> Traits:
    """What an operator does."""
    op_traits = _traits.get(id(func))
    if op_traits is None:
        op_traits = _traits[id(func)] = Traits(func)
    return op_traits


def _keys_above_kernels() -> Any:
    names = ("ADInplaceOrView", "AutogradFunctionality", "AutogradOther")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradNestedTensor)
    for name in dir(torch._C.DispatchKey):
        if name in names or name.startswith("Autocast"):
            keys = keys.add(getattr(torch._C.DispatchKey, name))
    # Of `is_grads_batched=True`: backward runs for many gradients at once.
    vmap = torch._C._parse_dispatch_key("VmapMode")
    return keys if vmap is None else keys.add(vmap)


_VERSIONS = torch._C.DispatchKey.ADInplaceOrView
_ABOVE_KERNELS = _keys_above_kernels()


class BelowAutograd:
    """Run ops of forward as a mode does: no graph, versions, autocast or `vmap`.

    Kernels may ask whether there are gradients, and there are.
    """

    __slots__ = ("_guard", "_was_enabled")

    def __enter__(self) -> None:
        self._was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        self._guard = torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS)
        self._guard.__enter__()

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(*error)
        torch._C._set_grad_enabled(self._was_enabled)


@contextlib.contextmanager
def as_a_step_begins() -> Iterator[None]:
    """Run with gradients and outside of autocast, whatever is open around it.

    An autocast inside drops its copies of weights, as the outermost one does. Other
    processes are out of reach for one that is alone (`_compat_alone`).
    """
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    enabled = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    for kind in enabled:
        torch.set_autocast_enabled(kind, False)
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    try:
        with torch.enable_grad(), _compat_alone.without_others():
            yield
    finally:
        for _ in range(depth):
            torch.autocast_increment_nesting()
        for kind in enabled:
            torch.set_autocast_enabled(kind, True)


def is_number(tensor: torch.Tensor) -> bool:
    """Whether it is a single integer."""
    return not (tensor.dim() or tensor.is_floating_point() or tensor.is_complex())


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()`, which counts changes together with it below autograd too."""
    with torch._C._SetExcludeDispatchKeyGuard(_VERSIONS, False):
        return tensor.detach()


def detached_unseen(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()` of a plain tensor, past modes, in one call."""
    return torch.Tensor._make_subclass(torch.Tensor, tensor)


def weak_storage(tensor: torch.Tensor) -> Any:
    """A weak reference to a tensor's storage, whose address is not reused meanwhile."""
    return StorageWeakRef(tensor.untyped_storage())


def is_sole(tensor: torch.Tensor) -> bool:
    """Whether no other tensor lies in a tensor's storage."""
    # Counted are this tensor and Python's object for the storage.
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count == 2


def keeps_graph() -> bool:
    """Whether the present backward pass, or a look at the graph, leaves it usable."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set a tensor's version counter back, as if nothing had changed it."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


plain_types: set[Any] = {torch.Tensor, torch.nn.Parameter, FakeTensor}  # known so far


def is_plain(kind: type) -> bool:
    """Whether tensors of a type do nothing of their own when an op is dispatched."""
    if kind in plain_types:
        return True
    own = getattr(kind, "__torch_dispatch__", None)
    if own is not torch._C._disabled_torch_dispatch_impl:
        return False
    plain_types.add(kind)
    return True


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory but that of other tensors, which it hides."""
    if is_plain(type(tensor)):
        return False
    if is_traceable_wrapper_subclass(tensor):
        return True
    # Tensors of `_make_wrapper_subclass` have a storage whose address is an error, also
    # without the `__tensor_flatten__` by which PyTorch knows others.
    with torch._C.DisableTorchFunctionSubclass():
        try:
            tensor.untyped_storage().data_ptr()
        except RuntimeError:
            return True
    return False


def is_in_transform() -> bool:
    """Whether a transform such as ``torch.vmap`` is at work, by the frames there are.

    Its levels are hidden while an op runs, and a mode that begins or ends then does so
    for some of them only: they put back what the ops around them had.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch._functorch."):
            return True
        frame = frame.f_back
    return False


def num_modes() -> int:
    """How many dispatch modes are active."""
    return int(torch._C._len_torch_dispatch_stack())


def is_transformed() -> bool:
    """Whether code runs under `torch.func`, `torch.vmap` or forward-mode autograd."""
    if forward_ad._current_level >= 0:
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_forward_mode() -> bool:
    """Whether code runs under forward-mode autograd, of `torch.func` or by itself."""
    return bool(forward_ad._current_level >= 0)


def untransformed() -> contextlib.AbstractContextManager[Any]:
    """Run ops outside of `torch.func` and `torch.vmap`, even if backward is inside."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return _NOTHING
    return pyfunctorch.temporarily_clear_interpreter_stack()


def called_at_run_time(reason: str) -> Callable[[Any], Any]:
    """Let code that is compiled call a function when it runs, as it is.

    Args:
        reason: What Dynamo says where it may not, as with ``fullgraph=True``.
    """

    def marked(function: Any) -> Any:
        function._torchdynamo_disable = True
        function._torchdynamo_disable_msg = reason
        return function

    return marked
