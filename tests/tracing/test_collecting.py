"""Python's collector, held back."""

import gc
import weakref

from autosac.tracing import collecting
from autosac.tracing.collecting import no_collections


class Record:
    """Part of a cycle, as profiles and what they keep are."""

    def __init__(self):
        self.itself = self


def test_what_is_no_longer_used_goes_once_it_piles_up(monkeypatch):
    monkeypatch.setattr(collecting, "_MANY", 1000)
    monkeypatch.setattr(collecting, "_survived", 0)
    monkeypatch.setattr(collecting, "_piled_up", 0)
    seen = []
    for _ in range(4):
        with no_collections():
            records = [Record() for _ in range(600)]
            seen.append(weakref.ref(records[0]))
            del records
            assert seen[-1]() is not None
    assert gc.isenabled()
    alive = [one() is not None for one in seen]
    assert alive == sorted(alive)  # the first ones go first
    assert sum(alive) <= 2
