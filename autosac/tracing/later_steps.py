"""Steps before the one that is traced, if a model does not do the same in each.

Modules keep what they make for later ones, as a queue that fills. And what a step does
may depend on numbers in modules that each step changes, such as a count of steps: a
loss over a queue of embeddings looks at more of it with every step until it is full,
and a schedule begins in some step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import eq, ge
from typing import Any

import numpy as np
import torch

from autosac.quantities import format_bytes
from autosac.step.arguments import warn
from autosac.step.ledger import Ledger

MOST_EARLIER = 16  # steps before the one that is traced: a heuristic
_MOST_COVERED = 2  # kinds of steps beside the planned and the first one: a heuristic
_NOT_READ = "num_batches_tracked"  # of batch norms, but for the weight of an average


def num_until_full(kept_bytes: Sequence[int]) -> int:
    """Steps after which modules keep no more than before; 0, and said, if none are."""
    for number, (before, after) in enumerate(pairwise(kept_bytes), 1):
        if after <= before:
            return number
    more = format_bytes(kept_bytes[-1] - kept_bytes[-2])
    warn(
        f"Modules or the loss keep {more} more with every step, which is on top of the"
        " peak of later ones: empty what collects tensors after each step."
    )
    return 0


Numbers = dict[tuple[int, str], float]  # by addresses of modules, and names


def numbers_of(modules: Sequence[torch.nn.Module]) -> Numbers:
    """Plain numbers of modules, and those in buffers that are known."""
    return {
        (id(module), f"{type(module).__name__}.{name}"): value
        for module in modules
        if not type(module).__module__.startswith("torch.nn.")
        for name, value in [*vars(module).items(), *_counts_in_buffers(module)]
        if type(value) in (bool, int, float)
    }


def _counts_in_buffers(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, buffer in module.named_buffers(recurse=False):
        is_count = buffer.numel() == 1 and not buffer.is_floating_point()
        is_count &= name != _NOT_READ
        if is_count and type(buffer) is torch.Tensor and not buffer.is_meta:
            yield name, buffer.item()  # of fake ones nothing is known


def changed_number(before: Numbers, after: Numbers) -> str | None:
    """The name of a number that has changed; None if none has."""
    for key, value in after.items():
        was = before.get(key, value)
        if was != value and (was == was or value == value):  # NaN stays NaN
            return key[1]
    return None


@dataclass(frozen=True, slots=True)
class Allocations:
    """What one of the steps allocates.

    Attributes:
        nbytes: Size of each storage that it makes.
        live_bytes: Bytes alive at the birth of each, with what earlier steps have left.
    """

    nbytes: tuple[int, ...]
    live_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at an instant: nothing but a birth adds any."""
        return max(self.live_bytes, default=0)

    @property
    def order(self) -> tuple[int, int]:
        """By the peak, and if that is the same by all that it allocates."""
        return self.peak_bytes, sum(self.nbytes)

    def covers(self, other: Allocations) -> bool:
        """Whether it allocates the same at least, in order, with as much alive.

        Sizes may grow, as over a queue that fills, only if there are as many.
        """
        of_size = ge if len(self.nbytes) == len(other.nbytes) else eq
        own = zip(self.nbytes, self.live_bytes, strict=True)
        return all(
            any(of_size(ours[0], nbytes) and ours[1] >= live_bytes for ours in own)
            for nbytes, live_bytes in zip(other.nbytes, other.live_bytes, strict=True)
        )  # each is looked for behind the one before


def allocations_of_steps(ledger: Ledger, begins: Sequence[int]) -> list[Allocations]:
    """What each of some steps allocates.

    Args:
        ledger: All that they do, in the order of births.
        begins: The first storage of each step, and where the last one ends.
    """
    timeline = ledger.timeline()
    steps = []
    for first, stop in pairwise(begins):
        own = first + np.flatnonzero(ledger.born[first:stop])  # not what it only met
        columns = (ledger.nbytes[own], timeline.at(ledger.born[own]))
        steps.append(Allocations(*(tuple(column.tolist()) for column in columns)))
    return steps


def dearest(steps: Sequence[Allocations], begin: int, counts: str | None) -> list[int]:
    """Steps that differ, those of the highest peaks first, as steps that come before.

    The first of them is the one to plan, behind those in which queues fill. The very
    first step is none of them, as it is covered anyway. If there are more kinds, or
    the last of all differ, that is said.

    Args:
        steps: What each step allocates.
        begin: Steps before those to choose from.
        counts: The number by which they may differ, if there is one.
    """
    number = max(range(begin, len(steps)), key=lambda n: steps[n].order, default=begin)
    if counts and steps[-2].nbytes != steps[-1].nbytes:
        warn(
            f"`{counts}` changes with every step, and so does what a step allocates,"
            f" beyond the first {len(steps)}: later ones may take more than planned."
            " Plan with modules as they are late in the training."
        )
    kinds = [n for n in (number, 0) if n < len(steps)]
    for n in sorted(range(1, len(steps)), key=lambda n: steps[n].order, reverse=True):
        if not any(steps[kind].covers(steps[n]) for kind in kinds):
            kinds.append(n)
    others = kinds[2:]
    left = others[_MOST_COVERED:]
    if left:
        most = format_bytes(steps[left[0]].peak_bytes)
        warn(
            f"Of the first {len(steps)} steps, {len(left)} more do other things than"
            f" those that plans cover: they take up to {most} in forward and backward"
            f" ({format_bytes(steps[number].peak_bytes)} the planned one), which may be"
            " more than planned. Budget for that, or let fewer kinds of steps differ."
        )
    return [number, *others[:_MOST_COVERED]]
