"""The ledger: lifetimes turned into bytes."""

import numpy as np

from autosac.step.ledger import Ledger


def test_what_is_made_in_each_stream_adds_up_to_all():
    born, died, nbytes, stream = np.array(
        [(1, 4, 10, 0), (2, 3, 20, 2), (3, 5, 40, 0), (4, 6, 80, 2)], dtype=np.int64
    ).T
    whole = Ledger(
        born=born, died=died, nbytes=nbytes, end=7, constant_bytes=5, stream=stream
    )
    parts = whole.by_stream()
    # 10, then 10 + 40, then 40; and 20, then 0, then 80 in the other stream.
    assert [part.timeline().peak_bytes for part in parts] == [5 + 50, 80]
    assert whole.timeline().peak_bytes == 5 + 40 + 80
    alone = Ledger(born=born, died=died, nbytes=nbytes)
    assert alone.by_stream() == [alone]


def test_peak_is_that_of_the_timeline_whatever_happens_at_one_instant():
    draws = np.random.default_rng(0)
    for size in (1, 2, 3, 40, 400):
        # Few instants: many entries come and go at the same one, some at once.
        born, lasts = draws.integers(-2, 8, size), draws.integers(0, 6, size)
        ledger = Ledger(
            born=born,
            died=born + lasts,
            nbytes=draws.integers(0, 9, size),
            constant_bytes=int(draws.integers(0, 3)),
        )

        assert ledger.peak_bytes == ledger.timeline().peak_bytes
