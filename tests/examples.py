"""How many examples hypothesis draws.

A quarter of what is asked for, as all tests have ten minutes on two cores; without
the slow tests, a tenth.
"""

import pytest
from hypothesis import settings

DEFAULT = 100
_share = 0.25


def draw_fewer() -> None:
    """Called before the tests are collected, where slow ones are left out."""
    global _share
    _share = 0.1


def at_most(number: int) -> int:
    """Examples to draw in this run, where that many would be enough for long."""
    return max(3, round(number * _share))


def examples(number: int) -> settings:
    """Decorates a test that draws a share of so many examples."""
    return settings(max_examples=at_most(number))


def seeds(number: int) -> pytest.MarkDecorator:
    """Parametrizes `seed`: the first quarter of them, and at least two, are fast."""
    slow = pytest.mark.slow
    first = max(2, number // 4)
    return pytest.mark.parametrize(
        "seed",
        [pytest.param(n, marks=() if n < first else slow) for n in range(number)],
    )
