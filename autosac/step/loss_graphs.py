"""What a loss takes, as its autograd graph tells, forward and backward together.

Backward has gone through a loss when it comes to the model, and what the loss saved is
gone; names and sizes are there still. They tell, by a rule for all functions, what is
alive while backward goes through it: results or arguments, if the function saves such,
and gradients. Losses are told apart by that, not measured: a planned loss and the same
one in training have the same figures to the byte.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from autosac import _compat_autograd
from autosac.step.tape import LossMemory

_MOST_FUNCTIONS = 100_000
_UNKNOWN = -1  # bytes of what has no plain sizes
_VIEWS = (
    *("View", "UnsafeView", "ReshapeAlias", "Reshape", "T", "Transpose", "Permute"),
    *("Unsqueeze", "Squeeze", "Alias", "Expand", "Unfold"),
)
# The gradient of their result is that of their (first) argument, too.
_PASSING = (*_VIEWS, "Clone", "Add", "Sub")
# What else functions make in backward, in tensors like their argument: on the way to
# its gradient (FunctionsManual.cpp of torch 2.10 to 2.15), or inside of one kernel.
_TEMPORARIES = {
    "Abs": 1,
    "BinaryCrossEntropyWithLogits": 1,
    "LinalgVectorNorm": 1,
    "LogSigmoid": 1,
    "Logsumexp": 2,
    "MseLoss": 1,
    "Pow": 2,
    "SmoothL1Loss": 1,
    "SoftMarginLoss": 1,
    "Sqrt": 1,
    "Std": 1,
    "Var": 1,
}
_RESULTS = frozenset({"result", "result0", "output", "log_alpha", "grad_input"})

_Value = tuple[Hashable, int]  # a function and one of its results


def loss_memory(roots: Iterable[Any], first: int) -> LossMemory | None:
    """What a loss takes; None if its graph does not tell.

    Args:
        roots: Autograd functions that backward begins at.
        first: Sequence number of the first one that the model did not make.
    """
    functions = list(_functions(roots, first))
    sizes = {size for one in functions for size in (*one.made, *one.taken)}
    if len(functions) == _MOST_FUNCTIONS or _UNKNOWN in sizes:
        return None
    return _Pass(functions, first).run()


@dataclass(frozen=True, slots=True)
class _Function:
    """An autograd function of a loss.

    Attributes:
        number: Its sequence number.
        name: Its name, such as ``LogSoftmax``.
        made: Bytes of its results,
        taken: and of its arguments that have gradients, in the order of their values.
        values: What makes these arguments.
        saves_results: It saves results,
        saves_taken: or arguments.
    """

    number: int
    name: str
    made: tuple[int, ...]
    taken: tuple[int, ...]
    values: tuple[_Value, ...]
    saves_results: bool
    saves_taken: bool


def _functions(roots: Iterable[Any], first: int) -> Iterator[_Function]:
    """Functions of a loss, as backward goes through them: the last one made first."""
    waiting: list[tuple[int, Any]] = []
    seen: set[Hashable] = set()

    def meet(function: Any) -> None:
        key = _key(function)
        if isinstance(key, int) and key >= first and key not in seen:
            seen.add(key)
            heapq.heappush(waiting, (-key, function))

    for root in roots:
        meet(root)
    for _ in range(_MOST_FUNCTIONS):
        if not waiting:
            return
        number, function = heapq.heappop(waiting)
        edges = [edge for edge in function.next_functions if edge[0] is not None]
        saved = _compat_autograd.saved_names(function)
        yield _Function(
            number=-number,
            name=_compat_autograd.name_of(function)
            .partition("Backward")[0]
            .rpartition("::")[2],
            made=tuple(map(_nbytes, _compat_autograd.results_of(function))),
            taken=tuple(_nbytes_at(*edge) for edge in edges),
            values=tuple((_key(one), place) for one, place in edges),
            saves_results=bool(saved & _RESULTS),
            saves_taken=bool(saved - _RESULTS),
        )
        for one, _ in edges:
            meet(one)


def _key(function: Any) -> Hashable:
    """Sequence number of a function that an op made; else what it is for."""
    variable = getattr(function, "variable", None)
    if variable is not None:
        return "leaf", id(variable)
    return _compat_autograd.sequence_nr(function)


def _nbytes(result: Any) -> int:
    """Bytes of a function's result."""
    if getattr(result, "is_nested_tensor", False):
        return _UNKNOWN
    return int(prod(result.shape)) * int(result.dtype.itemsize)


