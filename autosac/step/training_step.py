"""The training step that autosac traces, dry-runs and measures: one definition.

The order is forward, loss, backward, clipping of gradients, ``optimizer.step()``,
``zero_grad()``. The output stays referenced until the backward pass is done, as in
most training loops, and is released before the optimizer step. Forward and loss run
under autocast if that is asked for. With gradient accumulation they and backward
repeat before the optimizer steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from autosac import _compat_dispatch
from autosac.errors import ArgumentError, TraceError, UnsupportedError
from autosac.kinds import check_function, check_kind
from autosac.step.batches import first_batch

LossFn = Callable[[Any], torch.Tensor]
Marker = Callable[..., None]

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], Any]

_SAVED = "optimizers"  # what `OptimizerInBackward.state_dict` has


class OptimizerInBackward:
    """One optimizer per parameter, stepped as soon as its gradient is complete.

    Gradients then never exist all at once. The optimizers step in hooks of the
    parameters (``Tensor.register_post_accumulate_grad_hook``); calling `step` does
    nothing. `torch.optim.lr_scheduler` takes optimizers one by one, so each has its
    scheduler::

        schedulers = [OneCycleLR(one, ...) for one in optimizer.optimizers.values()]
        ...
        for scheduler in schedulers:  # where a loop calls `scheduler.step()`
            scheduler.step()

    Args:
        parameters: Those to train.
        make_optimizer: Builds the optimizer of a list of one parameter.

    Attributes:
        optimizers: The optimizer of each parameter.

    Source:
        pytorch.org, "How to save memory by fusing the optimizer step into the
        backward pass".
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        make_optimizer: MakeOptimizer,
    ) -> None:
        wanted = "a function of a list of parameters that makes their optimizer"
        check_function(make_optimizer, name="make_optimizer", wanted=wanted)
        self.make_optimizer = make_optimizer
        self.optimizers = {
            parameter: make_optimizer([parameter])
            for parameter in _listed(parameters)
            if parameter.requires_grad
        }
        for parameter in self.optimizers:
            parameter.register_post_accumulate_grad_hook(self.step_one)

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizerInBackward:
        """Optimizers of the copied parameters, in their first state."""
        parameters = [copy.deepcopy(parameter, memo) for parameter in self.optimizers]
        return OptimizerInBackward(parameters, self.make_optimizer)

    def step_one(self, parameter: torch.Tensor) -> None:
        """Step one parameter and drop its gradient."""
        optimizer = self.optimizers[parameter]  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for o in self.optimizers.values() for group in o.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The state of all optimizers."""
        return {key: s for o in self.optimizers.values() for key, s in o.state.items()}

    def step(self) -> None:
        """Do nothing: every parameter was stepped in backward."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that came otherwise than by backward, or set them to zero."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The states of all optimizers, in the order of their parameters."""
        return {_SAVED: [one.state_dict() for one in self.optimizers.values()]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, for as many parameters in the same order.

        Raises:
            ArgumentError: It is of another optimizer, or of more or fewer parameters;
                nothing is loaded then.
        """
        check_kind(state_dict, Mapping, name="state_dict", wanted="a dict")
        states = state_dict.get(_SAVED)
        if not isinstance(states, list):
            raise ArgumentError(
                "`state_dict` is not of an `OptimizerInBackward`: its state comes from"
                " `OptimizerInBackward.state_dict`, as it has an optimizer for each"
                " parameter."
            )
        if len(states) != len(self.optimizers):
            raise ArgumentError(
                f"`state_dict` is of {len(states)} parameters, and this optimizer has"
                f" {len(self.optimizers)}: make it of the same ones, in the same order."
            )
        for optimizer, state in zip(self.optimizers.values(), states, strict=True):
            optimizer.load_state_dict(state)


def _listed(parameters: Any) -> list[torch.nn.Parameter]:
    """Parameters as a list.

    Raises:
        ArgumentError: They are none, such as a model.
    """
    wanted = "parameters, as `model.parameters()` gives them"
    check_kind(parameters, Iterable, name="parameters", wanted=wanted)
    listed = list(parameters)
    for parameter in listed:
        check_kind(parameter, torch.Tensor, name="parameters", wanted=wanted)
    return listed


