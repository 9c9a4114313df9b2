"""The first ops of a step tell which of several plans it is to follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autosac import _compat, _compat_dispatch
from autosac._compat_distributed import WAITS, are_distributed
from autosac.tracing.real_steps import is_mark


class Opening(_compat.PlainDispatchMode):
    """Compares the first ops of a step with those of several plans.

    Args:
        openings: Number of a plan -> its `Planned.opening`.

    Attributes:
        left: Numbers of the plans whose ops ran so far.
        depth: How many modes there were before this one.
    """

    def __init__(self, openings: Mapping[int, tuple[str, ...]]) -> None:
        super().__init__()
        self.openings = openings
        self.left = list(openings)
        self.depth = _compat_dispatch.num_modes()
        self._place = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if types and are_distributed(types):
            return NotImplemented
        if len(self.left) > 1 and id(func) not in _compat.IGNORED_IDS:
            name = _compat.op_name(func)
            if not is_mark(name) and name not in WAITS:
                self.see(name)
        return func(*args, **(kwargs or {}))

    def see(self, name: str) -> None:
        """Keep the plans that expect this op next, or a unit's begin ('')."""
        if len(self.left) == 1:
            return
        here = slice(self._place, self._place + 1)
        left = [n for n in self.left if self.openings[n][here] == (name,)]
        self._place += 1
        # What no plan expects tells nothing; units will look for themselves.
        self.left = left or self.left[:1]
