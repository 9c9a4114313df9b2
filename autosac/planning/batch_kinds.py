"""Which batches of a list or a `DataLoader` are planned for, and which others by them.

A trace takes seconds, and a text corpus has hundreds of lengths. So batches of one
*kind* (one signature, and padding or none) are traced once, and of many kinds only
some: a batch takes no more memory than one that is as large or larger everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from autosac.errors import ArgumentError
from autosac.pytrees import tensors_in
from autosac.tracing.batch_signatures import (
    BatchSignature,
    positional_names,
    signature_of,
)
from autosac.tracing.batches import batches_at, spread_batches
from autosac.tracing.stepping import normalize_inputs

MOST_KINDS = 16  # that are traced
_MOST_ALIKE = 32  # batches of a loader in a row that show no other kind


@dataclass(frozen=True, slots=True)
class Kind:
    """What batches have in common.

    Attributes:
        signature: Of each.
        constant: Which of their tensors of integers or flags hold one value only, in
            their order: a mask without padding is one, and models branch on that.
    """

    signature: BatchSignature
    constant: tuple[int, ...]

    def covers(self, other: Kind) -> bool:
        """Whether a plan for this kind keeps its budget for another one."""
        return self.constant == other.constant and self.signature.covers(
            other.signature
        )


@dataclass(slots=True)
class Bucket:
    """Batches that get one plan.

    Attributes:
        batch: One of the largest, as the model is called with.
        num_batches: How many of those that were looked at.
        signatures: Of all, that of `batch` first.
    """

    batch: Any
    num_batches: int
    signatures: list[BatchSignature] = field(default_factory=list)


def are_several(inputs: Any) -> bool:
    """Whether inputs stand for several batches."""
    return isinstance(inputs, (list, DataLoader))


def buckets(model: torch.nn.Module, inputs: Any) -> list[Bucket]:
    """The batches to plan for, largest first, with what they stand for.

    Args:
        model: Is called with them.
        inputs: A list of batches, or a loader, of whose epoch some are looked at.

    Raises:
        ArgumentError: There is none.
    """
    names = positional_names(model)
    is_list = isinstance(inputs, list)
    numbered = enumerate(inputs) if is_list else spread_batches(inputs)
    counts: dict[Kind, int] = {}
    numbers: dict[Kind, int] = {}
    alike = 0
    for number, batch in numbered:
        kind = _kind(batch, names)
        alike = alike + 1 if kind in counts else 0
        counts[kind] = counts.get(kind, 0) + 1
        numbers.setdefault(kind, number)
        if not is_list and alike == _MOST_ALIKE:
            break
    if not counts:
        raise ArgumentError(
            "`inputs` is an empty list: pass the batches to plan for, or one of them."
        )
    served = assign(counts, MOST_KINDS)
    wanted = {numbers[kind]: kind for kind in served}
    if is_list:
        batches: Iterable[tuple[int, Any]] = ((n, inputs[n]) for n in wanted)
    else:
        batches = batches_at(inputs, wanted)
    made = [_bucket(batch, served[wanted[n]], counts) for n, batch in batches]
    return sorted(made, key=lambda one: -one.signatures[0].num_elements)


def assign(counts: dict[Kind, int], most: int) -> dict[Kind, list[Kind]]:
    """Choose some kinds, and for every kind the one whose plan serves it.

    First those that no other covers, the largest first; then, one by one, the kind that
    spares batches most elements too many: a heuristic.

    Args:
        counts: How many batches there are of every kind.
        most: How many to choose.

    Returns:
        Chosen kind -> kinds that it serves, itself first. What nothing covers is left
        out: such a batch is an unseen one.
    """
    by_size = sorted(counts, key=lambda kind: -kind.signature.num_elements)
    if len(by_size) <= most:
        return {kind: [kind] for kind in by_size}
    tops = [
        kind
        for kind in by_size
        if not any(other is not kind and other.covers(kind) for other in by_size)
    ]
    chosen = tops[:most]
    while len(chosen) < most:
        rest = [kind for kind in by_size if kind not in chosen]
        chosen.append(max(rest, key=lambda kind: _spared(kind, chosen, counts)))
    served: dict[Kind, list[Kind]] = {kind: [kind] for kind in chosen}
    for kind in by_size:
        if kind not in served and (best := _smallest(kind, chosen)) is not None:
            served[best].append(kind)
    return served


def _smallest(kind: Kind, chosen: Sequence[Kind]) -> Kind | None:
    covering = [one for one in chosen if one.covers(kind)]
    return min(covering, key=lambda one: one.signature.num_elements, default=None)


def _spared(kind: Kind, chosen: Sequence[Kind], counts: dict[Kind, int]) -> int:
    """Elements that batches would be planned for in vain without a kind."""
    spared = 0
    for other, count in counts.items():
        present = _smallest(other, chosen)
        if present is not None and kind.covers(other):
            sizes = present.signature.num_elements, kind.signature.num_elements
            spared += count * max(0, sizes[0] - sizes[1])
    return spared


def _bucket(batch: Any, kinds: Sequence[Kind], counts: dict[Kind, int]) -> Bucket:
    signatures = list(dict.fromkeys(kind.signature for kind in kinds))
    return Bucket(batch, sum(counts[kind] for kind in kinds), signatures)


def _kind(batch: Any, names: tuple[str, ...]) -> Kind:
    args, kwargs = normalize_inputs(batch)
    tensors = [t for t in tensors_in((args, kwargs)) if not t.is_floating_point()]
    constant = tuple(
        place
        for place, tensor in enumerate(tensors)
        if not tensor.is_meta and tensor.numel() and _is_constant(tensor)
    )
    return Kind(signature_of(args, kwargs, names), constant)


def _is_constant(tensor: torch.Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())