AnyOptimizer = torch.optim.Optimizer | OptimizerInBackward


def check_optimizer(
    optimizer: AnyOptimizer | None, accumulate: int, clip_grad_norm: float | None
) -> None:
    """Refuse options that need all gradients at once of an optimizer that drops each.

    Raises:
        ArgumentError: With what to leave out.
        UnsupportedError: The optimizer runs the model itself.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "`optimizer` is an LBFGS, which runs the model several times a step by a"
            " closure; autosac plans steps of one forward and one backward."
        )
    if not isinstance(optimizer, OptimizerInBackward):
        return
    if accumulate > 1:
        raise ArgumentError(
            f"`accumulate`={accumulate} keeps gradients over micro-steps, and an"
            " `OptimizerInBackward` drops each at once; use one of the two."
        )
    if clip_grad_norm is not None:
        raise ArgumentError(
            f"`clip_grad_norm`={clip_grad_norm} needs all gradients together, and an"
            " `OptimizerInBackward` drops each at once; use one of the two."
        )


def normalize_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split ``inputs`` into positional and keyword arguments of the model.

    Args:
        inputs: A tensor, a tuple (args), a mapping (kwargs) or ``(args, kwargs)``; or
            a `DataLoader`, whose first batch is one of these.

    Raises:
        ArgumentError: ``inputs`` is none of these, or a loader without a batch.
    """
    if isinstance(inputs, DataLoader):
        inputs = first_batch(inputs)
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), _keywords(inputs)
    if isinstance(inputs, (tuple, list)):
        if (
            len(inputs) == 2
            and isinstance(inputs[0], (tuple, list))
            and isinstance(inputs[1], Mapping)
        ):
            return tuple(inputs[0]), _keywords(inputs[1])
        return tuple(inputs), {}
    raise ArgumentError(
        "`inputs` must be a tensor, a tuple (args), a dict (kwargs),"
        f" (args, kwargs) or a DataLoader of these, got {type(inputs).__name__}."
    )


def _keywords(arguments: Mapping[Any, Any]) -> dict[str, Any]:
    """Keyword arguments of the model.

    Raises:
        ArgumentError: A key is no name.
    """
    for name in arguments:
        if not isinstance(name, str):
            raise ArgumentError(
                "`inputs` is a dict, whose keys must be names of arguments of the"
                f" model, got {name!r}: pass arguments without names in a tuple, and so"
                " a dict that is one of them."
            )
    return dict(arguments)


