"""Batches of a `DataLoader`, without touching what its user will get from it.

No iterator of the loader is made: that would draw from random generators, start
workers, or begin those anew that persist. A copy of its sampler says which samples a
batch has, and its dataset and `collate_fn` make the batch in this process.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from autosac.errors import ArgumentError
from autosac.step.random_streams import generators_kept, random_streams_kept

MOST_BATCHES = 512  # of a loader that are looked at
_LONGEST_EPOCH = 2**20  # batches; samplers may have no end


def first_batch(loader: DataLoader[Any]) -> Any:
    """What a loader would yield first.

    Random streams (PyTorch's, Python's and NumPy's, and generators that are attributes
    of the dataset) are left as they were found. Samplers that draw from them may
    therefore give other samples than the first ones of training.

    Args:
        loader: Over any dataset that can be read more than once.

    Raises:
        ArgumentError: The loader is empty; or its dataset is an iterator, of which a
            sample that is taken is gone.
    """
    return next(_kept(loader, lambda: _spread(loader, 1)))[1]


def spread_batches(loader: DataLoader[Any]) -> Iterator[tuple[int, Any]]:
    """Batches from all over an epoch with their numbers, 512 at most.

    The first one comes first, then the last one, then those that halve the largest
    gaps: samples may be sorted by length. Of an `IterableDataset` they come in order.
    Each is made when it is asked for.

    Args:
        loader: As in `first_batch`, like what is raised.
    """
    return _kept(loader, lambda: _spread(loader, _LONGEST_EPOCH))


def batches_at(
    loader: DataLoader[Any], numbers: Iterable[int]
) -> Iterator[tuple[int, Any]]:
    """Batches of these numbers, as in `spread_batches`."""
    wanted = sorted(numbers)
    return _kept(loader, lambda: _numbered(loader, lambda _: wanted, max(wanted) + 1))


def _kept(
    loader: DataLoader[Any], begin: Callable[[], Iterator[tuple[int, Any]]]
) -> Iterator[tuple[int, Any]]:
    """Batches that leave all random streams alone, also between two of them."""
    batches = None
    while True:
        with random_streams_kept(), generators_kept(_values(loader.dataset)):
            batches = begin() if batches is None else batches
            try:
                entry = next(batches)
            except StopIteration:
                return
        yield entry


def _spread(loader: DataLoader[Any], epoch: int) -> Iterator[tuple[int, Any]]:
    """Batches from all over the first ones of a loader."""
    if isinstance(loader.dataset, IterableDataset):
        stream = enumerate(_streamed(loader))
        batches: Iterator[tuple[int, Any]] = itertools.islice(stream, MOST_BATCHES)
    else:
        batches = _numbered(loader, halved, epoch)
    try:
        yield next(batches)
    except StopIteration:
        raise ArgumentError(
            "`inputs` is a DataLoader without a batch; its dataset is empty, or"
            " smaller than a batch and `drop_last` is set."
        ) from None
    yield from batches


def halved(length: int) -> Iterator[int]:
    """Numbers below a length: the first, the last, then halves of gaps; 512 at most."""
    size = min(length, MOST_BATCHES)
    places = [round(i * (length - 1) / max(size - 1, 1)) for i in range(size)]
    bits = max(size - 1, 1).bit_length()
    between = range(1, size - 1)
    order = sorted(between, key=lambda place: f"{place:0{bits}b}"[::-1])
    return (places[i] for i in [0, *([size - 1] if size > 1 else []), *order] if size)


def _numbered(
    loader: DataLoader[Any], choose: Callable[[int], Iterable[int]], epoch: int
) -> Iterator[tuple[int, Any]]:
    """Batches by their numbers, which are chosen by how many there are.

    Args:
        loader: Makes them.
        choose: Number of batches -> numbers of some, in any order.
        epoch: No more batches are counted.
    """
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        wanted = set(choose(0))
        stream = itertools.islice(_streamed(loader), epoch)
        yield from (entry for entry in enumerate(stream) if entry[0] in wanted)
        return
    # A copy of its own generators; the dataset, which may be large, is not copied.
    memo = {id(dataset): dataset}
    by_batch = loader.batch_sampler is not None
    sampler: Any = loader.batch_sampler if by_batch else loader.sampler
    sampler = copy.deepcopy(sampler, memo)
    samples = list(itertools.islice(sampler, epoch))
    for number in choose(len(samples)):
        indices = samples[number]
        if not by_batch:
            yield number, loader.collate_fn(dataset[indices])
        elif hasattr(dataset, "__getitems__"):
            yield number, loader.collate_fn(dataset.__getitems__(indices))
        else:
            yield number, loader.collate_fn([dataset[index] for index in indices])


def _streamed(loader: DataLoader[Any]) -> Iterator[Any]:
    """Batches of an `IterableDataset`."""
    dataset: Any = loader.dataset
    samples = iter(dataset)
    if samples is dataset:
        raise ArgumentError(
            f"`inputs` is a DataLoader over {type(samples).__name__}, which is its"
            " own iterator: a batch that is taken for planning would be missing in"
            " training. Pass a batch, or let `__iter__` return a new iterator."
        )
    if loader.batch_size is None:
        yield from map(loader.collate_fn, samples)
        return
    while batch := list(itertools.islice(samples, loader.batch_size)):
        if loader.drop_last and len(batch) < loader.batch_size:
            return
        yield loader.collate_fn(batch)


def _values(dataset: Any) -> list[Any]:
    """What a dataset holds, such as the generator of its augmentations."""
    return list(getattr(dataset, "__dict__", {}).values())
