"""What a trace says when the user's code fails in it."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Any

import torch

from autosac import _compat, _compat_compiler
from autosac._compat_distributed import is_loss_parallel
from autosac.errors import TraceError
from autosac.step import source_lines

_MOST_CHARACTERS = 500  # of a message that is quoted; some of PyTorch's are pages long
_VALUES = (
    " What the step does there depends on values: pass a real model and a real batch,"
    " on the device that is planned for, and autosac traces a step that really runs."
)
# What `torch.func.grad` and its like say where saved tensors are taken from autograd.
_REFUSES_HOOKS = "don't yet support saved tensor hooks"
_TRANSFORMED = (
    " `torch.func.jvp`, `jacfwd`, `grad`, `vjp`, `jacrev` and `hessian`, and"
    " forward-mode autograd by itself, let no trace see what they save: use"
    " `torch.autograd.grad(..., create_graph=True)` in their place, or train this model"
    " without a plan."
)
_HOOKS_OFF = (
    " `torch.autograd.graph.disable_saved_tensors_hooks` is in force there, and by such"
    " hooks a trace and a plan know what autograd saves: leave it out, or train this"
    " model without a plan."
)
_COMPILED = (
    "runs code that is compiled by torch.compile, and a plan is for ops that run one by"
    " one: call it as it was before that, or cap the memory of the whole model by"
    " `autosac.compile(model, memory_budget=...)`."
)
_HIGHER_ORDER = (
    "calls `{name}`, which compiles the functions that it is given, and a plan is for"
    " ops that run one by one: write it in plain Python, as an `if` or a loop, or as"
    " one op, as `torch.where`."
)
_READS = ".numpy() is not supported"  # for tensors that hold no data
_CANNOT = "The step cannot be traced without data: "
FAILS = "The step fails: "
RUNS_FIRST = " A step on such inputs must run before it can be planned."
_GATHERED = (
    " With `param_dtype` the model's parameters and arguments are {dtype} here, its"
    " buffers in their own type, and the casts of FSDP2 where units inside the model"
    " begin are not modelled: let the model cast to the type of its weights, or leave"
    " `param_dtype` and `reduce_dtype` out and pass `autocast`=torch.{dtype}."
)
_SPARSE = "not defined for sparse tensors"  # what PyTorch says of their size
_MIXED = "got mixed torch.Tensor and DTensor"
_ONE_BY_ONE = (
    " Optimizers that step on many tensors at once, as they do on GPUs, take no plain"
    " ones beside distributed ones: plan and train with `foreach=False`, as in"
    " functools.partial(torch.optim.AdamW, foreach=False)."
)
_BY_IDENTITY = (
    " An optimizer is copied, parameters too, before it is traced: if it knows them by"
    " `id`, pass a function that builds it, as `optimizer=lambda parameters: ...`."
)
_ONCE = (
    " Its `step()` is called without a closure, once after each backward pass, and must"
    " do then: if it runs the model itself, as SAM and LBFGS do by a closure, pass the"
    " optimizer that it is built on, and leave room for what it keeps besides."
)
_DIVIDED = (
    " PyTorch's `loss_parallel` takes `torch.nn.functional.cross_entropy` of class"
    " indices without label smoothing: use that, or leave `loss_parallel` out."
)
_ELSEWHERE = ("same device", "different devices")  # the latter of fakes in torch 2.10
_META = (
    " A model on the meta device is traced as if it were on the CPU: make the tensors"
    ' that its loss holds, such as targets, with `device="cpu"`.'
)


def explanation(
    error: BaseException, place: str, gathered_in: torch.dtype | None = None
) -> str:
    """Say where the step fails and why, and what to do.

    Args:
        error: What it raised.
        place: Where, such as "module `blocks.0`" or "the loss".
        gathered_in: Type that FSDP2 gathers parameters in, if not in their own.
    """
    depends = isinstance(error, _compat.TRACE_ERRORS) or _READS in str(error)
    line = _users_line(error.__traceback__)
    where = f" at {line}" if line else ""
    advice = _VALUES if depends else RUNS_FIRST
    if gathered_in is not None and not depends:
        advice = _GATHERED.format(dtype=str(gathered_in).removeprefix("torch."))
    is_elsewhere = any(words in str(error) for words in _ELSEWHERE)
    if is_elsewhere and "meta" in str(error):
        advice = _META
    if _SPARSE in str(error):
        return (
            f"The step cannot be traced: {place}{where} computes with a sparse tensor,"
            " whose memory is not known while tracing. Use dense tensors."
        )
    if _MIXED in str(error) and is_loss_parallel():
        advice = _DIVIDED
    if _MIXED in str(error) and ("_foreach_" in str(error) or "_fused_" in str(error)):
        advice = _ONE_BY_ONE
    if _compat_compiler.is_of_compiled_code(error):
        op = _compat_compiler.higher_order_op(error)
        why = _HIGHER_ORDER.format(name=op) if op else _COMPILED
        return f"The step cannot be traced: {place}{where} {why}"
    if place == "the optimizer" and not depends:
        advice = _BY_IDENTITY if isinstance(error, KeyError) else advice
        advice = _ONCE if "closure" in str(error).lower() else advice
    if _is_where_hooks_are_off(error.__traceback__):
        advice = _HOOKS_OFF
    if _REFUSES_HOOKS in str(error):
        return differentiates(place, line)
    return (
        f"{_CANNOT if depends else FAILS}in {place}{where}, {type(error).__name__} says"
        f" {quoted(error)}{advice}"
    )


def _is_where_hooks_are_off(where: TracebackType | None) -> bool:
    """Whether code that takes no saved-tensors hooks was entered, and refused them."""
    frames = (frame for frame, _ in traceback.walk_tb(where))
    names = {frame.f_code.co_name for frame in frames}
    return "disable_saved_tensors_hooks" in names


def differentiates(place: str, line: str) -> str:
    """Say that code transforms functions in a way that no trace can follow.

    Args:
        place: Where, as of `explanation`.
        line: ``file:line`` of the user's code; empty if it is not known.
    """
    where = f" at {line}" if line else ""
    return f"The step cannot be traced: {place}{where} differentiates.{_TRANSFORMED}"


def bypasses(func: Any, phase: str, shape: tuple[int, ...]) -> str:
    """Say that an op reads a parameter of the user's model, not of the traced copy."""
    return (
        f"{func} in {phase} reads a parameter of shape {shape} of the"
        " model itself, not through the model that is called: gradients would go past"
        " the trace. Compute what needs parameters inside the model's `forward`."
    )


def too_large(more: str) -> TraceError:
    """The error of a step that really runs and takes more memory than there is."""
    return TraceError(
        "This step depends on values, so that it really runs once to be traced. It"
        f" takes more {more}: plan with a smaller batch, or for the model on the CPU."
    )


def place_of(fqn: str, phase: str) -> str:
    """Where a step was when it failed.

    Args:
        fqn: The innermost module; empty for the model itself.
        phase: Of the step.
    """
    if phase == "optimizer":
        return "the optimizer"
    if phase == "loss" and not fqn:
        return "the loss"
    place = f"module `{fqn}`" if fqn else "the model itself"
    return f"backward of {place}" if phase == "backward" else place


def _users_line(trace: TracebackType | None) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if source_lines.is_users(frame.filename)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def quoted(error: BaseException) -> str:
    """The first paragraph of what an error says, not too long, as a sentence ends."""
    paragraph = " ".join(str(error).strip().partition("\n\n")[0].split()) or "nothing"
    if len(paragraph) > _MOST_CHARACTERS:
        paragraph = paragraph[:_MOST_CHARACTERS] + "..."
    return paragraph if paragraph.endswith((".", "!", "?")) else f"{paragraph}."
