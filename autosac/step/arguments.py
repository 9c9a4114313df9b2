"""What people pass to describe a step: read, and mistakes in it said in a sentence."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import torch

from autosac import _compat, _compat_compiler, _compat_dispatch, kinds
from autosac._compat_distributed import are_distributed
from autosac.errors import ArgumentError, UnsupportedError
from autosac.pytrees import held_tensors
from autosac.quantities import is_positive, whole_number
from autosac.step import source_lines
from autosac.step.offloaded_optimizer import OffloadedOptimizer
from autosac.step.training_step import AnyOptimizer, OptimizerInBackward

_CLOSE_OVER = "`loss_fn=lambda output: criterion(output, targets)`"
_WRAPPERS = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def warn(message: str) -> None:
    """Warn about the innermost line that is neither PyTorch's nor autosac's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and not source_lines.is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


# --- the model --------------------------------------------------------------------


def check_kind(model: Any) -> None:
    """Refuse what is no module, or runs its ops where no plan can reach them.

    Raises:
        ArgumentError: Says what to pass instead.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            f"`model` must be a torch.nn.Module, got {type(model).__name__}."
        )
    if isinstance(model, _WRAPPERS):
        raise ArgumentError(
            f"`model` is a {type(model).__name__}: pass the module inside,"
            " `model.module`, and wrap it once the plan is applied."
        )
    for fqn, module in model.named_modules():
        name = f"`{fqn}`" if fqn else "`model`"
        if _compat_compiler.is_compiled(module):
            raise ArgumentError(
                f"{name} is compiled by torch.compile, and a plan is for ops that run"
                " one by one: pass the model as it was before that, or cap the memory"
                " of a compiled one by `autosac.compile(model, memory_budget=...)`."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ArgumentError(
                f"{name} is a TorchScript module, whose ops no plan can reach: pass the"
                " module that it was made from."
            )


def check_no_synced_norms(model: torch.nn.Module) -> None:
    """Refuse norms that run other ops in many processes than in one that plans.

    Raises:
        UnsupportedError: The model has some; names the first.
    """
    for fqn, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise UnsupportedError(
                f"A plan for several processes: `SyncBatchNorm` (`{fqn}`) talks to"
                " other processes in forward, and takes other memory than in one that"
                " only plans; use `BatchNorm`, or a norm of each sample such as"
                " `GroupNorm`."
            )


def check_tensors(model: torch.nn.Module, inputs: Any) -> None:
    """Refuse tensors that no training step can use.

    Args:
        model: A module.
        inputs: All that it is called with.

    Raises:
        ArgumentError: Names the first.
    """
    if torch.is_inference_mode_enabled():
        raise ArgumentError(
            "`torch.inference_mode()` is on, under which nothing has a gradient: plan"
            " outside of it."
        )
    if _compat.caches_weights():
        raise ArgumentError(
            "`torch.nn.utils.parametrize.cached()` is on, and what it keeps after the"
            " step is not planned: plan outside of it, a model that enters it in its"
            " `forward` if the training has it."
        )
    _check_parameters(model)
    lazy = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    named |= dict(model.named_buffers())
    for name, tensor in named.items():
        if isinstance(tensor, lazy):
            raise ArgumentError(
                f"`{name}` of the model is lazy and has no shape yet: call the model"
                " once on a batch before it is planned."
            )
        if tensor.is_inference():
            raise ArgumentError(
                f"`{name}` of the model was made under `torch.inference_mode()` and can"
                " never have a gradient: build the model outside of it."
            )
    given = held_tensors(inputs)
    if any(tensor.is_nested for tensor in (*named.values(), *given)):
        raise ArgumentError(
            "A nested tensor is among the inputs or in the model, and no plan knows"
            " what its parts take: pad them to one tensor, with a mask."
        )
    for name, tensor in (*named.items(), *(("inputs", tensor) for tensor in given)):
        _check_memory(name, tensor)
    if any(tensor.is_inference() for tensor in given):
        raise ArgumentError(
            "`inputs` were made under `torch.inference_mode()`, and no step can save"
            " them for backward: make them outside of it."
        )
    is_real = bool(named) and not any(tensor.is_meta for tensor in named.values())
    if is_real and any(tensor.is_meta for tensor in given):
        device = next(iter(named.values())).device
        raise ArgumentError(
            f"`inputs` lie on the meta device and the model on {device}: make both on"
            " one of them."
        )


def _check_parameters(model: torch.nn.Module) -> None:
    """Refuse a model whose `parameters()` gives something else.

    Raises:
        ArgumentError: Says what it gives.
    """
    others = (p for p in model.parameters() if not isinstance(p, torch.Tensor))
    other = next(others, None)
    if other is not None:
        raise ArgumentError(
            f"`{type(model).__name__}.parameters()` gives a {type(other).__name__},"
            " where PyTorch and autosac expect parameters: let a method of another name"
            " make groups for an optimizer, such as `parameter_groups`."
        )


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor of a model, or of its inputs, whose memory no plan knows.

    Raises:
        ArgumentError: Says what to use instead.
    """
    if tensor.layout is not torch.strided:
        raise ArgumentError(
            f"`{name}` holds a tensor of layout {tensor.layout}, whose memory no plan"
            " knows: make it dense, or keep indices and values as tensors of their own"
            " and use `index_add` instead of its product."
        )
    kind = type(tensor)
    if _compat_dispatch.is_made_of_others(tensor) and not are_distributed((kind,)):
        raise ArgumentError(
            f"`{name}` holds a {kind.__name__}, a tensor that is made of others by its"
            " `__torch_dispatch__`, and no plan knows their memory: keep these as"
            " buffers, and compute with plain tensors in `forward`."
        )


