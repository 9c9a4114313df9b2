"""What exists before a step of a training that runs, and what its optimizer keeps.

Gradients of earlier micro-steps and the optimizer's state are there without being
made by the step that is traced.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from autosac import _compat_autograd, _compat_plain
from autosac._compat_distributed import are_distributed, local
from autosac.fake_tensors.equal_states import EqualStates, keeps_state_only
from autosac.lens.mode import host_state
from autosac.pytrees import held_tensors, module_tensors
from autosac.step.optimizer_state import optimizer_tensors
from autosac.step.training_step import AnyOptimizer, Marker, OptimizerInBackward
from autosac.tracing.far_states import put_away, updating, watch
from autosac.tracing.later_updates import settle
from autosac.tracing.recorder import Recorder
from autosac.tracing.step import Step

_COUNTED = frozenset({"_parameters", "_buffers", "_modules"})


class Copied:
    """Tensors of a copied model, before steps replace some by others.

    Args:
        model: The copy; nothing of it is kept alive.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._refs = {id(t): weakref.ref(t) for t in module_tensors(model)}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        ref = self._refs.get(id(tensor))
        return ref is not None and ref() is tensor


def register_outer(
    recorder: Recorder,
    step: Step,
    model: torch.nn.Module,
    optimizer: AnyOptimizer | None,
    inputs: Any,
    copied: Copied,
) -> None:
    """Count what exists before the step: copies of the user's tensors, gradients.

    Args:
        recorder: Counts it.
        step: The step.
        model: A copy of its model, after the steps that come before,
        optimizer: of its optimizer,
        inputs: and of its inputs.
        copied: What the copy held before these.
    """
    own, given = step.model, (step.args, step.kwargs)
    for pair in zip(own.parameters(), model.parameters(), strict=True):
        _register(recorder, *pair, copied, "parameter")
    _register_buffers(recorder, own, model, copied)
    _register_attributes(recorder, own, model, copied)
    recorder.register_copies(held_tensors(given), held_tensors(inputs), "input")
    if step.finds_gradients:
        _make_gradients(recorder, model)
        _register_gradients(recorder, step, model, optimizer)


def _register_buffers(
    recorder: Recorder, own: torch.nn.Module, model: torch.nn.Module, copied: Copied
) -> None:
    """Count buffers: copies of the user's, and those that an earlier step has made."""
    originals = dict(own.named_buffers())
    for name, buffer in model.named_buffers():
        _register(recorder, originals.get(name), buffer, copied, "buffer")


def _register(
    recorder: Recorder,
    original: torch.Tensor | None,
    tensor: torch.Tensor,
    copied: Copied,
    category: str,
) -> None:
    """Count a copy of the user's tensor, or what an earlier step made in its place.

    A parameter that it cast is the same object still.
    """
    if (
        original is None
        or tensor not in copied
        or (original.shape, original.dtype) != (tensor.shape, tensor.dtype)
    ):
        _register_made(recorder, tensor, category)
    else:
        recorder.register_copies([original], [tensor], category)


def _register_made(
    recorder: Recorder, tensor: torch.Tensor, category: str = "buffer"
) -> None:
    """Count what an earlier step has made, and the gradient that it retains."""
    recorder.register(iter([tensor]), category)
    if tensor.retains_grad and tensor.grad is not None:
        recorder.register(iter([tensor.grad]), "gradient")


def _register_attributes(
    recorder: Recorder, own: torch.nn.Module, model: torch.nn.Module, copied: Copied
) -> None:
    """Count what modules and parameters keep besides; the step may never meet it."""
    seen = [  # counted already, though a list may hold them or their modules as well
        {id(t): t for t in (*module.parameters(), *module.buffers())}
        for module in (own, model)
    ]
    pairs: list[tuple[Any, Any]] = [
        *zip(own.modules(), model.modules(), strict=False),
        *zip(own.parameters(), model.parameters(), strict=False),
    ]
    for original, copy in pairs:
        kept, copies = _kept_besides(original, seen[0]), _kept_besides(copy, seen[1])
        if [tensor.shape for tensor in kept] == [tensor.shape for tensor in copies]:
            for pair in zip(kept, copies, strict=True):
                _register(recorder, *pair, copied, "buffer")
        else:  # an earlier step has made some
            for tensor in copies:
                _register_made(recorder, tensor)


