"""One steady step of an optimizer as an FX graph that updates tensors in place.

The optimizer and its parameters are copied. The step of the copy is traced with fake
tensors: what it reads of a tensor, such as a step count, is a number in the graph.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import keystr, tree_flatten_with_path

from autosac import _compat, _compat_autograd, _compat_gpu, _compat_graphs
from autosac.errors import TraceError, UnsupportedError
from autosac.pytrees import tensors_in
from autosac.step.offloaded_optimizer import OffloadedOptimizer
from autosac.step.optimizer_state import step_left_alone
from autosac.step.training_step import (
    OptimizerInBackward,
    check_optimizer,
)

# What optimizers raise that cannot step on copies, or on numbers that nobody knows.
_STEP_ERRORS = (
    *_compat.TRACE_ERRORS,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerStep:
    """A step on copies of parameters and state.

    Attributes:
        module: Takes parameters, a gradient of each, then states; updates parameters
            and states in their memory. Numbers are nodes as well.
        trained: The user's parameters that it updates.
        parameters: Their copies, in the same order.
        states: Copies of what the optimizer keeps; what it did not keep yet is as its
            first step makes it, before it is updated.
        state_names: What each of these is.
    """

    module: fx.GraphModule
    trained: tuple[torch.nn.Parameter, ...]
    parameters: tuple[torch.nn.Parameter, ...]
    states: tuple[torch.Tensor, ...]
    state_names: tuple[str, ...]


def captured_step(
    optimizer: Any, model: torch.nn.Module, trained: Sequence[torch.nn.Parameter]
) -> OptimizerStep:
    """Capture a step of an optimizer, which is not changed, nor its parameters.

    Args:
        optimizer: A ``torch.optim.Optimizer``, or a callable on parameters.
        model: Names the parameters, and gives them to a callable.
        trained: Parameters that have a gradient.

    Raises:
        TraceError: The optimizer cannot be copied, or its step not captured.
        UnsupportedError: Its step is known to be none that a graph can have.
        TypeError: It is none of these.
    """
    own, copies = _copied(optimizer, model, trained)
    _check_kind(own)
    for name, parameter in model.named_parameters():
        if _compat_autograd.has_hooks(parameter):
            raise UnsupportedError(
                f"The parameter `{name}` has a hook, which a graph with an optimizer"
                " would leave out; remove it while planning."
            )
    stepped = _stepped(own, copies, trained)
    parameters = [copies[id(p)] for p in stepped]
    _keep_only(own, parameters)
    names = {
        id(copies[id(p)]): n for n, p in model.named_parameters() if id(p) in copies
    }
    try:
        for parameter in parameters:
            if parameter not in own.state:
                _make_state(own, parameter)
        states = _named_states(own, parameters, names)
        traced = _traced(own, parameters, list(states.values()))
    except _STEP_ERRORS as error:
        raise TraceError(
            f"A step of `{type(own).__name__}` cannot be captured"
            f" ({_first_line(error)}); steps that depend on values or on what lies"
            " outside of `optimizer.state` have no graph: use another optimizer, or"
            " `autosac.profile`."
        ) from error
    _check_trace(type(own).__name__, traced)
    return OptimizerStep(
        module=traced.module,
        trained=tuple(stepped),
        parameters=tuple(parameters),
        states=tuple(states.values()),
        state_names=tuple(states),
    )


def _stepped(
    own: torch.optim.Optimizer,
    copies: dict[int, torch.nn.Parameter],
    trained: Sequence[torch.nn.Parameter],
) -> list[torch.nn.Parameter]:
    """Parameters with a gradient that the optimizer of the copies has."""
    held = {id(p) for group in own.param_groups for p in group["params"]}
    if not held <= {id(p) for p in copies.values()}:
        raise TraceError(
            "`optimizer` makes an optimizer of other parameters than it is given; let"
            " it use its argument, or pass the optimizer itself."
        )
    stepped = [p for p in trained if id(p) in copies and id(copies[id(p)]) in held]
    if not stepped:
        raise TraceError(
            "`optimizer` has no parameter that gets a gradient from this step; make it"
            " from the model's own parameters."
        )
    return stepped


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _copied(
    optimizer: Any, model: torch.nn.Module, trained: Sequence[torch.nn.Parameter]
) -> tuple[torch.optim.Optimizer, dict[int, torch.nn.Parameter]]:
    """An optimizer of copies; ids of the user's parameters -> their copies."""
    if isinstance(optimizer, OptimizerInBackward):
        raise UnsupportedError(
            "An `OptimizerInBackward` steps while backward runs, which is no stage of a"
            " graph; give the optimizer itself, or use `autosac.profile`."
        )
    is_made = isinstance(optimizer, torch.optim.Optimizer)
    if is_made:
        _check_kind(optimizer)
        groups = optimizer.param_groups
        parameters = [p for group in groups for p in group["params"]]
    else:
        parameters = list(model.parameters())
    updated = {id(p) for p in trained}
    copies = {id(p): _copy_of(p, with_memory=id(p) in updated) for p in parameters}
    if not is_made:
        if not callable(optimizer):
            raise TypeError(
                "`optimizer` must be a torch.optim.Optimizer or a callable on"
                f" parameters, got {type(optimizer).__name__}."
            )
        own = optimizer(list(copies.values()))
    else:
        try:
            with step_left_alone(optimizer):
                own = copy.deepcopy(optimizer, dict[int, Any](copies))
        except (TypeError, RuntimeError, AttributeError) as error:
            raise TraceError(
                f"`{type(optimizer).__name__}` cannot be copied: copy.deepcopy says"
                f" {error}. Make it copyable."
            ) from error
    if not isinstance(own, torch.optim.Optimizer):
        raise TypeError(
            "`optimizer` must be a torch.optim.Optimizer or make one of parameters,"
            f" got {type(own).__name__}."
        )
    return own, copies


