"""Copies of the user's model, optimizer and inputs: these are never changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from autosac import _compat_alone, _compat_autograd, _compat_fakes, _compat_plain
from autosac._compat_distributed import unwrapped
from autosac.errors import ArgumentError, AutosacError, TraceError
from autosac.fake_tensors.values import keeps_values
from autosac.pytrees import module_tensors
from autosac.step.arguments import SEVERAL, short
from autosac.step.optimizer_state import step_left_alone
from autosac.step.training_step import OptimizerInBackward
from autosac.tracing.closures import own_functions
from autosac.tracing.failures import quoted
from autosac.tracing.shared_handles import handles_shared
from autosac.tracing.step import Step

_COPIED = frozenset({"defaults", "state", "param_groups"})  # by optimizers themselves
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules"})
_GIVE_A_COPY = (
    "Give its class a `__deepcopy__` that returns a copy or itself, or keep it outside"
    " of the model."
)
_BUILT_ANEW = (
    "Make it copyable, or pass a function that builds it, as"
    " `optimizer=lambda parameters: torch.optim.AdamW(parameters)`."
)
_OPTIMIZERS = (torch.optim.Optimizer, OptimizerInBackward)


class _Copies(TorchFunctionMode):
    """Lets ``copy.deepcopy`` hand on what a process has but once."""

    def __enter__(self) -> Any:
        self._handles = handles_shared()
        self._handles.__enter__()
        mode: Any = super()  # PyTorch's is not typed
        return mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        mode: Any = super()
        mode.__exit__(*error)
        self._handles.__exit__(*error)


class _FakeCopies(_Copies):
    """Makes ``copy.deepcopy`` turn every tensor it meets into a fake one."""

    def __init__(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.convert = convert

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self.convert(tensor)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


class AnyCopies(_Copies):
    """Lets ``copy.deepcopy`` copy tensors that it refuses.

    Those that were computed, which modules keep: the weight of
    ``torch.nn.utils.weight_norm`` is one. And those of a subclass that says nothing of
    copies.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if tensor.is_leaf:
            deepcopy: Any = func
            try:
                return deepcopy(tensor, memo)
            except RuntimeError:
                if type(tensor) is torch.Tensor:
                    raise
        if id(tensor) not in memo:
            own = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            memo[id(tensor)] = own
        return memo[id(tensor)]


@contextmanager
def copied(
    step: Step, mode: _compat_fakes.FakeTensorMode | None
) -> Iterator[tuple[Any, ...]]:
    """Inside, there are copies of model, optimizer, args and kwargs, a loss, modules.

    Functions of the model and the loss reach the copies where the user's reach what
    was copied, and what else they may write to is put back at the end. The modules are
    all that were copied, also those that only functions reach.

    Args:
        step: The step.
        mode: Of the fake tensors that they hold; None for real ones.
    """
    memo = typed_parameters(step) if mode is None else {}
    copies: _Copies = AnyCopies()
    if mode is not None:
        convert = _conversion(step, mode)
        # Parameters are not copied through `Tensor.__deepcopy__`.
        memo = _fake_parameters(step, mode, convert)
        copies = _FakeCopies(convert)
    if not isinstance(step.optimizer, OptimizerInBackward):
        _check_hooks(step.model)
    _check_slots(step.model)
    inputs = (step.args, step.kwargs)
    with copies:
        model = _copy_of("model", step.model, memo, _GIVE_A_COPY)
        _check_parameters(step.model, model, memo)
        advice = _advice_on_wrapper(step.optimizer) or _BUILT_ANEW
        with step_left_alone(step.optimizer):
            optimizer = _copy_of("optimizer", step.optimizer, memo, advice)
        args, kwargs = _copy_of("inputs", inputs, memo, "Make them copyable.")
        copy_parameter_attributes(step.model, memo)
        if isinstance(optimizer, torch.optim.Optimizer):
            _copy_attributes(step.optimizer, optimizer, memo)
    if optimizer is not None and not isinstance(optimizer, _OPTIMIZERS):
        with _compat_plain.fakes_of(mode), _compat_alone.without_others():
            optimizer = _built(optimizer, model)
    cast_arguments(model, step.compute_dtype)
    with copies:
        loss_fn, puts_back = own_functions(
            *(model, step.model, step.loss_fn, memo),
            optimizer=optimizer,
            is_real=mode is None,
            learned=step.learned,
        )
    modules = [own for own in memo.values() if isinstance(own, torch.nn.Module)]
    with puts_back:
        del memo  # it holds all that was copied
        yield model, optimizer, args, kwargs, loss_fn, modules


