"""The same sweep in this process and on a local Ray cluster: `pip install ray` first.

    python -m examples.sweep_on_ray

`autosac.sweep_grid` runs its cells through joblib, so that the context decides where.
"""

from __future__ import annotations

from typing import Any

import joblib
import ray
import torch
from ray.util.joblib import register_ray

import autosac
from autosac.cli.demo import GPT, next_token_loss


def make_step(layers: int, batch_size: int) -> dict[str, Any]:
    """A GPT on the meta device, for an H100 that need not be there."""
    tokens = torch.randint(512, (batch_size, 128))
    with torch.device("meta"):
        model = GPT(num_layers=layers, width=64, num_heads=2, length=128)
    return {
        "model": model,
        "inputs": tokens,
        "loss_fn": next_token_loss(tokens),
        "optimizer": torch.optim.AdamW,
        "device": "h100",
    }


def main() -> None:
    grid = {"layers": [2, 4], "batch_size": [2, 4]}
    here = autosac.sweep_grid(make_step, grid, n=5)

    ray.init(num_cpus=2, include_dashboard=False)
    register_ray()
    with joblib.parallel_config("ray"):
        there = autosac.sweep_grid(make_step, grid, n=5, n_jobs=2)
    ray.shutdown()

    assert there == here
    print(f"{len(there.rows)} rows: the same table here and on Ray.")


if __name__ == "__main__":
    main()
