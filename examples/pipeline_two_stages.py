"""Two processes train a GPT as a pipeline of two stages: one half of it each.

    python -m examples.pipeline_two_stages [--micro-batches 4]

Stage 0 sends activations on and gets their gradients back. While it waits for these, it
recomputes what it did not keep. The same step runs without checkpointing, with
`torch.utils.checkpoint` and with preceding recomputation; gradients are equal bit for
bit. The step of a process is in `first_stage` and `last_stage`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

import autosac
from autosac.cli.demo import GPT, next_token_loss
from autosac.verification.measuring import differences

MODES = ("no checkpoint", "torch.utils.checkpoint", "preceding recomputation")
LAST_STAGE = "last stage"  # of its ranges in a profile
SEND, RECEIVE = "send gradient", "wait for gradient"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained.

    Attributes:
        num_layers: Transformer blocks of each stage.
        width: Features of a token.
        length: Tokens of a sequence.
        batch: Sequences of a micro-batch.
        micro_batches: Micro-batches of a step.
    """

    num_layers: int = 4
    width: int = 256
    length: int = 128
    batch: int = 8
    micro_batches: int = 4


class FirstStage(nn.Module):
    """Embeddings and the first half of the blocks."""

    def __init__(self, gpt: GPT, num_layers: int) -> None:
        super().__init__()
        self.token, self.position = gpt.token, gpt.position
        self.blocks = gpt.blocks[:num_layers]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x


class LastStage(nn.Module):
    """The other half of the blocks and the head."""

    def __init__(self, gpt: GPT, num_layers: int) -> None:
        super().__init__()
        self.blocks = gpt.blocks[num_layers:]
        self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Stage:
    """One process's half of the model and its data, equal in every run."""

    def __init__(self, rank: int, setting: Setting) -> None:
        torch.manual_seed(0)
        gpt = GPT(
            num_layers=2 * setting.num_layers,
            width=setting.width,
            num_heads=4,
            vocabulary=512,
            length=setting.length,
        )
        kind = (FirstStage, LastStage)[rank]
        self.module = kind(gpt, setting.num_layers)
        shape = (setting.batch, setting.length)
        batches = range(setting.micro_batches)
        self.tokens = [torch.randint(512, shape) for _ in batches]
        self.shape = (*shape, setting.width)
        self.step = (first_stage, last_stage)[rank]


def first_stage(stage: Stage, mode: str) -> None:
    """Forward of all micro-batches; then backward of each, as gradients come."""
    running = []
    for tokens in stage.tokens:
        output, recompute = forward(stage.module, tokens, mode)
        # It must not be changed or freed before it is sent.
        running.append((output, recompute, dist.isend(output.detach(), dst=1)))
    for output, recompute, sent in running:
        gradient = torch.empty(stage.shape)
        with record_function(RECEIVE):
            arriving = dist.irecv(gradient, src=1)
            recompute()
            arriving.wait()
        sent.wait()
        output.backward(gradient)


def forward(
    module: nn.Module, tokens: torch.Tensor, mode: str
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Run the stage and tell how to recompute it before the gradient is there."""
    if mode == "preceding recomputation":
        output = autosac.pipeline_checkpoint(module, tokens)
        return output.output, output.recompute
    if mode == "torch.utils.checkpoint":
        return checkpoint(module, tokens, use_reentrant=False), lambda: None
    return module(tokens), lambda: None


def last_stage(stage: Stage, mode: str) -> None:
    """Forward and backward of each micro-batch as it comes; it never waits long."""
    sent = []
    for tokens in stage.tokens:
        x = torch.empty(stage.shape)
        dist.recv(x, src=0)
        x.requires_grad_()
        with record_function(LAST_STAGE):
            next_token_loss(tokens)(stage.module(x)).backward()
        with record_function(SEND):
            sent.append((dist.isend(x.grad, dst=0), x.grad))
    for work, _ in sent:
        work.wait()


def run_step(stage: Stage, mode: str) -> dict[str, torch.Tensor]:
    """One step from the same random state; its gradients."""
    stage.module.zero_grad()
    torch.manual_seed(1)
    dist.barrier()
    stage.step(stage, mode)
    return {name: p.grad for name, p in stage.module.named_parameters()}


def compare(rank: int, setting: Setting) -> None:
    """Run a step in each mode and hold its gradients against the plain ones."""
    stage = Stage(rank, setting)
    expected = run_step(stage, MODES[0])
    for mode in MODES[1:]:
        differing = differences(expected, run_step(stage, mode))
        print(f"stage {rank}, {mode}: {differing or 'gradients equal'}", flush=True)
        if differing:
            raise AssertionError(f"{mode} changes gradients: {differing}")


def launch(run: Callable[..., Any], *args: Any) -> None:
    """Run ``run(rank, *args)`` in two processes that can talk to each other."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        torch.multiprocessing.spawn(_process, (store, run, args), nprocs=2)


def _process(rank: int, store: str, run: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)  # one core for each of the two
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        run(rank, *args)
        dist.barrier()  # who is done waits for the other one
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, default=4)
    launch(compare, Setting(micro_batches=parser.parse_args().micro_batches))


if __name__ == "__main__":
    main()
