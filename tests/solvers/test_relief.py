"""What units elsewhere take away at most, and the rows that follow from it."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autosac.solvers.sac.relief import elsewhere

_POINTS = 2  # of each unit


@st.composite
def _forests(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Unit around each unit, and what each point of each unit adds."""
    num_units = draw(st.integers(1, 5))
    parents = [draw(st.integers(-1, u - 1)) for u in range(num_units)]
    size = num_units * _POINTS
    row = draw(st.lists(st.integers(-9, 9), min_size=size, max_size=size))
    return parents, row


def _path(parents: list[int], u: int) -> list[int]:
    path = []
    while u >= 0:
        path.append(u)
        u = parents[u]
    return path


def _most_elsewhere(parents: list[int], row: list[int], u: int) -> int:
    """By trying every choice without units around and inside a unit."""
    paths = [_path(parents, v) for v in range(len(parents))]
    apart = [v for v, path in enumerate(paths) if u not in path and v not in paths[u]]
    most = 0
    for points in product((None, *range(_POINTS)), repeat=len(apart)):
        chosen = {v: k for v, k in zip(apart, points, strict=True) if k is not None}
        if any(outer in chosen for v in chosen for outer in paths[v][1:]):
            continue
        most = max(most, -sum(row[v * _POINTS + k] for v, k in chosen.items()))
    return most


@given(forest=_forests())
def test_what_others_take_away_matches_trying_every_choice(
    forest: tuple[list[int], list[int]],
) -> None:
    parents, row = forest
    first = [_POINTS * u for u in range(len(parents) + 1)]

    most = elsewhere(np.array(row), first, parents)

    units = range(len(parents))
    assert most.tolist() == [_most_elsewhere(parents, row, u) for u in units]
