"""The ledger: lifetimes of memory turned into bytes alive, peaks and what they hold.

An entry is born, dies and has a size. It is alive from its birth on until just before
its death: what dies at an instant is gone before anything is born there, as in an
allocator that frees first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autosac.step.tape import IntArray


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Live memory over time.

    Attributes:
        keys: Instants at which it changes, ascending.
        live_bytes: Bytes alive after each.
    """

    keys: IntArray
    live_bytes: IntArray

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at one instant."""
        return int(self.live_bytes.max())

    @property
    def peak_key(self) -> int:
        """Key of the first instant of the peak."""
        return int(self.keys[self.live_bytes.argmax()])

    def at(self, keys: IntArray) -> IntArray:
        """Bytes alive after all that happens at some instants, the first or later."""
        live: IntArray = self.live_bytes[self.keys.searchsorted(keys, side="right") - 1]
        return live

    def most_from(self, starts: IntArray) -> IntArray:
        """Most bytes alive from each of some ascending keys until the next one.

        That is what is alive as a stretch begins, and all that follows in it.
        """
        firsts = np.maximum(self.keys.searchsorted(starts, side="right") - 1, 0)
        stops = self.keys.searchsorted(starts[1:], side="left")
        stops = np.maximum(np.append(stops, len(self.keys)), firsts + 1)
        ends = np.stack([firsts, stops], axis=1).ravel()
        return np.maximum.reduceat(np.append(self.live_bytes, 0), ends)[::2]


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What is allocated, when it comes and when it goes.

    Attributes:
        born: Instant of each entry's birth, shape (n,); 0 and less for what is there
            before the step.
        died: Instant of its death, likewise,
        nbytes: and its size.
        end: When the step ends; what dies later is there after it.
        constant_bytes: What is alive all the time besides.
        stream: The CUDA stream that each is made in; None for all in one.
    """

    born: IntArray
    died: IntArray
    nbytes: IntArray
    end: int = 0
    constant_bytes: int = 0
    stream: IntArray | None = None

    def timeline(self) -> Timeline:
        """Bytes alive over time."""
        keys = np.concatenate([self.born, self.died])
        change = np.concatenate([self.nbytes, -self.nbytes])
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        live = np.cumsum(change[order]) + self.constant_bytes
        # Of several changes at one instant only their sum is ever alive.
        last = np.append(keys[1:] != keys[:-1], True)
        return Timeline(keys=keys[last], live_bytes=live[last])

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at one instant, as `timeline` has it, in less time."""
        # What dies at an instant comes first: no sum within it is above both its ends.
        keys = np.concatenate([self.died, self.born])
        change = np.concatenate([-self.nbytes, self.nbytes])
        live = np.cumsum(change[np.argsort(keys, kind="stable")])
        return int(live.max()) + self.constant_bytes

    def by_stream(self) -> list[Ledger]:
        """What is made in each stream, whose free memory no other one gets."""
        if self.stream is None:
            return [self]
        parts = [
            replace(self, nbytes=np.where(self.stream == i, self.nbytes, 0))
            for i in np.unique(self.stream)
        ]
        return [parts[0], *(replace(part, constant_bytes=0) for part in parts[1:])]

    def by_row(self, rows: IntArray, num_rows: int) -> tuple[IntArray, IntArray]:
        """Bytes alive over time, apart for each row that entries belong to.

        Args:
            rows: Row of each entry, shape (n,).
            num_rows: How many there are.

        Returns:
            Ascending instants, shape (t,), and bytes without the constant ones, shape
            (num_rows, t).
        """
        keys, places = np.unique(
            np.concatenate([self.born, self.died]), return_inverse=True
        )
        change = np.zeros((num_rows, len(keys)), dtype=np.int64)
        np.add.at(change, (rows, places[: len(self.born)]), self.nbytes)
        np.subtract.at(change, (rows, places[len(self.born) :]), self.nbytes)
        return keys, np.cumsum(change, axis=1)

    def after_ticks(self, num_ticks: int, span: int = 1) -> IntArray:
        """Bytes alive after every tick, shape (num_ticks + 1,).

        Args:
            num_ticks: Of the step.
            span: Instants per tick; what is in between belongs to the earlier tick.
        """
        change = np.zeros(num_ticks + 1, dtype=np.int64)
        for instants, sign in ((self.born, 1), (self.died, -1)):
            ticks = np.maximum(instants // span, 0)
            kept = ticks <= num_ticks
            np.add.at(change, ticks[kept], sign * self.nbytes[kept])
        return np.cumsum(change) + self.constant_bytes

    def alive(self, key: int) -> npt.NDArray[np.bool_]:
        """Which entries are alive at an instant, shape (n,)."""
        return (self.born <= key) & (self.died > key)