def _kept_besides(
    holder: torch.nn.Module | torch.nn.Parameter, seen: dict[int, Any]
) -> list[torch.Tensor]:
    """Tensors in attributes that are neither parameters nor buffers; those not seen."""
    own = vars(holder)
    kept = {name: own[name] for name in own if name not in _COUNTED}
    return held_tensors(kept, seen, in_objects=False)


def marker(recorder: Recorder, model: torch.nn.Module, step: Step) -> Marker:
    """The function that the micro-step calls when a phase begins."""
    if step.adds_gradients or not step.finds_gradients:
        return recorder.mark

    def mark(phase: str, loss: torch.Tensor | None = None) -> None:
        if phase == "backward":
            for parameter in model.parameters():
                dropped[parameter] = recorder.storages_of([parameter.grad])
            model.zero_grad(set_to_none=True)
        recorder.mark(phase, loss)
        if phase == "finish":  # what backward never gives a gradient never had one
            for parameter in model.parameters():
                if parameter.grad is None:
                    for index in dropped[parameter]:
                        recorder.nbytes[index] = 0

    dropped: dict[torch.nn.Parameter, tuple[int, ...]] = {}
    return mark


def has_distributed(model: torch.nn.Module) -> bool:
    """Whether gradients may lie otherwise on the ranks than their parameters do.

    One may be whole on each, or a part of a sum: only backward shows it.
    """
    return are_distributed(map(type, model.parameters()))


def _make_gradients(recorder: Recorder, model: torch.nn.Module) -> None:
    """Give the parameters the gradients of earlier micro-steps that are not there."""
    with torch.no_grad(), _compat_plain.fakes_of(recorder.repeated.mode):
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _register_gradients(
    recorder: Recorder,
    step: Step,
    model: torch.nn.Module,
    optimizer: AnyOptimizer | None,
) -> None:
    """Count gradients of earlier micro-steps; those that are parts of a buffer once.

    Model or optimizer may hold that flat buffer, or nobody. If gradients are never
    dropped, the user's are there for good, also where backward never comes to one.
    """
    both = zip(step.model.parameters(), model.parameters(), strict=True)
    pairs = [
        (own.grad, copy.grad)
        for own, copy in both
        if step.keeps_gradients and own.grad is not None and copy.grad is not None
    ]
    flat = {local(part).untyped_storage()._cdata for part, _ in pairs}
    if flat and isinstance(step.optimizer, torch.optim.Optimizer):
        kept = optimizer_tensors(step.optimizer), optimizer_tensors(optimizer)
        of_optimizer = list(zip(*kept, strict=False))
        pairs = [
            *(p for p in of_optimizer if local(p[0]).untyped_storage()._cdata in flat),
            *pairs,
        ]
    for part, copy in pairs:
        recorder.register_copies([part], [copy], "gradient")
    parameters = model.parameters()
    recorder.register((p.grad for p in parameters if p.grad is not None), "gradient")


def _keeps_state_only(optimizer: torch.optim.Optimizer) -> bool:
    """The same of one whose state lies in far memory, which may have hooks itself."""
    has_hooks = _compat_autograd.has_hooks_of_others(optimizer)
    return keeps_state_only(updating(optimizer)) and not has_hooks