def _copy_of(what: str, original: Any, memo: dict[int, Any], advice: str) -> Any:
    """A deep copy of a part of the step, or one sentence that names the part."""
    before = dict(memo)  # without lists of which a part was copied
    try:
        return copy.deepcopy(original, memo)
    except (AutosacError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever `__deepcopy__` or `__reduce__` raises
        culprit = _culprit(original, before)
        raise TraceError(
            f"The {what} cannot be copied for tracing{culprit}: copy.deepcopy says"
            f" {quoted(error)} {advice}"
        ) from error


def _check_parameters(
    model: torch.nn.Module, copied: torch.nn.Module, memo: dict[int, Any]
) -> None:
    """Refuse a copy with parameters of its own making, which no optimizer knows."""
    own = dict(copied.named_parameters())
    for name, parameter in model.named_parameters():
        if own.get(name) is not memo.get(id(parameter), own):
            raise TraceError(
                "The model cannot be copied for tracing: a `__deepcopy__` does not copy"
                f" its parameter `{name}` as `copy.deepcopy(parameter, memo)`. Do that"
                " there, or leave `__deepcopy__` out."
            )


def _culprit(original: Any, memo: dict[int, Any]) -> str:
    """What of a module cannot be copied, in words; '' if nothing is found."""
    if not isinstance(original, torch.nn.Module):
        return ""
    for fqn, module in original.named_modules():
        own = {n: v for n, v in vars(module).items() if n not in _OF_MODULES}
        own |= dict(module.named_parameters(recurse=False))
        own |= dict(module.named_buffers(recurse=False))
        for name, value in own.items():
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:  # as above
                place = f"{fqn}.{name}".lstrip(".")
                return f", for its `{place}` ({type(value).__name__})"
    return ""


def _conversion(
    step: Step, mode: _compat_fakes.FakeTensorMode
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that makes fake tensors of real ones."""
    device = torch.device(step.traced_type)
    own = [*step.model.parameters(), *step.model.buffers()]
    is_here = bool(own) and not any(tensor.is_meta for tensor in own)

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        held, wrap = unwrapped(tensor)
        if held.is_meta and is_here:  # a skeleton, which `torch.func` gives weights
            return _another_skeleton(tensor)
        if keeps_values(held):
            fake = held.detach().clone()
        else:
            fake = _compat_fakes.fake_like(mode, held, device)
        if wrap is None:
            return fake
        with _compat_plain.fakes_of(mode):
            fake = wrap(fake).requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, tensor.requires_grad)
        return fake

    return convert


def _another_skeleton(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor without memory that has none in real steps, either."""
    data = torch.empty_like(tensor, requires_grad=False)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(data, tensor.requires_grad)
    return data.requires_grad_(tensor.requires_grad)


def _fake_parameters(
    step: Step,
    mode: _compat_fakes.FakeTensorMode,
    convert: Callable[[torch.Tensor], torch.Tensor],
) -> dict[int, Any]:
    """Fake parameters by the addresses of the user's, those in lists, too."""
    held = [t for t in module_tensors(step.model) if isinstance(t, torch.nn.Parameter)]
    parameters = list(dict.fromkeys([*step.model.parameters(), *held]))
    memo: dict[int, Any] = {id(p): convert(p) for p in parameters}
    if step.compute_dtype is not None:
        with _compat_plain.fakes_of(mode):
            for parameter in parameters:
                fake = memo[id(parameter)]
                memo[id(parameter)] = _in_dtype(mode, step.compute_dtype, fake)
    return memo


def typed_parameters(step: Step) -> dict[int, Any]:
    """Real parameters in the type that a step computes in, if not in their own.

    They are by the addresses of the user's.
    """
    if step.compute_dtype is None:
        return {}
    return {
        id(parameter): torch.nn.Parameter(
            parameter.detach().to(step.compute_dtype, copy=True),
            parameter.requires_grad,
        )
        for parameter in step.model.parameters()
        if parameter.is_floating_point()
    }


def cast_arguments(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Let a copied model take floating-point arguments in a type; None for their own.

    Args:
        model: The copy.
        dtype: Type that the step computes in.
    """
    if dtype is not None:
        cast = partial(_cast_inputs, dtype)
        model.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)


def copy_parameter_attributes(model: torch.nn.Module, memo: dict[int, Any]) -> None:
    """Give copied parameters what PyTorch leaves out of their copies.

    These are attributes such as gradients in another type, counts and marks.

    Args:
        model: The model.
        memo: Copies by the addresses of what was copied; those that are new are added.
    """
    for parameter in model.parameters():
        own = memo[id(parameter)]
        for name, value in vars(parameter).items():
            if name not in vars(own):
                setattr(own, name, _own_value(value, memo))


def _copy_attributes(
    original: torch.optim.Optimizer, copied: torch.optim.Optimizer, memo: dict[int, Any]
) -> None:
    """Give a copied optimizer what `torch.optim.Optimizer` leaves out of its copies.

    These are attributes of its subclass, and hooks. Methods that a scheduler has
    wrapped are those of the class again.
    """
    for name, value in vars(original).items():
        if name in _COPIED or (callable(value) and hasattr(type(original), name)):
            continue
        own = _own_value(value, memo)
        setattr(copied, name, own)
        if isinstance(own, torch.optim.Optimizer) and own is not value:
            _copy_attributes(value, own, memo)


def _own_value(value: Any, memo: dict[int, Any]) -> Any:
    """A copy; the value itself where it has none, as a process group."""
    try:
        return copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, AttributeError):
        return value


def _built(make_optimizer: Any, model: torch.nn.Module) -> Any:
    """An optimizer of a function of the parameters."""
    try:
        optimizer = make_optimizer(model.parameters())
    except (TypeError, AttributeError, ValueError) as error:
        way_out = (
            "its class or name, `lambda parameters: torch.optim.AdamW(parameters,"
            " lr=1e-3)`, or, but to `plan_pipeline`, an optimizer"
        )
        if "2D parameters" in str(error):
            way_out = (
                "`lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim"
                " == 2])`, or another optimizer"
            )
        raise ArgumentError(
            "`optimizer` is called with the model's parameters, and says"
            f" {type(error).__name__}: {quoted(error)} Pass {way_out}."
        ) from error
    if not isinstance(optimizer, _OPTIMIZERS):
        raise ArgumentError(
            "`optimizer` must return an optimizer when it is called with parameters; it"
            f" returned {short(optimizer)}.{SEVERAL}"
        )
    if isinstance(optimizer, torch.optim.Optimizer) and not _compat_autograd.can_hook(
        optimizer
    ):
        kind = type(optimizer).__name__
        raise ArgumentError(
            f"`optimizer` returned a {kind} that never called"
            " `torch.optim.Optimizer.__init__`."
            f" {_advice_on_wrapper(optimizer) or 'Call it there.'}"
        )
    return optimizer


def _advice_on_wrapper(optimizer: Any) -> str:
    """What to do about an optimizer that keeps all in another one; '' for others."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return ""
    own = vars(optimizer)
    held = (n for n, v in own.items() if isinstance(v, torch.optim.Optimizer))
    inner = next(held, None)
    if inner is None or not _COPIED.isdisjoint(own):
        return ""
    return (
        f"It wraps another optimizer: pass that one (its `{inner}`), and leave room in"
        " the budget for what the wrapper does besides, such as gradients of single"
        " samples, which no plan counts."
    )


def _in_dtype(mode: Any, dtype: torch.dtype, parameter: torch.Tensor) -> torch.Tensor:
    if not parameter.is_floating_point():
        return parameter
    held, wrap = unwrapped(parameter)
    if (
        _compat_fakes.is_fake(held) and held.is_contiguous()
    ):  # as `to`, which takes long
        layout = (tuple(held.shape), held.stride(), dtype, held.device)
        held = _compat_fakes.new_fake(mode, *layout)
    else:
        held = held.detach().to(dtype)
    data = held if wrap is None else wrap(held)
    return torch.nn.Parameter(data, requires_grad=parameter.requires_grad)


def _cast_inputs(
    dtype: torch.dtype, module: torch.nn.Module, args: Any, kwargs: Any
) -> Any:
    """What FSDP2 does to the arguments of its root module."""

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return tree_map(cast, (args, kwargs))


def _check_hooks(model: torch.nn.Module) -> None:
    """Refuse hooks of parameters, which the fake copy does not have."""
    for name, parameter in model.named_parameters():
        if _compat_autograd.has_hooks(parameter):
            raise TraceError(
                f"The parameter `{name}` has a hook, which would be left out of the"
                " trace. If it steps an optimizer, pass `optimizer=autosac."
                "OptimizerInBackward(model.parameters(), make_optimizer)` instead;"
                " otherwise remove it while planning."
            )


def _check_slots(model: torch.nn.Module) -> None:
    """Refuse modules that keep something in slots, which no copy of a module has."""
    for fqn, module in model.named_modules():
        for cls in type(module).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(module, name):
                    raise TraceError(
                        f"The module `{fqn}` ({type(module).__name__}) keeps `{name}`"
                        " in `__slots__`, and copy.deepcopy leaves that out of a"
                        f" module's copy: remove `__slots__` from {cls.__name__}."
                    )
