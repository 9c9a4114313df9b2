"""How far the rows of a MILP are raised for one budget, and when they move.

The MILP predicts memory; the budget caps the true one. Where a choice breaks the
budget, its rows are raised by what was understated at each position, so that the same
choice cannot come again. Between rows whose choice broke the budget and higher ones
whose choice fitted (or that nothing keeps) the next ones lie half way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autosac.step.tape import IntArray


@dataclass(slots=True)
class Rows:
    """Raised rows of the MILP for one budget.

    Attributes:
        near_bytes: Rows this close to each other give the same choice.
        too_low: Rows whose choice broke the budget, the highest so far.
        kept: How high rows may be until that choice breaks one.
        enough: Rows above which nothing is to be found, the lowest so far.
    """

    near_bytes: float
    too_low: IntArray | None = None
    kept: IntArray | None = None
    enough: IntArray | None = None

    def after_breaking(
        self, raised: IntArray, understated: IntArray, kept: IntArray
    ) -> IntArray:
        """Higher rows, which the choice that broke the budget does not keep.

        Args:
            raised: By how much each row was raised for that choice.
            understated: Its true memory above the predicted one at each position.
            kept: The budget above its predicted memory at each position.
        """
        self.too_low, self.kept = raised, kept
        return np.maximum(raised, understated)

    def after_fitting(
        self, raised: IntArray, understated: IntArray, *, overstated: bool
    ) -> IntArray | None:
        """Lower rows if the MILP saw more memory than there is; None if all is well."""
        self.enough = raised
        lower = np.minimum(raised, understated)
        return lower if overstated and (lower < raised).any() else None

    def between(self) -> IntArray | None:
        """Rows between too low and enough; None if one is unknown or they are near."""
        if self.too_low is None or self.kept is None or self.enough is None:
            return None
        apart = self.enough - self.too_low
        higher = apart > 0
        shares = (self.kept - self.too_low)[higher] / apart[higher]
        low = self.too_low + (float(shares.min(initial=1.0)) * apart).astype(np.int64)
        apart = self.enough - low
        if int(np.abs(apart).max()) <= self.near_bytes:
            return None
        rows: IntArray = low + apart // 2
        return rows