def make_states(recorder: Recorder, optimizer: OptimizerInBackward) -> None:
    """Give optimizers that step in backward the state they keep over steps."""

    def begin(*_: Any) -> None:
        recorder.phase = "optimizer"

    def end(*_: Any) -> None:
        recorder.phase = "backward"

    equal_states = EqualStates(recorder.repeated.mode, recorder.numbers.note_like)
    watch(recorder, optimizer)
    recorder.muted = True
    are_plain = all(map(_keeps_state_only, optimizer.optimizers.values()))
    for parameter, its_own in optimizer.optimizers.items():
        (group,) = its_own.param_groups
        kind = equal_states.kind(updating(its_own), group, parameter)
        its_own.register_step_pre_hook(begin)
        its_own.register_step_post_hook(end)
        if its_own.state.get(parameter):
            continue
        state = equal_states.like(kind)
        if state is not None:
            its_own.state[parameter] = state
            continue
        _step_one(optimizer, parameter)
        equal_states.learn(kind, its_own.state.get(parameter, {}))
    if not are_plain:
        settle(recorder, optimizer, partial(_step_each, optimizer))
    recorder.muted = False
    _register_state(recorder, optimizer)


def _step_one(optimizer: OptimizerInBackward, parameter: torch.Tensor) -> None:
    parameter.grad = torch.zeros_like(parameter)  # the values may be real
    optimizer.step_one(parameter)


def _step_each(optimizer: OptimizerInBackward) -> None:
    for parameter in optimizer.optimizers:
        _step_one(optimizer, parameter)


def _register_state(recorder: Recorder, optimizer: AnyOptimizer) -> None:
    """Count the optimizer's state; through a lens, not what it keeps on the CPU."""
    put_away(recorder, optimizer)
    if recorder.target is not None:
        recorder.exempt(host_state(optimizer))
    recorder.register(optimizer_tensors(optimizer), "optimizer")


def enter_steady_state(
    recorder: Recorder,
    model: torch.nn.Module,
    optimizer: AnyOptimizer | None,
    *,
    adds_gradients: bool,
) -> None:
    """Name the gradients, and give the optimizer the state it keeps over steps."""
    for parameter in model.parameters():
        grad: Any = parameter.grad
        is_made = grad is not None and adds_gradients and not grad._version
        if is_made and recorder.forget(grad):  # in advance; backward never came here
            parameter.grad = None
        recorder.rename(parameter.grad, "gradient")
    if optimizer is None or isinstance(optimizer, OptimizerInBackward):
        return
    watch(recorder, optimizer)
    recorder.phase = "optimizer"
    recorder.muted = True
    with _gradients_of_earlier_steps(recorder, model):
        if _keeps_state_only(optimizer):
            _make_state(
                EqualStates(recorder.repeated.mode, recorder.numbers.note_like),
                optimizer,
            )
        else:
            settle(recorder, optimizer, optimizer.step)
    recorder.muted = False
    _register_state(recorder, optimizer)


@contextmanager
def _gradients_of_earlier_steps(
    recorder: Recorder, model: torch.nn.Module
) -> Iterator[None]:
    """Let an optimizer keep state of what other steps than the traced one train."""
    trained = recorder.learned.trained
    missing = [
        parameter
        for index, parameter in enumerate(model.parameters())
        if index in trained and parameter.grad is None
    ]
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    yield
    for parameter in missing:
        parameter.grad = None


def _make_state(equal_states: EqualStates, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer what it keeps of every parameter that has a gradient.

    It steps on one parameter of each kind, and on all of them if that does not do.
    """
    kinds: dict[torch.Tensor, Hashable] = {}
    firsts: dict[Hashable, torch.Tensor] = {}
    own = updating(optimizer)
    groups = optimizer.param_groups
    of_groups = [group["params"] for group in groups]
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not optimizer.state.get(parameter):
                kinds[parameter] = equal_states.kind(own, group, parameter)
                firsts.setdefault(kinds[parameter], parameter)
    if not kinds:
        return
    if None not in firsts:
        chosen = set(firsts.values())
        for group in groups:
            group["params"] = [p for p in group["params"] if p in chosen]
        optimizer.step()
        for group, parameters in zip(groups, of_groups, strict=True):
            group["params"] = parameters
        for kind, parameter in firsts.items():
            equal_states.learn(kind, optimizer.state.get(parameter, {}))
        others = [
            (p, equal_states.like(kind)) for p, kind in kinds.items() if p not in chosen
        ]
        if all(state is not None for _, state in others):
            optimizer.state.update(others)
            return
    optimizer.step()