def default_loss(output: Any) -> torch.Tensor:
    """Take ``output.loss`` if there is one, else sum all outputs with a gradient.

    Raises:
        TraceError: The output holds neither a loss nor a tensor with a gradient.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if loss is None:
        loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    leaves = [
        leaf
        for leaf in tree_leaves(output)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if not leaves:
        raise TraceError(
            "The model's output has no `.loss` and no tensor that requires a gradient;"
            " train some parameters, or pass `loss_fn`."
        )
    numbers = [leaf.sum() if leaf.ndim else leaf for leaf in leaves]
    return numbers[0] if len(numbers) == 1 else torch.stack(numbers).sum()


def check_one_number(shape: torch.Size) -> None:
    """Refuse a loss of a shape that has more or fewer elements.

    Raises:
        TraceError: Says what to do.
    """
    if shape.numel() != 1:
        raise TraceError(
            f"The loss has shape {tuple(shape)} and must be one number: let"
            " `loss_fn` reduce it, as in `loss.mean()`."
        )


def check_loss(loss: Any, model: torch.nn.Module) -> None:
    """Refuse a loss that backward cannot begin at.

    Args:
        loss: What the loss function returned.
        model: The model.

    Raises:
        TraceError: Says what a loss must be.
    """
    if not isinstance(loss, torch.Tensor):
        raise TraceError(
            f"The loss is {loss!r}: `loss_fn` must return a tensor that backward can"
            " begin at, not a number or None."
        )
    check_one_number(loss.shape)
    if loss.requires_grad:
        return
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TraceError(
            "The step has no backward pass: no parameter requires a gradient. Call"
            " `requires_grad_()` on what shall be trained."
        )
    raise TraceError(
        "The step has no backward pass: the loss does not depend on any parameter that"
        " requires a gradient. Leave out `detach()`, `torch.no_grad()`, `.item()` and"
        " quantised layers between them."
    )


def _ignore(phase: str, loss: torch.Tensor | None = None) -> None:
    """Ignore what a step tells of its phases."""


def training_step(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    loss_fn: LossFn | None,
    optimizer: AnyOptimizer | None,
    autocast: torch.dtype | None = None,
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    gradients_in_forward: bool = False,
    keeps_gradients: bool = False,
) -> torch.Tensor:
    """Run one training step and return the detached loss of its last micro-step.

    Gradients are left on the parameters; the caller clears them.

    Args:
        model: The model, in the mode it trains in.
        args: Positional inputs, of every micro-step.
        kwargs: Keyword inputs, likewise.
        loss_fn: Maps the output to a scalar; None means `default_loss`.
        optimizer: Stepped after backward, unless None.
        autocast: Type that forward and loss autocast to, or None.
        accumulate: Micro-steps (forward, loss, backward) per optimizer step; the
            loss of each is divided by it.
        clip_grad_norm: Largest norm of all gradients together, or None.
        gradients_in_forward: Gradients that the caller left are dropped after the
            first forward,
        keeps_gradients: or set to zero in place there, if this is true as well.
    """
    check_optimizer(optimizer, accumulate, clip_grad_norm)

    def drop_gradients(phase: str, loss: torch.Tensor | None = None) -> None:
        if phase == "backward":
            model.zero_grad(set_to_none=not keeps_gradients)

    def one_micro_step(mark: Marker) -> torch.Tensor:
        return micro_step(
            model,
            args,
            kwargs,
            loss_fn=loss_fn,
            autocast=autocast,
            accumulate=accumulate,
            mark=mark,
        )

    first = drop_gradients if gradients_in_forward else _ignore
    *earlier, last = [first, *[_ignore] * (accumulate - 1)]
    with _compat_dispatch.as_a_step_begins():
        for mark in earlier:
            one_micro_step(mark)
        loss = one_micro_step(last)
        finish_step(model, optimizer, clip_grad_norm)
    return loss


def finish_step(
    model: torch.nn.Module,
    optimizer: AnyOptimizer | None,
    clip_grad_norm: float | None,
) -> None:
    """Clip the gradients and step the optimizer."""
    if clip_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
    if optimizer is not None:
        optimizer.step()


def micro_step(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    loss_fn: LossFn | None,
    autocast: torch.dtype | None,
    accumulate: int,
    mark: Marker = _ignore,
) -> torch.Tensor:
    """Run forward, loss and backward once and return the detached loss.

    Args:
        model: As in `training_step`, like what is not named here.
        args: Positional inputs.
        kwargs: Keyword inputs.
        loss_fn: Maps the output to a scalar.
        autocast: Type to autocast to.
        accumulate: What the loss is divided by.
        mark: Called with the name of each phase as it begins, and the loss before
            backward; with *finish* once backward is done.
    """
    output, loss = output_and_loss(
        model,
        args,
        kwargs,
        loss_fn=loss_fn,
        autocast=autocast,
        accumulate=accumulate,
        mark=mark,
    )
    mark("backward", loss)
    loss.backward()
    loss = loss.detach()
    mark("finish")
    del output  # alive until here
    return loss


def output_and_loss(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    loss_fn: LossFn | None,
    autocast: torch.dtype | None,
    accumulate: int,
    mark: Marker = _ignore,
) -> tuple[Any, torch.Tensor]:
    """Run forward and loss of a micro-step: see `micro_step`."""
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
        mark("forward")
        output = model(*args, **kwargs)
        mark("loss")
        loss = (loss_fn or default_loss)(output)
        check_loss(loss, model)
        if accumulate > 1:
            loss = loss / accumulate
    return output, loss
