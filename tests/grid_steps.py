"""Steps of the tests of grids, in a module that workers can import."""

import os
from pathlib import Path

import torch
from torch import nn


def make_step(width, batch_size, device="cpu", calls=None):
    """A small step; leaves a line in a file for every call."""
    if calls is not None:
        with open(calls, "a") as file:
            file.write(f"{width} {batch_size}\n")
    if width == 13:
        raise RuntimeError("thirteen\nis refused")
    if width == 666:
        os._exit(1)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)]
    return {
        "model": nn.Sequential(*layers),
        "inputs": torch.randn(batch_size, width),
        "optimizer": torch.optim.SGD,
        "device": device,
    }


def interrupted_step(width, batch_size, calls):
    """As `make_step`, but the third call is interrupted as by Ctrl-C."""
    step = make_step(width, batch_size, calls=calls)
    if len(Path(calls).read_text().splitlines()) == 3:
        raise KeyboardInterrupt
    return step
