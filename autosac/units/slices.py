"""Slices: consecutive layers of an `nn.Sequential` that are rerun together.

A layer such as a convolution or an activation is no AC unit worth having: it saves what
it is given, or what its neighbour keeps anyway. Several of them in a row are one: what
lies between them need not be kept. Where modules are written as a long sequence of
layers (VGG, perceptrons) nothing else would be there to choose, short of all of it.

Of a run of n layers those slices are candidates that span 2, 4, 8, ... of them, as for
chains. A slice runs as `nn.Sequential` runs its layers, one after the other, and is
rerun as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from autosac.devices.programs import ProgramCosts
from autosac.step.tape import ModuleCall, Tape
from autosac.units.candidates import make_unit
from autosac.units.chains import spans
from autosac.units.groups import TapeIndex
from autosac.units.policies import DETACHED, OpPolicy, Policy
from autosac.units.unit import Unit

_SHORTEST_RUN = 6  # shorter sequences are parts of blocks: those are units


@dataclass(frozen=True, kw_only=True, eq=False)
class Slice(Unit):
    """Layers of an `nn.Sequential`; `fqn` is the first one's.

    Attributes:
        until: FQN of the last layer.
    """

    until: str

    @property
    def label(self) -> str:
        return f"{self.fqn}-{self.until}"

    def op_policies(
        self, tape: Tape, policy: Policy, *, training: bool
    ) -> tuple[OpPolicy, ...]:
        spelled = self.spelled(tape, policy, training, after=DETACHED, until=self.until)
        return (spelled,)


def plain_sequences(model: torch.nn.Module) -> frozenset[str]:
    """FQNs of the modules that run as `nn.Sequential` does."""
    return frozenset(
        fqn
        for fqn, module in model.named_modules()
        if type(module).forward is torch.nn.Sequential.forward
        and "forward" not in module.__dict__
    )


def find_slices(
    tape: Tape,
    op_ms: Sequence[float],
    sequences: Collection[str],
    program: ProgramCosts,
    *,
    exclude: Iterable[str] = (),
) -> tuple[Slice, ...]:
    """Slices of a tape, in forward order.

    Args:
        tape: The traced step.
        op_ms: Time to run every op of the tape again.
        sequences: FQNs of modules that call their children one after the other.
        program: What units take of it besides.
        exclude: FQNs of sequences and layers to leave alone.
    """
    if not sequences:
        return ()
    index = TapeIndex(tape)
    num_layers = Counter(node.parent for node in tape.modules.nodes)
    slices = []
    for run in _runs(tape, sequences, frozenset(exclude)):
        whole = num_layers[tape.modules[run[0].module].parent]
        for first, last in spans(len(run)):
            if last - first == whole:
                continue  # that is the sequence itself
            call = _joined(run[first:last])
            unit = make_unit(index, call, (0, 1), op_ms, program)
            if isinstance(unit, Unit):
                until = tape.modules[run[last - 1].module].fqn
                slices.append(unit.as_kind(Slice, until=until, key=("slice", unit.key)))
    return tuple(sorted(slices, key=lambda unit: (unit.call.enter, -unit.call.exit)))


def _runs(
    tape: Tape, sequences: Collection[str], excluded: frozenset[str]
) -> Iterator[list[ModuleCall]]:
    """Calls of layers that follow each other in a sequence that is called once."""
    counts = Counter(call.module for call in tape.calls)
    run: list[ModuleCall] = []
    for call in tape.calls:
        node = tape.modules[call.module]
        if (
            node.parent >= 0
            and node.is_leaf
            and tape.modules[node.parent].fqn in sequences
            and counts[node.parent] == counts[call.module] == 1
            and call.phase == "forward"
            and call.once is None
            and excluded.isdisjoint((node.fqn, tape.modules[node.parent].fqn))
        ):
            if run and tape.modules[run[-1].module].parent != node.parent:
                yield from _long(run)
                run = []
            run.append(call)
        else:
            yield from _long(run)
            run = []
    yield from _long(run)


def _long(run: list[ModuleCall]) -> Iterator[list[ModuleCall]]:
    if len(run) >= _SHORTEST_RUN:
        yield run


def _joined(calls: Sequence[ModuleCall]) -> ModuleCall:
    first, last = calls[0], calls[-1]
    return replace(first, exit=last.exit, outputs=last.outputs)
