"""Which results of one AC unit to save: a knapsack with reruns.

Groups g of ops, in execution order, whose results move together; s_g = 1 if the
results of g are saved, e_g = 1 if g is rerun in backward:

minimize    T + sum_g t_g e_g         recompute time [ms], and at once
            sum_g m_g s_g             saved activation memory [bytes]
subject to  s_g + e_g >= 1            for g in needed: backward reads it       (1)
            e_g <= s_h + e_h          for h in inputs of g: a rerun reads it   (2)
            e_g = 0                   for g in pinned: never rerun             (3)
            s_g = 0                   for g in unsavable                       (4)
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveProblem:
    """Save-or-rerun choice for the op groups of one AC unit.

    Attributes:
        saved_bytes: Activation memory that saving each group's results takes.
        runtime_ms: Forward time of each group, same length.
        inputs: The earlier groups whose results each group reads, same length.
        needed: Groups whose results backward reads.
        pinned: Groups that are never rerun.
        unsavable: Groups whose results cannot be saved.
        fixed_ms: T, whatever is rerun.
    """

    saved_bytes: tuple[int, ...]
    runtime_ms: tuple[float, ...]
    inputs: tuple[tuple[int, ...], ...]
    needed: frozenset[int]
    pinned: frozenset[int] = frozenset()
    unsavable: frozenset[int] = frozenset()
    fixed_ms: float = 0.0

    def __post_init__(self) -> None:
        lengths = (len(self.saved_bytes), len(self.runtime_ms), len(self.inputs))
        if len(set(lengths)) > 1:
            raise ValueError(
                "`saved_bytes`, `runtime_ms` and `inputs` must have the same length,"
                f" got {lengths}."
            )
        if any(nbytes < 0 for nbytes in self.saved_bytes):
            raise ValueError("`saved_bytes` must not be negative.")
        if any(not math.isfinite(t) or t < 0.0 for t in self.runtime_ms):
            raise ValueError("`runtime_ms` must be finite and not negative.")
        for g, read in enumerate(self.inputs):
            if any(not 0 <= h < g for h in read):
                raise ValueError(
                    f"`inputs[{g}]` must name groups before {g}, got {read}."
                )
        for g in self.needed | self.pinned | self.unsavable:
            if not 0 <= g < self.num_groups:
                raise ValueError(
                    f"`needed`, `pinned` and `unsavable` must name groups below"
                    f" {self.num_groups}, got {g}."
                )

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.saved_bytes)
