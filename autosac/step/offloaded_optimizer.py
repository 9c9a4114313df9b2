"""An optimizer whose state lies in far memory: pinned memory of the host, or a file.

A step goes through the parameters chunk by chunk. The state of a chunk is allocated on
the device and comes while that of the chunk before it leaves; the program waits for
both, lets go of what has left, and runs the optimizer on the chunk. So state of two
chunks at most is on the device at once, whatever the speed of copies:

    allocate k | k - 1 leaves, k comes | free k - 1 | update k | allocate k + 1 | ...
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autosac import _compat_autograd, _compat_dispatch, _compat_fakes
from autosac.errors import ArgumentError
from autosac.far_memory import Copy, FarMemory
from autosac.kinds import read_directory
from autosac.quantities import parse_bytes
from autosac.step.training_step import OptimizerInBackward

_CHUNK_BYTES = 2**26  # at the rates of a host's link 1 ms: latencies are a small part
_AMP = ("grad_scale", "found_inf")  # that GradScaler hands to an optimizer
_OWN = ("torch", "optim")  # where classes are known to update each parameter by itself


@dataclass(frozen=True, slots=True)
class _Moved:
    """A tensor of the state on its way."""

    state: dict[str, Any]
    name: str
    tensor: torch.Tensor
    copy: Copy | None


@functools.cache
def _memory_in(directory: str | None) -> FarMemory:
    """The far memory that all optimizers of a process share."""
    return FarMemory(directory)


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is on the device for updates only.

    It takes the place of the optimizer that it is made of: in training loops, learning
    rate schedulers, `torch.amp.GradScaler` and `OptimizerInBackward`. Parameters,
    state and results have the same bits; a checkpoint of either one loads into the
    other. Loading needs memory on the device for one parameter's state. State tensors
    of no dimension, such as step counts, stay where they are.

    `autosac.profile` and all that builds on it knows peak and time of a step with it.
    Not tried on a GPU yet.

    Args:
        optimizer: One of ``torch.optim`` but LBFGS; from now on it is this one's.
        chunk_bytes: Most state that is updated at once, in bytes or as text; two chunks
            at most are on the device. What one parameter keeps is never divided. None
            for as much as the largest parameter keeps, and 64 MiB at most.
        offload_dir: Directory of the CPU's far memory; None for the system's temporary
            one, which may be memory.

    Attributes:
        base: The optimizer that it is made of.
        memory: Where the state lies.
        far: Of each parameter, by name, what lies there.
        noted: Called when a step has waited for copies, with the tensors on the
            device that left and those that came.

    Raises:
        ArgumentError: Updates of the optimizer's parameters depend on each other, or
            that is not known; it has hooks; or parameters are not plain tensors.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        chunk_bytes: int | str | None = None,
        offload_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        directory = read_directory(offload_dir)
        _check(optimizer)
        if chunk_bytes is not None:
            chunk_bytes = parse_bytes(chunk_bytes, name="chunk_bytes")
        self._wrap(optimizer, chunk_bytes, directory)

    def _wrap(
        self,
        base: torch.optim.Optimizer,
        chunk_bytes: int | None,
        directory: str | None,
    ) -> None:
        super().__setstate__(
            {
                "defaults": base.defaults,
                "state": base.state,
                "param_groups": base.param_groups,
            }
        )
        self.base = base
        self.chunk_bytes = chunk_bytes
        self.offload_dir = directory
        self.memory = _memory_in(directory)
        self.far: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self.noted: Callable[[list[torch.Tensor], list[torch.Tensor]], None] | None
        self.noted = None
        self._last: Copy | None = None
        self.put_away()

    # --- what trainers see --------------------------------------------------------

    @property
    def far_bytes(self) -> int:
        """Bytes of state that lie in far memory."""
        return sum(tensor.nbytes for tensor in self.far_tensors())

    def far_tensors(self) -> Iterator[torch.Tensor]:
        """The tensors of the state that lie in far memory."""
        return (tensor for of_one in self.far.values() for tensor in of_one.values())

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether it unscales gradients itself: GradScaler asks for that name."""
        return _compat_autograd.unscales_gradients(self.base)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient, chunk by chunk.

        Args:
            closure: As of the optimizer itself.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._share()
        leaving: list[_Moved] = []
        coming: list[_Moved] = []
        try:
            for group, parameters in list(self._chunks()):
                self._fetch(parameters, coming)
                self._wait(leaving, coming)
                _arrive(coming)
                try:
                    self._update(group, parameters)
                finally:
                    self._send(parameters, leaving)
        finally:
            self._wait(leaving, coming)
            coming.clear()
        if self._last is not None:
            self._last.settle()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what either optimizer has saved, parameter by parameter."""
        taken: dict[str, Any] = {}

        def take(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            taken.update(given)
            return {**given, "state": {}}

        def put(_: Any) -> None:
            self._load(taken["state"], taken["param_groups"])

        handles = (
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(put, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of the optimizer itself.

        Raises:
            ArgumentError: Parameters are not plain tensors.
        """
        self.base.add_param_group(param_group)
        try:
            _check_parameters(self.base)
        except ArgumentError:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {"wrapped": (self.base, self.chunk_bytes, self.offload_dir)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "wrapped" in state:  # of a copy
            self._wrap(*state["wrapped"])
            return
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let the optimizer inside have groups and state that others may replace."""
        self.base.state, self.base.param_groups = self.state, self.param_groups

    # --- chunks -------------------------------------------------------------------

    def _chunks(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """Parameters that are updated at once, with their group.

        Those of which nothing lies in far memory yet are updated one by one.
        """
        most_bytes = self.chunk_bytes
        if most_bytes is None:
            each = (sum(t.nbytes for t in far.values()) for far in self.far.values())
            most_bytes = min(_CHUNK_BYTES, max(each, default=0))
        for group in self.param_groups:
            chunk: list[torch.Tensor] = []
            num_bytes = 0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                far = self.far.get(parameter, {}).values()
                own_bytes = sum(t.nbytes for t in far) or most_bytes + 1
                if chunk and num_bytes + own_bytes > most_bytes:
                    yield group, chunk
                    chunk, num_bytes = [], 0
                chunk.append(parameter)
                num_bytes += own_bytes
            if chunk:
                yield group, chunk

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Run the optimizer on some parameters of a group."""
        all_parameters, group["params"] = group["params"], parameters
        self.base.param_groups = [group]
        scaling = {name: getattr(self, name) for name in _AMP if hasattr(self, name)}
        vars(self.base).update(scaling)
        try:
            self.base.step()
        finally:
            for name in scaling:
                del vars(self.base)[name]
            group["params"] = all_parameters
            self.base.param_groups = self.param_groups

    def _fetch(self, parameters: list[torch.Tensor], coming: list[_Moved]) -> None:
        """Allocate the state of a chunk, and begin to copy it."""
        for parameter in parameters:
            state = self.state.get(parameter, {})
            for name, far in self.far.get(parameter, {}).items():
                if state.get(name) is far:
                    new = torch.empty_strided(
                        far.size(),
                        far.stride(),
                        dtype=far.dtype,
                        device=parameter.device,
                    )
                    coming.append(_Moved(state, name, new, self._begin(new, far)))

    def _begin(self, target: torch.Tensor, far: torch.Tensor) -> Copy | None:
        if _compat_fakes.is_fake(target):
            return None
        return self.memory.begin_copy(target, far, "back")

    def _send(self, parameters: Iterable[torch.Tensor], leaving: list[_Moved]) -> None:
        """Begin to copy the state of a chunk to far memory."""
        for parameter in parameters:
            state = self.state.get(parameter, {})
            own = self.far.setdefault(parameter, {})
            for name, tensor in list(state.items()):
                if not _moves(tensor) or own.get(name) is tensor:
                    continue
                far, copy = self._sent(tensor, own.get(name), parameter.device)
                leaving.append(_Moved(state, name, tensor, copy))
                own[name] = state[name] = far
            for name in own.keys() - state.keys():
                del own[name]

    def _sent(
        self, tensor: torch.Tensor, far: torch.Tensor | None, device: torch.device
    ) -> tuple[torch.Tensor, Copy | None]:
        """A tensor's place in far memory, and the copy to there that has begun."""
        is_fake = _compat_fakes.is_fake(tensor)
        if far is None or _layout(far) != _layout(tensor):
            # A fake tensor that was there before the step stands for its own copy.
            far = tensor if is_fake else self.memory.new(tensor, device)
        if is_fake:
            return far, None
        self._last = self.memory.begin_copy(far, tensor, "out")
        return far, self._last

    def _wait(self, leaving: list[_Moved], coming: list[_Moved]) -> None:
        """Wait for copies of a step, and let go of what has left."""
        _wait_for((*leaving, *coming))
        if self.noted is not None and (leaving or coming):
            self.noted([one.tensor for one in leaving], [one.tensor for one in coming])
        leaving.clear()

    def put_away(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Move to far memory what the optimizer keeps on the device.

        Args:
            parameters: Of these; None for all.
        """
        for parameter in list(self.state) if parameters is None else parameters:
            if isinstance(parameter, torch.Tensor):
                leaving: list[_Moved] = []
                try:
                    self._send([parameter], leaving)
                finally:
                    _wait_for(leaving)
        if self._last is not None:
            self._last.settle()

    def _load(self, states: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
        """Load saved states: the groups are loaded already, and state is empty."""
        states = dict(states)
        self.far.clear()
        for group, saved in zip(self.param_groups, groups, strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                if key in states:
                    self.state[parameter] = self._loaded(
                        parameter, group, states.pop(key)
                    )
                    self.put_away([parameter])
        self.state.update(states)  # what belongs to no parameter

    def _loaded(
        self, parameter: torch.Tensor, group: dict[str, Any], state: Any
    ) -> dict[str, Any]:
        """State of a parameter on its device, as the optimizer itself loads it."""
        saved = {**group, "params": [0]}
        self.base.param_groups = [{**group, "params": [parameter]}]
        try:
            self.base.load_state_dict({"state": {0: state}, "param_groups": [saved]})
            loaded: dict[str, Any] = self.base.state[parameter]
        finally:
            self._share()
        return loaded


def offloaded_parts(optimizer: Any) -> list[OffloadedOptimizer]:
    """The optimizers with state in far memory that an optimizer is, or consists of."""
    parts = [optimizer]
    if isinstance(optimizer, OptimizerInBackward):
        parts = list(optimizer.optimizers.values())
    return [one for one in parts if isinstance(one, OffloadedOptimizer)]


def _wait_for(moved: Iterable[_Moved]) -> None:
    for one in moved:
        if one.copy is not None:
            one.copy.wait()


def _arrive(coming: list[_Moved]) -> None:
    """Give the optimizer the tensors that have come, and keep none."""
    for one in coming:
        one.state[one.name] = one.tensor
    coming.clear()


def _moves(value: Any) -> bool:
    """Whether a part of a state is worth moving: counts of steps are not."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.size(), tensor.stride(), tensor.dtype


def _check(optimizer: Any) -> None:
    """Refuse what cannot be updated part by part.

    Raises:
        ArgumentError: Says what to pass.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            "`optimizer` must be an optimizer of torch.optim, got"
            f" {type(optimizer).__name__}: pass one, as in `autosac.OffloadedOptimizer("
            "torch.optim.AdamW(model.parameters()))`."
        )
    kind = type(optimizer)
    is_own = tuple(kind.__module__.split(".")[:2]) == _OWN
    if not is_own or isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError(
            f"`optimizer` is a {kind.__name__}, and only the classes of torch.optim"
            " other than LBFGS are known to update every parameter by itself: use one"
            " of these, or keep the state on the device."
        )
    if _compat_autograd.has_hooks(optimizer):
        raise ArgumentError(
            "`optimizer` has hooks, which would run once for each chunk: register them"
            " on the OffloadedOptimizer that is made of it."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ArgumentError(
            "`optimizer` is differentiable, and a graph through its state keeps that on"
            " the device: make it without `differentiable`."
        )
    _check_parameters(optimizer)


def _check_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Refuse parameters whose state has no memory of its own on one device.

    Raises:
        ArgumentError: Names type and shape.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        plain = _compat_fakes.is_fake(parameter) or _compat_dispatch.is_plain(
            type(parameter)
        )
        if not plain or parameter.layout is not torch.strided:
            raise ArgumentError(
                f"`optimizer` trains a {type(parameter).__name__} of shape"
                f" {tuple(parameter.shape)}, and state of plain dense tensors only can"
                " be moved: keep the state of such parameters on the device."
            )
    if len({parameter.device for parameter in parameters}) > 1:
        raise ArgumentError(
            "`optimizer` trains parameters on several devices: make an"
            " OffloadedOptimizer of those of each."
        )
