"""Really running ranks of FSDP2 on the CPU, and what their allocators say.

Ranks are processes that gloo connects, or this process alone as one of a fake group
whose collectives do nothing: then FSDP2, autograd and the allocator are the real ones,
at any number of ranks.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import profile as profiler
from torch.profiler import record_function

from autosac._compat_distributed import fake_group
from autosac.checkpointing import installing
from autosac.devices.allocator_events import (
    cpu_events,
    recorded_events,
)
from autosac.parallel.fsdp_applying import shard
from autosac.parallel.fsdp_memory import GLOO_THREADS
from autosac.parallel.plans import ParallelPlan
from autosac.parallel.sharding import Sharding
from autosac.profiles.profile import Profile, profile
from autosac.step.optimizer_state import optimizer_tensors
from autosac.step.training_step import (
    LossFn,
    finish_step,
    micro_step,
    normalize_inputs,
)
from autosac.units.policies import OpPolicy
from benchmarks.rank_server import run_ranks


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A step that every rank runs, each on its own batch.

    Attributes:
        make_model: Builds the model in training mode, like what follows a function of
            a module, so that it can be pickled.
        make_inputs: Makes a batch.
        loss_fn: Output -> scalar; None for the output's own loss.
        make_optimizer: Builds the optimizer of parameters; None for none.
        clip_grad_norm: Largest norm of all gradients, or None.
        accumulate: Micro-steps, each of which reduces its gradients.
        gradients_in_forward: Gradients are dropped between forward and backward.
        blocks: FQNs of its blocks.
    """

    make_model: Callable[[], nn.Module]
    make_inputs: Callable[[], Any]
    loss_fn: LossFn | None = None
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = torch.optim.AdamW
    clip_grad_norm: float | None = None
    accumulate: int = 1
    gradients_in_forward: bool = False
    blocks: tuple[str, ...] = ()

    def model(self) -> nn.Module:
        """The model; the same on every rank."""
        return seeded(self.make_model, 0)

    def inputs(self, rank: int = 0) -> Any:
        """The batch of a rank."""
        return seeded(self.make_inputs, 1 + rank)

    def profile(self, autocast: torch.dtype | None = None) -> Profile:
        """The step that one process runs."""
        return profile(
            self.model(),
            self.inputs(),
            loss_fn=self.loss_fn,
            optimizer=self.make_optimizer,
            autocast=autocast,
            clip_grad_norm=self.clip_grad_norm,
            accumulate=self.accumulate,
            gradients_in_forward=self.gradients_in_forward,
        )


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank measured.

    Attributes:
        peak_bytes: The most that was alive in steady-state steps, if threads of gloo
            drop in time what they have reduced. When they do is not known, see
            `step_peaks`.
        highest_peak_bytes: The same if they are as slow as they can be.
        phase_peaks: The most in each phase, if they are in time.
        loss: The loss of the first step.
        gradients: Name -> whole gradient of the first step, if asked for.
    """

    peak_bytes: int
    highest_peak_bytes: int
    phase_peaks: dict[str, int]
    loss: float
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def seeded(make: Callable[[], Any], seed: int) -> Any:
    """What a function makes after seeding; generators are left as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def run_rank(
    recipe: Recipe,
    sharding: Sharding,
    policies: tuple[OpPolicy, ...] = (),
    *,
    want_gradients: bool = False,
    num_measured: int = 1,
    ac_first: bool = True,
    plan: ParallelPlan | None = None,
) -> RankResult:
    """Train a few steps in the process group that is there, and measure the last.

    Args:
        recipe: The step.
        sharding: How the model is sharded.
        policies: Op policies of AC units.
        want_gradients: Gather the gradients of the first step.
        num_measured: How many steps are measured.
        ac_first: Install AC units before the model is sharded, not after.
        plan: Is applied instead of these.
    """
    model = recipe.model()
    if plan is not None:
        plan.apply(model, plan.make_mesh("cpu"))
    else:
        if ac_first:
            installing.install(model, policies)
        shard(model, sharding, _mesh(sharding))
        if not ac_first:
            installing.install(model, policies)
    make = recipe.make_optimizer
    optimizer = None if make is None else make(model.parameters())
    args, kwargs = normalize_inputs(recipe.inputs(dist.get_rank()))
    running = contextlib.ExitStack()
    drops: list[bool] = []

    def end_step() -> None:
        if recipe.gradients_in_forward:
            drops.append(True)
        else:
            model.zero_grad()

    def mark(phase: str, loss: Any = None) -> None:
        if phase == "backward" and drops:
            drops.clear()
            assert optimizer is not None
            optimizer.zero_grad()  # it has the shards; the model may be gathered
        running.close()
        running.enter_context(record_function(f"phase {phase}"))

    def step() -> torch.Tensor:
        for _ in range(recipe.accumulate):
            loss = micro_step(
                model,
                args,
                kwargs,
                loss_fn=recipe.loss_fn,
                autocast=None,
                accumulate=recipe.accumulate,
                mark=mark,
            )
        mark("optimizer")
        finish_step(model, optimizer, recipe.clip_grad_norm)
        running.close()
        return loss

    torch.manual_seed(2)
    loss = float(step())
    gradients = _whole_gradients(model) if want_gradients else {}
    end_step()
    with cpu_events() as recording:
        step()
        end_step()
        gc.collect()
        tensors = [*model.parameters(), *model.buffers(), *_leaves((args, kwargs))]
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        if optimizer is not None:
            tensors += optimizer_tensors(optimizer)
        persistent = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in map(_local, tensors)
        }
        del tensors  # gradients among them
        held = []
        for _ in range(num_measured):
            held.append(_held())
            with record_function("measured step"):
                kept = step()
            del kept
            end_step()
        held.append(_held())
    peaks = step_peaks(recording, persistent, held)
    worst = max(peaks, key=lambda of_step: of_step.peak_bytes)
    return RankResult(
        peak_bytes=worst.peak_bytes,
        highest_peak_bytes=max(of_step.highest_bytes for of_step in peaks),
        phase_peaks=worst.phases,
        loss=loss,
        gradients=gradients,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPeaks:
    """Most bytes alive in a step.

    Attributes:
        phases: In each phase, if threads drop in time what they have reduced.
        highest_bytes: In all of it, if they are as slow as they can be.
    """

    phases: dict[str, int]
    highest_bytes: int

    @property
    def peak_bytes(self) -> int:
        """In all of it, if they are in time."""
        return max(self.phases.values())


def step_peaks(
    recording: profiler, persistent: Mapping[int, int], held: Sequence[Set[int]]
) -> list[StepPeaks]:
    """Most bytes alive in each measured step, on all threads: see `account`.

    Args:
        recording: Of at least one step, and then of the measured ones.
        persistent: Address -> bytes of what is there before the measured ones.
        held: Addresses of all tensors before each measured step and after the last.
    """
    steps: list[tuple[int, int]] = []
    phases: list[tuple[int, str]] = []
    events: list[tuple[int, int, int]] = []
    for event in recorded_events(recording):
        kind, fields = event.typed
        if kind.name == "Allocation":
            events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name == "measured step":
            steps.append((event.start_time_ns, event.end_time_ns))
        elif event.name.startswith("phase "):
            phases.append((event.start_time_ns, event.name.removeprefix("phase ")))
    events.sort(key=lambda event: event[0])
    return account(events, sorted(steps), sorted(phases), persistent, held)


def account(
    events: Sequence[tuple[int, int, int]],
    steps: Sequence[tuple[int, int]],
    phases: Sequence[tuple[int, str]],
    persistent: Mapping[int, int],
    held: Sequence[Set[int]],
) -> list[StepPeaks]:
    """Most bytes alive in each step.

    The profiler sees what threads of gloo do while they run a collective, not that they
    drop it afterwards. So what they reduce, in a copy, is seen to be freed only if the
    main thread is the last to hold it. Otherwise it counts when it is made, and from
    then on the largest such copies count as held, one for each thread: a thread takes
    nothing up before it has dropped what it had.

    Args:
        events: In order, each with its time, an address, and bytes: more than 0 if so
            many are allocated there, less if they are freed.
        steps: First and last time of each step.
        phases: Beginning of each phase of any step, and its name.
        persistent: Address -> bytes of what is there all the time.
        held: Addresses of all tensors before each step and after the last: what was
            there before a step counts if it is among them.
    """
    unseen = _freed_unseen(events, held[-1] | persistent.keys())
    return [
        _of_one_step(step, phases, events, unseen, persistent, there)
        for step, there in zip(steps, held[:-1], strict=True)
    ]


def _freed_unseen(events: Sequence[tuple[int, int, int]], kept: Set[int]) -> set[int]:
    """Allocations whose memory is free later without an event that says so."""
    is_open: dict[int, int] = {}
    unseen = set()
    for i, (_, address, num_bytes) in enumerate(events):
        before = is_open.pop(address, None)
        if num_bytes > 0:
            is_open[address] = i
            if before is not None:
                unseen.add(before)
    return unseen | {i for address, i in is_open.items() if address not in kept}


def _of_one_step(
    step: tuple[int, int],
    phases: Sequence[tuple[int, str]],
    events: Sequence[tuple[int, int, int]],
    unseen: Set[int],
    persistent: Mapping[int, int],
    held: Set[int],
) -> StepPeaks:
    starts = [start for start, _ in phases]
    live: dict[int, int] = {}
    slow: list[int] = []  # what threads may still hold, the largest
    alive: int | None = None
    highest = 0
    peaks: dict[str, int] = {}
    for i, (when, address, num_bytes) in enumerate(events):
        if when >= step[0] and alive is None:
            live = {at: nbytes for at, nbytes in live.items() if at in held}
            alive = sum((live | persistent).values())
        change, instant = num_bytes, 0
        if i in unseen:
            change, instant = 0, num_bytes
        elif num_bytes > 0:
            live[address] = num_bytes
        else:
            change = -live.pop(address, 0)
        if alive is not None and when <= step[1]:
            phase = phases[bisect_right(starts, when) - 1][1]
            alive += change
            peaks[phase] = max(peaks.get(phase, 0), alive + instant)
            highest = max(highest, alive + instant + sum(slow))
        if instant:
            slow = heapq.nlargest(GLOO_THREADS, [*slow, instant])
    return StepPeaks(phases=peaks, highest_bytes=highest)


def _held() -> set[int]:
    """Addresses of the memory of plain tensors, but for those `gc.freeze` hides."""
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
    return {
        t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided
    }


def _mesh(sharding: Sharding) -> DeviceMesh:
    names = sharding.mesh_dim_names
    return init_device_mesh("cpu", sharding.mesh_shape, mesh_dim_names=names)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _leaves(value: Any) -> list[torch.Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.full_tensor().clone()
    return gradients


def reference(
    recipe: Recipe, num_ranks: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Loss of each rank's batch and mean of the gradients, without any sharding."""
    losses, mean = [], {}
    for rank in range(num_ranks):
        model = recipe.model()
        args, kwargs = normalize_inputs(recipe.inputs(rank))
        torch.manual_seed(2)
        loss = micro_step(
            model, args, kwargs, loss_fn=recipe.loss_fn, autocast=None, accumulate=1
        )
        losses.append(float(loss))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad / num_ranks
                mean[name] = mean[name] + grad if name in mean else grad
    return losses, mean


# --- process groups -----------------------------------------------------------


def run_fake_rank(
    recipe: Recipe,
    sharding: Sharding,
    policies: tuple[OpPolicy, ...] = (),
    *,
    rank: int = 0,
    ac_first: bool = True,
) -> RankResult:
    """Run one of many ranks alone."""
    num_ranks = sharding.shard_degree * sharding.replicate_degree
    with fake_group(num_ranks, rank):
        return run_rank(recipe, sharding, policies, ac_first=ac_first)


def _gloo_rank(rank: int, jobs: list[tuple[Any, ...]]) -> list[RankResult]:
    gc.freeze()  # `_held` looks at what a step makes, not at what libraries made
    return [
        run_rank(recipe, sharding, policies, **options)
        for recipe, sharding, policies, options in jobs
    ]


def run_gloo_ranks(
    num_ranks: int, jobs: list[tuple[Any, ...]], *, timeout_s: float = 300
) -> list[list[RankResult]]:
    """Run jobs one after the other on the same processes; results per job and rank.

    Args:
        num_ranks: Processes to start.
        jobs: Recipe, sharding, op policies and further options of `run_rank`.
        timeout_s: After this long the processes are killed.

    Raises:
        RuntimeError: A rank failed, or they did not end in time.
    """
    ranks = run_ranks(_gloo_rank, num_ranks, jobs, timeout_s=timeout_s)
    return [list(results) for results in zip(*ranks, strict=True)]
