"""What units take away from the live memory at a position at most.

A unit that is chosen needs the others' help where memory is scarce: at a position q

    sum_k a_qk z_k <= (P - B_q + r_q) y        with z, y of one unit               (*)

if r_q is what all units but those around and inside it take away there at most. The
row of q says so of y = 1 only; where units are chosen in part, each of them seems to
need but a part of that help, and relaxations mix units that no choice can have at all.
(*) is the perspective reformulation of that row (Guenluek and Linderoth 2010,
Mathematical Programming 124), with the others at their best.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .holds import Ints


def elsewhere(row: Ints, first: Sequence[int], parents: Sequence[int]) -> Ints:
    """What units neither around nor inside each unit take away at most.

    Args:
        row: What each column adds at the position.
        first: First column of each unit, and the number of columns.
        parents: Unit around each unit, -1 for none.

    Returns:
        Bytes by unit, never negative.
    """
    starts = np.array(first[:-1], dtype=np.int64)
    own = np.maximum(0, -np.minimum.reduceat(row, starts)).tolist()
    children: list[list[int]] = [[] for _ in parents]
    roots: list[int] = []
    for u, parent in enumerate(parents):
        (roots if parent < 0 else children[parent]).append(u)
    order = list(roots)
    for u in order:
        order += children[u]
    inside = [0] * len(own)  # by all units inside each at most,
    most = [0] * len(own)  # and by that one or these
    for u in reversed(order):
        inside[u] = sum(most[v] for v in children[u])
        most[u] = max(own[u], inside[u])
    total = sum(most[u] for u in roots)
    others = [0] * len(own)
    for u in order:
        around = total if parents[u] < 0 else others[parents[u]] + inside[parents[u]]
        others[u] = around - most[u]
    return np.array(others, dtype=np.int64)
