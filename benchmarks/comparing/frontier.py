"""Real frontiers on three models that other systems were measured on earlier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import autosac
from autosac.cli import demo
from autosac.step.training_step import normalize_inputs
from autosac.storages import storage_bytes
from autosac.verification.recipes import Recipe
from benchmarks.comparing.profiles import budget_at
from benchmarks.comparing.timing import measure
from benchmarks.environment import MIB
from benchmarks.models import language, vision
from benchmarks.rivals import published
from benchmarks.rivals.checkpointing import every_block

NOISE = 0.06  # of the published times, and about that of ours
ROUNDING = 0.001  # of the published peaks: three or four digits
Record = dict[str, Any]
_VOCABULARY, _BATCH, _LENGTH = 4096, 4, 512  # of the GPT


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that others were measured on.

    Attributes:
        name: For tables.
        make_model: Builds it.
        make_inputs: Makes its batch.
        loss_fn: Output -> scalar, None for the output's own.
        accumulate: 2 if gradients are there beforehand and do not count.
        points: What others reached.
        eager_bytes: Peak of the plain step there, above parameters and inputs; None
            if it is not known.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_inputs: Callable[[], Any]
    loss_fn: Callable[[Any], torch.Tensor] | None
    accumulate: int
    points: Sequence[published.Point]
    eager_bytes: int | None


class _Reduced(nn.Module):
    """Returns one number, so that nobody keeps the logits until backward is done."""

    def __init__(self, model: nn.Module, reduce: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.reduce = reduce

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.reduce(self.model(*args, **kwargs))


class _GPTWithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = demo.GPT(
            num_layers=8,
            width=512,
            num_heads=8,
            vocabulary=_VOCABULARY,
            length=_LENGTH,
            dropout=0.0,
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.gpt(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _gpt() -> _GPTWithLoss:
    torch.manual_seed(0)
    return _GPTWithLoss()


def _tokens_and_targets() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(_VOCABULARY, (_BATCH, _LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _itself(loss: torch.Tensor) -> torch.Tensor:
    return loss


def subjects() -> dict[str, Subject]:
    """The three models, with a loss or alone, by command-line name."""
    llama = language.llama(
        layers=6, width=512, heads=8, vocabulary=4096, batch=4, length=512
    )
    resnet = vision.resnet50(batch=8, pixels=128)
    return {
        "gpt": Subject(
            name="GPT, 8 blocks of width 512",
            make_model=_gpt,
            make_inputs=_tokens_and_targets,
            points=published.GPT,
            eager_bytes=published.GPT_EAGER_BYTES,
            loss_fn=_itself,
            accumulate=1,
        ),
        "llama": Subject(
            name="Llama, 6 blocks of width 512",
            make_model=lambda: _Reduced(llama.make_model(), lambda out: out.loss),
            make_inputs=llama.make_inputs,
            points=published.LLAMA,
            eager_bytes=published.LLAMA_EAGER_BYTES,
            loss_fn=_itself,
            accumulate=1,
        ),
        "gpt-alone": Subject(
            name="GPT without its loss",
            make_model=lambda: _Reduced(_gpt().gpt, torch.sum),
            make_inputs=lambda: _tokens_and_targets()[:1],
            points=published.GPT_ALONE,
            eager_bytes=None,
            loss_fn=_itself,
            accumulate=2,
        ),
        "llama-alone": Subject(
            name="Llama without its loss",
            make_model=lambda: _Reduced(
                llama.make_model(), lambda out: out.logits.sum()
            ),
            make_inputs=lambda: {"input_ids": llama.make_inputs()["input_ids"]},
            points=published.LLAMA_ALONE,
            eager_bytes=None,
            loss_fn=_itself,
            accumulate=2,
        ),
        "resnet50": Subject(
            name="ResNet-50, batch 8 at 128 px",
            make_model=resnet.make_model,
            make_inputs=resnet.make_inputs,
            loss_fn=torch.sum,
            accumulate=2,
            points=published.RESNET50,
            eager_bytes=published.RESNET50_EAGER_BYTES,
        ),
    }


def run(name: str, num_budgets: int, rounds: int) -> Record:
    """Plan at every published peak and at budgets between; measure all of them."""
    subject = subjects()[name]
    torch.manual_seed(0)
    model, inputs = subject.make_model(), subject.make_inputs()
    traced = autosac.calibrate(
        autosac.profile(
            model, inputs, loss_fn=subject.loss_fn, accumulate=subject.accumulate
        ),
        refresh=True,  # cached times may be those of a busy machine
        progress=False,
    )
    held = _held_bytes(model, inputs, subject.accumulate)
    low, high = autosac.floor(traced), traced.baseline_peak_bytes
    scale = _scale(high - held, subject.eager_bytes)
    targets = [
        held + int(point.peak_bytes * scale)
        for point in subject.points
        if point.time_ratio is not None
    ]
    budgets = {budget_at(traced, k / num_budgets) for k in range(num_budgets)}
    budgets |= {target for target in targets if low <= target < high}
    plans = [autosac.plan(traced, memory_budget=budget) for budget in sorted(budgets)]
    recipe = Recipe(
        make_model=subject.make_model,
        make_inputs=subject.make_inputs,
        loss_fn=subject.loss_fn,
        steps=1,
        accumulate=subject.accumulate,
    )
    measured = measure(plans, recipe, rounds)
    step_ms = traced.baseline_ms
    return {
        "model": name,
        "title": subject.name,
        "eager_bytes": high - held,
        "their_eager_bytes": subject.eager_bytes,
        "floor_bytes": low - held,
        "every_block_bytes": traced.peak_bytes(every_block(traced)) - held,
        "ours": [
            {
                "budget_bytes": plan.budget_bytes - held,
                "predicted_bytes": plan.peak_bytes - held,
                "measured_bytes": seen.measured_peak_bytes - held,
                "predicted_ratio": 1 + plan.recompute_ms / step_ms,
                "time_ratio": ratio,
                "identical": seen.identical,
            }
            for plan, (seen, ratio) in zip(plans, measured, strict=True)
        ],
        "published": [
            {
                "system": point.system,
                "peak_bytes": point.peak_bytes,
                "time_ratio": point.time_ratio,
            }
            for point in subject.points
        ],
    }


def _held_bytes(model: nn.Module, inputs: Any, accumulate: int) -> int:
    """What does not count: parameters, buffers, inputs, earlier gradients."""
    args, kwargs = normalize_inputs(inputs)
    leaves = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    parameters = storage_bytes(model.parameters())
    held = parameters + storage_bytes([*model.buffers(), *leaves])
    return held + (parameters if accumulate > 1 else 0)


def _scale(eager_bytes: int, their_eager_bytes: int | None) -> float:
    """What to multiply their peaks by: below 1 if our model is lighter than theirs."""
    if their_eager_bytes is None:
        return 1.0
    return min(1.0, eager_bytes / their_eager_bytes)


def verdict(model: Record, point: Record) -> str:
    """Where our measured frontier lies from one published point."""
    scale = _scale(model["eager_bytes"], model["their_eager_bytes"])
    peak_bytes, ratio = point["peak_bytes"] * scale, point["time_ratio"]
    most = peak_bytes * (1 + ROUNDING)
    within = [cell for cell in model["ours"] if cell["measured_bytes"] <= most]
    if peak_bytes >= model["eager_bytes"]:
        return "below: the plain step needs no more"
    if not within:
        return f"**above**: our floor is {model['floor_bytes'] / MIB:.1f} MiB"
    best = min(within, key=lambda cell: cell["time_ratio"])
    ours = f"x{best['time_ratio']:.2f} at {best['measured_bytes'] / MIB:.1f} MiB"
    if ratio is None:
        return f"ours {ours}; its time was not measured"
    if best["time_ratio"] <= ratio:
        return f"below: {ours}"
    if best["time_ratio"] <= ratio * (1 + NOISE):
        return f"on it, within noise: {ours}"
    return f"**above**: {ours}"


def page(record: Record) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Frontiers on the models that others were measured on\n"
    yield (
        "Peaks above parameters and inputs, by the allocator's events; our times are"
        " CPU time over the plain step's, medians of rounds."
        " The others' figures were measured earlier on two CPU cores of one machine"
        " (`benchmarks/rivals/published.py`), times good to about 6 %. GPT and Llama:"
        " forward, loss and backward, gradients count. Without loss, and ResNet-50:"
        " the module alone, gradients are there beforehand. Their models are rebuilt"
        " from descriptions that do not tell how wide Llama's MLP is, nor who keeps the"
        " logits (here nobody does). Where the plain step needs less here than there,"
        " our frontier has to meet their peaks scaled down by as much.\n"
    )
    for model in record["models"]:
        yield f"\n### {model['title']}\n"
        theirs = model["their_eager_bytes"]
        scale = _scale(model["eager_bytes"], theirs)
        yield (
            f"The plain step peaks at {model['eager_bytes'] / MIB:.1f} MiB here,"
            f" {'not known' if theirs is None else f'{theirs / MIB:.1f} MiB'} where the"
            " others were measured"
            f"{f': their peaks count times {scale:.3f}' if scale < 1 else ''}. Every"
            f" block checkpointed: {model['every_block_bytes'] / MIB:.1f} MiB here. Our"
            f" floor: {model['floor_bytes'] / MIB:.1f} MiB.\n"
        )
        yield "| budget MiB | predicted MiB | real MiB | predicted time | time | bits |"
        yield "|" + " ---: |" * 6
        for cell in model["ours"]:
            yield (
                f"| {cell['budget_bytes'] / MIB:.1f} |"
                f" {cell['predicted_bytes'] / MIB:.1f} |"
                f" {cell['measured_bytes'] / MIB:.1f} |"
                f" x{cell['predicted_ratio']:.2f} | x{cell['time_ratio']:.2f} |"
                f" {'identical' if cell['identical'] else '**differ**'} |"
            )
        yield "\n| system | peak MiB | time | our frontier |"
        yield "| --- | ---: | ---: | --- |"
        for point in model["published"]:
            ratio = point["time_ratio"]
            yield (
                f"| {point['system']} | {point['peak_bytes'] / MIB:.1f} |"
                f" {'?' if ratio is None else f'x{ratio:.2f}'} |"
                f" {verdict(model, point)} |"
            )
        where = ", ".join(f"{k} {v}" for k, v in model["environment"].items())
        yield f"\n{model['rounds']} rounds: {where}."
