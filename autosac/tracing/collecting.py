"""Python's cyclic garbage collector, held back where it is in the way."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_MANY = 2**20  # records that may pile up until those that are no longer used go

_frozen_by_others = False  # once seen: to count frozen objects takes long if there are
_piled_up = 0  # objects that were made where nothing was collected, since all were
_survived = 0  # objects that were left then


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Collect no cycles inside.

    A trace must see tensors die when their last reference goes, not later. And who
    makes many records that stay alive would have them all looked through, time after
    time. Afterwards these count as old: they have survived. Python does not count them
    among what may be worth a collection, so that is done here: once there are as many
    of them as there were objects.
    """
    global _frozen_by_others, _piled_up, _survived
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            _frozen_by_others = _frozen_by_others or gc.get_freeze_count() > 0
            if not _frozen_by_others:  # who froze objects wants them frozen
                _piled_up += gc.get_count()[0]
                if _piled_up > max(_MANY, _survived):
                    gc.collect()
                    _piled_up, _survived = 0, len(gc.get_objects())
                gc.freeze()
                gc.unfreeze()
            gc.enable()
