"""Trainings on two processes, one after the other: what each of them measured.

Run by `torch.distributed.run`: ``replica_runs.py KIND FOLDER``. Each rank writes a
dictionary: name of a training -> its peaks, its weights, the plan's figures.
"""

import gc
import sys
import warnings

import torch
import torch.distributed as dist

from tests import shim

warnings.simplefilter("ignore")


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


def huggingface(folder, *, accumulate=2, **options):
    import transformers

    from autosac.integrations.huggingface import MemoryBudget
    from tests.integrations.test_huggingface import Texts, gpt2

    def train(callback, make_model=gpt2):
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
            make_model(),
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


def main():
    kind, folder = sys.argv[1:]
    results = globals()[kind](folder)
    torch.save(results, f"{folder}/{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
