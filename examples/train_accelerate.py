"""Trains a GPT with Accelerate on several processes, sharded by FSDP2, in a budget.

    accelerate launch --cpu --num_processes 2 -m examples.train_accelerate
    torchrun --nproc-per-node 2 -m examples.train_accelerate --budget 10MiB

Accelerate 1.15 knows FSDP2 on GPUs only (on the CPU it takes no notice of
`FullyShardedDataParallelPlugin` and puts DDP around the model), and chooses units by
class. Here the plan shards, on either: Accelerate prepares autocast (`evaluation_mode`
keeps it from wrapping), the first process plans what it prepared, and every process
applies that plan before it makes the optimizer.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

import autosac
from autosac.cli.demo import GPT
from autosac.devices.specs import device_spec
from autosac.integrations.accelerate_sharded import save_sharded
from autosac.parallel.clusters import ClusterSpec, cluster_spec

VOCABULARY, LENGTH, BATCH, WIDTH = 1032, 64, 6, 96
LARGEST_NORM = 1.0


def make_model() -> torch.nn.Module:
    """The model, the same in every process."""
    torch.manual_seed(0)
    return GPT(
        num_layers=4, width=WIDTH, num_heads=4, vocabulary=VOCABULARY, length=LENGTH
    ).train()


def make_batch(number: int) -> torch.Tensor:
    """A batch: each process has its own."""
    generator = torch.Generator().manual_seed(1 + number)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    """Any loss will do."""
    return logits.float().exp().mean()


def cluster_here(accelerator: Accelerator) -> ClusterSpec:
    """What the processes run on: on the CPU with links borrowed from a node of GPUs."""
    if accelerator.device.type == "cuda":
        return cluster_spec("hgx-h100", num_gpus=accelerator.num_processes)
    links = cluster_spec("pcie-l40s", num_gpus=accelerator.num_processes)
    return replace(links, device=device_spec("cpu"))


def planned(
    accelerator: Accelerator, model: torch.nn.Module, budget: int | str
) -> autosac.ParallelPlan:
    """The plan of the first process, in all of them."""
    folder = [tempfile.mkdtemp() if accelerator.is_main_process else ""]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "plan.json"
    if accelerator.is_main_process:
        plan = autosac.plan_parallel(
            model,
            make_batch(0),
            loss_fn=loss_of,
            optimizer=torch.optim.AdamW,
            clip_grad_norm=LARGEST_NORM,
            cluster=cluster_here(accelerator),
            degrees=[accelerator.num_processes],
            memory_budget=budget,
        )
        plan.save(path)
    accelerator.wait_for_everyone()
    return autosac.ParallelPlan.load(path)


def prepared(
    accelerator: Accelerator, budget: int | str
) -> tuple[torch.nn.Module, Any, autosac.ParallelPlan]:
    """Model and optimizer as Accelerate and a plan prepare them."""
    model = accelerator.prepare_model(
        make_model().to(accelerator.device), evaluation_mode=True
    )
    plan = planned(accelerator, model, budget)
    plan.apply(model, plan.make_mesh(accelerator.device.type))
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    save_sharded(accelerator)  # `save_state` and `load_state`
    return model, optimizer, plan


def step(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: Any
) -> torch.Tensor:
    """One training step on this process's batch."""
    batch = make_batch(accelerator.process_index).to(accelerator.device)
    output = model(batch)  # alive during backward, as planned
    loss = loss_of(output)
    accelerator.backward(loss)
    del output
    accelerator.clip_grad_norm_(model.parameters(), LARGEST_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main() -> None:
    """Plan and train as one of the processes that a launcher starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="12MiB")
    parser.add_argument("--precision", choices=["no", "bf16"], default="bf16")
    options = parser.parse_args()
    on_cpu = not torch.cuda.is_available()
    accelerator = Accelerator(cpu=on_cpu, mixed_precision=options.precision)
    model, optimizer, plan = prepared(accelerator, options.budget)
    accelerator.print(plan)
    for number in range(3):
        loss = step(accelerator, model, optimizer)
        accelerator.print(f"step {number}: loss {float(loss):.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
