"""PuLP models as the runners see them: variables by name, coefficients in arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pulp


def _forget_importers() -> None:
    """Let go of the frames in which PuLP's optional solvers could not be imported.

    PuLP keeps the errors, they keep their tracebacks, and these all variables of
    whoever was the first to import it: a model that a function planned, for good.
    """
    for solver in vars(pulp.apis).values():
        error = getattr(solver, "err", None)
        while isinstance(error, BaseException):
            error.__traceback__ = None
            error = error.__context__


_forget_importers()


def row(terms: Iterable[tuple[pulp.LpVariable, float]]) -> pulp.LpAffineExpression:
    """Sum of (variable, coefficient) pairs; repeated variables add up."""
    pairs = list(terms)
    total = pulp.LpAffineExpression(pairs)
    if len(total) < len(pairs):  # of a repeated one it has the last
        total = pulp.LpAffineExpression()
        for variable, coefficient in pairs:
            total.addterm(variable, coefficient)
    return total


class Model(pulp.LpProblem):  # type: ignore[misc]
    """A minimisation that looks at its variables and rows only when there are new ones.

    Right-hand sides and the objective may change at any time.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, pulp.LpMinimize)
        self._in_order: tuple[object, list[pulp.LpVariable]] = (None, [])
        self._matrix: tuple[object, Matrix] | None = None

    def variables(self) -> list[pulp.LpVariable]:
        """Variables by name; PuLP asks for them several times a solve."""
        size = self._size()
        if size != self._in_order[0]:
            self._in_order = size, super().variables()
        return self._in_order[1]

    def matrix(self) -> Matrix:
        """Coefficients of the model's variables, row by row."""
        size = self._size()
        if self._matrix is None or size != self._matrix[0]:
            self._matrix = size, _as_matrix(self)
        return self._matrix[1]

    def _size(self) -> tuple[int, int]:
        """Number of rows, and of objective terms: PuLP adds one where there is none."""
        return self.numConstraints(), len(self.objective or ())


class Matrix(NamedTuple):
    """Coefficients of a model, row by row.

    Attributes:
        rows: The rows.
        starts: Where each row begins in the next two, and their length.
        columns: Numbers of variables, in the order of `LpProblem.variables`,
        coefficients: and their coefficients.
    """

    rows: list[pulp.LpConstraint]
    starts: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    coefficients: npt.NDArray[np.float64]

    @property
    def constants(self) -> npt.NDArray[np.float64]:
        """The constant that each row adds to its terms."""
        return np.array([row.constant for row in self.rows], np.float64)

    def bounds(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Lower and upper bound on the sum of the terms of each row."""
        lowest = or_else(-math.inf, (row.getLb() for row in self.rows))
        return lowest, or_else(math.inf, (row.getUb() for row in self.rows))


def _as_matrix(model: pulp.LpProblem) -> Matrix:
    rows = list(model.constraints())
    number = {id(v): i for i, v in enumerate(model.variables())}
    sizes = [len(row) for row in rows]
    pairs = [
        (number[id(v)], coefficient) for row in rows for v, coefficient in row.items()
    ]
    columns, coefficients = zip(*pairs, strict=True) if pairs else ((), ())
    return Matrix(
        rows=rows,
        starts=np.cumsum([0, *sizes]),
        columns=np.array(columns, np.int64),
        coefficients=np.array(coefficients, np.float64),
    )


def matrix_of(model: pulp.LpProblem) -> Matrix:
    return model.matrix() if isinstance(model, Model) else _as_matrix(model)


def or_else(instead: float, values: Iterable[float | None]) -> npt.NDArray[np.float64]:
    """Values as an array, with a given number instead of each None."""
    return np.array([instead if v is None else v for v in values], np.float64)
