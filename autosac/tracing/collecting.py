"""Python's cyclic garbage collector, held back where it is in the way."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_frozen_by_others = False  # once seen: to count frozen objects takes long if there are


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Collect no cycles inside.

    A trace must see tensors die when their last reference goes, not later. And who
    makes many records that stay alive would have them all looked through, time after
    time. Afterwards these count as old: they have survived.
    """
    global _frozen_by_others
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            _frozen_by_others = _frozen_by_others or gc.get_freeze_count() > 0
            if not _frozen_by_others:  # who froze objects wants them frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
