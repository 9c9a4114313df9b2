"""Which modules run whenever a parameter is read.

FSDP2 gives whole parameters to a unit while that runs; before and after it, they are
shards, which no other tensor goes with. So one that the parent reads (a scale that it
multiplies a block's output by, an embedding's weight as a head) belongs to no unit
inside the parent.
"""

from __future__ import annotations

from collections.abc import Iterable

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
        self._runs: dict[str, list[tuple[int, int]]] = {}
        for call in tape.calls:
            name = tape.modules[call.module].fqn
            self._runs.setdefault(name, []).append((call.enter, call.exit))
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
        runs = self._runs.get(module, [])
        return next(
            (
                op
                for op in self._reads.get(parameter.storage, [])
                if not any(enter < op.start < leave for enter, leave in runs)
            ),
            None,
        )
