"""What readers are told to type does what is said, with names that they bring."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
WIDTH, LENGTH, VOCABULARY = 32, 16, 4000


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        hidden = (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.mlp = nn.Sequential(*hidden)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def make_inputs(batch_size):
    return torch.randint(VOCABULARY, (batch_size, LENGTH))


def mean_square(output):
    return output.square().mean()


def make_step(batch_size):
    inputs = make_inputs(batch_size)
    return {"model": MyModel(), "inputs": inputs, "loss_fn": mean_square}


def blocks(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.slowest
def test_the_blocks_of_the_readme_run_as_they_stand(tmp_path, monkeypatch, one_thread):
    brought = {
        "MyModel": MyModel,
        "inputs": make_inputs(8),
        "loss_fn": mean_square,
        "make_inputs": make_inputs,
        "make_step": make_step,
    }
    monkeypatch.chdir(tmp_path)
    ours = [code for code in blocks("README.md") if "trainer =" not in code]
    asked = 'make_inputs, memory_budget="6GiB"'  # for batches of a model of that size
    ours = [code.replace(asked, asked.replace("6GiB", "60MiB")) for code in ours]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for code in ours:
            exec(code, brought)
            if "plan.apply(model)" in code:
                brought["plan"].unapply(brought["model"])
    assert len(ours) == 4
    assert {"plan.html", "memory.png", "trade_offs.png", "plan.json"} <= {
        path.name for path in tmp_path.iterdir()
    }
