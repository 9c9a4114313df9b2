"""Private PyTorch APIs of the autograd engine (checked for torch 2.10 to 2.15)."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch

from autosac._compat import TORCH_VERSION, no_modes

# Functions that split ties and then fill what they made in place; before, they filled a
# copy of the gradient (derivatives.yaml of torch 2.10 to 2.15).
MASKED_IN_PLACE = (
    frozenset(
        {
            *("ClampBackward0", "ClampMinBackward1", "ClampMaxBackward1"),
            *("FminBackward0", "FmaxBackward0"),
        }
    )
    if TORCH_VERSION >= (2, 14)
    else frozenset()
)


def next_sequence_nr() -> int:
    """Sequence number that the next autograd node will get."""
    return int(torch._C._autograd._get_sequence_nr())


def current_node() -> Any:
    """The autograd node that runs now, None outside backward."""
    return torch._C._current_autograd_node()


def drop_failed_backward() -> None:
    """Let the engine go of what was to run in a backward pass of this thread.

    After an exception in backward it goes on holding the functions that were to run
    next, with their gradients and all that they have saved, until the next backward
    pass of whatever (torch 2.10 to 2.15). This one runs no op and takes no memory.
    """
    if current_node() is None:
        leaf, gradient = _leaf()
        _ENGINE.run_backward(
            (leaf,), (gradient,), False, False, (leaf,), accumulate_grad=False
        )


_ENGINE = torch.autograd.Variable._execution_engine


@cache
def _leaf() -> tuple[torch.Tensor, torch.Tensor]:
    with no_modes(), torch.inference_mode(False):
        leaf = torch.empty(0, device="cpu", requires_grad=True)
        return leaf, torch.empty(0, device="cpu")


def has_saving_hooks() -> bool:
    """Whether `torch.autograd.graph.saved_tensors_hooks` of the user's are on."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return False
    module = f"{getattr(hooks[0], '__module__', '')}."
    return not module.startswith(("torch.utils.checkpoint.", "autosac."))


def is_the_engines_own() -> bool:
    """Whether the op dispatched now is the engine's, not of Python code in backward.

    That is code of hooks and of custom functions, and what a checkpoint runs again. A
    GPU's backward has a thread of its own, in which nobody calls the engine's ops.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    caller = frame.f_back
    while caller is not None and caller.f_code.co_name == "__torch_dispatch__":
        caller = caller.f_back  # `runners_under_autocast`
    return caller is None or caller.f_code.co_name == "_engine_run_backward"


# References to a gradient that only the engine's buffer holds, while an op on it is
# dispatched to Python: to the tensor, and by it to its storage (torch 2.10 to 2.15).
_ENGINE_TENSOR_USES, _ENGINE_STORAGE_USES = 4, 2


def held_by_engine_only(gradient: torch.Tensor) -> bool:
    """Whether nothing but the engine refers to an argument of the op dispatched now."""
    counted: Any = gradient  # stubs of some versions lack the count
    storage = gradient.untyped_storage()
    storage_uses = int(torch._C._storage_Use_Count(storage._cdata))
    tensor_uses = int(counted._use_count())
    return tensor_uses <= _ENGINE_TENSOR_USES and storage_uses <= _ENGINE_STORAGE_USES


def current_node_sequence_nr() -> int | None:
    """Sequence number of the autograd node that runs now, None outside backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else sequence_nr(node)


def sequence_nr(node: Any) -> int:
    """Number of an autograd node, in the order in which its thread made them."""
    return int(node._sequence_nr())


def name_of(node: Any) -> str:
    """Name of an autograd node; a custom function's `ctx.name` may hide the method."""
    return str(type(node).name(node))


def current_node_variable() -> torch.Tensor | None:
    """The leaf that the running ``AccumulateGrad`` node accumulates into."""
    node = torch._C._current_autograd_node()
    is_leaf = node is not None and name_of(node).endswith("AccumulateGrad")
    return getattr(node, "variable", None) if is_leaf else None


def results_of(node: Any) -> tuple[Any, ...]:
    """What autograd knows of a node's results: `shape` and `dtype` of each."""
    return tuple(node._input_metadata)


def saved_names(node: Any) -> frozenset[str]:
    """Names of the tensors that a node saves, or has saved and let go.

    Those of custom functions have one name, "tensors".
    """
    names = [name for name in dir(type(node)) if name.startswith("_raw_saved_")]
    return frozenset(name.removeprefix("_raw_saved_") for name in names)


def saves_through_others(pack: Any) -> bool:
    """Whether other hooks are in force on what autograd saves than those of a `pack`.

    Autograd asks the innermost hooks only.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and bool(hooks[0] != pack)


def backward_roots() -> tuple[Any, ...]:
    """Nodes that the backward pass of this thread began at; empty if nobody tells.

    The engine does not: the frame that called it does (`_engine_run_backward` of
    torch/autograd/graph.py). A GPU's backward has a thread of its own, for which the
    one that waits is looked for.
    """
    frame: Any = _running_backward(sys._getframe(1))
    if frame is None:
        frames = map(_running_backward, sys._current_frames().values())
        waiting = [one for one in frames if one is not None]
        frame = waiting[0] if len(waiting) == 1 else None
    outputs = () if frame is None else frame.f_locals.get("t_outputs", ())
    nodes = [getattr(output, "grad_fn", None) for output in outputs]
    return tuple(node for node in nodes if node is not None)


def _running_backward(frame: Any) -> Any:
    """The innermost frame of a thread that runs backward, None if none does."""
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        frame = frame.f_back
    return frame


_OF_STEPS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks", *_OF_STEPS)


def can_hook(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks on the steps of an optimizer can be registered."""
    return all(hasattr(optimizer, kind) for kind in _OF_STEPS)


def has_hooks(owner: torch.nn.Parameter | torch.optim.Optimizer) -> bool:
    """Whether hooks of any kind are registered on a parameter or an optimizer.

    Those of others on all optimizers at once count for each.
    """
    is_optimizer = isinstance(owner, torch.optim.Optimizer)
    if is_optimizer and not all(map(_is_own, _hooks_on_all_steps())):
        return True
    return any(getattr(owner, kind, None) for kind in _HOOKS)


def has_hooks_of_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks are registered on an optimizer that are not autosac's own."""
    of_this = (getattr(optimizer, kind, None) or {} for kind in _HOOKS)
    hooks = [hook for of_kind in of_this for hook in of_kind.values()]
    return not all(map(_is_own, [*hooks, *_hooks_on_all_steps()]))


def _hooks_on_all_steps() -> list[Any]:
    """Hooks on the steps of all optimizers."""
    of_all = sys.modules[torch.optim.Optimizer.__module__]
    kinds = (of_all._global_optimizer_pre_hooks, of_all._global_optimizer_post_hooks)
    return [hook for of_kind in kinds for hook in of_kind.values()]


def _is_own(hook: Any) -> bool:
    """Whether a hook is autosac's."""
    return str(getattr(hook, "__module__", "")).startswith("autosac.")


def unscales_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is given scaled gradients by `torch.amp.GradScaler`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