def check_inputs(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Refuse inputs that the model's ``forward`` cannot take.

    Raises:
        ArgumentError: Says what they are, and what they must be.
    """
    problem = _unbound(model.forward, *args, **kwargs)
    if problem is not None:
        given = [f"a {type(arg).__name__}" for arg in args]
        given += [f"`{name}`" for name in kwargs]
        raise ArgumentError(
            f"`inputs` do not fit {type(model).__name__}.forward{problem}."
            f" They are {', '.join(given) or 'empty'}. Pass only what the model is"
            f" called with, and targets through `loss_fn`, as in {_CLOSE_OVER}."
        )


def fits_forward(model: torch.nn.Module, *args: Any) -> bool:
    """Whether a model's ``forward`` takes these arguments."""
    return _unbound(model.forward, *args) is None


def check_maker(function: Any, *, name: str) -> None:
    """Refuse what cannot be called without arguments.

    Args:
        function: What was passed.
        name: The argument's name, for the error message.

    Raises:
        ArgumentError: Says what it takes.
    """
    kinds.check_function(function, name=name, wanted="a function of nothing")
    problem = _unbound(function)
    if problem is not None:
        raise ArgumentError(
            f"`{name}` must be a function of nothing, and it takes {problem}. Let it"
            " hold what it needs, as `lambda: make(size)` does."
        )


# --- the loss ---------------------------------------------------------------------


def check_loss_fn(loss_fn: Any) -> None:
    """Refuse a loss that cannot be called with the model's output alone.

    Raises:
        ArgumentError: Says how to pass targets.
    """
    if loss_fn is None:
        return
    if isinstance(loss_fn, type):
        raise ArgumentError(
            f"`loss_fn` is the class {loss_fn.__name__}, and must be a function of the"
            f" model's output, as in {_CLOSE_OVER}."
        )
    if not callable(loss_fn):
        raise ArgumentError(
            f"`loss_fn`={loss_fn!r} must be a function of the model's output, as in"
            f" {_CLOSE_OVER}."
        )
    is_module = isinstance(loss_fn, torch.nn.Module)
    problem = _unbound(loss_fn.forward if is_module else loss_fn, None)
    if problem is not None:
        kind = type(loss_fn).__name__ if is_module else "it"
        raise ArgumentError(
            "`loss_fn` is called with the model's output and nothing else, and"
            f" {kind} takes {problem}. Let it hold its targets, as in {_CLOSE_OVER}."
        )


def _unbound(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """Signature of a function that does not take the arguments, and why; else None."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of no Python function
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return f"{signature}: {error}"
    return None


# --- the optimizer ----------------------------------------------------------------


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of ``torch.optim`` of a name; case does not matter.

    Raises:
        ArgumentError: There is none.
    """
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value not in (torch.optim.Optimizer, torch.optim.LBFGS)
    }
    if name.lower() not in classes:
        raise ArgumentError(
            f"`optimizer`={name!r} must be one of {', '.join(sorted(classes))}, or an"
            " optimizer."
        )
    return classes[name.lower()]


def read_optimizer(optimizer: Any, model: torch.nn.Module) -> Any:
    """The optimizer as a step takes it: one of this model, or what builds one.

    Args:
        optimizer: What was passed; a name stands for its class.
        model: The model that it must train.

    Raises:
        ArgumentError: It is no optimizer, or trains something else.
    """
    if isinstance(optimizer, str):
        return optimizer_class(optimizer)
    if isinstance(optimizer, (torch.optim.Optimizer, OptimizerInBackward)):
        _check_trained(optimizer, model)
    elif optimizer is not None and not callable(optimizer):
        raise ArgumentError(
            f"`optimizer`={short(optimizer)} must be an optimizer of torch.optim, its"
            f" class or name, or a function of the model's parameters.{SEVERAL}"
        )
    return optimizer


SEVERAL = (
    " Of several make one: a subclass of torch.optim.Optimizer with all their"
    " `param_groups`, whose `step` calls theirs."
)


def short(value: Any) -> str:
    """A number or a word as it is written; of anything else the type."""
    if value is None or isinstance(value, (bool, int, float, str, type)):
        return repr(value)
    return f"<{type(value).__name__}>"


def optimizer_name(optimizer: Any) -> str:
    """Name of an optimizer's class, for people; '' if there is none, or unknown."""
    if isinstance(optimizer, OptimizerInBackward):
        return "optimizer in backward"
    maker = getattr(optimizer, "func", optimizer)  # of a `functools.partial`
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer = optimizer.base
    if isinstance(optimizer, torch.optim.Optimizer):
        maker = type(optimizer)
    return maker.__name__ if isinstance(maker, type) else ""


def optimizer_for(make_optimizer: Any, model: torch.nn.Module) -> AnyOptimizer | None:
    """Build the optimizer of a model.

    Args:
        make_optimizer: Function of the model; a class of ``torch.optim``, also with
            some arguments given (``functools.partial``), gets the parameters, and a
            name stands for its class.
        model: The model.

    Raises:
        ArgumentError: That is no such function, or it builds something else.
    """
    if make_optimizer is None:
        return None
    if isinstance(make_optimizer, str):
        make_optimizer = optimizer_class(make_optimizer)
    built = None
    if callable(make_optimizer):
        of_class = make_optimizer
        while isinstance(of_class, functools.partial):
            of_class = of_class.func
        takes_parameters = isinstance(of_class, type) and issubclass(
            of_class, torch.optim.Optimizer
        )
        given = model.parameters() if takes_parameters else model
        try:
            built = make_optimizer(given)
        except (TypeError, AttributeError) as error:
            what = "the model's parameters" if takes_parameters else "the model"
            raise ArgumentError(
                f"`make_optimizer` is called with {what}, and says"
                f" {type(error).__name__}: {error}. Pass a class of torch.optim or a"
                " function of the model, as in"
                " `lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)`."
            ) from error
    if not isinstance(built, (torch.optim.Optimizer, OptimizerInBackward)):
        built_what = f" that returns {short(built)}" if callable(make_optimizer) else ""
        raise ArgumentError(
            "`make_optimizer` must be a class of torch.optim or a function that builds"
            " the optimizer of a model, as in `lambda model:"
            f" torch.optim.AdamW(model.parameters())`; got"
            f" {short(make_optimizer)}{built_what}.{SEVERAL}"
        )
    _check_trained(built, model)
    return built


def check_replans(optimizer: Any, model: torch.nn.Module) -> None:
    """Refuse to plan anew for a model with the optimizer of another one.

    Raises:
        ArgumentError: It trains other parameters.
    """
    if isinstance(optimizer, AnyOptimizer) and _foreign(optimizer, model):
        raise ArgumentError(
            "`on_mismatch`='replan' plans with the optimizer of the first plan, which"
            " trains another model than the one that the plan is applied to. Apply it"
            " to the model that was planned, or plan with `optimizer` as a class, such"
            " as `torch.optim.AdamW`."
        )


def _foreign(optimizer: AnyOptimizer, model: torch.nn.Module) -> list[torch.Tensor]:
    """What an optimizer trains that are no parameters of a model."""
    own = {id(parameter) for parameter in model.parameters()}
    trained = (p for group in optimizer.param_groups for p in group["params"])
    return [parameter for parameter in trained if id(parameter) not in own]


def _check_trained(optimizer: AnyOptimizer, model: torch.nn.Module) -> None:
    _check_parameters(model)
    foreign = _foreign(optimizer, model)
    if not foreign:
        return
    num_trained = sum(len(group["params"]) for group in optimizer.param_groups)
    which = "none" if len(foreign) == num_trained else "not all"
    raise ArgumentError(
        f"`optimizer` trains other parameters: {which} of its {num_trained} are"
        f" parameters of `model`, as the one of shape {tuple(foreign[0].shape)}. Make"
        " it anew for this model, as in `torch.optim.AdamW(model.parameters())`, or"
        " plan one module that holds all that it trains."
    )


# --- numbers and types ----------------------------------------------------------------


def check_numbers(accumulate: int, clip_grad_norm: float | None) -> None:
    """Refuse numbers of a step that mean nothing.

    Raises:
        ArgumentError: Says which, and what it must be.
    """
    whole_number(accumulate, name="accumulate")
    if clip_grad_norm is not None and not is_positive(clip_grad_norm):
        raise ArgumentError(
            f"`clip_grad_norm` must be positive, got {clip_grad_norm!r}: pass a number,"
            " or None."
        )


def read_dtype(
    dtype: torch.dtype | str | None, *, name: str = "autocast"
) -> torch.dtype | None:
    """A type by itself or by name, such as ``"bfloat16"`` or ``"bf16"``.

    Args:
        dtype: What was passed.
        name: The argument's name, for the error message.

    Raises:
        ArgumentError: It is no floating-point type.
    """
    named = dtype
    if isinstance(dtype, str):
        full_name = dtype.removeprefix("torch.")
        named = getattr(torch, _SHORT.get(full_name, full_name), None)
    if named is None and dtype is None:
        return None
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise ArgumentError(
            f"`{name}`={dtype!r} is no type to compute in, such as torch.bfloat16,"
            " 'bfloat16' or 'bf16'."
        )
    return named


class FsdpDtypes(TypedDict):
    """PyTorch's names of the types of FSDP2's mixed precision, by argument."""

    param_dtype: str | None
    reduce_dtype: str | None


def read_fsdp_dtypes(
    param_dtype: torch.dtype | str | None, reduce_dtype: torch.dtype | str | None
) -> FsdpDtypes:
    """Types that FSDP2 gathers and reduces in, as `read_dtype` reads them.

    Raises:
        ArgumentError: One is no floating-point type.
    """
    return FsdpDtypes(
        param_dtype=_name_of(read_dtype(param_dtype, name="param_dtype")),
        reduce_dtype=_name_of(read_dtype(reduce_dtype, name="reduce_dtype")),
    )


def _name_of(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def autocast_name(dtype: torch.dtype | None) -> str | None:
    """The type that a step autocasts to, '' for none.

    None for a type that some devices turn autocast off for.
    """
    if dtype is None:
        return ""
    return None if dtype.itemsize > 2 else str(dtype).removeprefix("torch.")
