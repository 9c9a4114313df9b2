"""Trains a model on a pipeline of several processes from a saved plan.

    python -m examples.train_pipeline plan.json --plan --ranks 2
    torchrun --nproc-per-node 2 -m examples.train_pipeline plan.json

The first command plans and writes the file; it needs no process group. The second one
trains: each rank loads the plan and builds its own stage. On the CPU (gloo) the
gradients of the first step are held against those of one process; the last step's model
is saved with torch.distributed.checkpoint and loaded into a model without a plan.

``--tp 2`` with the first command lets two neighbouring ranks share slices of each
stage's tensors, ``--fsdp 2`` shards each stage over two ranks with batches of their
own, ``--cp 2`` over two with a part each of the same sequences: each takes twice as
many processes. With ``--tp`` and ``--loss-parallel`` logits stay divided over the
vocabulary, too.

On GPUs add ``--backend nccl`` to the second command and ``--cluster hgx-h100`` to the
first.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

import autosac
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import cluster_spec

VOCABULARY, LENGTH, BATCH, WIDTH, NUM_BLOCKS = 1032, 64, 16, 96, 6
LARGEST_DIFFERENCE = 1e-5  # of the largest element of any gradient
STEPS = 3


class Attention(nn.Module):
    """Causal attention; a rank may have some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // 4
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix the tokens."""
        q, k, v = (
            part(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.wq, self.wk, self.wv)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        x = x + self.attention(self.first(x))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Embedding(nn.Module):
    """Tokens and their positions, which a rank with a part of a sequence is given."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Embed the tokens."""
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)
        out: torch.Tensor = self.tokens(x) + self.positions(position_ids)
        return out


class Model(nn.Module):
    """A chain: embedding, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the model."""
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def make_model() -> Model:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    return Model()


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a step."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def write_plan(
    path: Path,
    ranks: int,
    mesh: dict[str, int],
    cluster: str | None,
    budget: str,
    divides_loss: bool,
) -> None:
    """Plan for ranks on this machine's CPU, or for the GPUs of a cluster."""
    spec = replace(cluster_spec("pcie-l40s"), device=device_spec("cpu"))
    inputs, target = (tensor.chunk(mesh["fsdp"])[0].clone() for tensor in make_batch())
    plan = autosac.plan_pipeline(
        make_model(),
        inputs,
        target=target,
        loss_fn=loss_of,
        num_ranks=ranks,
        num_micro_batches=(4, 8),
        memory_budget=budget,
        cluster=cluster or spec,
        mesh=mesh,
        loss_parallel=divides_loss,
        optimizer=torch.optim.AdamW,
    )
    plan.save(path)
    print(plan)


def train(path: Path, backend: str) -> None:
    """What every rank does."""
    dist.init_process_group(backend)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    plan = autosac.PipelinePlan.load(path)
    mesh = plan.make_mesh(device.type)
    (stage,) = plan.stages(make_model().to(device), mesh)
    schedule = plan.schedule([stage], loss_of)
    optimizer = torch.optim.AdamW(stage.submod.parameters())
    batches = plan.parallel.num_batches
    inputs, target = (
        plan.part_of(tensor.chunk(batches)[plan.batch_index(mesh)], mesh).to(device)
        for tensor in make_batch()
    )
    for step in range(STEPS):
        losses: list[torch.Tensor] = []
        args = (inputs,) if stage.is_first else ()
        kwargs = {"target": target, "losses": losses} if stage.is_last else {}
        with loss_parallel():  # without effect if the plan divides no logits
            schedule.step(*args, **kwargs, **plan.step_kwargs)
        if step == 0 and backend == "gloo":
            compare(stage.submod)
        optimizer.step()
        optimizer.zero_grad()
        if stage.is_last:
            loss = float(torch.stack(losses).detach().mean())
            print(f"step {step}: loss {loss:.6f}", flush=True)
    if backend == "gloo":
        save_and_reload(stage.submod)
    dist.destroy_process_group()


def compare(own: nn.Module) -> None:
    """Hold gradients against those of one process on the whole batch."""
    plain = make_model()
    inputs, target = make_batch()
    loss_of(plain(inputs), target).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    scale = max(float(grad.abs().max()) for grad in expected.values())
    off = max(
        float((whole(p.grad) - expected[name]).abs().max())
        for name, p in own.named_parameters()
    )
    if off > LARGEST_DIFFERENCE * scale:
        raise SystemExit(f"Gradients differ by {off / scale:.1e} of the largest.")
    print(f"gradients equal to {off / scale:.1e} of the largest element", flush=True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor of which a rank may have a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_and_reload(own: nn.Module) -> None:
    """Save what the ranks have trained, and load it into a model without a plan."""
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(where)
    checkpoint.save({"model": own.state_dict()}, checkpoint_id=where[0])
    plain = make_model()
    checkpoint.load({"model": plain.state_dict()}, checkpoint_id=where[0])
    for name, parameter in own.named_parameters():
        if not torch.equal(whole(parameter), plain.get_parameter(name)):
            raise SystemExit(f"`{name}` was not reloaded as it was saved.")
    print("checkpoint reloaded without a plan: identical", flush=True)


def main() -> None:
    """Plan, or train as one of the processes that torchrun starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--loss-parallel", action="store_true")
    parser.add_argument("--cluster")
    parser.add_argument("--budget", default="12MiB")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    options = parser.parse_args()
    if options.plan:
        mesh = {"fsdp": options.fsdp, "cp": options.cp, "tp": options.tp}
        write_plan(
            options.path,
            options.ranks,
            mesh,
            options.cluster,
            options.budget,
            options.loss_parallel,
        )
    else:
        train(options.path, options.backend)


if __name__ == "__main__":
    main()
