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

from autosac.devices.specs import device_spec
from autosac.errors import AutosacError
from autosac.parallel.clusters import cluster_spec
from benchmarks import allocator_shim as shim


def cluster():
    links = cluster_spec("pcie-l40s", num_gpus=dist.get_world_size())
    return replace(links, device=device_spec("cpu"))


def _result(peaks, model, plan, memory_budget):
    figures = None
    if plan is not None:
        figures = {
            "peak_bytes": plan.peak_bytes,
            "late_bytes": plan.late_bytes,
            "budget_bytes": memory_budget,
            "policy": plan.policy,
            "units": [unit.fqn for unit in plan.sharding.units],
        }
    weights = {name: p.full_tensor() for name, p in model.named_parameters()}
    return {"peaks": peaks, "weights": weights, "plan": figures}


def _trainings(train):
    """A plain training, one with an ample budget, one with 85 % of its peak."""
    results = {"plain": train(None), "ample": train("1GiB")}
    ample = results["ample"]["plan"]
    highest_bytes = ample["peak_bytes"] + ample["late_bytes"]
    results["planned"] = train(int(0.85 * highest_bytes))
    return results


def make_trainer(folder, kind=None, *, adapt=lambda model: model, **options):
    import transformers

    from tests.integrations.test_huggingface import Texts, gpt2

    torch.manual_seed(0)
    known = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    return (kind or transformers.Trainer)(
        adapt(gpt2()),
        transformers.TrainingArguments(folder, **{**known, **options}),
        train_dataset=Texts((96,) * 48),
    )


def first_batch(trainer):
    return trainer.data_collator([trainer.train_dataset[row] for row in range(4)])


def huggingface(folder, **options):
    import transformers

    from autosac.integrations.huggingface_fsdp import plan_and_shard

    def train(memory_budget):
        gc.collect()
        before, peaks = shim.live_bytes(), []

        class Measured(transformers.Trainer):
            def training_step(self, *args, **kwargs):
                def run():
                    return transformers.Trainer.training_step(self, *args, **kwargs)

                loss, peak_bytes = shim.peak_of(run)
                if self.state.global_step > 0:
                    peaks.append(peak_bytes - before)
                return loss

        trainer, plan = make_trainer(folder, Measured, **options), None
        if memory_budget is None:
            for name, block in trainer.model.named_modules():
                if name.rpartition(".")[0].endswith("transformer.h"):
                    fully_shard(block)
            fully_shard(trainer.model)
            trainer.is_distributed_loading_by_transformers = True
        else:
            plan = plan_and_shard(
                trainer,
                first_batch(trainer),
                memory_budget=memory_budget,
                cluster=cluster(),
                degrees=[2],
                report=lambda text: None,
            )
        trainer.train()
        return _result(peaks, trainer.model, plan, memory_budget)

    return _trainings(train)


def huggingface_bf16(folder):
    return huggingface(folder, bf16=True)


def lora(folder):
    import peft

    def adapt(model):
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1)
        return peft.get_peft_model(model, config)

    return huggingface(folder, adapt=adapt)


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
        for _ in range(3):
            _, peak_bytes = shim.peak_of(run)
            peaks.append(peak_bytes - before)
        result = _result(peaks[1:], model, plan, memory_budget)
        accelerator.free_memory()
        return result

    return _trainings(train)


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
    accumulates = make_trainer(folder, gradient_accumulation_steps=2)
    with_optimizer = make_trainer(folder)
    with_optimizer.create_optimizer()
    quantized = make_trainer(folder)
    weight = torch.zeros(4, dtype=torch.uint8)
    quantized.model.packed = torch.nn.Parameter(weight, requires_grad=False)
    sharded = make_trainer(folder)
    fully_shard(sharded.model)
    sharded.is_distributed_loading_by_transformers = True
    sharded.add_callback(MemoryBudget("1GiB"))
    results = {
        "infeasible": told(make_trainer(folder), "1MiB"),
        "quantized": told(quantized),
        "accumulates": told(accumulates),
        "saves": told(make_trainer(folder, save_strategy="steps")),
        "with optimizer": told(with_optimizer),
    }
    try:
        sharded.train()
    except AutosacError as error:
        results["callback"] = type(error).__name__, str(error)
    return results
