"""What modules and nodes of graphs have in common: seven figures, and a stage.

The terms are those of Colossal-AI's analyzer (``GraphInfo``, ``Stage``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Floating point operations, and bytes that forward keeps and backward makes."""

    fwd_flop: int = 0
    bwd_flop: int = 0
    fwd_mem_in: int = 0
    fwd_mem_tmp: int = 0
    bwd_mem_tmp: int = 0
    bwd_mem_out: int = 0
    bwd_mem_peak: int = 0


FIGURES = tuple(field.name for field in fields(Figures))


class Staged:
    """Has a stage: placeholder, forward, loss, backward or optimizer."""

    __slots__ = ()
    stage: str

    @property
    def is_placeholder(self) -> bool:
        """Whether the step begins with it."""
        return self.stage == "placeholder"

    @property
    def is_forward(self) -> bool:
        """Whether it belongs to forward."""
        return self.stage == "forward"

    @property
    def is_loss(self) -> bool:
        """Whether it belongs to the loss."""
        return self.stage == "loss"

    @property
    def is_backward(self) -> bool:
        """Whether it belongs to backward."""
        return self.stage == "backward"
