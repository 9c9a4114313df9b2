"""A training step ready to be traced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from autosac import _compat_fakes
from autosac._compat_distributed import are_distributed
from autosac.devices.specs import DeviceSpec
from autosac.pytrees import held_tensors
from autosac.step.training_step import LossFn
from autosac.tracing.learned import Learned


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step: the user's objects, never changed.

    Attributes:
        model: The model; on the CPU, a GPU or the meta device.
        args: Positional inputs.
        kwargs: Keyword inputs.
        loss_fn: Output -> scalar tensor, None for `stepping.default_loss`.
        optimizer: Instance, or callable on the parameters, or None.
        device_type: ``cpu`` or ``cuda``.
        granularity_bytes: Allocations are rounded up to a multiple of this.
        autocast: Type that forward and loss autocast to, or None.
        accumulate: Micro-steps per optimizer step. One of them is traced, with the
            gradients that the earlier ones left.
        clip_grad_norm: Largest norm of all gradients together, or None.
        gradients_in_forward: The gradients of the step before are dropped between
            forward and backward only.
        keeps_gradients: Gradients are never dropped.
        sharded: FSDP2 shards the model, so that gradients of earlier micro-steps and
            steps are shards, which no trace has: backward makes new ones.
        lens: The GPU whose kernels are traced though the model is not there.
        compute_dtype: Type that floating-point parameters and inputs of the model are
            traced in, as under a mixed-precision policy of FSDP2; None for their own.
        opaque: FQNs of modules that must not be run again, nor cut inside.
        overlapped: Other forward passes may run between its forward and its backward,
            as those of a pipeline's other micro-batches.
        learned: What its runs have taught so far.
    """

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: LossFn | None
    optimizer: Any
    device_type: str
    granularity_bytes: int
    autocast: torch.dtype | None = None
    accumulate: int = 1
    clip_grad_norm: float | None = None
    gradients_in_forward: bool = False
    keeps_gradients: bool = False
    sharded: bool = False
    lens: DeviceSpec | None = None
    compute_dtype: torch.dtype | None = None
    opaque: frozenset[str] = frozenset()
    overlapped: bool = False
    learned: Learned = field(default_factory=Learned, repr=False, compare=False)

    @property
    def adds_gradients(self) -> bool:
        """Whether gradients are added to those that are there already."""
        return self.keeps_gradients or self.accumulate > 1

    @property
    def finds_gradients(self) -> bool:
        """Whether its trace begins with gradients of earlier steps."""
        return not self.sharded and (self.adds_gradients or self.gradients_in_forward)

    @property
    def traced_type(self) -> str:
        """Type of device that the traced tensors say they are on."""
        return self.device_type if self.lens is None else "cpu"

    @property
    def is_present(self) -> bool:
        """Whether the step can really run as it is: `can_run`, in its own types."""
        return self.compute_dtype is None and self.can_run

    @property
    def can_run(self) -> bool:
        """Whether model and batch are here, on the step's device.

        Distributed ones are on other ranks as well, which may not plan just now.
        """
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += held_tensors((self.args, self.kwargs))
        return (
            self.lens is None
            and not any(
                tensor.is_meta or _compat_fakes.is_fake(tensor) for tensor in tensors
            )
            and not are_distributed(map(type, tensors))
        )
