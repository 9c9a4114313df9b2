"""How many examples hypothesis draws: a fifth of them without the slow tests."""

import pytest
from hypothesis import settings

DEFAULT = 100
_share = 1.0


def draw_fewer() -> None:
    """Called before the tests are collected, where slow ones are left out."""
    global _share
    _share = 0.2


def at_most(number: int) -> int:
    """Examples to draw where a run of all tests draws that many."""
    return max(3, round(number * _share))


def examples(number: int) -> settings:
    """Decorates a test that draws so many examples with the slow tests."""
    return settings(max_examples=at_most(number))


def seeds(number: int) -> pytest.MarkDecorator:
    """Parametrizes `seed`: the first quarter of them, and at least two, are fast."""
    slow = pytest.mark.slow
    first = max(2, number // 4)
    return pytest.mark.parametrize(
        "seed",
        [pytest.param(n, marks=() if n < first else slow) for n in range(number)],
    )
