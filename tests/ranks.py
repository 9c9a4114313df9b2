"""Really running ranks of FSDP2 on the CPU: gloo processes, or one of a fake group."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

from autosac import applying
from autosac.fsdp_applying import shard
from autosac.measuring import optimizer_tensors, recorded_events, storage_bytes
from autosac.policies import OpPolicy
from autosac.sharding import Sharding
from autosac.stepping import LossFn, finish_step, micro_step, normalize_inputs

PHASES = ("forward", "loss", "backward", "finish", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A step that every rank runs; picklable, so functions are those of a module."""

    make_model: Callable[[], nn.Module]
    make_inputs: Callable[[], Any]
    loss_fn: LossFn | None = None
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = torch.optim.AdamW
    clip_grad_norm: float | None = None
    equal_batches: bool = True


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank measured.

    Attributes:
        peak_bytes: The most that was alive in a steady-state step,
        phase_peaks: and in each phase of it.
        loss: The loss of the first step.
        gradients: Name -> whole gradient of the first step, if asked for.
    """

    peak_bytes: int
    phase_peaks: dict[str, int]
    loss: float
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def seeded(make: Callable[[], Any], seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def run_rank(
    recipe: Recipe,
    sharding: Sharding,
    policies: tuple[OpPolicy, ...] = (),
    *,
    want_gradients: bool = False,
    ac_first: bool = True,
) -> RankResult:
    """Train a few steps in the process group that is there, and measure the last."""
    model = seeded(recipe.make_model, 0)
    if ac_first:
        applying.install(model, policies)
    shard(model, sharding, _mesh(sharding))
    if not ac_first:
        applying.install(model, policies)
    make = recipe.make_optimizer
    optimizer = None if make is None else make(model.parameters())
    rank = 0 if recipe.equal_batches else dist.get_rank()
    args, kwargs = normalize_inputs(seeded(recipe.make_inputs, 1 + rank))
    running = contextlib.ExitStack()

    def mark(phase: str, loss: Any = None) -> None:
        running.close()
        running.enter_context(record_function(f"phase {phase}"))

    def step() -> torch.Tensor:
        loss = micro_step(
            model,
            args,
            kwargs,
            loss_fn=recipe.loss_fn,
            autocast=None,
            accumulate=1,
            mark=mark,
        )
        mark("optimizer")
        finish_step(model, optimizer, recipe.clip_grad_norm)
        running.close()
        return loss

    torch.manual_seed(2)
    loss = float(step())
    gradients = _whole_gradients(model) if want_gradients else {}
    model.zero_grad()
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as recording:
        step()
        model.zero_grad()
        gc.collect()
        tensors = [*model.parameters(), *model.buffers(), *_leaves((args, kwargs))]
        if optimizer is not None:
            tensors += optimizer_tensors(optimizer)
        persistent = storage_bytes(map(_local, tensors))
        with record_function("measured step"):
            kept = step()
        del kept
    phases = phase_peaks(recording, persistent)
    return RankResult(
        peak_bytes=max(phases.values()),
        phase_peaks=phases,
        loss=loss,
        gradients=gradients,
    )


def phase_peaks(recording: profile, persistent: int) -> dict[str, int]:
    """Most bytes alive in each phase of the measured step, on all threads."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    events = []
    for event in recorded_events(recording):
        kind, fields = event.typed
        if kind.name == "Allocation":
            events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name == "measured step" or event.name.startswith("phase "):
            span = (event.start_time_ns, event.end_time_ns)
            ranges.setdefault(event.name.removeprefix("phase "), []).append(span)
    begin, end = ranges.pop("measured step")[0]
    starts = sorted((max(spans)[0], name) for name, spans in ranges.items())
    live: dict[int, int] = {}
    added, peaks, phase = 0, dict.fromkeys(ranges, 0), ""
    for when, address, num_bytes in sorted(events, key=lambda event: event[0]):
        change = num_bytes
        if num_bytes > 0:
            live[address] = num_bytes
        else:
            change = -live.pop(address, 0)
        if begin <= when <= end:
            phase = max(((t, n) for t, n in starts if t <= when), default=(0, phase))[1]
            added += change
            peaks[phase] = max(peaks[phase], added)
    return {name: persistent + peak for name, peak in peaks.items()}


def _mesh(sharding: Sharding) -> DeviceMesh:
    if sharding.replicate_degree == 1:
        return init_device_mesh("cpu", (sharding.shard_degree,))
    shape = (sharding.replicate_degree, sharding.shard_degree)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _leaves(value: Any) -> list[torch.Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.full_tensor().clone()
    return found


# --- process groups -----------------------------------------------------------


@contextlib.contextmanager
def fake_group(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """This process is one of many ranks; collectives do nothing."""
    dist.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=num_ranks
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_fake_rank(
    recipe: Recipe,
    sharding: Sharding,
    policies: tuple[OpPolicy, ...] = (),
    *,
    rank: int = 0,
) -> RankResult:
    """Run one of many ranks alone."""
    num_ranks = sharding.shard_degree * sharding.replicate_degree
    with fake_group(num_ranks, rank):
        return run_rank(recipe, sharding, policies)


def _gloo_rank(
    rank: int, num_ranks: int, directory: str, jobs: list[tuple[Any, ...]]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=num_ranks,
    )
    for i, (recipe, sharding, policies, options) in enumerate(jobs):
        found = run_rank(recipe, sharding, policies, **options)
        torch.save(found, f"{directory}/{i}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


def run_gloo_ranks(
    num_ranks: int, jobs: list[tuple[Any, ...]], *, timeout_s: float = 300
) -> list[list[RankResult]]:
    """Run jobs one after the other on the same processes; results per job and rank.

    Args:
        num_ranks: Processes to start.
        jobs: Recipe, sharding, op policies and further options of `run_rank`.
        timeout_s: After this long the processes are killed.

    Raises:
        TimeoutError: They did not end in time.
    """
    with tempfile.TemporaryDirectory() as directory:
        ranks = mp.spawn(
            _gloo_rank,
            args=(num_ranks, directory, jobs),
            nprocs=num_ranks,
            join=False,
        )
        deadline = time.monotonic() + timeout_s
        try:
            while not ranks.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{num_ranks} ranks ran over {timeout_s} s.")
        finally:
            for process in ranks.processes:
                if process.is_alive():
                    process.kill()
        return [
            [
                torch.load(Path(directory) / f"{i}.{rank}", weights_only=False)
                for rank in range(num_ranks)
            ]
            for i in range(len(jobs))
        ]
