"""What units take of the program besides their ops, where that runs on the device.

On the CPU the program and the ops share the time: a unit is followed in forward as its
ops run, what autograd saves of it passes through Python there and back, and what runs
again is written down first. On a GPU kernels run meanwhile, and the longer of both
decides (`costs.host`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCosts:
    """Time that units take of the program, in ms.

    Attributes:
        unit_ms: Of each call that is a unit,
        saved_ms: of each tensor that autograd saves in one,
        op_ms: of each op in one that is no view,
        rerun_ms: of each op that runs again,
        call_ms: and of each op call in one, views too.
    """

    unit_ms: float = 0.0
    saved_ms: float = 0.0
    op_ms: float = 0.0
    rerun_ms: float = 0.0
    call_ms: float = 0.0

    def followed_ms(self, num_saved: int, num_ops: int, num_calls: int) -> float:
        """Time that a unit takes whatever runs again of it.

        Args:
            num_saved: Tensors that autograd saves in it.
            num_ops: Ops in it that are no views.
            num_calls: All of its op calls.
        """
        of_ops_ms = num_ops * self.op_ms + num_calls * self.call_ms
        return self.unit_ms + num_saved * self.saved_ms + of_ops_ms


NO_PROGRAM = ProgramCosts()  # of a GPU: kernels run meanwhile
# Fitted to steps of eight models; `python -m benchmarks.program_costs` holds them
# against these and others.
CPU_PROGRAM = ProgramCosts(unit_ms=0.15, saved_ms=0.009, op_ms=0.02, rerun_ms=0.046)
