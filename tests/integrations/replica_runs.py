"""Trainings on two processes, one after the other: what each of them measured.

Run by `two_processes`. Each rank has a dictionary: name of a training -> its peaks, its
weights, the plan's figures.
"""

import gc
from types import SimpleNamespace

import torch
import torch.distributed as dist

from benchmarks import allocator_shim as shim


def _result(peaks, model, callback, log=()):
    plan = None if callback is None else callback.plan
    return {
        "peaks": peaks,
        "weights": {n: t.detach().clone() for n, t in model.state_dict().items()},
        "plan": None
        if plan is None
        else {
            "peak_bytes": plan.peak_bytes,
            "budget_bytes": callback.memory_budget,
            "policy": plan.policy,
            "composition": plan.composition,
            "num_kinds": len(plan.each),
        },
        "log": list(log),
    }


def _trainings(train, make_budget):
    """A plain training, one with an ample budget, one with four fifths of its peak."""
    results = {"plain": train(None)}
    results["ample"] = train(make_budget("1GiB"))
    budget_bytes = int(0.8 * results["ample"]["plan"]["peak_bytes"])
    results["planned"] = train(make_budget(budget_bytes))
    return results


def huggingface(folder, *, accumulate=2, make_model=None, **options):
    import transformers

    from autosac.integrations.huggingface import MemoryBudget
    from tests.integrations.test_huggingface import Texts, gpt2

    def train(callback):
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

        torch.manual_seed(0)
        known = {
            "max_steps": 3,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": accumulate,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "save_strategy": "no",
            "logging_strategy": "no",
        }
        trainer = Measured(
            (make_model or gpt2)(),
            transformers.TrainingArguments(folder, **{**known, **options}),
            train_dataset=Texts((96,) * 48),
            callbacks=[] if callback is None else [callback],
        )
        trainer.train()
        log = trainer.state.log_history
        return _result(peaks, trainer.model, callback, log)

    def budget(memory_budget):
        return MemoryBudget(memory_budget, report=lambda text: None)

    return _trainings(train, budget)


def lora(folder):
    import peft

    from tests.integrations.test_huggingface import gpt2

    def make_model():
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1)
        return peft.get_peft_model(gpt2(), config)

    return huggingface(folder, accumulate=1, make_model=make_model, bf16=True)


def lightning(folder, **options):
    import lightning.pytorch as lightning
    from torch.utils.data import DataLoader

    from autosac.integrations.lightning import MemoryBudget
    from tests.integrations.test_lightning import BATCH, Network, Rows

    def train(callback):
        gc.collect()
        before, peaks = shim.live_bytes(), []

        class Measured(torch.optim.AdamW):
            def step(self, closure=None):
                own = torch.optim.AdamW.step
                _, peak_bytes = shim.peak_of(lambda: own(self, closure))
                peaks.append(peak_bytes - before)

        class Measure(Network):
            def configure_optimizers(self):
                return Measured(self.parameters(), lr=1e-3)

        torch.manual_seed(0)
        module = Measure()
        trainer = lightning.Trainer(
            callbacks=[] if callback is None else [callback],
            max_steps=3,
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(module, DataLoader(Rows(), batch_size=BATCH))
        return _result(peaks[1:], module, callback)

    def budget(memory_budget):
        return MemoryBudget(memory_budget, report=lambda text: None)

    return _trainings(train, budget)


def accelerate(folder):
    """A loop of one's own, with longer batches on the second process."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    import autosac
    from tests.integrations.test_huggingface import gpt2

    def train(memory_budget):
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
        model, optimizer = accelerator.prepare(model, optimizer)
        length = 64 + 32 * accelerator.process_index
        ids = torch.randint(200, (4, length))
        batch = {"input_ids": ids, "labels": ids}
        plan = None
        if memory_budget is not None:
            plan = autosac.plan_replicas(
                model, batch, memory_budget=memory_budget, optimizer=optimizer
            )
            plan.apply(accelerator.unwrap_model(model))

        def step():
            output = model(**batch)
            accelerator.backward(output.loss)
            del output
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            _, peak_bytes = shim.peak_of(step)
            peaks.append(peak_bytes - before)
        callback = None
        if plan is not None:
            callback = SimpleNamespace(plan=plan, memory_budget=memory_budget)
        return _result(peaks[1:], accelerator.unwrap_model(model), callback)

    return _trainings(train, lambda memory_budget: memory_budget)


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
