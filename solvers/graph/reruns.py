"""When ops run again: the variables s of `graph/model.py`, with rows (3) to (5)."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cached_property

import pulp

from .choices import Choices, Expression, number
from .recomputation import GraphProblem


class TimedChoices(Choices):
    """Choices, and which ops have run again by which step.

    There are variables and rows for what was asked for.
    """

    def __init__(self, problem: GraphProblem, *, movable: Collection[int]) -> None:
        self._again: dict[tuple[int, int], Expression] = {}
        super().__init__(problem, movable=movable)

    def _has_run(self, op: int, step: int) -> bool:
        """Whether the op has run again by the step if it runs again at all."""
        values = self.problem.makes[op]
        is_read = len(values) == 1 and self._is_read_by(values[0], step)
        return is_read or not self._occasions[op] >> (step + 1)

    def _is_read_by(self, value: int, step: int) -> bool:
        return self.problem.first_need.get(value, math.inf) <= step

    @cached_property
    def _occasions(self) -> dict[int, int]:
        """Ops -> the steps before which they could run again, as the bits of a number.

        An op runs again where backward first reads a value of it, or where an op runs
        again that reads one.
        """
        occasions: dict[int, int] = {}
        for op in reversed(self.ops):
            steps = 0
            for v in self.problem.makes[op]:
                if v not in self.keep:
                    continue
                if v in self.problem.first_need:
                    steps |= 1 << self.problem.first_need[v]
                for c in self.readers.get(v, ()):
                    steps |= occasions[c]
            occasions[op] = steps
        return occasions

    def occasions(self, op: int) -> list[int]:
        """The steps before which an op may run again."""
        bits = bin(self._occasions[op])[:1:-1]
        return [step for step, bit in enumerate(bits) if bit == "1"]

    def has_run(self, op: int, step: int) -> pulp.LpVariable:
        """The variable that says so of a step which is no earlier than an occasion."""
        (variable,) = self.again(op, step)
        return variable

    def again(self, op: int, step: int) -> Expression:
        """s_ot: whether an op has run again by a step."""
        if (known := self._known_again(op, step)) is not None:
            return known
        pending = [op]  # no recursion: chains of readers are as long as the step
        while pending:
            last = pending[-1]
            readers = (c for v in self._asked_late(last, step) for c in self.readers[v])
            missing = [c for c in readers if self._known_again(c, step) is None]
            if missing:
                pending += missing
                continue
            pending.pop()
            if self._known_again(last, step) is None:
                self._define_again(last, step)
        known = self._known_again(op, step)
        assert known is not None
        return known

    def _known_again(self, op: int, step: int) -> Expression | None:
        """s_ot, None if it is a variable that is still to be defined."""
        while (reader := self._runs_with.get(op)) is not None:
            op = reader
        if op not in self.run:
            return number(0)
        so_far = self._occasions[op] & ((1 << (step + 1)) - 1)
        if not so_far:
            return number(0)
        if self._has_run(op, step):
            return self.run[op] + 0.0
        # Nothing of it has changed since the last occasion.
        return self._again.get((op, so_far.bit_length() - 1))

    def _asked_late(self, op: int, step: int) -> list[int]:
        """Values of an op that by a step only ops which run again may have read."""
        return [
            v
            for v in self.problem.makes[op]
            if v in self.keep and v in self.readers and not self._is_read_by(v, step)
        ]

    def _define_again(self, op: int, step: int) -> None:
        """Add s_ot, with rows (3) to (5); a kept value asks for nothing."""
        so_far = self._occasions[op] & ((1 << (step + 1)) - 1)
        step = so_far.bit_length() - 1
        s = self._binary(f"s{op}_{step}")
        self._again[op, step] = s + 0.0
        self.model += s <= self.run[op]
        asked = number(0)
        for v in self.problem.makes[op]:
            if v in self.keep and self._is_read_by(v, step):
                self.model += s >= 1 - self.keep[v]
                asked += 1 - self.keep[v]
        for v in self._asked_late(op, step):
            by_readers = [self.again(c, step) for c in self.readers[v]]
            by_readers = [term for term in by_readers if len(term)]
            for term in by_readers:
                self.model += s >= term - self.keep[v]
            if by_readers:
                z = s
                if len(self.problem.makes[op]) > 1:
                    z = self._binary(f"z{v}_{step}")
                    asked += z
                self.model += z <= pulp.lpSum(by_readers)
                self.model += z <= 1 - self.keep[v]
        if len(self.problem.makes[op]) > 1:
            self.model += s <= asked