def _nbytes_at(function: Any, place: int) -> int:
    results = _compat_autograd.results_of(function)
    return _nbytes(results[place]) if place < len(results) else _UNKNOWN


@dataclass(slots=True)
class _Pass:
    """Goes through a loss as backward does.

    Attributes:
        functions: As backward comes to them.
        first: Sequence number of the first one.
    """

    functions: list[_Function]
    first: int
    live_bytes: int = 0
    gradients: dict[_Value, int] = field(default_factory=dict)  # its memory's number
    nbytes: list[int] = field(default_factory=lambda: [0])  # of each; 0 is a number's
    uses: Counter[int] = field(default_factory=Counter)

    def run(self) -> LossMemory:
        """Go through it."""
        saved = self._saved()
        last_use = {v: one.number for one in self.functions for v in saved[one.number]}
        sizes = {v: n for values in saved.values() for v, n in values.items()}
        self.live_bytes = peak_bytes = sum(sizes.values())
        for one in self.functions:
            own: list[_Value] = [(one.number, place) for place in range(len(one.made))]
            incoming = [self.gradients.pop(v) for v in own if v in self.gradients]
            gradients = self._gradients(one, incoming)
            more = _TEMPORARIES.get(one.name, 0) * max(one.taken, default=0)
            peak_bytes = max(peak_bytes, self.live_bytes + more)
            self._hand_on(one, gradients)
            for gradient in incoming:
                self._let_go(gradient)
            self.live_bytes -= sum(
                sizes[value]
                for value in saved[one.number]
                if last_use[value] == one.number
            )
        return LossMemory(
            peak_bytes=peak_bytes, handed_bytes=self.live_bytes, most_of=self._most_of()
        )

    def _saved(self) -> dict[int, dict[_Value, int]]:
        """Number of a function -> what it saves that the model did not make."""
        views: dict[Hashable, _Value] = {
            one.number: one.values[0]
            for one in self.functions
            if one.name in _VIEWS and one.values
        }
        saved: dict[int, dict[_Value, int]] = {}
        for one in self.functions:
            pairs: list[tuple[_Value, int]] = []
            if one.saves_results:
                own: list[_Value] = [(one.number, i) for i in range(len(one.made))]
                pairs += zip(own, one.made, strict=True)
            if one.saves_taken:
                pairs += zip(one.values, one.taken, strict=True)
            saved[one.number] = {}
            for value, size in pairs:
                while value[0] in views:
                    value = views[value[0]]
                if isinstance(value[0], int) and value[0] >= self.first:
                    saved[one.number][value] = size
        return saved

    def _gradients(self, one: _Function, incoming: list[int]) -> list[int]:
        """Make the gradients of a function's arguments from those of its results."""
        gradients = []
        for place, size in enumerate(one.taken):
            gradient = self._passed(one, place, incoming)
            gradients.append(self._make(size) if gradient is None else gradient)
            self.uses[gradients[-1]] += 1
        return gradients

    def _hand_on(self, one: _Function, gradients: list[int]) -> None:
        """Give gradients to the functions that made a function's arguments."""
        for value, size, gradient in zip(one.values, one.taken, gradients, strict=True):
            before = self.gradients.get(value)
            self.gradients[value] = gradient
            if before is not None:  # the sum of both
                self.gradients[value] = total = self._make(size)
                self.uses[total] += 1
                self._let_go(before)
                self._let_go(gradient)

    def _passed(self, one: _Function, place: int, incoming: list[int]) -> int | None:
        """The gradient that is an argument's as well, None if a new one is made."""
        if one.name == "Sum":
            return incoming[0] if incoming else 0  # expanded
        is_whole = one.taken[place] == one.made[0] and not (place and one.name == "Sub")
        return incoming[0] if incoming and one.name in _PASSING and is_whole else None

    def _make(self, nbytes: int) -> int:
        self.live_bytes += nbytes
        self.nbytes.append(nbytes)
        return len(self.nbytes) - 1

    def _let_go(self, gradient: int) -> None:
        self.uses[gradient] -= 1
        if not self.uses[gradient]:
            self.live_bytes -= self.nbytes[gradient]

    def _most_of(self) -> str:
        """Name of the function that makes or takes most."""
        sizes = {
            one.name: max((*one.made, *one.taken), default=0)
            for one in reversed(self.functions)
        }
        return max(sizes, key=lambda name: sizes[name], default="")
