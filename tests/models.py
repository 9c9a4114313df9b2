"""Tiny models that each do one thing that makes planning hard, and random plans."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autosac.cli.demo import GPT
from autosac.profiles.profile import Profile, profile
from autosac.solvers.curves.knapsack import rerun_closure
from autosac.step.tape import ModuleCall
from autosac.step.training_step import LossFn
from autosac.units.chains import Chain
from autosac.units.curves import made_onward, save_problem, spell
from autosac.units.policies import Policy
from autosac.units.unit import Unit

WIDTH, BATCH = 8, 4


@dataclass(frozen=True)
class Case:
    """A model, its inputs and its loss."""

    make_model: Callable[[], nn.Module]
    make_inputs: Callable[[], Any]
    loss_fn: LossFn | None = None

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make_model()

    def inputs(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.make_inputs()

    def profile(self, optimizer: Any = None) -> Profile:
        return profile(
            self.model(), self.inputs(), optimizer=optimizer, loss_fn=self.loss_fn
        )


@functools.cache
def shared_profile(case: Case, optimizer: Any = None) -> Profile:
    """Traced once, for tests that only read it and have the model of `case.model()`."""
    return case.profile(optimizer)


# --- models -------------------------------------------------------------------


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(
                nn.Sequential(
                    nn.Linear(WIDTH, 2 * WIDTH),
                    nn.GELU(),
                    nn.Dropout(0.5),
                    nn.Linear(2 * WIDTH, WIDTH),
                    nn.Tanh(),
                )
                for _ in range(3)
            )
        )


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        out += identity
        return self.relu(out)


class ConvNet(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3), nn.BatchNorm2d(WIDTH), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(*(ResidualBlock() for _ in range(num_blocks)))
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.blocks(self.stem(x))).mean((2, 3)))


class DenseLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, WIDTH)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        joined = torch.cat(features, 1)
        return torch.relu_(self.linear(torch.relu(self.norm(joined))))


class DenseNet(nn.Module):
    """The caller appends to the list that a layer was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(WIDTH * n) for n in (1, 2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.outer = nn.ModuleDict({"last": nn.Sequential(*Mlp()[0])})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer["last"](self.shared(self.shared(self.first(x))))


class Counting(nn.Module):
    """Changes buffers in forward, and one of them is read by backward."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        hidden = torch.sigmoid(self.linear(x))
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return torch.tanh(hidden * self.mean) + x


class TiedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.body = Mlp()
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


def _frozen() -> nn.Module:
    model = Mlp()
    model[0].requires_grad_(False)
    model[1][0].requires_grad_(False)
    return model


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        left, right = torch.tanh(self.left(x)), torch.sigmoid(self.right(x))
        return {"both": (left, right), "product": left * right, "note": "text"}


class Recurrent(nn.Module):
    """Reads tokens one after the other; each layer returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(
            nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


class ForkingOutputs(nn.Module):
    """Units return dicts and tuples; so does the model."""

    def __init__(self) -> None:
        super().__init__()
        self.forks = nn.ModuleList(Fork() for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        for fork in self.forks:
            forked = fork(x)
            left, right = forked["both"]
            x = forked["product"] + left - right.exp()
        return x, forked


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, *, x: torch.Tensor, scale: torch.Tensor, flip: bool = False
    ) -> torch.Tensor:
        out = torch.tanh(self.linear(x) * scale)
        return -torch.exp(out) if flip else torch.exp(out)


class KeywordsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, *, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for i, part in enumerate(self.parts):
            x = part(x=x, scale=scale, flip=i == 1)
        return x


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, pair: tuple[torch.Tensor, tuple[torch.Tensor, list[torch.Tensor]]]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, list[torch.Tensor]]]:
        a, (b, [c]) = pair
        a = torch.sigmoid(self.linear(a * b))
        return a, (torch.cos(b) * a, [c.sin() * 2])


class NestedInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Mixing() for _ in range(3))

    def forward(self, pair: Any) -> torch.Tensor:
        for part in self.parts:
            pair = part(pair)
        a, (b, [c]) = pair
        return a * b * c


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, square = ctx.saved_tensors
        return grad * (square + 2 * x * x)


