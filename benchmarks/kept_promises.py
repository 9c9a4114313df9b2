"""Plans that ranks have run, held against what they promise: caps, peaks, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

import autosac
from benchmarks.environment import MIB, environment

LINKS = "pcie-l40s"  # the cluster that ranks on the CPU borrow their links from
NUM_STEPS = 7  # of which the first is not measured
LARGEST_ERROR = 0.01
LARGEST_DIFFERENCE = 1e-5  # of gradients, relative to the largest element of any
SHARES = (0.03, 0.3, 0.7)  # of the way from the least peak to the fastest plan's
KINDS = ("tensor", "sequence")
EXPERT = "expert"  # the kind whose ranks have whole experts of a mixture
LOSS = "sequence and loss"  # the kind whose logits stay divided over the vocabulary
GIVEN = "given"  # the kind that leaves a vocabulary whole, which may be odd
# Of that kind: the layers of the blocks of `rank_models`.
_STYLES = {
    **{f"h.*.attn.{name}_proj": "colwise" for name in "qkv"},
    "h.*.attn.out_proj": "rowwise",
    "h.*.mlp.0": "colwise",
    "h.*.mlp.2": "rowwise",
}
_INFINITE = 2**40
TRUTH = f"within {LARGEST_DIFFERENCE:.0e} of one process that holds all"


def divided_by(kind: str) -> dict[str, Any]:
    """Options of plans of a kind."""
    if kind == GIVEN:
        return {"tp_plan": _STYLES}
    tp_plan = "sequence" if kind == LOSS else kind
    return {"tp_plan": tp_plan or None, "loss_parallel": kind == LOSS}


class AnyPlan(Protocol):
    """A plan for many ranks."""

    @property
    def highest_peak_bytes(self) -> int:
        """Predicted peak with all that slow threads of gloo may hold."""


_Plan = TypeVar("_Plan", bound=AnyPlan)


def under_caps(
    make_plan: Callable[[int], _Plan], shares: Sequence[float] = SHARES
) -> Iterator[_Plan]:
    """Plans under caps between the least peak and the fastest plan's.

    Args:
        make_plan: Cap in bytes -> the plan.
        shares: Of the way there; by default near the least peak and two between.
    """
    fastest = make_plan(_INFINITE)
    try:
        make_plan(2**10)
    except autosac.InfeasibleBudgetError as error:
        least_bytes = error.lowest_peak_bytes
    between = fastest.highest_peak_bytes - least_bytes
    for share in shares:
        yield make_plan(int(least_bytes + share * between))


class RankPeaks(Protocol):
    """What a rank measured."""

    @property
    def peaks(self) -> list[int]:
        """The most it held in each step but the first."""

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the first step, by name, whole."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the ranks of one plan did.

    Attributes:
        label: What ran, by column of the table.
        cap: On the peak of a rank, in bytes.
        predicted: Peak of each stage's ranks.
        late_bytes: What slow threads of gloo may hold besides.
        peaks: The least of the measured steps, by rank: all do the same, and slow
            threads only add.
        highest_bytes: The most in any step of any rank.
        loss_difference: Largest relative one to one process,
        gradient_difference: and of gradients, relative to the largest element of any.
        most_error: The most that a prediction may be above,
        most_difference: and losses and gradients may differ.
    """

    label: dict[str, str]
    cap: int
    predicted: tuple[int, ...]
    late_bytes: int
    peaks: tuple[int, ...]
    highest_bytes: int
    loss_difference: float
    gradient_difference: float
    most_error: float = LARGEST_ERROR
    most_difference: float = LARGEST_DIFFERENCE

    @property
    def errors(self) -> list[float]:
        """Of the prediction, rank by rank."""
        of_stage = len(self.peaks) // len(self.predicted)
        return [
            self.predicted[rank // of_stage] / peak - 1
            for rank, peak in enumerate(self.peaks)
        ]

    @property
    def is_kept(self) -> bool:
        """Whether every promise is."""
        return (
            self.highest_bytes <= self.cap
            and all(0 <= error <= self.most_error for error in self.errors)
            and self.loss_difference <= self.most_difference
            and self.gradient_difference <= self.most_difference
        )

    @property
    def cells(self) -> dict[str, str]:
        """Its line of the table."""
        of_stage = len(self.peaks) // len(self.predicted)
        starts = range(0, len(self.peaks), of_stage)
        return {
            **self.label,
            "cap": _mib(self.cap),
            "predicted": _mib(*self.predicted),
            "measured": _mib(*(max(self.peaks[i : i + of_stage]) for i in starts)),
            "error": f"{max(self.errors, key=abs):+.4%}",
            "late": _mib(self.late_bytes),
            "highest": _mib(self.highest_bytes),
            "losses": f"{self.loss_difference:.1e}",
            "gradients": f"{self.gradient_difference:.1e}",
            "kept": "yes" if self.is_kept else "NO",
        }


def _mib(*numbers: int) -> str:
    return ", ".join(f"{number / MIB:.3f}" for number in numbers)


def differences(
    results: Sequence[RankPeaks],
    losses: Iterable[tuple[float, float]],
    gradients: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """What ranks measured, held against one process; parts of an `Outcome`.

    Args:
        results: Of each rank.
        losses: Pairs of theirs and that process's.
        gradients: Of that process.
    """
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert {name for result in results for name in result.gradients} == set(gradients)
    return {
        "peaks": tuple(min(result.peaks) for result in results),
        "highest_bytes": max(max(result.peaks) for result in results),
        "loss_difference": max(abs(loss / truth - 1) for loss, truth in losses),
        "gradient_difference": max(
            float((gradient - gradients[name]).abs().max()) / scale
            for result in results
            for name, gradient in result.gradients.items()
        ),
    }


def write_table(
    path: Path,
    title: str,
    rows: Sequence[Outcome],
    *notes: str,
    truth: str = TRUTH,
) -> bool:
    """Write a table of rows, and of those that it had of other models.

    Args:
        path: The file.
        title: What they were.
        rows: How plans did.
        notes: Paragraphs besides.
        truth: What losses and gradients are.

    Returns:
        Whether every promise of these rows is kept.
    """
    own = [row.cells for row in rows]
    models = {cells["model"] for cells in own}
    others = [cells for cells in _cells_of(path) if cells["model"] not in models]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_page(title, [*others, *own], *notes, truth=truth))
    return all(row.is_kept for row in rows)


def _cells_of(path: Path) -> list[dict[str, str]]:
    """Lines of a table that was written."""
    text = path.read_text() if path.exists() else ""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    heads, *rows = [line.strip("|").strip(" ").split(" | ") for line in lines] or [[]]
    return [dict(zip(heads, row, strict=True)) for row in rows]


def _page(title: str, rows: Sequence[dict[str, str]], *notes: str, truth: str) -> str:
    num_kept = sum(row["kept"] == "yes" for row in rows)
    heads = list(rows[0])
    lines = [
        f"# {title}: caps, predicted and measured peaks",
        "",
        f"{num_kept} of {len(rows)} plans keep every promise: no rank above its cap in"
        " any step, none above its prediction nor below it by over"
        f" {LARGEST_ERROR:.0%}, losses and gradients {truth}.",
        "",
        "Peaks in MiB. *measured*: what the allocator held at most, on all threads, in"
        f" the step of {NUM_STEPS - 1} in which threads of gloo were least late;"
        " *highest*: the most in any step of any rank; *error*: of the prediction, at"
        " the rank where it is largest.",
        *(line for note in notes for line in ("", note)),
        "",
        "Machine and load are those of the rows that were written last.",
        "",
        "```",
        *(f"{key}: {value}" for key, value in environment().items()),
        "```",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *(f"| {' | '.join(row.values())} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"
