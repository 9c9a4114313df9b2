"""The first batch of a `DataLoader`, without touching what its user will get from it.

No iterator of the loader is made: that would draw from random generators, start
workers, or begin those anew that persist. A copy of its sampler says which samples come
first, and its dataset and `collate_fn` make the batch in this process.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from autosac.tracing.random_streams import random_streams_kept


def first_batch(loader: DataLoader[Any]) -> Any:
    """What a loader would yield first.

    Random streams (PyTorch's, Python's and NumPy's, and generators that are attributes
    of the dataset) are left as they were found. Samplers that draw from them may
    therefore give other samples than the first ones of training.

    Args:
        loader: Over any dataset that can be read more than once.

    Raises:
        ValueError: The loader is empty; or its dataset is an iterator, of which a
            sample that is taken is gone.
    """
    with random_streams_kept(), _own_streams_kept(loader.dataset):
        try:
            return _first(loader)
        except StopIteration:
            raise ValueError(
                "`inputs` is a DataLoader without a batch; its dataset is empty, or"
                " smaller than a batch and `drop_last` is set."
            ) from None


def _first(loader: DataLoader[Any]) -> Any:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        samples = iter(dataset)
        if samples is dataset:
            raise ValueError(
                f"`inputs` is a DataLoader over {type(dataset).__name__}, which is its"
                " own iterator: a batch that is taken for planning would be missing in"
                " training. Pass a batch, or let `__iter__` return a new iterator."
            )
        if loader.batch_size is None:
            return loader.collate_fn(next(samples))
        batch = list(itertools.islice(samples, loader.batch_size))
        if not batch or (loader.drop_last and len(batch) < loader.batch_size):
            raise StopIteration
        return loader.collate_fn(batch)
    # A copy of its own generators; the dataset, which may be large, is not copied.
    memo = {id(dataset): dataset}
    if loader.batch_sampler is None:
        index = next(iter(copy.deepcopy(loader.sampler, memo)))
        return loader.collate_fn(dataset[index])
    indices = next(iter(copy.deepcopy(loader.batch_sampler, memo)))
    if hasattr(dataset, "__getitems__"):
        return loader.collate_fn(dataset.__getitems__(indices))
    return loader.collate_fn([dataset[index] for index in indices])


@contextlib.contextmanager
def _own_streams_kept(dataset: Any) -> Iterator[None]:
    """Restore the generators that a dataset draws its augmentations from."""
    restore: list[Callable[[], object]] = []
    for value in vars(dataset).values() if hasattr(dataset, "__dict__") else ():
        if isinstance(value, torch.Generator):
            restore.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            restore.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.RandomState):
            restore.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            restore.append(partial(setattr, bits, "state", bits.state))
    try:
        yield
    finally:
        for put_back in restore:
            put_back()
