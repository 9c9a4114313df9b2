"""Really running pipelines on the CPU, and the most that each rank's allocator held.

Ranks are processes that gloo connects (`rank_server`). What they hold is counted by
`allocator_shim.c`, on all threads, to the byte; it takes a C compiler. oneDNN is
switched off: it keeps memory between steps that no plan knows of.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from autosac.checkpointing import installing
from autosac.pipelines.plans import PipelinePlan
from autosac.pipelines.schedules import Schedule
from autosac.units.policies import OpPolicy
from benchmarks import allocator_shim, rank_server

NUM_STEPS = 3  # the first one is not measured
SEED = 7


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a pipeline trains.

    Attributes:
        make_model: Builds it: a sequence of blocks, or with a plan any chain. A
            function of a module.
        make_batch: Makes inputs and targets of so many micro-batches.
        loss_fn: Output and targets -> mean over the micro-batch.
        make_optimizer: Builds the optimizer of a stage's parameters.
    """

    make_model: Callable[[], Any]
    make_batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW

    def stages(self, starts: Sequence[int]) -> list[nn.Sequential]:
        """The model, cut before some of its blocks."""
        torch.manual_seed(SEED)
        model = self.make_model()
        stops = [*starts[1:], len(model)]
        return [model[a:b] for a, b in zip(starts, stops, strict=True)]


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What a rank measured.

    Attributes:
        peaks: The most it held in each step but the first.
        losses: Of its micro-batches in the first step, on the last rank.
        share: Which share of the batch it got, of all replicas and shards,
        part: and which part of its sequences.
        gradients: Of the first step, by name in the model, whole.
    """

    peaks: list[int]
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    share: int = 0
    part: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most it held in a step in which no thread of gloo was late."""
        return min(self.peaks)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A pipeline to run.

    Attributes:
        recipe: What it trains.
        schedule: How.
        starts: First block of each stage.
        policies: Of each stage's AC units; none if it is empty.
        plan: Makes the stages instead of these, as users do.
        num_steps: Of which the first is not measured.
    """

    recipe: Recipe
    schedule: Schedule
    starts: tuple[int, ...]
    policies: tuple[tuple[OpPolicy, ...], ...] = ()
    plan: PipelinePlan | None = None
    num_steps: int = NUM_STEPS

    @property
    def num_ranks(self) -> int:
        """Of all, those that share a stage among them."""
        return self.schedule.num_ranks if self.plan is None else self.plan.num_ranks

    @property
    def num_shares(self) -> int:
        """How many parts of a batch are trained on beside each other."""
        return 1 if self.plan is None else self.plan.parallel.num_batches

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Type in which the model computes, None for its own."""
        return None if self.plan is None else self.plan.parallel.compute_dtype


def can_count() -> bool:
    """Whether the allocator can be watched here."""
    return allocator_shim.library() is not None


def run_ranks(job: Job) -> list[RankResult]:
    """Run a pipeline in as many processes as it has ranks."""
    (results,) = run_jobs([job])
    return results


def run_jobs(jobs: Sequence[Job]) -> list[list[RankResult]]:
    """Run pipelines of as many ranks one after the other, in the same processes."""
    (num_ranks,) = {job.num_ranks for job in jobs}
    of_ranks = rank_server.run_ranks(_run_all, num_ranks, jobs, timeout_s=900)
    return [list(results) for results in zip(*of_ranks, strict=True)]


