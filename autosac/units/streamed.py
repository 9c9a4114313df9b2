"""The whole model as a unit that reruns nothing: its saved tensors are *streamed*.

Each storage that autograd saves in the model's forward, and that nobody else needs, is
sent to far memory as it is first saved. When some later ones are sent, or forward is
over, the program waits for the copy and lets go of it. Its memory is allocated again
where backward first reads it, or, *prefetched*, where backward first reads another one
before it; the copy back begins there, and the read waits for it. It goes when autograd
has used it. So the storages come back one by one, at places that the traced step fixes,
and memory does not depend on how fast copies are.

A policy says of every storage whether it stays on the device; and else how many reads
earlier it is fetched, and how many later ones are sent before the program waits for it.
Its waits are those of the step, played: copies of one way follow one another. As the
unit is the whole model, nothing else is copied meanwhile.

The rule of thumb behind it, with all of them moved, none prefetched, and five on their
way, is that of torchtune (torchtune/training/_activation_offloading.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from autosac.devices.links import Link
from autosac.devices.programs import ProgramCosts
from autosac.quantities import rounded_up
from autosac.step.tape import ModuleCall, Tape
from autosac.units.groups import TapeIndex
from autosac.units.policies import SAVE, OpPolicy, Policy
from autosac.units.unit import Move, Unit

_LEAST_SHARE = 2**-18  # of all that the step's storages add up to
_LEAST_BYTES = 512  # what a GPU's allocator rounds to
_LEAST = ord("a")  # the letter of 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A storage that can be streamed.

    Attributes:
        storage: The storage,
        nbytes: and its size.
        place: Of the first tensor in it, among those that are saved in the model.
        packed: Tick at which that is saved.
        freed: Tick from which on nobody but these holds it.
        read: Tick at which backward first reads one of them.
        until: Tick at which autograd has used the last of them.
    """

    storage: int
    nbytes: int
    place: int
    packed: int
    freed: int
    read: int
    until: int


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedModel(Unit):
    """A whole model whose saved tensors lie in far memory and come back one by one.

    Attributes:
        streams: What can be moved, in the order of saving.
        link: To far memory.
        starts: Ticks at which ops begin,
        passed_ms: and how long those before each take, and all.
    """

    streams: tuple[Stream, ...]
    link: Link
    starts: tuple[int, ...]
    passed_ms: tuple[float, ...]
    known_waits_ms: dict[Policy, float] = field(init=False, default_factory=dict)

    @property
    def is_streamed(self) -> bool:
        return True

    def schedule(self, policy: Policy) -> tuple[()]:
        return ()

    def held_until(self, storage: int) -> int:
        return 0

    def far_bytes(self, policy: Policy) -> int:
        return sum(self.streams[k].nbytes for k in moved(policy))

    def moves(self, policy: Policy) -> tuple[Move, ...]:
        fetched_with = self.fetched_with(policy)
        return tuple(
            Move(
                storage=self.streams[k].storage,
                let_go=let_go,
                fetched=self.streams[fetched_with[k]].read,
                until=self.streams[k].until,
            )
            for k, let_go in self.let_go(policy).items()
        )

    def let_go(self, policy: Policy) -> dict[int, int]:
        """Tick at which the program lets go of each stream that is moved."""
        order = moved(policy)
        ticks = [*(self.streams[k].packed for k in order), self.call.exit]
        return {k: ticks[after] for k, after in self.let_go_with(policy).items()}

    def let_go_with(self, policy: Policy) -> dict[int, int]:
        """Of each stream that is moved, after how many sent before one it goes.

        It goes at the end of forward if that is their number.
        """
        order, lags = moved(policy), policy.choices[len(self.streams) :]
        return {
            k: min(place + ord(lags[k]) - _LEAST, len(order))
            for place, k in enumerate(order)
        }

    def reads(self, policy: Policy) -> list[int]:
        """Streams that are moved, as backward first reads them."""
        return sorted(moved(policy), key=lambda k: self.streams[k].read)

    def fetched_with(self, policy: Policy) -> dict[int, int]:
        """Of each stream that is moved, with which one's first read it is fetched."""
        order = self.reads(policy)
        ahead = (ord(policy.choices[k]) - _LEAST for k in order)
        return {
            k: order[max(place - number, 0)]
            for place, (k, number) in enumerate(zip(order, ahead, strict=True))
        }

    def passed(self, tick: int) -> float:
        """Time that the ops before a tick take, in ms."""
        return self.passed_ms[bisect_left(self.starts, tick)]

    def waits_ms(self, policy: Policy) -> float:
        if policy not in self.known_waits_ms:
            sizes = [self.streams[k].nbytes for k in moved(policy)]
            issued_ms = 2 * self.link.issued_ms(sizes)
            self.known_waits_ms[policy] = self._play(policy) + issued_ms
        return self.known_waits_ms[policy]

    def _play(self, policy: Policy) -> float:
        """Time that a step waits for copies, played op by op."""
        streams, waited_ms, free_ms = self.streams, 0.0, 0.0
        events = [(streams[k].packed, 0, k) for k in moved(policy)]
        events += [(tick, 1, k) for k, tick in self.let_go(policy).items()]
        sent_ms: dict[int, float] = {}
        for tick, is_end, k in sorted(events):
            now_ms = self.passed(tick) + waited_ms
            if is_end:
                waited_ms += max(0.0, sent_ms[k] - now_ms)
            else:
                out_ms = self.link.out_ms(streams[k].nbytes, 1)
                free_ms = sent_ms[k] = max(free_ms, now_ms) + out_ms
        return waited_ms + self._play_back(policy, waited_ms)

    def _play_back(self, policy: Policy, begun_ms: float) -> float:
        """What of that is for copies back, which begin so much later."""
        begins: dict[int, list[int]] = defaultdict(list)
        order, fetched_with = self.reads(policy), self.fetched_with(policy)
        for k in order:
            begins[fetched_with[k]].append(k)
        waited_ms, free_ms = 0.0, 0.0
        back_ms: dict[int, float] = {}
        for k in order:
            now_ms = self.passed(self.streams[k].read) + begun_ms + waited_ms
            for other in begins[k]:
                own_ms = self.link.back_ms(self.streams[other].nbytes, 1)
                free_ms = back_ms[other] = max(free_ms, now_ms) + own_ms
            waited_ms += max(0.0, back_ms[k] - now_ms)
        return waited_ms

    def op_policies(
        self, tape: Tape, policy: Policy, *, training: bool
    ) -> tuple[OpPolicy, ...]:
        order, fetched_with = self.reads(policy), self.fetched_with(policy)
        places = {k: place for place, k in enumerate(order)}
        names, let_go_with = self.op_names(tape), self.let_go_with(policy)
        return (
            OpPolicy(
                fqn=self.fqn,
                names=names,
                actions=SAVE * len(names),
                training=training,
                streamed=tuple(self.streams[k].place for k in order),
                streamed_bytes=tuple(self.streams[k].nbytes for k in order),
                fetched_with=tuple(places[fetched_with[k]] for k in order),
                let_go_with=tuple(let_go_with[k] for k in order),
                num_saved=len(_counted(tape, self.saved)),
            ),
        )

    def policy_of(self, spelled: OpPolicy) -> Policy:
        """The policy that `op_policies` spelled out.

        Raises:
            ValueError: It streams what cannot be here.
        """
        by_place = {stream.place: k for k, stream in enumerate(self.streams)}
        if not by_place.keys() >= set(spelled.streamed):
            raise ValueError("what is to be streamed is not saved here")
        order = [by_place[place] for place in spelled.streamed]
        sent = {k: number for number, k in enumerate(sorted(order))}
        ahead, lags = [SAVE] * len(self.streams), [SAVE] * len(self.streams)
        for number, k in enumerate(order):
            ahead[k] = letter(number - spelled.fetched_with[number])
            lags[k] = letter(spelled.let_go_with[number] - sent[k])
        return Policy("".join(ahead + lags))


