"""Real training steps of `benchmarks.gpu_validation`, one model alive at a time."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autosac import Plan, _compat
from autosac.step.optimizer_state import optimizer_tensors
from autosac.step.training_step import normalize_inputs, training_step
from autosac.verification.measuring import (
    State,
    capture_state,
    differences,
    measure_peak,
)
from benchmarks.gpu_models import Subject

STEPS = 3  # before states are compared; the last one's peak counts
TIMED_STEPS = 3
# Kernels that add in any order differ from run to run. A planned run may differ from
# a plain one by so many times what two plain ones differ by: a heuristic, as both are
# one draw each.
OWN_DISTANCES = 3.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one model in training showed.

    Attributes:
        allocated_bytes: Peak of a steady step; on a GPU ``max_memory_allocated``.
        requested_bytes: The same before the allocator rounds; None on the CPU.
        reserved_bytes: ``max_memory_reserved``; None on the CPU.
        held_bytes: Allocated before the model was built: nothing, as a rule.
        step_ms: Median time of a step.
        losses: Of each step up to the measured one.
        state: All that the steps changed, on the CPU.
    """

    allocated_bytes: int
    requested_bytes: int | None
    reserved_bytes: int | None
    held_bytes: int
    step_ms: float
    losses: tuple[float, ...]
    state: State = field(repr=False)


class _Training:
    """One model in training, with or without a plan."""

    def __init__(self, subject: Subject, device: str, plan: Plan | None) -> None:
        torch.manual_seed(0)
        self.model = subject.build(device)
        if plan is not None:
            plan.apply(self.model)
        self.optimizer = subject.make_optimizer(self.model)
        self.batch = subject.make_batch(device)
        self.args, self.kwargs = normalize_inputs(self.batch.inputs)
        self.autocast = subject.autocast
        self.losses: list[float] = []
        torch.manual_seed(0)

    def step(self) -> torch.Tensor:
        return training_step(
            self.model,
            self.args,
            self.kwargs,
            loss_fn=self.batch.loss_fn,
            optimizer=self.optimizer,
            autocast=self.autocast,
        )

    def earlier_steps(self) -> None:
        for _ in range(STEPS - 1):
            self.losses.append(self.step().item())
            self.model.zero_grad(set_to_none=True)

    def tensors(self) -> list[torch.Tensor]:
        """For the CPU: a GPU's allocator knows by itself."""
        batch = tree_leaves((self.batch.inputs, self.batch.targets))
        tensors = [t for t in batch if isinstance(t, torch.Tensor)]
        tensors += [*self.model.parameters(), *self.model.buffers()]
        return tensors + optimizer_tensors(self.optimizer)

    def timed_step_ms(self, device: str) -> float:
        self.model.zero_grad(set_to_none=True)
        synchronize(device)
        start = time.perf_counter()
        self.step()
        synchronize(device)
        return (time.perf_counter() - start) * 1000


def train(
    subject: Subject,
    device: str,
    plan: Plan | None,
    *,
    timed_steps: int = TIMED_STEPS,
) -> Run:
    """Train a few steps from the same beginning, and measure the last one."""
    on_gpu = device == "cuda"
    clean(device)
    held_bytes = torch.cuda.memory_allocated() if on_gpu else 0
    training = _Training(subject, device, plan)
    loss, peak_bytes = measure_peak(
        training.step,
        device=device,
        held=training.tensors,
        warm_up=training.earlier_steps,
    )
    # Of the same interval: `measure_peak` reset all statistics before the step.
    reserved_bytes = torch.cuda.max_memory_reserved() if on_gpu else None
    requested_bytes = None
    if on_gpu:
        requested_bytes = torch.cuda.memory_stats().get("requested_bytes.all.peak")
    state = capture_state(training.model, training.optimizer, loss)
    losses = (*training.losses, loss.item())
    times_ms = [training.timed_step_ms(device) for _ in range(timed_steps)]
    return Run(
        allocated_bytes=peak_bytes,
        requested_bytes=requested_bytes,
        reserved_bytes=reserved_bytes,
        held_bytes=held_bytes,
        step_ms=statistics.median(times_ms) if times_ms else 0.0,
        losses=losses,
        state=state,
    )


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def clean(device: str) -> None:
    """Let go of all that earlier runs left, workspaces and cache included."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        _compat.clear_blas_workspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Only kernels that give the same bits every time."""
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


# --- comparing runs -----------------------------------------------------------


def comparison(plain: Run, other: Run, own_distance: float | None) -> dict[str, Any]:
    """How far a run is from a plain one, beside what plain ones differ by.

    Args:
        plain: A run without a plan.
        other: Another run.
        own_distance: `distance` of two plain runs; None if that is what is asked.
    """
    differing = differences(plain.state, other.state, limit=4)
    far = distance(plain.state, other.state) if differing else 0.0
    exact = [name for name in plain.state if name.startswith("random state")]
    random_equal = not differences(
        {name: plain.state[name] for name in exact},
        {name: other.state[name] for name in exact if name in other.state},
    )
    first_equal = plain.losses[0] == other.losses[0]
    verdict = "identical" if not differing else "differs"
    if (
        differing
        and own_distance
        and random_equal
        and far <= OWN_DISTANCES * own_distance
    ):
        verdict = "as two plain runs"
    return {
        "verdict": verdict,
        "differences": list(differing),
        "distance": far,
        "first_loss_equal": first_equal,
        "random_states_equal": random_equal,
    }


def distance(expected: State, actual: State) -> float:
    """Length of the difference of all gradients over the length of the gradients."""
    error = size = 0.0
    for name, value in expected.items():
        if name.startswith("gradient of") and value.is_floating_point():
            if name not in actual or actual[name].shape != value.shape:
                return float("inf")
            wanted = value.float()
            error += float((actual[name].float() - wanted).square().sum())
            size += float(wanted.square().sum())
    return (error / size) ** 0.5 if size else float("inf")
