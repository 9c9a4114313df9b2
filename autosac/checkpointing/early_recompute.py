"""Recomputation that precedes the gradient: it hides in the time a pipeline waits.

A stage of a pipeline sends its output on and then waits for the gradient. Ordinary
checkpointing recomputes the stage after that gradient has come; here it is recomputed
while it is awaited. A pair of autograd functions does it: `_Checkpoint` runs forward
and keeps no graph; `_Recompute`, which lies after whatever waits, makes it again.

The idea is that of torchgpipe (Kim et al. 2020, "torchgpipe: On-the-fly Pipeline
Parallelism for Training Giant Models", section 3.3).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autosac.checkpointing.backward_order import phony
from autosac.checkpointing.checkpointed_call import Call
from autosac.errors import ArgumentError
from autosac.kinds import check_kind


class _State(threading.local):
    """Whether this thread runs `pipeline_checkpoint`'s forward, or recomputes.

    Both of a call that is nested in another one, while that is recomputed.
    """

    checkpointing = False
    recomputing = False


_state = _State()


def is_checkpointing() -> bool:
    """Whether this thread runs the forward pass of `pipeline_checkpoint`."""
    return _state.checkpointing


def is_recomputing() -> bool:
    """Whether this thread recomputes what ran under `pipeline_checkpoint`."""
    return _state.recomputing


@contextlib.contextmanager
def _doing(name: str) -> Iterator[None]:
    before = getattr(_state, name)
    setattr(_state, name, True)
    try:
        yield
    finally:
        setattr(_state, name, before)  # true still, of a nested call


class Checkpointed:
    """What `pipeline_checkpoint` returns.

    Attributes:
        output: What the function returned.
    """

    def __init__(self, output: Any, call: Call | None) -> None:
        self.output = output
        self._call = call

    def recompute(self) -> None:
        """Recompute now, on the current stream; backward then does it no more.

        Called between forward and backward, best while the gradient is awaited. A
        second call does nothing, nor does one when nothing is to be recomputed, as in
        the first run of an outer call, which keeps nothing. No other thread may run
        the same modules or draw random numbers meanwhile.

        Raises:
            RuntimeError: The function cannot be recomputed as it ran: an input, a
                parameter or the random numbers differ, or backward is already over.
        """
        if self._call is not None and not _state.checkpointing:
            _recompute(self._call)

    def precede(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let backward through a tensor begin with the recomputation.

        For pipelines that autograd drives: pass what an operation returned whose
        backward waits for the gradient (a send whose backward receives), and go on
        with the result.

        Args:
            tensor: A tensor that requires a gradient.

        Returns:
            A view of it. Its backward recomputes, then hands the gradient on.

        Raises:
            ArgumentError: It is no tensor, or requires no gradient, so that no backward
                goes through it.
        """
        check_kind(tensor, torch.Tensor, name="tensor", wanted="a tensor")
        if self._call is None:
            return tensor
        if not tensor.requires_grad:
            raise ArgumentError(
                "`tensor` requires no gradient, so that backward never comes there;"
                " pass the result of the operation whose backward waits."
            )
        preceded: torch.Tensor = _Recompute.apply(self._call, tensor)
        return preceded


def pipeline_checkpoint(
    fn: Callable[..., Any], /, *args: Any, preserve_rng: bool = True, **kwargs: Any
) -> Checkpointed:
    """Call a stage of a pipeline without keeping activations for its backward.

    ``fn(*args, **kwargs)`` runs and leaves no graph. `Checkpointed.recompute` runs it
    again for one; where nobody calls that, backward does. The second run finds random
    states, autocast, buffers and plain attributes of modules as the first one did and
    leaves them as it finds them, so that gradients, buffers and random streams are bit
    for bit those of a plain call. (Gradients of a tensor that ``fn`` uses several times
    and others use as well are added up in another order.)

    Where nothing requires a gradient, floating-point results require one all the same
    (and nothing receives one): a schedule may go backward through every stage alike.

    Calls may be nested: the inner ones are recomputed when the outer one is, and again
    when backward comes to them.

    Any number of calls may be in flight. Each keeps its tensor arguments and a copy of
    the buffers of the modules that ``fn`` reaches.

    Args:
        fn: A module, or a function that reaches its modules and tensors by closure,
            ``self``, defaults or globals. Its result must depend on nothing else.
        args: Tensors and plain values, in tuples, lists and dicts of any depth.
        preserve_rng: Draw the same random numbers again, from PyTorch's default
            generators of the CPU and of the GPUs that arguments and parameters are on,
            and from generators that ``fn`` reaches.
        kwargs: Like ``args``.

    Returns:
        The output and the means to recompute early.

    Raises:
        ArgumentError: ``fn`` cannot be called.
        TypeError: An argument or result is neither tensor nor plain value.
        RuntimeError: ``fn`` changes an argument, draws from Python's or NumPy's random
            numbers, goes backward by itself, reads a parameter with a gradient hook,
            which would run twice, or a tensor that requires a gradient and was not
            found. At recomputation: ``fn`` depends
            on what has changed in between. Each says what to do.
    """
    if not callable(fn):
        raise ArgumentError(
            f"`fn` must be a module or a function, got {type(fn).__name__}; its"
            " arguments follow it."
        )
    if not torch.is_grad_enabled():
        return Checkpointed(fn(*args, **kwargs), None)
    call = Call(fn, args, kwargs, preserve_rng=preserve_rng)
    trigger = phony(torch.device("cpu"), requires_grad=True)
    results = _Checkpoint.apply(call, trigger, *call.tensors, *call.parameters)
    return Checkpointed(call.output(results), call)


def _recompute(call: Call) -> None:
    with call.lock:
        node = None if call.node is None else call.node()
        if node is not None and call.graph is None:
            saved = node.saved_tensors  # an outer checkpoint may rerun all this for it
            with _doing("recomputing"):
                call.recompute(saved)


class _Checkpoint(torch.autograd.Function):
    """Runs a call and keeps no graph; goes backward through the recomputed one."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, trigger: torch.Tensor, *tensors: torch.Tensor
    ) -> Any:
        with _doing("checkpointing"):
            results = call.run()
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[: len(call.tensors)])
        call.leave_to(ctx)
        has_none = call.has_no_gradient()
        if all(has_none):  # but for the trigger backward would never come here
            has_none = [not t.dtype.is_floating_point for t in results]
        without = zip(results, has_none, strict=True)
        ctx.mark_non_differentiable(*(t for t, has_none in without if has_none))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        _recompute(ctx.call)
        return None, None, *ctx.call.gradients(gradients, ctx.needs_input_grad[2:])


class _Recompute(torch.autograd.Function):
    """Identity; recomputes a call when backward comes through."""

    @staticmethod
    def forward(ctx: Any, call: Call, tensor: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _recompute(ctx.call)
        return None, gradient
