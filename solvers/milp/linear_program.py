"""A linear program that is solved for many objectives: arrays in, arrays out.

PuLP would look at every variable and every row before and after each solve, which takes
longer than the solve itself when HiGHS goes on from where the one before it ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import highspy
import numpy as np
import numpy.typing as npt

from .highs import QuietHighs

_Floats = npt.NDArray[np.float64]
_Row = Sequence[tuple[int, float]]  # columns and their coefficients

_TOLERANCE = 1e-5  # 10 x the absolute row tolerance of HiGHS


class Program:
    """Minimise a sum of variables from 0 to some bound, with lower bounds of rows.

    Args:
        most: Upper bound of every variable.
        rows: Terms of every row.
        least: Lower bound of every row.
    """

    def __init__(self, most: _Floats, rows: Sequence[_Row], least: _Floats) -> None:
        self._most, self._least = most, least
        pairs = [pair for row in rows for pair in row]
        self._columns = np.array([column for column, _ in pairs], dtype=np.int64)
        self._coefficients = np.array(
            [coefficient for _, coefficient in pairs], dtype=np.float64
        )
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        self._row_of = np.repeat(np.arange(len(rows)), lengths)
        self._highs = QuietHighs()  # type: ignore[no-untyped-call]
        self._highs.setOptionValue("threads", 1)
        passed = highspy.HighsLp()
        passed.num_col_, passed.num_row_ = len(most), len(rows)
        passed.col_cost_ = passed.col_lower_ = np.zeros(len(most))
        passed.col_upper_ = most
        passed.row_lower_ = least
        passed.row_upper_ = np.full(len(rows), highspy.kHighsInf)
        passed.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        passed.a_matrix_.start_ = np.append(0, np.cumsum(lengths))
        passed.a_matrix_.index_ = self._columns
        passed.a_matrix_.value_ = self._coefficients
        self._highs.passModel(passed)

    def best(self, costs: _Floats) -> _Floats | None:
        """Values of the variables at the least sum of their costs.

        Args:
            costs: Of one unit of each variable.

        Returns:
            None if no values keep all rows.

        Raises:
            ArithmeticError: The solver's optimum breaks rows.
        """
        numbers = np.arange(len(costs), dtype=np.int32)
        self._highs.changeColsCost(len(costs), numbers, costs)
        self._highs.run()
        if self._highs.getModelStatus() == highspy.HighsModelStatus.kNotset:
            # HiGHS refuses another number of threads than in its last run.
            highspy.Highs.resetGlobalScheduler(True)
            self._highs.run()
        if self._highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        values = np.array(self._highs.getSolution().col_value, dtype=np.float64)
        if not self._keeps(values):
            raise ArithmeticError(
                f"The optimum of HiGHS breaks a row of a linear program of {len(costs)}"
                f" variables by more than {_TOLERANCE:g}."
            )
        return values

    def _keeps(self, values: _Floats) -> bool:
        """Whether values keep all rows and bounds."""
        terms = self._coefficients * values[self._columns]
        totals = np.bincount(self._row_of, terms, len(self._least))
        is_within = (values >= -_TOLERANCE) & (values <= self._most + _TOLERANCE)
        return bool(is_within.all() and (totals >= self._least - _TOLERANCE).all())
