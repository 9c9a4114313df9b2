"""Trainings on two processes, one after the other: what each of them measured.

Run by `two_processes`. Each rank has a dictionary: name of a training -> its peaks, its
weights, the plan's figures.
"""

import gc

import torch
import torch.distributed as dist

from autosac.errors import InfeasibleBudgetError
from benchmarks import allocator_shim as shim
from tests.integrations.measured_runs import (
    measured_fit,
    measured_trainer,
    result,
    trainings,
    with_adapter,
)

_NAMES = ("input_ids", "labels")
_FRACTION = 0.8  # of the ample plan's peak that a budget leaves


def huggingface(folder, *, accumulate=2, **options):
    from autosac.integrations.huggingface import MemoryBudget

    def train(memory_budget):
        callbacks = _callbacks(MemoryBudget, memory_budget)
        options["gradient_accumulation_steps"] = accumulate
        trainer, peaks = measured_trainer(folder, callbacks=callbacks, **options)
        trainer.train()
        plan = callbacks[0].plan if callbacks else None
        return result(peaks, trainer.model, plan, memory_budget)

    return trainings(train, _FRACTION)


def lora(folder):
    return huggingface(folder, accumulate=1, make_model=with_adapter, bf16=True)


def images(folder):
    import transformers

    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "image_size": 32}
    config = transformers.ViTConfig(**layers, **sizes, patch_size=4)
    rows = [{"pixel_values": torch.ones(3, 32, 32), "labels": 1}] * 96
    return huggingface(
        folder,
        accumulate=1,
        make_model=lambda: transformers.ViTForImageClassification(config),
        dataset=rows,
        per_device_train_batch_size=8,
    )


def _callbacks(kind, memory_budget):
    if memory_budget is None:
        return []
    return [kind(memory_budget, report=lambda text: None)]


def lightning(folder):
    from autosac.integrations.lightning import MemoryBudget
    from tests.integrations.test_lightning import Network

    def train(memory_budget):
        callbacks = _callbacks(MemoryBudget, memory_budget)
        module, _, peaks = measured_fit(Network, callbacks=callbacks, strategy="ddp")
        plan = callbacks[0].plan if callbacks else None
        return result(peaks, module, plan, memory_budget)

    return trainings(train, _FRACTION)


def accelerate(folder):
    """A loop of one's own, with longer batches on the second process."""
    return trainings(accelerated, _FRACTION)


def least_feasible(rank):
    """The same loop on one process, under the least budget that is feasible."""
    try:
        accelerated(1000, (96,))
    except InfeasibleBudgetError as error:
        return accelerated(error.lowest_peak_bytes, (96,))
    raise AssertionError("1000 bytes are enough")


def accelerated(memory_budget, lengths=(64, 96)):
    """A loop over a loader of Accelerate, whose batches have these lengths in turn."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs
    from torch.utils.data import DataLoader

    import autosac
    from tests.integrations.test_huggingface import Texts, gpt2

    gc.collect()
    before, peaks = shim.live_bytes(), []
    torch.manual_seed(0)
    handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", kwargs_handlers=[handler]
    )
    model = gpt2()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    texts = Texts([length for length in lengths * 4 for _ in range(4)])
    loader = DataLoader(texts, batch_size=4, collate_fn=_ids_and_labels)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def step(batch):
        output = model(**batch)
        accelerator.backward(output.loss)
        del output
        optimizer.step()
        optimizer.zero_grad()

    plan = None
    for batch in loader:
        if memory_budget is not None and plan is None:
            plan = autosac.plan_replicas(
                model,
                batch,
                memory_budget=memory_budget,
                optimizer=optimizer,
                loader=loader,
            )
            plan.apply(accelerator.unwrap_model(model))
        _, peak_bytes = shim.peak_of(lambda batch=batch: step(batch))
        peaks.append(peak_bytes - before)
    trained = accelerator.unwrap_model(model)
    return result(peaks[1:], trained, plan, memory_budget)


def _ids_and_labels(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in _NAMES}


def errors(folder):
    """What each process gets where no plan fits or the step cannot be traced."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import autosac

    class Stops(torch.nn.Linear):
        def forward(self, x):
            raise ValueError("no such step")

    class Talks(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            dist.all_reduce(y)
            return y

    dist.init_process_group("gloo")
    inputs, told = torch.ones(4, 8), {}
    for kind in (torch.nn.Linear, Stops, Talks):
        model = DistributedDataParallel(kind(8, 8))
        try:
            autosac.plan_replicas(model, inputs, memory_budget=64)
        except Exception as error:
            told[kind.__name__] = type(error).__name__, str(error)
    try:
        autosac.plan_replicas(torch.nn.Linear(8, 8), inputs, memory_budget=64)
    except autosac.ArgumentError as error:
        told["unwrapped"] = type(error).__name__, str(error)
    sharded = fully_shard(torch.nn.Linear(8, 8))
    try:
        autosac.plan_replicas(sharded, inputs, memory_budget=64)
    except autosac.ArgumentError as error:
        told["sharded"] = type(error).__name__, str(error)
    return told
