"""Trainings of models that FSDP2 shards, on two processes one after the other.

Run by `two_processes`. Each rank has a dictionary: name of a training -> its peaks, its
whole weights, the plan's figures.
"""

import functools
import gc
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import default_collate

from autosac.devices.specs import device_spec
from autosac.errors import AutosacError
from autosac.parallel.clusters import cluster_spec
from benchmarks import allocator_shim as shim
from tests.integrations.measured_runs import (
    measured_fit,
    measured_trainer,
    result,
    trainings,
    whole,
    with_adapter,
)

_FRACTION = 0.85  # of the ample plan's peak that a budget leaves


def cluster():
    links = cluster_spec("pcie-l40s", num_gpus=dist.get_world_size())
    return replace(links, device=device_spec("cpu"))


def first_batch(trainer):
    return trainer.data_collator([trainer.train_dataset[row] for row in range(4)])


def _shard(trainer, memory_budget):
    """Shard a trainer's model by a plan, or by hand; the plan."""
    from autosac.integrations.huggingface_fsdp import plan_and_shard
    from autosac.integrations.huggingface_sharded import adopt_sharded

    if memory_budget is not None:
        return plan_and_shard(
            trainer,
            first_batch(trainer),
            memory_budget=memory_budget,
            cluster=cluster(),
            degrees=[2],
            report=lambda text: None,
        )
    for name, block in trainer.model.named_modules():
        if name.rpartition(".")[0].endswith("transformer.h"):
            fully_shard(block)
    fully_shard(trainer.model)
    adopt_sharded(trainer)
    return None


def huggingface(folder):
    """Accumulating trainings that go on from what those before them have saved."""
    import transformers

    given = []

    def train(memory_budget):
        number, checkpoint = len(given), None
        if given:  # plain for one step, ample for another, planned for the last
            checkpoint = f"{folder}/{number - 1}/checkpoint-{number}"
        given.append(memory_budget)
        here = f"{folder}/{number}"
        options = {"gradient_accumulation_steps": 2, "save_strategy": "steps"}
        options |= {"save_steps": 1, "lr_scheduler_type": "constant"}
        trainer, peaks = measured_trainer(here, **options)
        plan = _shard(trainer, memory_budget)
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(here)
        dist.barrier()
        saved = transformers.GPT2LMHeadModel.from_pretrained(here)
        more = {"saved": {name: whole(t) for name, t in saved.state_dict().items()}}
        return result(peaks, trainer.model, plan, memory_budget, **more)

    return trainings(train, _FRACTION)


def lora(folder):
    """With a scaler for fp16; an adapter is saved without the model around it."""
    import peft

    from tests.integrations.test_huggingface import gpt2

    def train(memory_budget):
        trainer, peaks = measured_trainer(folder, make_model=with_adapter, fp16=True)
        plan = _shard(trainer, memory_budget)
        trainer.train()
        trainer.save_model(folder)
        dist.barrier()
        saved = peft.PeftModel.from_pretrained(gpt2(), folder).state_dict()
        adapter = {name: whole(t) for name, t in saved.items() if "lora" in name}
        return result(peaks, trainer.model, plan, memory_budget, saved=adapter)

    return trainings(train, _FRACTION)


def lightning(folder):
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import register_fsdp_forward_method

    from autosac.integrations.lightning_fsdp import plan_and_shard
    from tests.integrations.test_lightning import BATCH, Network, Rows

    def train(memory_budget):
        plans = []

        class Sharded(Network):
            def training_step(self, batch, batch_idx):
                x, y = batch
                return torch.nn.functional.cross_entropy(self.forward(x), y)

            def configure_model(self):
                if memory_budget is not None:
                    rows = Rows()
                    batch = default_collate([rows[i] for i in range(BATCH)])
                    plan = plan_and_shard(
                        self,
                        batch,
                        memory_budget=memory_budget,
                        cluster=cluster(),
                        degrees=[2],
                        report=lambda text: None,
                    )
                    plans.append(plan)
                    return
                for block in self.blocks:
                    fully_shard(block)
                fully_shard(self)
                register_fsdp_forward_method(self, "training_step")

        def fit(**options):
            return measured_fit(
                Sharded,
                strategy=ModelParallelStrategy(2, 1),
                accumulate_grad_batches=2,
                gradient_clip_val=0.5,
                precision="bf16-mixed",
                **options,
            )

        module, trainer, peaks = fit()
        # Lightning's checkpoints have no random states, and lose their place in data.
        checkpoint = f"{folder}/lightning-{memory_budget}"
        trainer.save_checkpoint(checkpoint)
        loaded, _, _ = fit(checkpoint=checkpoint)
        plan = plans[0] if plans else None
        saved = {name: whole(t) for name, t in loaded.state_dict().items()}
        return result(peaks, module, plan, memory_budget, saved=saved)

    results = trainings(train)
    results["plain"]["refused"] = _refused_by_lightning()
    return results