class Cube(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(_Cube.apply(self.linear(x)))


class Noisy(nn.Module):
    """Random in every way: functional dropout, `rand`, in-place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(self.linear(x), 0.3, self.training)
        noise = torch.rand(x.shape[0], 1) + torch.randn_like(x).mul_(0.1)
        mask = torch.empty_like(x).bernoulli_(0.5)
        return torch.tanh(hidden * noise) * mask + functional.dropout1d(x[None])[0]


def _resnet() -> nn.Module:
    import torchvision  # slow to import, and only one case needs it

    model = torchvision.models.resnet18(num_classes=4)
    model.layer4, model.fc = nn.Identity(), nn.Linear(256, 4)  # most of its parameters
    return model


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # slow to import

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_head=2,
            n_embd=16,
            vocab_size=32,
            n_positions=16,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # slow to import

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2,
            hidden_size=16,
            intermediate_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=32,
            max_position_embeddings=16,
            use_cache=False,
        )
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM  # slow to import

    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=2,
            hidden_size=16,
            intermediate_size=32,
            num_attention_heads=2,
            vocab_size=32,
            max_position_embeddings=16,
        )
    )


def gpt(num_layers: int = 2) -> nn.Module:
    return GPT(
        num_layers=num_layers, width=16, num_heads=2, vocabulary=32, length=8
    ).train()


def gpt_on_a_gpu() -> Profile:
    """A step whose tensors are so large that a GPU's allocator adds to them."""
    with torch.device("meta"):
        model = GPT(num_layers=2, width=256, num_heads=4, vocabulary=500, length=300)
    return profile(
        model,
        torch.zeros(3, 300, dtype=torch.long),
        loss_fn=lambda logits: logits.square().mean(),
        device="h100",
        autocast=torch.bfloat16,
    )


def _rows() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH)


def tokens() -> torch.Tensor:
    return torch.randint(32, (2, 8))


def _labelled() -> dict[str, torch.Tensor]:
    return {"input_ids": (ids := tokens()), "labels": ids.clone()}


def _masked() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return {**_labelled(), "attention_mask": mask}


def _images() -> torch.Tensor:
    return torch.randn(2, 3, 10, 10)


def _nested() -> tuple[Any, ...]:
    return ((_rows(), (_rows(), [_rows()])),)


CASES = {
    "mlp": Case(Mlp, _rows),
    "gpt": Case(gpt, tokens, lambda logits: logits.square().mean()),
    "convolutions": Case(ConvNet, _images),
    "list inputs": Case(DenseNet, _rows),
    "called twice": Case(CalledTwice, _rows),
    "changed buffers": Case(lambda: nn.Sequential(Counting(), Counting()), _rows),
    "tied weights": Case(TiedWeights, lambda: torch.randint(16, (2, 4))),
    "frozen parameters": Case(_frozen, _rows),
    "dict outputs": Case(ForkingOutputs, _rows),
    "keywords only": Case(
        KeywordsOnly, lambda: {"x": _rows(), "scale": torch.rand(WIDTH)}
    ),
    "nested inputs": Case(NestedInputs, _nested),
    "custom function": Case(lambda: nn.Sequential(Cube(), Cube()), _rows),
    "noise": Case(lambda: nn.Sequential(Noisy(), Noisy()), _rows),
    "lstm": Case(Recurrent, lambda: torch.randint(16, (4, 6))),
    "resnet": Case(_resnet, lambda: torch.randn(2, 3, 32, 32)),
    "gpt2": Case(_gpt2, _labelled),
    "llama": Case(_llama, _labelled),
    "bert": Case(_bert, _masked),
}

_SLOW = ("resnet",)  # its 3 M parameters

# Deep enough for chains and nests: its floor takes both.
SMALL_GPT = Case(
    lambda: gpt(4),
    lambda: torch.randint(32, (16, 8)),
    lambda logits: logits.square().mean(),
)

each_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if name in _SLOW else [])
        for name, case in CASES.items()
    ],
)


# --- random plans -------------------------------------------------------------


def random_choice(
    traced: Profile, seed: int, *, save_share: float | None = None
) -> dict[Unit, Policy]:
    """Units that do not nest, each under a policy whose reruns have their inputs.

    Args:
        made: The profile.
        seed: Of the draws.
        save_share: Chance of saving each group; None draws one per unit.
    """
    draw = random.Random(seed)
    chosen: dict[Unit, Policy] = {}
    units = list(traced.candidates)
    draw.shuffle(units)
    for unit in units:
        free = not any(_nest(unit.call, other.call) for other in chosen)
        if free and draw.random() < 0.8:
            policy = random_policy(unit, draw.random(), save_share=save_share)
            if policy is not None:
                chosen[unit] = policy
    return chosen


def _nest(one: ModuleCall, other: ModuleCall) -> bool:
    return one.enter < other.exit and other.enter < one.exit


def random_policy(
    unit: Unit, seed: float, *, save_share: float | None = None
) -> Policy | None:
    """A policy, or None if something would have to be both saved and rerun."""
    draw = random.Random(seed)
    if isinstance(unit, Chain):
        parts = [
            policy and made_onward(block, policy)
            for block in unit.blocks
            for policy in [
                random_policy(block.unit, draw.random(), save_share=save_share)
            ]
        ]
        if None in parts:
            return None
        return Policy("".join(part.choices for part in parts if part))
    share = draw.random() if save_share is None else save_share
    problem = save_problem(unit)
    saved = [
        g not in problem.unsavable and draw.random() < share
        for g in range(problem.num_groups)
    ]
    while True:
        rerun = rerun_closure(problem, saved)
        forbidden = [g for g in problem.pinned if rerun[g]]
        if not forbidden:
            return Policy(spell(tuple(saved), rerun))
        if problem.unsavable.issuperset(forbidden):
            return None
        for g in forbidden:
            saved[g] = g not in problem.unsavable
