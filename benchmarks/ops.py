"""Every op of PyTorch's own list in a step of its own: `python -m benchmarks.ops`.

Each entry of `op_db` in `torch.testing._internal.common_methods_invocations` that has a
backward pass in float32 makes a step: the tensors of its largest sample, times weights,
go through the op. The predicted peak of the plain step is held against the measured
one. Samples have sizes of 24, 40 and 64 instead of PyTorch's 5, 10 and 20, so that
tensors weigh more than numbers; those of entries with sizes of their own stay small.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.testing._internal import common_methods_invocations as listed
from torch.utils._pytree import tree_leaves, tree_map

import autosac
from benchmarks.environment import environment

RESULT = Path(__file__).parent / "results" / "ops.md"
SIZES = {"S": 24, "M": 40, "L": 64}  # for 5, 10 and 20
MOST_SAMPLES, MOST_NUMBERS = 12, 2**21
NEAR, NEAR_BYTES = 0.005, 4096  # what is off by less is exact enough


class Applies(nn.Module):
    """An op on tensors, those that train something times weights of one."""

    def __init__(self, op: Any, arguments: Any) -> None:
        super().__init__()
        self.op, self.arguments = op, tree_map(_placeholder, arguments)
        shapes = [t.shape for t in _tensors(arguments) if t.requires_grad]
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(s)) for s in shapes)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        given, weights = iter(tensors), iter(self.weights)

        def put(leaf: Any) -> Any:
            if not isinstance(leaf, _Placeholder):
                return leaf
            tensor = next(given)
            return tensor * next(weights) if leaf.trained else tensor

        first, args, kwargs = tree_map(put, self.arguments)
        loss = torch.zeros(())
        for leaf in tree_leaves(self.op(first, *args, **kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                parts = (
                    torch.view_as_real(leaf.resolve_conj())
                    if leaf.is_complex()
                    else leaf
                )
                loss = loss + parts.square().mean()
        return loss


@dataclass(frozen=True)
class _Placeholder:
    trained: bool


def _placeholder(leaf: Any) -> Any:
    is_tensor = isinstance(leaf, torch.Tensor)
    return _Placeholder(leaf.requires_grad) if is_tensor else leaf


def _tensors(arguments: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)]


@dataclass(frozen=True)
class Outcome:
    """What became of one entry.

    Attributes:
        verdict: ``exact``, ``said``, ``off``, ``refused`` or ``no sample``.
        predicted_bytes: Of the plain step.
        measured_bytes: Likewise.
        words: What planning warned of, or why it refused.
    """

    verdict: str
    predicted_bytes: int = 0
    measured_bytes: int = 0
    words: str = ""


def entries() -> list[Any]:
    """Those with a backward pass in float32."""
    return [
        op
        for op in listed.op_db
        if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    ]


def largest_sample(op: Any) -> Any:
    """Arguments of the largest sample that trains something; None without any."""
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=True)
    usable = islice(filter(_is_usable, map(_arguments, samples)), MOST_SAMPLES)
    return max(usable, key=_trained_numbers, default=None)


def _arguments(sample: Any) -> tuple[Any, ...]:
    return sample.input, sample.args, sample.kwargs


def _is_usable(arguments: tuple[Any, ...]) -> bool:
    is_dense = all(t.layout is torch.strided for t in _tensors(arguments))
    return is_dense and 0 < _trained_numbers(arguments) <= MOST_NUMBERS


def _trained_numbers(arguments: tuple[Any, ...]) -> int:
    return sum(t.numel() for t in _tensors(arguments) if t.requires_grad)


def judged(op: Any) -> Outcome:
    """Predict the peak of an op's step, and measure it."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = largest_sample(op)
    if arguments is None:
        return Outcome("no sample")
    tensors = tuple(t.detach().clone() for t in _tensors(arguments))
    options: dict[str, Any] = {"loss_fn": lambda loss: loss}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            profile = autosac.profile(Applies(op, arguments), tensors, **options)
            profile = autosac.calibrate(profile, progress=False)
            peak_bytes = profile.baseline_peak_bytes
            said = [str(w.message) for w in caught if "real step" in str(w.message)]
            done = autosac.verify(
                autosac.plan(profile, memory_budget=peak_bytes, dry_run=False),
                lambda: Applies(op, arguments),
                lambda: tensors,
                timing_rounds=0,
                **options,
            )
        except autosac.errors.AutosacError as error:
            return Outcome("refused", words=str(error).replace(f"{Path.cwd()}/", ""))
    measured_bytes = done.baseline_peak_bytes
    off_bytes = abs(peak_bytes - measured_bytes)
    verdict = "exact"
    if off_bytes > max(NEAR * measured_bytes, NEAR_BYTES):
        verdict = "said" if said else "off"
    return Outcome(verdict, peak_bytes, measured_bytes, " ".join(said))


def name_of(op: Any) -> str:
    """Its name with that of its variant."""
    return ".".join(filter(None, (op.name, op.variant_test_name)))


def page(outcomes: dict[str, Outcome]) -> str:
    """The results as Markdown."""
    counts = Counter(outcome.verdict for outcome in outcomes.values())
    ran = [o for o in outcomes.values() if o.measured_bytes]
    where = ", ".join(f"{key} {value}" for key, value in environment().items())
    large = sum(o.measured_bytes >= 2**14 for o in ran)
    lines = [
        "# Ops: predicted and measured peaks",
        "",
        f"`python -m benchmarks.ops`: {where}.",
        "",
        "Every entry of PyTorch's `op_db` with a backward pass in float32, in a step of"
        " its own.",
        "",
        f"{len(outcomes)} entries; {len(ran)} ran, {large} of them took 16 KiB or more:"
        f" the predicted peak of {counts['exact']} is within 0.5 % or 4 KiB of the"
        f" measured one, {counts['said']} are farther off and planning says so,"
        f" {counts['off']} are farther off in silence. {counts['refused']} are refused,"
        f" {counts['no sample']} have no sample that trains a dense tensor.",
        "",
        "| op | predicted | measured | | what planning says |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for name, outcome in outcomes.items():
        if outcome.verdict in ("said", "off"):
            error = outcome.predicted_bytes / outcome.measured_bytes - 1
            lines.append(
                f"| {name} | {outcome.predicted_bytes:,} | {outcome.measured_bytes:,}"
                f" | {error:+.1%} | {outcome.words or '**nothing**'} |"
            )
        elif outcome.verdict == "refused":
            lines.append(f"| {name} | | | refused | {outcome.words[:160]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Judge all entries, or those that are named, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops")
    parser.add_argument("--ops", type=lambda text: text.split(","), help="default: all")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    vars(listed).update(SIZES)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the list is large, and measuring looks for garbage time and again
    outcomes = {}
    for op in entries():
        if options.ops and op.name not in options.ops:
            continue
        outcome = outcomes[name_of(op)] = judged(op)
        numbers = f"{outcome.predicted_bytes} {outcome.measured_bytes}"
        print(outcome.verdict, name_of(op), numbers, outcome.words[:160], flush=True)
        gc.collect()
    options.output.write_text(page(outcomes))


if __name__ == "__main__":
    main()
