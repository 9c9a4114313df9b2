"""What a training loop does otherwise than the planned step, said once of each kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch

from autosac import _compat, _compat_autograd
from autosac.checkpointing.backend_flags import BackendFlags, flags_of
from autosac.checkpointing.backward_passes import BackwardPasses
from autosac.checkpointing.earlier_gradients import EarlierGradients
from autosac.checkpointing.forward_results import ForwardResults
from autosac.checkpointing.kept_outputs import Headroom, KeptOutputs
from autosac.checkpointing.planned_autocast import PlannedAutocast
from autosac.pytrees import tensors_in
from autosac.quantities import format_bytes
from autosac.step.arguments import warn
from autosac.step.batch_signatures import BatchSignature
from autosac.units.policies import OpPolicy

_NOTHING = contextlib.nullcontext()
_REQUIRES_GRAD = attrgetter("requires_grad")
_LITTLE = 0.01  # of the planned peak: so little is not said


class Planned(Protocol):
    """A plan for batches of some signatures; None for what it does not know.

    Attributes:
        finds_gradients: Those of earlier steps are there as it begins.
        autocast: Type that forward autocasts to, '' for none.
        keeps_graph: Some backward pass keeps the graph,
        calls_again: or the step calls the model several times.
        trains_inputs: Inputs of the model require gradients.
        backends: Settings of ``torch.backends`` that kernels depend on.
        forward_bytes: What ops of forward make, added up.
        headroom_bytes: What a loss may take, or be kept besides: see `Plan`.
        peak_bytes: Its peak.
        num_batches: How many batches it was made for, 0 for one that is like them.
        offloads: It moves anything to far memory.
        reserved_bytes: What a GPU's allocator reserves; None on the CPU.
        op_policies: What its units do.
        signatures: Of the batches that it is for.
        opening: Names of the first ops of forward, up to the one that tells it from
            the other plans for such batches, or '' where one of their units begins;
            empty if nothing tells.
        offload_dir: Directory of the CPU's far memory.
        far_state_bytes: Bytes of the optimizer's state that lie in far memory.
        budget_bytes: The cap on its peak.
        composition: What its peak is made of, in bytes, the optimizer's state by
            itself.
    """

    @property
    def finds_gradients(self) -> bool: ...
    @property
    def autocast(self) -> str | None: ...
    @property
    def keeps_graph(self) -> bool | None: ...
    @property
    def calls_again(self) -> bool | None: ...
    @property
    def trains_inputs(self) -> bool | None: ...
    @property
    def backends(self) -> dict[str, bool] | None: ...
    @property
    def forward_bytes(self) -> int | None: ...
    @property
    def headroom_bytes(self) -> dict[str, int] | None: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def num_batches(self) -> int: ...
    @property
    def offloads(self) -> bool: ...
    @property
    def reserved_bytes(self) -> int | None: ...
    @property
    def op_policies(self) -> tuple[OpPolicy, ...]: ...
    @property
    def signatures(self) -> tuple[BatchSignature, ...]: ...
    @property
    def opening(self) -> tuple[str, ...]: ...
    @property
    def offload_dir(self) -> str | None: ...
    @property
    def far_state_bytes(self) -> int: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def composition(self) -> dict[str, int]: ...


def _ambient(device_type: str) -> tuple[Any, ...] | None:
    """Autocast and settings of backends, as they are now; None if one has to look."""
    if device_type not in ("cpu", "cuda"):
        return None
    return (
        device_type,
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        flags_of(device_type),
    )


class TrainingHabits:
    """Runs the forward of each step and looks at how it is called.

    Args:
        model: The model.
        plan: The first of its plans.
        finds_gradients: Gradients of earlier steps are there in some planned step.
        trains_all: Its plans train all parameters.
        is_wrapped: Its ``forward`` was replaced before the plans were applied.
        num_calls: How often a step calls the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plan: Planned,
        *,
        finds_gradients: bool,
        trains_all: bool,
        is_wrapped: bool,
        num_calls: int,
    ) -> None:
        self._model = model
        self._is_wrapped = is_wrapped
        self._usual: tuple[Any, ...] | None = None  # of which nothing is left to say
        self._little_bytes = _LITTLE * plan.peak_bytes if trains_all else 0
        self._trains_inputs = plan.trains_inputs is not False
        self._warns_of_transform = not plan.op_policies  # units do
        self._warns_of_weights = bool(plan.op_policies)
        self._warns_of_hooks = bool(plan.op_policies)
        self._gradients = EarlierGradients(planned=finds_gradients, num_calls=num_calls)
        self._autocast = PlannedAutocast(plan.autocast)
        self._results = ForwardResults(model)
        self._backends = BackendFlags(plan.backends)
        may_call_again = plan.calls_again is not False
        self._outputs = KeptOutputs(model, may_keep=may_call_again)
        self._passes = BackwardPasses(
            may_keep=plan.keeps_graph is not False,
            may_call_again=may_call_again,
            has_units=bool(plan.op_policies),
        )

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device_type: str,
        plan: Callable[[], Planned | None],
    ) -> Any:
        """Run forward.

        Args:
            forward: The model's forward under its plans.
            args: Its arguments,
            kwargs: and those by name.
            device_type: Of the model.
            plan: Says, once it has run, which plan was followed; None if something
                else was said already that makes it do more.
        """
        _compat_autograd.drop_failed_backward()
        self._gradients.look(self._model)
        self._passes.begin()
        self._outputs.begin(args, kwargs)
        self._look_at_inputs(args, kwargs)
        self._look_at_weights()
        self._look_at_hooks()
        around = None
        ambient = _ambient(device_type)
        if ambient is None or ambient != self._usual:
            self._backends.look(device_type)
            around = self._autocast.watching(device_type, is_wrapped=self._is_wrapped)
            self._usual = ambient if around is None else None
        made = self._results.begin(device_type)
        if around is None and made is None:
            output = forward(*args, **kwargs)
        else:
            with around or _NOTHING:
                with made or _NOTHING:
                    output = forward(*args, **kwargs)
                if made is not None:
                    followed = self._planned(device_type, plan)
                    if followed is not None:
                        planned_bytes = followed.forward_bytes
                        self._results.compare(made, planned_bytes, followed.peak_bytes)
        self._results.end()
        room = partial(self._room, device_type, plan)
        self._outputs.end(output, room)
        self._passes.end(output, room)
        return output

    def _planned(
        self, device_type: str, plan: Callable[[], Planned | None]
    ) -> Planned | None:
        """The plan that was followed; None if it says nothing of a step like this."""
        followed = None if self._autocast.differs else plan()
        if followed is None or not followed.num_batches or followed.offloads:
            return None
        if (followed.reserved_bytes is None) != (device_type == "cpu"):
            return None  # planned for another kind of device, with other ops
        return followed

    def _room(
        self, device_type: str, plan: Callable[[], Planned | None]
    ) -> Headroom | None:
        """What the plan that was followed has room for; None if it does not say."""
        followed = self._planned(device_type, plan)
        if followed is None or followed.headroom_bytes is None:
            return None
        return Headroom(followed.headroom_bytes, followed.peak_bytes)

    def _look_at_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._trains_inputs:
            return
        tensors = [*tensors_in([*args, *kwargs.values()])]
        if not any(map(_REQUIRES_GRAD, tensors)):
            return
        nbytes = sum(tensor.nbytes for tensor in tensors if tensor.requires_grad)
        if nbytes > self._little_bytes:
            self._trains_inputs = True
            frozen = "" if self._little_bytes else " and what frozen layers save"
            warn(
                f"Inputs of the model ({format_bytes(nbytes)}) require gradients, and"
                " those of the planned step do not: the peak may be higher by these"
                f" gradients{frozen}. Plan again with inputs like these, or `detach()`"
                " them."
            )

    def _look_at_weights(self) -> None:
        if self._warns_of_weights and _compat.caches_weights():
            self._warns_of_weights = False
            warn(
                "The model is called inside of `torch.nn.utils.parametrize.cached()`,"
                " which keeps the weights that it makes until its block ends: the peak"
                " may be above the budget by them. Enter it in the model's `forward`,"
                " and plan that."
            )

    def _look_at_hooks(self) -> None:
        if self._warns_of_hooks and _compat_autograd.has_saving_hooks():
            self._warns_of_hooks = False
            warn(
                "The model is called inside of `saved_tensors_hooks`, and its AC units"
                " save nothing through them, as `torch.utils.checkpoint` does not: if"
                " they change values, as by a lower precision, gradients are others"
                " than without a plan; if they move them elsewhere, those of units"
                " stay. Train without the hooks, or call `plan.unapply(model)`."
            )

    def note_transform(self) -> None:
        """The model is called under a transform."""
        if self._warns_of_transform:
            self._warns_of_transform = False
            warn(
                "The model runs under a transform of `torch.func`, `torch.vmap` or"
                " forward-mode autograd, which its plan is not for: the planned peak"
                " does not hold for this call."
            )
