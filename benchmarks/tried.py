"""Small models, and commands on them, as a new user would try them."""

from __future__ import annotations

import re
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

import autosac
from autosac.cli import commands as cli
from autosac.cli.demo import GPT as Gpt
from autosac.cli.demo import next_token_loss
from benchmarks.models.short import mean_square

ROWS, WIDTH, CLASSES = 64, 64, 8
X, Y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, CLASSES)
GPT = "benchmarks.tried:demo"
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 64, "max_position_embeddings": 16,
}  # fmt: skip
EXACT = r"kept, equal bits, predicted \+?-?0\.[0-2]\d? % off"
Row = tuple[str, str, Callable[[], Any], str]  # kind, what, how, what it must say


def demo(layers: int = 2) -> Any:
    """A model as `autosac plan benchmarks.tried:demo` takes it."""
    tokens = torch.randint(32, (4, 8))
    sizes = {"vocabulary": 32, "length": 8, "width": 16, "num_heads": 2}
    return Gpt(num_layers=layers, **sizes), tokens, next_token_loss(tokens)


def mlp(inner: int = 256) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, inner), nn.ReLU(), nn.Linear(inner, CLASSES))


def loss(output: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, Y)


def plan(model: Any, inputs: Any = X, **options: Any) -> autosac.Plan:
    options = {"loss_fn": loss, "memory_budget": "1GiB", **options}
    return autosac.plan(model, inputs, **options)


def planned() -> nn.Module:
    """A model that recomputes."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)), mlp())
    profile = autosac.profile(model, X.repeat(64, 1), loss_fn=torch.sum)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    return plan.apply(model) or model


def scripted(make: Callable[[], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        return make()


class Calls(nn.Module):
    """A layer, a function, and another layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x)))


def verified(make: Any, inputs: Any, loss_fn: Any = mean_square, part: int = 20) -> str:
    """Plan near the floor, train really, and say how that went."""
    torch.manual_seed(0)
    profile = autosac.profile(make(), inputs(), loss_fn=loss_fn)
    profile = autosac.calibrate(profile, progress=False)
    floor, peak = autosac.floor(profile), profile.baseline_peak_bytes
    plan = autosac.plan(profile, memory_budget=floor + (peak - floor) // part)
    options: dict[str, Any] = {"loss_fn": loss_fn, "timing_rounds": 0}
    done = autosac.verify(plan, make, inputs, **options)
    kept = "kept" if done.within_budget else "EXCEEDED"
    bits = "equal bits" if done.identical else "OTHER BITS"
    return f"budget {kept}, {bits}, predicted {done.prediction_error:+.2%} off".replace(
        "%", " %"
    )


def command(*arguments: str) -> str:
    """What a command line says, and its exit code."""
    result = CliRunner().invoke(cli.app, list(arguments), prog_name="autosac")
    text = result.stderr or result.stdout
    if result.exception and not isinstance(result.exception, SystemExit):
        text = "".join(traceback.format_exception_only(result.exception))
    words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())
    return f"exit code {result.exit_code}: {words}"


def with_config(text: str, *arguments: str) -> str:
    """What planning a config says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(text)
        options = ("plan", f"hf:{path}", "-b", "1GiB", "--on", "meta", *arguments)
        return command(*options).replace(folder, "")


def loaded(text: str) -> autosac.Plan:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(text)
        return autosac.Plan.load(path)
