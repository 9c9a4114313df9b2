"""Trainings that are measured on each of several processes: what their runs share."""

import gc

import torch

from autosac.errors import InfeasibleBudgetError
from benchmarks import allocator_shim as shim


def trainings(train, fraction=None):
    """A plain training, one with an ample budget, one with a fraction of its peak.

    Or, without a fraction, with a hundredth more than the least feasible budget.
    """
    results = {"plain": train(None), "ample": train("1GiB")}
    if fraction is None:
        budget = 1.01 * _least_feasible(train)
    else:
        budget = fraction * results["ample"]["plan"]["highest_bytes"]
    results["planned"] = train(int(budget))
    return results


def _least_feasible(train):
    try:
        train("1MiB")
    except InfeasibleBudgetError as error:
        return error.lowest_peak_bytes
    raise AssertionError("1 MiB is enough")


def result(peaks, model, plan, memory_budget, **more):
    """What a process saves of a training."""
    figures = None
    if plan is not None:
        late_bytes = getattr(plan, "late_bytes", 0)
        figures = {
            "peak_bytes": plan.peak_bytes,
            "late_bytes": late_bytes,
            "highest_bytes": plan.peak_bytes + late_bytes,
            "budget_bytes": memory_budget,
            "policy": plan.policy,
            "composition": plan.composition,
        }
    weights = {name: whole(t) for name, t in model.state_dict().items()}
    return {"peaks": peaks, "weights": weights, "plan": figures, **more}


def whole(tensor):
    """A copy of a tensor, also of one that is sharded."""
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().clone()


def measured_trainer(folder, *, make_model=None, dataset=None, callbacks=(), **options):
    """A trainer of Transformers, and a list for the peaks of its steps but the first.

    A step is all micro-steps, clipping and the optimizer's.
    """
    import transformers

    from tests.integrations.test_huggingface import ScalingTrainer, Texts, gpt2

    gc.collect()
    before, peaks = shim.live_bytes(), []

    class Measure(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            shim.reset()

        def on_step_end(self, args, state, control, **_):
            if state.global_step > 1:
                peaks.append(shim.peak_bytes() - before)

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
    trainer = ScalingTrainer(
        (make_model or gpt2)(),
        transformers.TrainingArguments(str(folder), **{**known, **options}),
        train_dataset=dataset or Texts((96,) * 48),
        callbacks=[*callbacks, Measure()],
    )
    return trainer, peaks


def measured_fit(make_module, *, callbacks=(), checkpoint=None, max_steps=3, **options):
    """A module trained by Lightning, its trainer, the peaks of all but its first step.

    A micro-step is all that the trainer does from one batch to the next.
    """
    import lightning.pytorch as lightning
    from torch.utils.data import DataLoader

    from tests.integrations.test_lightning import BATCH, Rows

    gc.collect()
    before, peaks = shim.live_bytes(), []

    class Measure(lightning.Callback):
        def on_train_batch_start(self, *_):
            shim.reset()

        def on_train_batch_end(self, *_):
            peaks.append(shim.peak_bytes() - before)

    torch.manual_seed(0)
    module = make_module()
    trainer = lightning.Trainer(
        callbacks=[*callbacks, Measure()],
        max_steps=max_steps,
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(Rows(), batch_size=BATCH), ckpt_path=checkpoint)
    return module, trainer, peaks[trainer.accumulate_grad_batches :]


def with_adapter():
    """A model of Transformers with LoRA."""
    import peft

    from tests.integrations.test_huggingface import gpt2

    config = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1)
    return peft.get_peft_model(gpt2(), config)
