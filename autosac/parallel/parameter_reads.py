"""Which modules run whenever a parameter is read.

FSDP2 gives whole parameters to a unit while that runs; before and after it, they are
shards, which no other tensor goes with. So one that the parent reads (a scale that it
multiplies a block's output by, an embedding's weight as a head) belongs to no unit
inside the parent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from operator import attrgetter

from autosac.step.tape import FORWARD_PHASES, Op, Parameter, Tape


class ParameterReads:
    """Where forward reads parameters.

    Args:
        tape: The traced step.

    Attributes:
        homes: Name of a parameter -> name of the innermost module around it that runs
            at all reads; if there are none, of the module that has it. It is the model
            of what a loss reads: that is still gathered then.
    """

    def __init__(self, tape: Tape) -> None:
        self._modules = tape.modules
        # Of each module where calls begin, and the latest end of all calls so far.
        self._runs: dict[str, tuple[list[int], list[int]]] = {}
        for call in sorted(tape.calls, key=attrgetter("enter")):
            fqn = tape.modules[call.module].fqn
            enters, exits = self._runs.setdefault(fqn, ([], []))
            enters.append(call.enter)
            exits.append(max(call.exit, exits[-1] if exits else call.exit))
        storages = {parameter.storage for parameter in tape.parameters}
        self._reads: dict[int, list[Op]] = {}
        for op in tape.ops:
            if op.phase in FORWARD_PHASES:
                for storage in storages.intersection(op.reads):
                    self._reads.setdefault(storage, []).append(op)
        self.homes = {
            fqn: self._home(parameter, fqn)
            for parameter in tape.parameters
            for fqn in parameter.fqns
        }

    def outside(self, module: str, parameters: Iterable[Parameter]) -> str | None:
        """Says which of a module's parameters is read while it does not run, and how.

        Args:
            module: Its name.
            parameters: What to look at; those of other modules do not count.
        """
        for parameter in parameters:
            names = [f for f in parameter.fqns if f.startswith(f"{module}.")]
            op = self._first_outside(parameter, module) if names else None
            if op is not None:
                fqn = self._modules[op.module].fqn
                reader = f"`{fqn}`" if fqn else "the model itself"
                source = f" ({op.source})" if op.source else ""
                return (
                    f"`{names[0]}` is read in {reader} by `{op.name}`{source} while"
                    f" `{module}` does not run, and is a shard there: read it in the"
                    f" forward of `{module}`, or make a module around both the unit, or"
                    " none but the model"
                )
        return None

    def _home(self, parameter: Parameter, fqn: str) -> str:
        home = fqn.rpartition(".")[0]
        while home and self._first_outside(parameter, home) is not None:
            home = home.rpartition(".")[0]
        return home

    def _first_outside(self, parameter: Parameter, module: str) -> Op | None:
        """The first op that reads a parameter while a module does not run."""
        enters, exits = self._runs.get(module, ([], []))
        for op in self._reads.get(parameter.storage, []):
            num_begun = bisect_left(enters, op.start)
            if not num_begun or exits[num_begun - 1] <= op.start:
                return op
        return None
