"""Exceptions of autosac: each message says what, what was got, what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class AutosacError(Exception):
    """Base of every error that is autosac's own."""


class ArgumentError(AutosacError, ValueError, TypeError):
    """An argument is not valid; the message says what is.

    Whether a value or a type is wrong is a fine point: it is caught as either.
    """


class UnsupportedError(AutosacError, NotImplementedError):
    """A request is not supported; the message says what to change."""


class InfeasibleBudgetError(AutosacError):
    """No plan fits the budget.

    Attributes:
        budget_bytes: The budget that was asked for.
        lowest_peak_bytes: The least peak that any plan reaches. For a GPU that is here
            with what a budget leaves to its allocator: the least feasible budget.
        composition: Bytes alive at that peak per category (parameters, ...).
        advice: What would help besides another budget or batch: sentences, or ''.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        lowest_peak_bytes: int,
        composition: Mapping[str, int],
        advice: str = "",
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.lowest_peak_bytes = lowest_peak_bytes
        self.composition = dict(composition)
        self.advice = advice

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its figures, as one process tells another."""
        figures = (self.budget_bytes, self.lowest_peak_bytes, self.composition)
        return _infeasible, (str(self), *figures, self.advice)


def _infeasible(
    message: str,
    budget_bytes: int,
    lowest_peak_bytes: int,
    composition: dict[str, int],
    advice: str,
) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(
        message,
        budget_bytes=budget_bytes,
        lowest_peak_bytes=lowest_peak_bytes,
        composition=composition,
        advice=advice,
    )


class TraceError(AutosacError):
    """The training step could not be traced; says which module and line.

    Attributes:
        fqn: The module that it fails in; empty if that is not known.
    """

    def __init__(self, message: str = "", *, fqn: str = "") -> None:
        super().__init__(message)
        self.fqn = fqn


class PlanMismatchError(AutosacError):
    """A plan was applied to a model it was not made for."""


class SolverError(AutosacError):
    """A solver stopped without the answer it owed."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a search; what was found by then is kept.

    Attributes:
        done: The rows that are done, as a `Sweep`; in a shell it is
            ``sys.last_value.done``.
    """

    def __init__(self, done: Any, what: str) -> None:
        super().__init__(f"interrupted; {what}: `.done` of this exception has them")
        self.done = done