def letter(number: int) -> str:
    """How many reads early a stream is fetched, or how many are sent before it goes.

    A policy has one for each stream, and then another one for each; `SAVE` twice for
    those that stay.
    """
    return chr(_LEAST + number)


def moved(policy: Policy) -> list[int]:
    """Streams that a policy moves, in the order of saving."""
    ahead = policy.choices[: len(policy.choices) // 2]
    return [k for k, choice in enumerate(ahead) if choice != SAVE]


def find_streamed(
    tape: Tape,
    op_ms: Sequence[float],
    link: Link,
    program: ProgramCosts,
    *,
    exclude: Collection[str] = (),
) -> StreamedModel | None:
    """The model as a unit that is streamed; None if that moves nothing.

    It must be called once in a step, and backward must go through it once.

    Args:
        tape: The traced step.
        op_ms: Time of every op of the tape.
        link: To far memory.
        program: What units take of it besides.
        exclude: FQNs of modules that must not be units.
    """
    calls = [c for c in tape.calls if not tape.modules[c.module].fqn]
    is_rerun = any(call.phase == "backward" for call in tape.calls)
    if len(calls) != 1 or calls[0].phase != "forward" or is_rerun or "" in exclude:
        return None
    (call,), index = calls, TapeIndex(tape)
    saved = index.saved_in(call.enter, call.exit)
    if call.once is not None or any(tape.saved[i].used_again for i in saved):
        return None
    streams = tuple(_streams(index, call, saved))
    if not streams:
        return None
    return StreamedModel(
        fqn="",
        module=call.module,
        call=call,
        call_index=0,
        num_calls=1,
        ops=index.ops_in(call.enter, call.exit),
        saved=saved,
        last_pack=tape.saved[saved[-1]].packed,
        trigger=min(stream.read for stream in streams),
        released=max(tape.saved[i].released for i in saved),
        last_use=max(int(tape.saved_until[i]) for i in saved),
        groups=(),
        key="streamed",
        activation_bytes=0,
        sole_bytes=0,
        followed_ms=program.followed_ms(len(saved), 0, 0),
        streams=streams,
        link=link,
        starts=tuple(index.starts),
        passed_ms=tuple(accumulate(op_ms, initial=0.0)),
    )


def _counted(tape: Tape, saved: Iterable[int]) -> list[int]:
    """Saved tensors that count in places: numbers may lie on the host or not."""
    return [i for i in saved if not tape.saved[i].is_number]


def _streams(index: TapeIndex, call: ModuleCall, saved: range) -> Iterator[Stream]:
    """Storages that can be moved, in the order of saving."""
    tape = index.tape
    least = rounded_up(int(_LEAST_SHARE * sum(tape.nbytes.tolist())), _LEAST_BYTES)
    by_storage: dict[int, list[int]] = defaultdict(list)
    places = {i: place for place, i in enumerate(_counted(tape, saved))}
    for i in places:
        by_storage[tape.saved[i].storage].append(i)
    for storage, own in by_storage.items():
        record, first = tape.storages[storage], tape.saved[own[0]]
        unpacked = [t for i in own if (t := tape.saved[i].unpacked) is not None]
        if record.nbytes < max(least, _LEAST_BYTES) or not record.born or not unpacked:
            continue
        read, freed = min(unpacked), index.held_elsewhere_until(storage, saved)
        is_written = index.written_between(storage, first.packed, read)
        if read > max(freed, call.exit) and not is_written:
            yield Stream(
                storage=storage,
                nbytes=record.nbytes,
                place=places[own[0]],
                packed=first.packed,
                freed=max(freed, call.exit),
                read=read,
                until=max(index.until[i] for i in own),
            )
