"""Changes of a training step that may lower its peak, each as a step to be traced."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_map

from autosac.advice.bf16_models import cast, in_bf16, optimizer_of_copy
from autosac.advice.deferred_logits import deferred, head_of
from autosac.advice.tiled_mlp import tile_mlp
from autosac.profiles.profile import Profile
from autosac.pytrees import tensors_in
from autosac.step.offloaded_optimizer import OffloadedOptimizer
from autosac.step.training_step import LossFn, OptimizerInBackward

Results = Literal["same", "rounded", "other"]
MakeLoss = Callable[[Any], LossFn]
STATE_OFFLOADED = "optimizer state offloaded"
_MICRO_STEPS = (2, 4, 8)
_MOST_CHUNK_BYTES = 64 * 2**20
_CHUNKS = 8  # of logits that are not much larger than that


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """A step that differs from the one that was asked about.

    Attributes:
        name: What people call it.
        how: What to write.
        results: What becomes of losses and weights: "same" bits, "rounded" otherwise,
            or "other" ones.
        options: Of `profile` that differ.
        inputs: What the model is called with.
        micro_steps: How many of its steps do the work of one.
        make_model: Makes another model to trace; None for the same.
        around: Must be entered while the step is traced and planned.
    """

    name: str
    how: str
    results: Results
    options: dict[str, Any]
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    micro_steps: int = 1
    make_model: Callable[[], torch.nn.Module] | None = None
    around: Callable[[], contextlib.AbstractContextManager[Any]] = field(
        default=contextlib.nullcontext
    )

    def and_also(self, other: Change) -> Change:
        """Both changes."""

        @contextlib.contextmanager
        def both() -> Iterator[None]:
            with self.around(), other.around():
                yield

        order: list[Results] = ["same", "rounded", "other"]
        return replace(
            self,
            name=f"{self.name} + {other.name}",
            how=f"{self.how}; {other.how}",
            results=max(self.results, other.results, key=order.index),
            options={**self.options, **other.options},
            around=both,
        )


def changes_of(profile: Profile, make_loss_fn: MakeLoss | None) -> Iterator[Change]:
    """Changes of a step, whether they help or not."""
    step = profile.step
    inputs = step.args, step.kwargs
    if step.keeps_gradients or step.gradients_in_forward:
        yield Change(
            name="gradients set to None",
            how="optimizer.zero_grad() before forward",
            results="same",
            options={"keeps_gradients": False, "gradients_in_forward": False},
            inputs=inputs,
        )
    yield from _optimizer_changes(profile)
    head = head_of(profile)
    if head is not None:
        fqn, module, logits_bytes = head
        chunk_bytes = max(1, min(_MOST_CHUNK_BYTES, 3 * logits_bytes // _CHUNKS))
        yield Change(
            name="chunked cross entropy",
            how=f"autosac.chunked_cross_entropy(hidden, {fqn}.weight, targets,"
            f" memory_budget={chunk_bytes})",
            results="rounded",
            options={},
            inputs=inputs,
            around=partial(deferred, module, chunk_bytes),
        )
    yield Change(
        name="tiled MLPs",
        how="autosac.tile_mlp(model)",
        results="rounded",
        options={},
        inputs=inputs,
        around=partial(tile_mlp, step.model),
    )
    yield from _smaller_batches(profile, make_loss_fn)
    yield from _bf16_changes(profile)


def _bf16_changes(profile: Profile) -> Iterator[Change]:
    step = profile.step
    if all(parameter.dtype != torch.float32 for parameter in step.model.parameters()):
        return
    if step.autocast is None:
        yield Change(
            name="bf16 autocast",
            how='torch.autocast(device, torch.bfloat16), autocast="bf16"',
            results="other",
            options={"autocast": torch.bfloat16},
            inputs=(step.args, step.kwargs),
        )
    yield Change(
        name="bf16 parameters and states",
        how="model.to(torch.bfloat16) before the optimizer is made, likewise inputs;"
        " no autocast",
        results="other",
        options={
            "autocast": None,
            "optimizer": optimizer_of_copy(step.optimizer, step.model),
        },
        inputs=cast((step.args, step.kwargs)),
        make_model=partial(in_bf16, step.model),
    )


# --- the optimizer ------------------------------------------------------------


def _optimizer_changes(profile: Profile) -> Iterator[Change]:
    step = profile.step
    optimizer = step.optimizer
    if optimizer is None or isinstance(optimizer, OptimizerInBackward):
        return
    change = partial(Change, results="rounded", inputs=(step.args, step.kwargs))
    for name, flags in (
        ("optimizer without foreach", {"foreach": False, "fused": False}),
        ("fused optimizer", {"foreach": False, "fused": True}),
    ):
        flag = "fused=True" if flags["fused"] else "foreach=False"
        built = partial(_with_flags, optimizer, flags)
        yield change(
            name=name, how=f"{flag} of the optimizer", options={"optimizer": built}
        )
    rebuild = _rebuilder(optimizer)
    if rebuild is not None and step.accumulate == 1 and step.clip_grad_norm is None:
        yield change(
            name="optimizer in backward",
            how="autosac.OptimizerInBackward(model.parameters(), make_optimizer)",
            results="same",
            options={"optimizer": partial(_in_backward, rebuild)},
        )


def offloaded_states(profile: Profile) -> Change | None:
    """The step with the state of its optimizer in far memory; None if it has none.

    Raises:
        ArgumentError: The state of such an optimizer cannot lie there.
    """
    step, optimizer = profile.step, profile.step.optimizer
    has_state = any(one.states for one in profile.tape.parameters)
    if profile.device.link is None or not has_state:
        return None
    if isinstance(optimizer, OptimizerInBackward):
        moved: Any = copy.copy(optimizer)  # whose hooks are there already
        moved.make_optimizer = partial(_with_far_state, optimizer.make_optimizer)
    elif isinstance(optimizer, torch.optim.Optimizer):
        same = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        moved = OffloadedOptimizer(copy.deepcopy(optimizer, dict[int, Any](same)))
    else:
        moved = partial(_with_far_state, optimizer)
    return Change(
        name=STATE_OFFLOADED,
        how="autosac.OffloadedOptimizer(optimizer)",
        results="same",
        options={"optimizer": moved},
        inputs=(step.args, step.kwargs),
    )


def _with_far_state(rebuild: Callable[[Any], Any], parameters: Any) -> Any:
    return OffloadedOptimizer(rebuild(list(parameters)))


def _with_flags(optimizer: Any, flags: dict[str, bool], parameters: Any) -> Any:
    """An optimizer of other parameters, that takes another way to the same result."""
    rebuild = _rebuilder(optimizer)
    if rebuild is None:
        raise TypeError("the optimizer has several groups of parameters")
    built = rebuild(list(parameters))
    for group in built.param_groups:
        unknown = [name for name in flags if name not in group and flags[name]]
        if unknown:
            raise TypeError(f"{type(built).__name__} has no `{unknown[0]}`")
        group.update({name: flag for name, flag in flags.items() if name in group})
    return built


def _in_backward(rebuild: Callable[[Any], Any], parameters: Any) -> Any:
    return OptimizerInBackward(parameters, rebuild)


def _rebuilder(optimizer: Any) -> Callable[[Any], Any] | None:
    """Builds such an optimizer of parameters; None if that is not known."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer if callable(optimizer) else None
    if len(optimizer.param_groups) > 1:
        return None
    known = inspect.signature(type(optimizer)).parameters
    group = {k: v for k, v in optimizer.param_groups[0].items() if k in known}
    group.pop("params", None)
    return partial(type(optimizer), **copy.copy(group))


