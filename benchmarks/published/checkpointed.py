"""What activation checkpointing of blocks saves, published and predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import autosac
from benchmarks.environment import environment
from benchmarks.published.titan_llama import Llama

Record = dict[str, Any]
_GIB = 2**30
_NAMES = {0: "none", 2: "every second layer", 1: "every layer"}
_ABOUT = """\
What checkpointing every second layer and every layer takes off the peak of a rank, as
differences to none: optimizer, gradients and collectives drop out of them. Held against
it is what a step of the same model on one GPU holds until its loss is done, which is
taken to be where the ranks' peaks lie: their gradients are shards. torchtitan's Llama
is rewritten from its description, with the norm op by op, as PyTorch ran it in 2025.
The source says GB; torchtitan's log, where such figures are from, prints GiB, and so
they are taken (as 10^9 bytes they would be 7 % less)."""


def predicted_gib(length: int = 4096) -> dict[int, float]:
    """Most GiB alive until the loss is done, by which k-th layers are checkpointed.

    Args:
        length: Tokens of the one sample.
    """
    with torch.device("meta"):
        model = Llama(layers=32, width=4096, hidden=14336, words=128256)
    angles = model.angles  # stay complex
    model = model.to(torch.bfloat16)
    model.angles = angles
    tokens = torch.zeros(1, length, dtype=torch.long)
    inputs = {"tokens": tokens, "labels": tokens.clone()}
    profile = autosac.profile(model, inputs, device="h100", optimizer=torch.optim.AdamW)
    end = profile.tape.phases["model backward"] * profile.simulator.span

    def until_loss(k: int) -> float:
        chosen = profile.rules.every_kth_block(k) if k else {}
        timeline = profile.simulator.timeline(chosen)
        return float(timeline.live_bytes[timeline.keys <= end].max()) / _GIB

    return {k: until_loss(k) for k in _NAMES}


def write(published: Record, folder: Path) -> None:
    """Write ``published_checkpointing.md``.

    Args:
        published: What the figures say.
        folder: Where to.
    """
    gib = {int(k): value for k, value in published["gib"].items()}
    predicted = predicted_gib()
    lines = ["# Published peaks with checkpointing, predicted", "", _ABOUT, ""]
    lines += [f"{published['model']}, {published['gpu']} ({published['source']}).", ""]
    lines += ["| checkpointed | peak | saved | predicted | error |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for k, name in _NAMES.items():
        saved, ours = gib[0] - gib[k], predicted[0] - predicted[k]
        error = f"{ours / saved - 1:+.2%}" if k else ""
        cells = (f"{figure:.2f} GiB" for figure in (gib[k], saved, ours))
        lines.append(f"| {name} | {' | '.join(cells)} | {error} |")
    lines += ["", *(f"- {name}: {value}" for name, value in environment().items())]
    command = "python -m benchmarks.published --parts checkpointing"
    lines += [f"- command: `{command}`", ""]
    (folder / "published_checkpointing.md").write_text("\n".join(lines))
