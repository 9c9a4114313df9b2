"""What the command line's tests name as models."""

import random
from collections import OrderedDict

import numpy as np
import torch
from torch import nn

from autosac.cli.demo import next_token_loss
from tests.models import gpt as small_gpt


def gpt(layers=2, rows=16):
    tokens = torch.randint(32, (rows, 8))
    return small_gpt(layers), tokens, next_token_loss(tokens)


def gpt_with_labels():
    model, tokens, _ = gpt()
    return model, tokens, next_token_loss(tokens.clone())


def mlp(layers=3, rows=64):
    blocks = (
        nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        for _ in range(layers)
    )
    model = nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks)))
    return model, torch.randn(rows, 8), mean_square


def drawn():
    model, inputs, loss_fn = mlp()
    return model, inputs * random.random() * float(np.random.rand()), loss_fn


def mean_square(outputs):
    return outputs.square().mean()


def named(word="adam"):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizers = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    return {
        "model": model,
        "inputs": torch.randn(2, 4),
        "optimizer": lambda parameters: optimizers[word](parameters, lr=0.1),
    }


def mlp_and_optimizer():
    model, inputs, loss_fn = mlp()
    return model, inputs, loss_fn, torch.optim.AdamW(model.parameters())


def mlp_and_name():
    return (*mlp(), "adamw")


def rows():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return {"model": model, "inputs": [torch.randn(n, 4) for n in (8, 2, 8)]}


def alone():
    return nn.Linear(2, 2)


NUMBER = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


def chain(layers=2, rows=4):
    """Blocks that stages of a pipeline can have, with the target apart."""
    blocks = (Block() for _ in range(layers))
    tokens = torch.zeros(rows, 64, dtype=torch.int64)
    return {
        "model": nn.Sequential(nn.Embedding(32, 8), *blocks, nn.Linear(8, 32)),
        "inputs": tokens,
        "target": tokens,
        "loss_fn": mean_cross_entropy,
    }


def mean_cross_entropy(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def regression(batch=64):
    """A loss that holds a target as large as all activations."""
    layers = [nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    target = torch.randn(batch, 512)
    model = nn.Sequential(*layers, nn.Linear(64, 512))
    return model, torch.randn(batch, 8), lambda out: (out - target).square().mean()
