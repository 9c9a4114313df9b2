"""How many batches a loader of Accelerate holds besides the one that it gave."""

from __future__ import annotations

from typing import Any


def num_batches_ahead(loader: Any, *, on_cpu: bool, num_processes: int) -> int:
    """Batches that are held where the model lies, besides that of the step.

    Args:
        loader: What ``accelerator.prepare`` made of a loader.
        on_cpu: Whether the model lies there: a batch is moved when its step begins.
        num_processes: How many share the batches.

    Source:
        accelerate 1.15, data_loader.py: `DataLoaderShard.__iter__` fetches one ahead;
        for `DataLoaderDispatcher` the first process fetches a batch for each, joins and
        slices them.
    """
    kinds = {kind.__name__ for kind in type(loader).__mro__}
    joined = 2 * num_processes if "DataLoaderDispatcher" in kinds else 0
    return int(on_cpu) + joined