def _copy_of(parameter: torch.nn.Parameter, *, with_memory: bool) -> torch.nn.Parameter:
    data = parameter.detach().clone() if with_memory else parameter.detach()
    return torch.nn.Parameter(data, requires_grad=parameter.requires_grad)


def _check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers whose step is no graph, or another one each time."""
    check_optimizer(optimizer, 1, None)
    if isinstance(optimizer, OffloadedOptimizer):
        raise UnsupportedError(
            "`optimizer` is an OffloadedOptimizer, and copies to far memory are not"
            " part of a graph: pass the optimizer that it is made of."
        )
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"`{name}.step` needs a closure that runs the model; a graph has one"
            " forward and one backward: use an optimizer that does without."
        )
    if _compat_autograd.has_hooks(optimizer):
        raise UnsupportedError(
            f"`{name}` has hooks around its step, which are Python and not part of a"
            " graph; remove them while planning."
        )
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params" and any(True for _ in tensors_in(value)):
                raise UnsupportedError(
                    f"The option `{key}` of `{name}` is a tensor, which a graph would"
                    f" take for a constant; give a number, such as"
                    f" {key}=float({key})."
                )


def _keep_only(
    optimizer: torch.optim.Optimizer, parameters: Collection[torch.Tensor]
) -> None:
    """Forget parameters that get no gradient, and so are not stepped."""
    wanted = {id(p) for p in parameters}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in wanted]
    for parameter in [p for p in optimizer.state if id(p) not in wanted]:
        del optimizer.state[parameter]


# --- state that an optimizer does not have yet ----------------------------------


def _make_state(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter
) -> None:
    """Give an optimizer what it keeps of a parameter, as its first step makes it.

    It steps, without weight decay, on a gradient of zeros; what this writes is undone.
    """
    groups = optimizer.param_groups
    options = [dict(group) for group in groups]
    for group in groups:
        group["params"] = [p for p in group["params"] if p is parameter]
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    parameter.grad = torch.zeros_like(parameter)
    writes = _Writes()
    with torch.random.fork_rng(devices=[]), writes:
        optimizer.step()
    writes.undo()
    parameter.grad = None
    for group, before in zip(groups, options, strict=True):
        group.update(before)


class _Writes(_compat.DispatchMode):
    """Remembers what memory held before it was first updated."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[Any, Any]] = {}
        self._empty: dict[int, Any] = {}  # not filled yet

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in(_compat.written_arguments(func, args, kwargs)):
            key, storage = _compat_graphs.storage_key(tensor), tensor.untyped_storage()
            if self._empty.pop(key, None) is None and key not in self._before:
                self._before[key] = storage, storage.clone()
        out = func(*args, **kwargs)
        if "empty" in str(func):
            for tensor in tensors_in(out):
                storage = tensor.untyped_storage()
                self._empty[_compat_graphs.storage_key(tensor)] = storage
        return out

    def undo(self) -> None:
        """Put back what memory held before it was first updated."""
        for storage, before in self._before.values():
            storage.copy_(before)


# --- the step as a graph --------------------------------------------------------


def _named_states(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    names: dict[int, str],
) -> dict[str, torch.Tensor]:
    """Tensors that an optimizer keeps."""
    states: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for parameter in parameters:
        owner = names.get(id(parameter), "another parameter")
        for path, leaf in tree_flatten_with_path(optimizer.state.get(parameter, {}))[0]:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in seen:
                states[f"optimizer state {keystr(path)} of {owner}"] = leaf
                seen.add(id(leaf))
    return states


@dataclass(frozen=True, eq=False)
class _Trace:
    """A traced step, and what the optimizer kept before and after it."""

    module: fx.GraphModule
    before: dict[str, Any]
    after: dict[str, Any]


def _traced(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    states: Sequence[torch.Tensor],
) -> _Trace:
    mode = _compat_graphs.symbolic_fake_mode()
    twins: dict[int, Any] = {
        id(t): _compat_graphs.fake_twin(mode, t) for t in (*parameters, *states)
    }
    with step_left_alone(optimizer):
        fake = copy.deepcopy(optimizer, dict(twins))
    with mode:
        for parameter in parameters:
            twin = twins[id(parameter)]
            twin.grad = torch.empty_like(twin)
    tensors = [twins[id(p)] for p in parameters]
    tensors += [twin.grad for twin in tensors]
    tensors += [twins[id(s)] for s in states]
    before = _kept(fake)
    with _compat_gpu.real_foreach(on_gpu=False):
        module = _compat_graphs.capture_updates(fake.step, tensors)
    return _Trace(module, before, _kept(fake))


def _kept(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that an optimizer keeps from one step to the next."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    kept = {"state": list(optimizer.state.values()), "param_groups": groups}
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(kept)[0]}


def _check_trace(name: str, trace: _Trace) -> None:
    """Refuse what a graph cannot keep: numbers, and tensors that are replaced."""
    for key in dict.fromkeys([*trace.before, *trace.after]):
        old, new = trace.before.get(key), trace.after.get(key)
        is_tensor = isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor)
        if old is new or (not is_tensor and old == new):
            continue
        changes = "replaces" if is_tensor else "counts in Python by"
        raise UnsupportedError(
            f"`{name}` {changes} its `{key}` in every step; a graph updates tensors in"
            " their memory: use an optimizer that does so."
        )
    if constants := trace.module.graph.find_nodes(op="get_attr"):
        raise UnsupportedError(
            f"A step of `{name}` reads {len(constants)} tensors that are neither"
            " parameters, gradients nor in `optimizer.state`; a graph would take them"
            " for constants: keep them in the state."
        )
