"""A plan as plain data: what is recomputed of each module, and the step's figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from autosac.costs.host import host_times
from autosac.devices.allocator_settings import Cap
from autosac.kinds import check_profile
from autosac.planning.spelling import followed
from autosac.profiles.fingerprints import Fingerprint
from autosac.profiles.traced_step import TracedStep
from autosac.quantities import share_above
from autosac.step.batch_signatures import BatchSignature
from autosac.units.policies import OpPolicy

if TYPE_CHECKING:
    from typing_extensions import Self

OnMismatch = Literal["recompute", "replan", "raise"]
Replan = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], "PlanData"]


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanData:
    """What a plan holds; `Plan` says what each attribute is."""

    policy: dict[str, float]
    op_policies: tuple[OpPolicy, ...]
    budget_bytes: int
    peak_bytes: int
    baseline_peak_bytes: int
    recompute_ms: float
    step_ms: float
    bound_ms: float
    composition: dict[str, int]
    device: str
    calibrated: bool
    model: Fingerprint
    torch_version: str
    measured_fraction: float
    reserved_bytes: int | None
    dry_run: bool
    signatures: tuple[BatchSignature, ...]
    cap: Cap = "allocated"
    num_batches: int = 1
    opening: tuple[str, ...] = ()
    on_mismatch: OnMismatch = "recompute"
    offloaded_bytes: int = 0
    exposed_ms: float = 0.0
    far_state_bytes: int = 0
    finds_gradients: bool = False
    autocast: str | None = None
    forward_bytes: int | None = None
    headroom_bytes: dict[str, int] | None = None
    keeps_graph: bool | None = None
    calls_again: bool | None = None
    trains_inputs: bool | None = None
    backends: dict[str, bool] | None = None
    offload_dir: str | None = None
    variants: tuple[Self, ...] = ()
    traced: TracedStep | None = field(default=None, compare=False, repr=False)
    replan: Replan | None = field(default=None, compare=False, repr=False)
    frugal: PlanData | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "traced": None, "replan": None}

    @property
    def each(self) -> tuple[Self, ...]:
        """The plan for every kind of batches."""
        return self.variants or (self,)

    @property
    def is_streamed(self) -> bool:
        """Whether it reruns nothing: the model's saved tensors come back one by one."""
        return any(one.streamed for one in self.op_policies)

    @property
    def offloads(self) -> bool:
        """Whether it moves anything to far memory."""
        return any(one.offloads for one in self.op_policies)

    @property
    def host_ms(self) -> float | None:
        """Time in which the host issues the ops of an eager step, beside `step_ms`.

        The longer one decides. 0.0 if the host is the device, None if the plan comes
        from a file.
        """
        if self.traced is None:
            return None
        tape, device = self.traced.tape, self.traced.device
        return host_times(tape, device, followed(self.op_policies)).step_ms

    def of(self, signature: BatchSignature) -> tuple[Self, ...]:
        """The plans that batches of a signature follow, or that of the highest peak."""
        matching = tuple(plan for plan in self.each if signature in plan.signatures)
        return matching or self.each[:1]

    def shown(self, profile: TracedStep | None) -> Self:
        """The plan for the batch of a step, or that of the highest peak."""
        if profile is None:
            return self.each[0]
        check_profile(profile, TracedStep)
        return self.of(profile.signature)[0]

    @property
    def optimality_gap(self) -> float:
        """``(recompute_ms - bound_ms) / recompute_ms``, 0.0 without recomputation."""
        return share_above(self.recompute_ms, self.bound_ms)

    def notes(self) -> dict[str, str]:
        """Which chain or nest an AC unit belongs to, if it does."""
        chains: dict[str, list[str]] = {}
        for one in self.op_policies:
            if one.chain:
                chains.setdefault(one.chain, []).append(one.fqn)
        return {
            one.fqn: f"part of {one.around}"
            if one.around
            else f"input made again from {chains[one.chain][0]}"
            for one in self.op_policies
            if one.around or one.position
        } | {
            one.fqn: f"arguments {'and results ' if one.far_ops else ''}offloaded"
            for one in self.op_policies
            if one.far
        }
