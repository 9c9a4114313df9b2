"""Trains a GPT on several processes from a saved parallel plan.

    python -m examples.train_fsdp plan.json --plan --ranks 2
    torchrun --nproc-per-node 2 -m examples.train_fsdp plan.json

The first command needs no process group: it plans and writes the file. The second one
trains: each rank loads the plan, applies it, and takes a batch of its own. With gloo on
the CPU the gradients of the first step are held against those of one process without
any sharding; then the model is saved with torch.distributed.checkpoint and loaded into
a model without a plan.

``--tp 2 --budget 17MiB`` with the first command lets two neighbouring ranks share
slices of tensors and take one batch together; ``--cp 2`` gives each of them a part of
its sequence. With both, four ranks take one batch.

On GPUs add ``--backend nccl`` to the second command and ``--cluster hgx-h100`` to the
first, with the number of GPUs as ranks; nothing else changes.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint

import autosac
from autosac.cli.demo import GPT
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import cluster_spec

VOCABULARY, LENGTH, BATCH, WIDTH = 1032, 64, 6, 96
LARGEST_DIFFERENCE = 1e-5  # of the largest element of any gradient
STEPS = 3


def make_model(*, drops: bool = True) -> torch.nn.Module:
    """The model, the same on every rank; parts of a sequence have dropout of their own.

    Args:
        drops: It has dropout.
    """
    torch.manual_seed(0)
    return GPT(
        num_layers=4,
        width=WIDTH,
        num_heads=4,
        vocabulary=VOCABULARY,
        length=LENGTH,
        dropout=0.1 if drops else 0.0,
    ).train()


def make_batch(number: int) -> torch.Tensor:
    """A batch: each rank has its own, or those that share tensors or a sequence."""
    generator = torch.Generator().manual_seed(1 + number)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    """Any loss will do."""
    return logits.float().exp().mean()


def write_plan(
    path: Path, ranks: int, mesh: dict[str, int], cluster: str | None, budget: str
) -> None:
    """Plan for ranks on this machine's CPU, or for the GPUs of a cluster."""
    if cluster is None:
        spec = replace(cluster_spec("pcie-l40s"), device=device_spec("cpu"))
    else:
        spec = cluster_spec(cluster)
    plan = autosac.plan_parallel(
        make_model(drops=mesh["cp"] == 1),
        make_batch(0),
        cluster=spec,
        num_gpus=ranks,
        mesh=mesh,
        memory_budget=budget,
        loss_fn=loss_of,
        optimizer=torch.optim.AdamW,
    )
    plan.save(path)
    print(plan)


def train(path: Path, backend: str) -> None:
    """What every rank does."""
    dist.init_process_group(backend)
    rank = dist.get_rank()
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    plan = autosac.ParallelPlan.load(path)
    mesh = plan.make_mesh(device.type)
    drops = plan.context.degree == 1
    model = plan.apply(make_model(drops=drops).to(device), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = make_batch(rank // plan.division.degree).to(device)
    args, kwargs = plan.part_of(batch, mesh)
    for step in range(STEPS):
        torch.manual_seed(2)  # of dropout: the same in the comparison
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        if step == 0 and backend == "gloo":
            compare(model, dist.get_world_size() // plan.division.degree, drops=drops)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {float(loss.detach()):.6f}", flush=True)
    if backend == "gloo":
        save_and_reload(model)
    dist.destroy_process_group()


def compare(model: torch.nn.Module, num_batches: int, *, drops: bool) -> None:
    """Hold gradients against the mean of those of one process on all batches."""
    plain = make_model(drops=drops)
    for number in range(num_batches):
        torch.manual_seed(2)
        (loss_of(plain(make_batch(number))) / num_batches).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    scale = max(float(grad.abs().max()) for grad in expected.values())
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    off = max(
        float((gradients[name] - expected[name]).abs().max()) for name in expected
    )
    if off > LARGEST_DIFFERENCE * scale:
        raise SystemExit(f"Gradients differ by {off / scale:.1e} of the largest.")
    if dist.get_rank() == 0:
        print(f"gradients equal to {off / scale:.1e} of the largest element")


def save_and_reload(model: torch.nn.Module) -> None:
    """Save the planned model, and load that into one without a plan."""
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(where)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=where[0])
    plain = make_model()
    checkpoint.load({"model": plain.state_dict()}, checkpoint_id=where[0])
    for name, parameter in model.named_parameters():
        if not torch.equal(parameter.full_tensor(), plain.get_parameter(name)):
            raise SystemExit(f"`{name}` was not reloaded as it was saved.")
    if dist.get_rank() == 0:
        print("checkpoint reloaded without a plan: identical")


def main() -> None:
    """Plan, or train as one of the processes that torchrun starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--cluster")
    parser.add_argument("--budget", default="13MiB")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    options = parser.parse_args()
    if options.plan:
        mesh = {"cp": options.cp, "tp": options.tp}
        write_plan(options.path, options.ranks, mesh, options.cluster, options.budget)
    else:
        train(options.path, options.backend)


if __name__ == "__main__":
    main()
