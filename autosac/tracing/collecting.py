"""Python's cyclic garbage collector, held back where it is in the way."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Collect no cycles inside.

    A trace must see tensors die when their last reference goes, not later. And who
    makes many records that stay alive would have them all looked through, time after
    time. Afterwards these count as old: they have survived.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if not gc.get_freeze_count():  # else who froze objects wants them frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