def accelerate(folder):
    """The recipe of ``examples/train_accelerate.py``."""
    from accelerate import Accelerator

    from examples import train_accelerate as recipe

    def train(memory_budget):
        gc.collect()
        before, peaks, plan = shim.live_bytes(), [], None
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        if memory_budget is None:
            model = recipe.make_model()
            model = accelerator.prepare_model(model, evaluation_mode=True)
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters())
            optimizer = accelerator.prepare(optimizer)
        else:
            model, optimizer, plan = recipe.prepared(accelerator, memory_budget)
        gc.collect()
        run = functools.partial(recipe.step, accelerator, model, optimizer)
        for number in range(3):
            _, peak_bytes = shim.peak_of(run)
            peaks.append(peak_bytes - before)
            if plan is not None and number == 1:  # another step is undone
                accelerator.save_state(f"{folder}/{memory_budget}")
                run()
                accelerator.load_state(f"{folder}/{memory_budget}")
        figures = result(peaks[1:], model, plan, memory_budget)
        accelerator.free_memory()
        return figures

    return trainings(train, _FRACTION)


def _refused_by_lightning():
    from lightning.pytorch.strategies import ModelParallelStrategy

    from autosac.integrations.lightning_fsdp import plan_and_shard
    from tests.integrations.test_lightning import WIDTH, Network

    class CallsItself(Network):
        def configure_model(self):
            batch = torch.randn(4, WIDTH), torch.zeros(4, dtype=torch.long)
            plan_and_shard(self, batch, memory_budget="1GiB", cluster=cluster())

    told = {}
    for name, strategy in {
        "calls itself": ModelParallelStrategy(2, 1),
        "tensors": ModelParallelStrategy(1, 2),
        "ddp": "ddp",
    }.items():
        try:
            measured_fit(CallsItself, strategy=strategy)
        except AutosacError as error:
            told[name] = type(error).__name__, str(error)
    return told


def refused(folder):
    """What each process gets where a trainer cannot be planned."""
    from autosac.integrations.huggingface import MemoryBudget
    from autosac.integrations.huggingface_fsdp import plan_and_shard

    def told(trainer, memory_budget="1GiB"):
        try:
            plan_and_shard(
                trainer,
                first_batch(trainer),
                memory_budget=memory_budget,
                cluster=cluster(),
            )
        except AutosacError as error:
            return type(error).__name__, str(error)

    dist.init_process_group("gloo")

    def make_trainer(**options):
        return measured_trainer(folder, **options)[0]

    reads_whole = make_trainer()
    reads_whole.args.load_best_model_at_end = True
    launched = make_trainer()
    launched.is_fsdp_enabled = True  # by the environment
    with_optimizer = make_trainer()
    with_optimizer.create_optimizer()
    quantized = make_trainer()
    weight = torch.zeros(4, dtype=torch.uint8)
    quantized.model.packed = torch.nn.Parameter(weight, requires_grad=False)
    sharded = make_trainer()
    fully_shard(sharded.model)
    sharded.is_distributed_loading_by_transformers = True
    sharded.add_callback(MemoryBudget("1GiB"))
    results = {
        "infeasible": told(make_trainer(), "1MiB"),
        "less than batches take": told(make_trainer(), 64),
        "quantized": told(quantized),
        "reads whole": told(reads_whole),
        "launched with FSDP": told(launched),
        "with optimizer": told(with_optimizer),
    }
    try:
        sharded.train()
    except AutosacError as error:
        results["callback"] = type(error).__name__, str(error)
    return results
