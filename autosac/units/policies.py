"""Op policies: what happens to every op of an AC unit when it is rerun."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autosac.step.tape import Op

SAVE = "S"  # its output is kept from the forward pass
RERUN = "R"  # it runs again
SKIP = "-"  # nobody needs its output in backward
VIEW = "V"  # a view: runs again, costs nothing
DETACHED = "X"  # only changes a tensor from outside the unit: must not run twice

# Its number may differ between forward and rerun (see `_compat.IGNORED_OPS`).
_IGNORED_NAME = "aten.detach.default"


class Policy(NamedTuple):
    """For every group of a unit: saved, rerun, or skipped as nobody needs it.

    A tuple, as these are looked up all the time.

    Attributes:
        choices: One of `SAVE`, `RERUN`, `SKIP` per group of `Unit.groups`.
    """

    choices: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPolicy:
    """What to do with the ops of one AC unit, in execution order.

    Attributes:
        fqn: The unit's module.
        names: Overload name of each op.
        actions: One of `SAVE`, `RERUN`, `SKIP`, `VIEW`, `DETACHED` per op.
        training: Mode that the model was traced in; in the other one the plan
            is not in force.
        call_index: Which call of the module in a step it is for, from 0,
        num_calls: and how often the step calls the module.
        chain: Name of the chain that the call is a block of, if it is,
        position: its place there, from 0,
        onward: and what to do with its ops when only its output is made again.
        around: FQN of the module of the nest that the chain is, if it is one.
        until: FQN of the last layer of a slice, of which `fqn` is the first.
        far: Which of its arguments lie in far memory between forward and its rerun:
            places among their distinct storages,
        far_until: FQN of the module at the end of whose call the program lets go of
            them,
        prefetched: and whether they begin to come back when backward comes to that
            call, not as the unit is rerun.
        far_ops: Places of the ops whose results lie in far memory as well.
        streamed: Of a whole model that reruns nothing: which of the tensors that it
            saves are the first of a storage that lies in far memory, as backward reads
            these storages,
        streamed_bytes: how large these are,
        fetched_with: of each, with the read of which of them its copy back begins,
        let_go_with: after how many of them are sent the next one must be before the
            program lets go of it,
        num_saved: and how many tensors it saves.
        settings: Number of the global settings of PyTorch that it begins under.
    """

    fqn: str
    names: tuple[str, ...]
    actions: str
    training: bool
    call_index: int = 0
    num_calls: int = 1
    chain: str = ""
    position: int = 0
    onward: str = ""
    around: str = ""
    until: str = ""
    far: tuple[int, ...] = ()
    far_until: str = ""
    prefetched: bool = False
    far_ops: tuple[int, ...] = ()
    streamed: tuple[int, ...] = ()
    streamed_bytes: tuple[int, ...] = ()
    fetched_with: tuple[int, ...] = ()
    let_go_with: tuple[int, ...] = ()
    num_saved: int = 0
    settings: int = 0

    @property
    def offloads(self) -> bool:
        """Whether it moves anything to far memory."""
        return bool(self.far or self.streamed)

    @property
    def far_kind(self) -> tuple[tuple[int, ...], bool, bool]:
        """As `Unit.far_kind`."""
        return self.far, self.prefetched, bool(self.far_ops)

    @property
    def label(self) -> str:
        """Name of the unit for people, as `Unit.label`."""
        return f"{self.fqn}-{self.until}" if self.until else self.fqn


def is_listed(op: Op) -> bool:
    """Whether op policies name an op."""
    return op.name != _IGNORED_NAME
