"""Steps before the one that is traced, if a model does not do the same in each.

Modules keep what they make for later ones, as a queue that fills. And what a step does
may depend on numbers in modules that each step changes, such as a count of steps: a
loss over a queue of embeddings looks at more of it with every step until it is full,
and a schedule begins in some step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from autosac.quantities import format_bytes
from autosac.step.arguments import warn

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


def dearest(
    made_bytes: Sequence[Sequence[int]], begin: int, counts: str | None
) -> list[int]:
    """Steps that differ, those that allocate most first, as steps that come before.

    The first of them is the one to plan, behind those in which queues fill. The very
    first step is none of them. If the last of all differ, that is said.

    Args:
        made_bytes: Sizes of all that each step allocates.
        begin: Steps before those to choose from.
        counts: The number by which they may differ, if there is one.
    """
    sums = [sum(sizes) for sizes in made_bytes]
    number = max(range(begin, len(sums)), key=sums.__getitem__, default=begin)
    if counts and made_bytes[-2] != made_bytes[-1]:
        warn(
            f"`{counts}` changes with every step, and so does what a step allocates,"
            f" beyond the first {len(sums)}: later ones may take more than planned."
            " Plan with modules as they are late in the training."
        )
    kinds = {tuple(made_bytes[n]): n for n in reversed(range(1, len(sums)))}
    planned = made_bytes[number] if number < len(sums) else ()
    kinds.pop(tuple(planned), None)
    others = sorted(kinds.values(), key=sums.__getitem__, reverse=True)
    return [number, *others[:_MOST_COVERED]]
