"""What a user could live with, and what happens now: rows of `first_use`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autosac
from benchmarks.tried import GPT, Row, X, command, loss, mlp, plan


def rows() -> Iterator[Row]:
    """What a user could live with."""
    for what, run, wanted in _tried():
        yield "friction", what, lambda run=run: str(run()), wanted


def _tried() -> Iterator[tuple[str, Callable[[], Any], str]]:
    yield (
        "`plan.apply` to a wrapped model",
        lambda: plan(mlp()).apply(nn.DataParallel(mlp())), "`model.module`",
    )  # fmt: skip
    yield (
        "a model with checkpointing of its own",
        lambda: plan(Checkpointed()), "cannot be an AC unit.*checkpointing",
    )  # fmt: skip
    yield "`use_cache` left on", with_cache, "holds a DynamicCache"
    for text in ("6G", "6Gi"):
        budget = {"memory_budget": text}
        yield f"a budget of {text!r}", partial(plan, mlp(), **budget), "6.0 GiB"
    yield "`repr(profile)`", lambda: repr(profiled()), "^model .*units"
    yield "`sweep.plot()`", lambda: type(swept().plot()).__name__, "Axes"
    yield (
        "an infeasible row of a sweep",
        lambda: autosac.sweep(profiled(), memory_budgets=[1]), "floor.*below the floor",
    )  # fmt: skip
    yield "`autosac --version`", lambda: command("--version"), "exit code 0"
    yield (
        "`--autocast bf16`, `sweep -n`",
        lambda: command("sweep", GPT, "-n", "2", "--autocast", "bf16"), "exit code 0",
    )  # fmt: skip
    yield "files that are written", written, "wrote /plan.json .*/plan.html"
    for name in ("batch-size", "parallel", "compile", "graph-info"):
        said = partial(command, name, "--help")
        yield f"`autosac {name}`", said, f"exit code 0.*Usage: autosac {name}"


def profiled() -> autosac.Profile:
    return autosac.profile(mlp(), X, loss_fn=loss)


def swept() -> autosac.Sweep:
    return autosac.sweep(profiled(), memory_budgets=["1GiB"])


class Checkpointed(nn.Module):
    """Has checkpointing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return out


def with_cache() -> autosac.Plan:
    """A decoder whose cache is left on."""
    import transformers  # only here, and slow to import

    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=100, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM",
    )  # fmt: skip
    tokens = torch.randint(100, (2, 64))
    inputs = {"input_ids": tokens, "labels": tokens}
    return plan(transformers.GPT2LMHeadModel(config), inputs, loss_fn=None)


def written() -> str:
    """What a command says that writes files."""
    with tempfile.TemporaryDirectory() as folder:
        names = [str(Path(folder) / name) for name in ("plan.json", "plan.html")]
        options = ("-o", names[0], "--html", names[1])
        return command("plan", GPT, "-b", "1GiB", *options).replace(folder, "")