# --- the batch ----------------------------------------------------------------


def _smaller_batches(
    profile: Profile, make_loss_fn: MakeLoss | None
) -> Iterator[Change]:
    step = profile.step
    inputs = step.args, step.kwargs
    sizes = [tensor.shape[0] for tensor in tensors_in(inputs) if tensor.ndim]
    for parts in _MICRO_STEPS:
        if not sizes or sizes[0] % parts or sizes[0] <= parts:
            return
        smaller = _sliced(inputs, sizes[0], sizes[0] // parts)
        options: dict[str, Any] = {"accumulate": step.accumulate * parts}
        if make_loss_fn is not None:
            args, kwargs = smaller
            alone = args[0] if len(args) == 1 and not kwargs else args
            options["loss_fn"] = make_loss_fn(kwargs if kwargs and not args else alone)
        yield Change(
            name=f"{parts} micro-steps of {sizes[0] // parts}",
            how=f"batches of {sizes[0] // parts}, accumulate={options['accumulate']}",
            results="rounded",
            options=options,
            inputs=smaller,
            micro_steps=parts,
        )


def _sliced(inputs: Any, size: int, smaller: int) -> Any:
    """The first samples of a batch."""

    def first(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == size:
            return leaf[:smaller].clone()
        return leaf

    return tree_map(first, inputs)
