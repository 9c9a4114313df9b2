"""An AC unit: a module call that can run under activation checkpointing.

A unit *says*, as plain data, what happens in its backward: the pieces of the forward
pass that run again, and when. Simulation, times and pictures ask for nothing else. The
other kinds of units are classes of their own, a file each: chains of blocks
(`chains.py`), nests of parts (`nests.py`), slices of sequences (`slices.py`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from autosac.step.tape import ModuleCall, Tape
from autosac.units.groups import Group
from autosac.units.policies import DETACHED, VIEW, OpPolicy, Policy, is_listed

_Kind = TypeVar("_Kind", bound="Unit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of the forward pass that runs again in backward.

    Attributes:
        unit: The module call whose ops these are.
        groups: Groups of its ops,
        choices: and for each of them whether it is saved, recomputed or skipped.
        trigger: Tick of backward before which the piece runs,
        enter: and the tick of forward that its beginning repeats.
        leave: Of a piece that only makes what later pieces get: the tick of forward at
            which it ends; autograd keeps nothing of it. None for the others.
        outputs_until: Until then what it returns may live on, for the code between the
            pieces reads it.
        relayed: Arguments that earlier pieces make. None if the piece ends with its
            last saved tensor, as nobody needs what it makes after that.
        far: Arguments that lie in far memory,
        results: and results of its ops, if they are saved,
        let_go: which the device holds until this tick.
        fetched: Tick at which memory is allocated again for all of these; None for as
            the piece begins.
    """

    unit: Unit
    groups: tuple[Group, ...]
    choices: str
    trigger: int
    enter: int
    leave: int | None = None
    outputs_until: int = 0
    relayed: tuple[int, ...] | None = None
    far: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    let_go: int = 0
    fetched: int | None = None

    def begin(self, span: int) -> int:
        """Key at which it begins, less the tick of forward that it repeats then.

        Args:
            span: Keys per tick; those between two ticks are the earlier one's.
        """
        return (self.trigger - 1) * span + 1 - self.enter


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A storage of saved tensors that lies in far memory by itself.

    Attributes:
        storage: The storage,
        let_go: which the program holds until this tick,
        fetched: and has again from this one on,
        until: until autograd has used it.
    """

    storage: int
    let_go: int
    fetched: int
    until: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """A module call that can run under activation checkpointing.

    Attributes:
        fqn: Name of the module.
        module: Index of the module in the tree.
        call: The module call.
        call_index: How many calls of the module came before it in the step,
        num_calls: and how many there are.
        ops: Indices (in the tape) of all ops of the call.
        saved: Range of the tensors (in the tape) that autograd saves in it.
        last_pack: Tick of the last saved tensor, where a rerun stops.
        trigger: Tick at which backward first reads one of them.
        released: Tick at which the last of them is dropped; its inputs live so long.
        last_use: Tick after which it no longer matters, at least `released`.
        groups: Its groups, each after those it reads.
        key: Equal for units that behave alike, tick by tick.
        activation_bytes: What it keeps for backward when nothing is recomputed,
            without its input and output.
        sole_bytes: What nobody else keeps of what it keeps, its output included.
        followed_ms: What it takes of the program whatever runs again.
        known_ms: Time to rerun it under the policies that were asked for.
    """

    fqn: str
    module: int
    call: ModuleCall
    call_index: int
    num_calls: int
    ops: range
    saved: range
    last_pack: int
    trigger: int
    released: int
    last_use: int
    groups: tuple[Group, ...]
    key: Hashable
    activation_bytes: int
    sole_bytes: int
    followed_ms: float = 0.0
    known_ms: dict[Hashable, float] = field(init=False, default_factory=dict)

    @property
    def label(self) -> str:
        """Its name in policies and plan files."""
        return self.fqn

    @property
    def title(self) -> str:
        """Its name for people."""
        return self.label

    @property
    def calls(self) -> tuple[Unit, ...]:
        """The module calls that it reruns one by one, each as a unit of its own."""
        return (self,)

    @property
    def around(self) -> str:
        """FQN of the module that is rerun in parts; '' if it is none."""
        return ""

    def by_call(self, policy: Policy) -> list[tuple[Unit, Policy]]:
        """Its calls, each with its part of a policy."""
        return [(self, policy)]

    def schedule(self, policy: Policy) -> tuple[Piece, ...]:
        """What runs again in backward, piece by piece."""
        return (
            Piece(
                unit=self,
                groups=self.groups,
                choices=policy.choices,
                trigger=self.trigger,
                enter=self.call.enter,
            ),
        )

    @property
    def far_kind(self) -> tuple[tuple[int, ...], bool, bool]:
        """Which of its arguments lie in far memory, as in `OpPolicy.far`.

        And whether they come back before it is rerun, and whether results do as well.
        """
        return (), False, False

    @property
    def resumes(self) -> int:
        """Tick of backward after which it changes anything again."""
        return self.trigger - 1

    def waits_ms(self, policy: Policy) -> float:
        """Time that a step waits for copies because of it."""
        return 0.0

    def far_bytes(self, policy: Policy) -> int:
        """Bytes that it has in far memory between forward and its rerun."""
        return 0

    def held_until(self, storage: int) -> int:
        """Tick until which it holds one of its arguments."""
        return self.released

    def is_apart_from(self, other: Unit) -> bool:
        """Whether neither of two units lies in the other one."""
        one, two = self.call, other.call
        return one.exit < two.enter or two.exit < one.enter

    @property
    def is_streamed(self) -> bool:
        """Whether it reruns nothing, and its saved tensors are offloaded one by one."""
        return False

    def moves(self, policy: Policy) -> tuple[Move, ...]:
        """What is offloaded one by one."""
        return ()

    def op_policies(
        self, tape: Tape, policy: Policy, *, training: bool
    ) -> tuple[OpPolicy, ...]:
        """A policy spelled out for every op, one for each of its calls."""
        return (self.spelled(tape, policy, training, after=DETACHED),)

    def spelled(
        self, tape: Tape, policy: Policy, training: bool, *, after: str, **kind: Any
    ) -> OpPolicy:
        """A policy of its groups, spelled out for every op.

        Args:
            tape: The traced step.
            policy: What happens to its groups.
            training: Mode that the model was traced in.
            after: What happens to ops after its last saved tensor.
            kind: Other fields of the `OpPolicy`.
        """
        ops = [tape.ops[i] for i in self.ops]
        actions = [
            VIEW if op.is_view else after if op.start >= self.last_pack else DETACHED
            for op in ops
        ]
        for group, choice in zip(self.groups, policy.choices, strict=True):
            for position in group.ops:
                actions[position] = choice
        listed = [a for a, op in zip(actions, ops, strict=True) if is_listed(op)]
        return OpPolicy(
            fqn=self.fqn,
            names=self.op_names(tape),
            actions="".join(listed),
            training=training,
            call_index=self.call_index,
            num_calls=self.num_calls,
            settings=self.call.settings,
            **kind,
        )

    def op_names(self, tape: Tape) -> tuple[str, ...]:
        """Names of the ops for which an op policy says what to do."""
        return tuple(op.name for i in self.ops if is_listed(op := tape.ops[i]))

    def as_kind(self, kind: type[_Kind], **changes: Any) -> _Kind:
        """The same call as a unit of another kind, with some fields of its own."""
        own = {f.name: getattr(self, f.name) for f in fields(Unit) if f.init}
        return kind(**{**own, **changes})