@torch.backends.mkldnn.flags(enabled=False)
def reference(job: Job) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the micro-batches and gradients, by one process without a pipeline."""
    recipe, number = job.recipe, job.schedule.num_micro_batches * job.num_shares
    torch.manual_seed(SEED)
    model = recipe.make_model()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients = {name: torch.zeros_like(p) for name, p in trained.items()}
    if job.compute_dtype is not None:
        for p in model.parameters():
            p.data = p.data.to(job.compute_dtype)
    inputs, targets = recipe.make_batch(number)
    if job.compute_dtype is not None and inputs.is_floating_point():
        inputs = inputs.to(job.compute_dtype)
    losses = []
    for x, target in zip(inputs.chunk(number), targets.chunk(number), strict=True):
        loss = recipe.loss_fn(model(x), target)
        loss.backward()
        losses.append(float(loss.detach()))
        for name, p in trained.items():
            if p.grad is not None:
                gradients[name] += p.grad / number
        model.zero_grad()
    return losses, gradients


def _run_all(rank: int, jobs: Sequence[Job]) -> list[RankResult]:
    torch.backends.mkldnn.set_flags(False)
    return [_run(rank, job) for job in jobs]


def _run(rank: int, job: Job) -> RankResult:
    schedule, recipe = job.schedule, job.recipe
    gc.collect()
    dist.barrier()  # which leaves something behind
    before_bytes = allocator_shim.live_bytes()
    share = part = 0
    if job.plan is None:
        modules, stages = _stages(job, rank)
        schedule_class = get_schedule_class(schedule.name)
        runner = schedule_class(
            stages if schedule.is_looped else stages[0],
            schedule.num_micro_batches,
            loss_fn=recipe.loss_fn,
        )
    else:
        torch.manual_seed(SEED)
        mesh = job.plan.make_mesh("cpu")
        stages = job.plan.stages(recipe.make_model(), mesh)
        share = job.plan.batch_index(mesh)
        if job.plan.context.degree > 1:
            part = mesh.get_local_rank("cp")
        modules = {stage.stage_index: stage.submod for stage in stages}
        runner = job.plan.schedule(stages, recipe.loss_fn)
    optimizers = [recipe.make_optimizer(m.parameters()) for m in modules.values()]
    number = schedule.num_micro_batches * job.num_shares
    is_last = schedule.num_stages - 1 in modules
    is_needed = 0 in modules, is_last
    # What a stage needs of the batch is there beside the rank's part, as in a loop.
    batch = [
        tensor.chunk(job.num_shares)[share].clone()
        for tensor, needed in zip(recipe.make_batch(number), is_needed, strict=True)
        if needed
    ]
    given = batch
    if job.plan is not None:
        given = [job.plan.part_of(whole, mesh) for whole in batch]
    args = tuple(given[:1]) if 0 in modules else ()
    kwargs = {"target": given[-1]} if is_last else {}
    first_losses, gradients = [], {}
    peaks = []
    divides_loss = job.plan is not None and job.plan.tensor.divides_loss
    for number in range(job.num_steps):
        gc.collect()
        dist.barrier()
        allocator_shim.reset()
        losses: list[torch.Tensor] = []
        more = {**kwargs, "losses": losses} if is_last else {}
        with loss_parallel() if divides_loss else nullcontext():
            runner.step(*args, return_outputs=False, **more)
        if number == 0:
            first_losses = [float(loss.detach()) for loss in losses]
            gradients = _gradients(modules.values())
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if number:
            peaks.append(allocator_shim.peak_bytes() - before_bytes)
    return RankResult(
        peaks=peaks,
        losses=first_losses,
        gradients=gradients,
        share=share,
        part=part,
    )


def _gradients(modules: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    """Copies of whole gradients by name, elsewhere than the allocator's."""
    return {
        name: torch.from_numpy(whole(p.grad).numpy().copy())
        for module in modules
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def whole(gradient: torch.Tensor) -> torch.Tensor:
    """All of a gradient that ranks may have parts of."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _stages(job: Job, rank: int) -> tuple[dict[int, nn.Module], list[PipelineStage]]:
    """The rank's modules by stage, and PyTorch's stages of them."""
    schedule = job.schedule
    own = schedule.stages_of(rank)
    passed, _ = job.recipe.make_batch(1)
    modules: dict[int, nn.Module] = {}
    stages = []
    for i, module in enumerate(job.recipe.stages(job.starts)):
        received = passed
        with torch.random.fork_rng(devices=[]):
            passed = module(passed).detach().requires_grad_()
        if i in own:
            modules[i] = module
            if job.policies:
                installing.install(module, job.policies[i])
            stage = PipelineStage(
                module,
                i,
                schedule.num_stages,
                torch.device("cpu"),
                input_args=_example(received),
                output_args=_example(passed),
            )
            stages.append(stage)
    return modules, stages


def _example(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that holds nothing."""
    empty = torch.empty_like(tensor.detach(), device="meta")
    return empty.requires_grad_(tensor.requires_grad)
