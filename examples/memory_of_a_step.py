"""Memory over a step, without a plan and with one: `docs/step_memory.png`.

python -m examples.memory_of_a_step docs/step_memory.png
"""

from __future__ import annotations

import sys

import torch

import autosac
from autosac.cli.demo import BATCH, GPT, LENGTH, VOCABULARY, next_token_loss


def main(path: str) -> None:
    """Plan the demo's model two fifths of the way from its floor, and draw that."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    model = GPT()
    profile = autosac.profile(
        model,
        tokens,
        loss_fn=next_token_loss(tokens),
        optimizer=torch.optim.AdamW(model.parameters()),
    )
    profile = autosac.calibrate(profile)
    floor, baseline = autosac.floor(profile), profile.baseline_peak_bytes
    plan = autosac.plan(profile, memory_budget=round(floor + 0.4 * (baseline - floor)))
    autosac.plotting.memory(plan).save(path)


if __name__ == "__main__":
    main(sys.argv[1])
