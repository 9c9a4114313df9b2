"""Which batches of a list or a `DataLoader` are planned for, and which others by them.

A trace takes seconds, and a text corpus has hundreds of lengths. So batches of one
*kind* (one signature, and padding or none) are traced once, and of many kinds only
some: a batch takes no more memory than one that is as large or larger everywhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from autosac.errors import ArgumentError
from autosac.pytrees import tensors_in
from autosac.step.batch_signatures import BatchSignature, positional_names, signature_of
from autosac.step.batches import batches_at, spread_batches
from autosac.step.training_step import normalize_inputs

MOST_KINDS = 16  # that are traced
_MOST_ALIKE = 32  # batches of a loader in a row that show no other kind


@dataclass(frozen=True, slots=True)
class Kind:
    """A batch kind: the signature and constants that its batches have in common.

    Attributes:
        signature: Of each.
        constant: Which of their tensors of integers or flags hold one value only, in
            their order: a mask without padding is one, and models branch on that.
    """

    signature: BatchSignature
    constant: tuple[int, ...]


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
    buckets = []
    for number, batch in batches:
        kinds = served[wanted[number]]
        signatures = list(dict.fromkeys(kind.signature for kind in kinds))
        buckets.append(Bucket(batch, sum(map(counts.__getitem__, kinds)), signatures))
    return sorted(buckets, key=lambda one: -one.signatures[0].num_elements)


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
    kinds = sorted(counts, key=lambda kind: -kind.signature.num_elements)
    if len(kinds) <= most:
        return {kind: [kind] for kind in kinds}
    elements = np.array([float(kind.signature.num_elements) for kind in kinds])
    weights = np.array([counts[kind] for kind in kinds])
    covers = _covers(kinds)
    # Of kinds that are equal in size one is enough; none of these is equal otherwise.
    tops = np.flatnonzero(covers.sum(axis=0) == 1)
    chosen = [int(top) for top in tops[:most]]
    # Elements of the smallest chosen kind that covers each.
    follows = np.where(covers[chosen], elements[chosen, None], np.inf).min(axis=0)
    while len(chosen) < most:
        too_many = np.where(np.isfinite(follows), follows - elements[:, None], 0.0)
        spared = (weights * np.where(covers, too_many, 0.0).clip(min=0.0)).sum(axis=1)
        spared[chosen] = -1.0
        best = int(spared.argmax())
        chosen.append(best)
        own = np.where(covers[best], elements[best], np.inf)
        follows = np.minimum(follows, own)
    served: dict[Kind, list[Kind]] = {kinds[i]: [kinds[i]] for i in chosen}
    for place, kind in enumerate(kinds):
        covering = [i for i in chosen if covers[i, place]]
        if kind not in served and covering:
            served[kinds[min(covering, key=lambda i: elements[i])]].append(kind)
    return served


def _covers(kinds: Sequence[Kind]) -> npt.NDArray[np.bool_]:
    """Whether the kind of a row covers that of a column."""
    covers = np.zeros((len(kinds), len(kinds)), dtype=bool)
    alike: dict[Hashable, list[int]] = {}
    for place, kind in enumerate(kinds):
        alike.setdefault((kind.constant, kind.signature.form), []).append(place)
    for places in alike.values():
        sizes = np.array([kinds[place].signature.sizes for place in places])
        sizes = sizes.reshape(len(places), -1)
        covers[np.ix_(places, places)] = (sizes[:, None] >= sizes).all(axis=2)
    return covers


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
