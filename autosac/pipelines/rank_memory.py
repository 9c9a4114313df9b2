"""Memory of one rank of a pipeline: its actions, replayed over the tapes of its stages.

An action takes place as the tape has it: forward with the loss, or backward. What
forward leaves to backward lives from one action to the other; so does, for each
micro-batch apart, what autograd saves under AC policies. To this come
    - the inputs and targets of all micro-batches, which the user's batch holds; of
      ranks with parts of a sequence the whole ones besides (`besides`);
    - what is received: buffers for all micro-batches, activations and gradients, which
      are made in the first step and stay;
    - what is sent: the schedule holds the latest output and the latest gradient of
      GPipe's and 1F1B's stage until the next one is there, and GPipe and the looped
      schedules all that they have sent until the step ends;
    - the losses of all micro-batches;
    - the optimizer steps of the rank's stages, one after the other;
    - of a sharded stage what FSDP2 gathers and reduces (`sharded_stages`).

That is how torch 2.10 to 2.14 do it; 2.15 holds less (`_compat_pipelining.HOLDS_LESS`),
so that there a peak is an upper bound.

Source: schedules.py and stage.py of torch/distributed/pipelining.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autosac.errors import UnsupportedError
from autosac.parallel.fsdp_hooks import PLACES, Replay
from autosac.pipelines.schedules import GPIPE, ONE_F_ONE_B, Action, Schedule
from autosac.pipelines.sharded_stages import ShardedStage
from autosac.pipelines.stage_steps import StageStep
from autosac.profiles.profile import Profile
from autosac.solving.rules_of_thumb import Choice
from autosac.step.ledger import Ledger, Timeline
from autosac.step.tape import CATEGORIES, IntArray, Tape

MOST_GATHERED = 3  # stages of a rank: `max_active_stages` of `_add_unshard_reshard`
_ROUNDS, _BESIDES = 4, 16  # of micro-batches that are replayed at most under 1F1B

_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a stage allocates in the step of one micro-batch, by kind.

    Keys are those of its simulator; the others are entries of its ledger.

    Attributes:
        ledger: All of it.
        loss_key: When the stage's own forward is over,
        backward_key: when backward begins,
        optimizer_key: and when the optimizer does.
        of_micro_batch: Entries that each micro-batch has anew.
        gradients: Those of them that stay until the step ends: the first backward
            makes them, and there is a loss for each micro-batch.
        sent: The output,
        sent_back: and the gradient of what was received.
        left: What forward leaves behind until the next one takes its place.
        always_bytes: What is there all the time.
        input_bytes: Of what was received or given, and of the target.
        output_bytes: Of the output.
        loss_bytes: Of the loss, if the stage has it, which stays until the step ends.
    """

    ledger: Ledger
    loss_key: int
    backward_key: int
    optimizer_key: int
    of_micro_batch: _Mask
    gradients: _Mask
    sent: _Mask
    sent_back: _Mask
    left: _Mask
    always_bytes: int
    input_bytes: int
    output_bytes: int
    loss_bytes: int

    @property
    def is_held(self) -> _Mask:
        """Which entries a micro-batch holds between its forward and its backward."""
        born, died = self.ledger.born, self.ledger.died
        born_before: _Mask = born <= self.backward_key
        return self.of_micro_batch & born_before & (died > self.backward_key)


def part_of(profile: Profile, ledger: Ledger, *, is_last: bool) -> Part:
    """Sort what the step of one micro-batch allocates.

    Args:
        profile: Of the stage.
        ledger: Of the step of the profile.
        is_last: Whether it has the loss.
    """
    tape, span = profile.tape, profile.simulator.span
    loss_key, backward_key, optimizer_key = (
        tape.phases[phase] * span for phase in ("loss", "backward", "optimizer")
    )
    is_kept = (ledger.born <= 0) & (ledger.died >= ledger.end)
    in_optimizer = ledger.born >= optimizer_key
    of_micro_batch = ~is_kept & ~in_optimizer
    stays = of_micro_batch & (ledger.died >= optimizer_key)
    in_loss = (ledger.born >= loss_key) & (ledger.born < backward_key)
    in_backward = ledger.born >= backward_key
    is_gradient, is_input = (
        _of_category(tape, name, len(ledger.born)) for name in ("gradient", "input")
    )
    sent = np.zeros(len(ledger.born), dtype=bool)
    sent[list(_outputs(tape))] = True
    if not is_last:
        of_micro_batch &= ~_of_received_gradient(tape, ledger, loss_key, backward_key)
    gradients = stays & (is_gradient | (in_loss & is_last))
    return Part(
        ledger=ledger,
        loss_key=loss_key,
        backward_key=backward_key,
        optimizer_key=optimizer_key,
        of_micro_batch=of_micro_batch,
        gradients=gradients,
        sent=sent & of_micro_batch,
        sent_back=stays & in_backward & ~is_gradient,
        left=stays & ~in_backward & ~in_loss & ~is_gradient,
        always_bytes=_sum(ledger, is_kept & ~is_gradient & ~is_input),
        input_bytes=_sum(ledger, is_kept & is_input),
        output_bytes=_sum(ledger, sent),
        loss_bytes=_sum(ledger, gradients & ~is_gradient),
    )


def _sum(ledger: Ledger, mask: _Mask) -> int:
    return int(ledger.nbytes[mask].sum())


def _of_category(tape: Tape, name: str, size: int) -> _Mask:
    """Which entries of a ledger of so many are storages of a category."""
    mask = np.zeros(size, dtype=bool)
    mask[: len(tape.storages)] = tape.categories == CATEGORIES.index(name)
    return mask


def _outputs(tape: Tape) -> tuple[int, ...]:
    """Storages of the stage's output."""
    (call,) = (call for call in tape.calls if call.module == 0)
    return call.outputs


def _of_received_gradient(
    tape: Tape, ledger: Ledger, loss_key: int, backward_key: int
) -> _Mask:
    """What a trace makes to begin backward where there is no loss."""
    made = (ledger.born >= loss_key) & (ledger.born < backward_key)
    of_loss = next(op for op in tape.ops if op.phase == "backward")
    made[list(of_loss.creates)] = True
    return made


class RankReplay:
    """Replays what one rank of a pipeline does in a step.

    Args:
        schedule: Of the pipeline.
        rank: The rank.
        stages: The steps of its stages, by their index in the pipeline.
        besides_bytes: What else is there all the time.

    Raises:
        UnsupportedError: So many stages are sharded that not all stay gathered.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, StageStep],
        *,
        besides_bytes: int = 0,
    ) -> None:
        assert set(stages) == set(schedule.stages_of(rank))
        if len(stages) > MOST_GATHERED and any(s.sharded for s in stages.values()):
            raise UnsupportedError(
                f"A rank has {len(stages)} stages that FSDP2 shards, and PyTorch keeps"
                f" {MOST_GATHERED} gathered: use no more, or no shards."
            )
        self.schedule = _few_alike(schedule)
        self._left_out = schedule.num_micro_batches - self.schedule.num_micro_batches
        self.stages = stages
        self.besides_bytes = besides_bytes
        self.actions = self.schedule.actions(rank)

    def peak_bytes(self, chosen: Mapping[int, Choice] | None = None) -> int:
        """Peak of the rank, with AC units of each stage's later step."""
        return self.timeline(chosen).peak_bytes

    def timeline(self, chosen: Mapping[int, Choice] | None = None) -> Timeline:
        """Live memory of the rank over a step; keys count on from action to action."""
        return self.ledger(chosen or {}).timeline()

    def stage_peaks(
        self, chosen: Mapping[int, Choice], *, adding: bool
    ) -> dict[int, int]:
        """Most bytes while each stage computes.

        Args:
            chosen: AC units of each stage's later step.
            adding: In backwards that add to gradients, or else in all other actions.
        """
        replay, constant_bytes = self._replayed(chosen)
        own = replay.ledger()
        timeline = own.timeline()
        starts = np.array([replay.starts[action] for action in self.actions])
        most = timeline.most_from(starts * PLACES) + constant_bytes
        peaks: dict[int, int] = {}
        for action, peak_bytes in zip(self.actions, most.tolist(), strict=True):
            if action.adds == adding:
                peaks[action.stage] = max(peaks.get(action.stage, 0), peak_bytes)
        return peaks

    def ledger(self, chosen: Mapping[int, Choice]) -> Ledger:
        """All that the rank allocates in a step."""
        replay, constant_bytes = self._replayed(chosen)
        ledger = replay.ledger()
        return replace(ledger, constant_bytes=ledger.constant_bytes + constant_bytes)

    def _replayed(self, chosen: Mapping[int, Choice]) -> tuple[_Replay, int]:
        """The replay, and what is there besides all the time."""
        pairs = {}
        for stage, step in self.stages.items():
            choice = chosen.get(stage, {})
            of_first = step.in_first(choice)
            ledger = (step.sharded or step.first.simulator).ledger(of_first)
            again = step.later.simulator.ledger(choice)
            pairs[stage] = (
                part_of(step.first, ledger, is_last=step.is_last),
                part_of(step.later, again, is_last=step.is_last),
            )
        constant_bytes = self.besides_bytes
        for stage, (_, later) in pairs.items():
            constant_bytes += self._left_out * self._of_each(stage, later)
        replay = _Replay(self.schedule, self.actions, pairs, self.stages)
        return replay, constant_bytes

    def _of_each(self, stage: int, later: Part) -> int:
        """What a stage has all the time of each micro-batch, at most."""
        is_last = stage == self.schedule.num_stages - 1
        received_back = 0 if is_last else later.output_bytes
        return later.input_bytes + received_back + later.loss_bytes


def _few_alike(schedule: Schedule) -> Schedule:
    """The schedule with fewer micro-batches, if all that is left out is alike.

    In between 1F1B does the same with each, but for what stays of it.
    """
    few = _ROUNDS * schedule.num_ranks + _BESIDES
    if schedule.name != ONE_F_ONE_B or schedule.num_micro_batches <= few:
        return schedule
    return replace(schedule, num_micro_batches=few)


class _Replay:
    """One replay: where each action begins, and what is alive until when."""

    def __init__(
        self,
        schedule: Schedule,
        actions: tuple[Action, ...],
        parts: Mapping[int, tuple[Part, Part]],
        steps: Mapping[int, StageStep],
    ) -> None:
        self.schedule, self.actions, self.parts = schedule, actions, parts
        self.starts: dict[Action, int] = {}
        at = len(parts)  # a key before for each stage that is gathered then
        for action in actions:
            self.starts[action] = at
            part = self._part(action)
            begin, end = (0, part.backward_key)
            if not action.is_forward:
                begin, end = part.backward_key, part.optimizer_key
            at += end - begin + 1
        # Gradients are reduced while the schedule still holds what it has sent.
        self.end_of_actions = at + 1
        self.end = at + 2 + sum(p.ledger.end for p, _ in parts.values())
        self.replays: list[Replay] = []
        # When gradients are freed of which FSDP2 takes care, by stage and micro-batch.
        self.freed: dict[tuple[int, int], dict[int, int]] = {}
        for place, (stage, step) in enumerate(steps.items()):
            if step.sharded is not None and self.schedule.is_looped:
                last = next(a for a in reversed(actions) if a.stage == stage)
                part = self._part(last)
                length = part.optimizer_key - part.backward_key
                end = self.starts[last] + length
                self._shard(stage, step.sharded, end, unshard=place)
            elif step.sharded is not None:
                self._shard(stage, step.sharded, at)

    def _shard(
        self, stage: int, sharded: ShardedStage, end: int, unshard: int | None = None
    ) -> None:
        """Replay what FSDP2 does to a stage."""
        backwards = []
        for number in range(self.schedule.num_micro_batches):
            action = Action(False, stage, number)
            backwards.append(self.starts[action] - self._part(action).backward_key)
        forward = self.starts[Action(True, stage, 0)]
        replay, died = sharded.replay(forward, backwards, end, unshard)
        self.replays.append(replay)
        self.freed.update({(stage, number): own for number, own in enumerate(died)})
        self.freed.setdefault((stage, 0), replay.gradient_died)

    def _part(self, action: Action) -> Part:
        """The step that a micro-batch runs: the first one makes the gradients."""
        return self.parts[action.stage][action.micro_batch > 0]

    def ledger(self) -> Ledger:
        """All that the rank allocates."""
        forwards = [action for action in self.actions if action.is_forward]
        pieces = [self._of_micro_batch(forward) for forward in forwards]
        pieces += self._of_optimizers()
        pieces += [self._of_sharding(replay) for replay in self.replays]
        born, died, nbytes, stream = map(np.concatenate, zip(*pieces, strict=True))
        return Ledger(
            born=born,
            died=died,
            nbytes=nbytes,
            stream=stream,
            end=self.end * PLACES,
            constant_bytes=self._constant_bytes(),
        )

    def _of_sharding(self, replay: Replay) -> tuple[IntArray, ...]:
        """Entries of what a stage's FSDP units gather and reduce."""
        born, died, nbytes, stream = (
            np.array(column, dtype=np.int64)
            for column in (replay.born, replay.died, replay.nbytes, replay.stream)
        )
        return born, np.where(died < 0, self.end * PLACES, died), nbytes, stream

    def _of_micro_batch(self, forward: Action) -> tuple[IntArray, ...]:
        """Entries of a micro-batch in a stage."""
        part, ledger = self._part(forward), self._part(forward).ledger
        begin = self.starts[forward]
        back = self.starts[forward._replace(is_forward=False)] - part.backward_key
        born = np.where(ledger.born < part.backward_key, begin, back) + ledger.born
        died = np.where(ledger.died <= part.backward_key, begin, back) + ledger.died
        died[part.gradients] = self.end
        held = died[part.sent]
        died[part.sent] = np.maximum(held, self._sent_until(forward, part))
        died[part.sent_back] = self._sent_back_until(forward)
        died[part.left] = self._next(forward, part.backward_key)
        died *= PLACES
        freed = self.freed.get(forward[1:], {})
        died[list(freed)] = list(freed.values())
        own = part.of_micro_batch
        born, died, nbytes = born[own] * PLACES, died[own], ledger.nbytes[own]
        return born, died, nbytes, np.zeros_like(born)

    @property
    def _holds_all(self) -> bool:
        """Whether what is sent is held until the end of the step."""
        return self.schedule.is_looped or self.schedule.name == GPIPE

    def _sent_until(self, forward: Action, part: Part) -> int:
        """Key until which the schedule holds an output at least."""
        is_last = forward.stage == self.schedule.num_stages - 1
        if self._holds_all and not is_last:
            return self.end_of_actions
        if self.schedule.is_looped:
            return 0
        # The next forward replaces the output, but 1F1B waits for all sends of its
        # first forwards but the last one, and keeps what the last of these has sent.
        until = self._next(forward, part.loss_key)
        num_first = self.schedule.most_in_flight(forward.stage)
        if forward.micro_batch == num_first - 2 and not is_last:
            until = max(until, self._end_of_steady_state)
        return until

    @cached_property
    def _end_of_steady_state(self) -> int:
        """Key at which 1F1B's backward behind the last forward is done."""
        last = max(i for i, action in enumerate(self.actions) if action.is_forward)
        after = self.actions[last + 2 :]
        return self.starts[after[0]] if after else self.end_of_actions

    def _sent_back_until(self, forward: Action) -> int:
        """Key until which the schedule holds a gradient that it sends back."""
        if self._holds_all:
            return self.end_of_actions
        part = self._part(forward)
        length = part.optimizer_key - part.backward_key
        return self._next(forward._replace(is_forward=False), length)

    def _next(self, action: Action, place: int) -> int:
        """A place in the next action of the same kind and stage, or the end of all."""
        following = self._following.get(action)
        if following is None:
            return self.end_of_actions
        return self.starts[following] + place

    @cached_property
    def _following(self) -> dict[Action, Action]:
        """The next action of the same kind and stage."""
        following: dict[Action, Action] = {}
        latest: dict[tuple[bool, int], Action] = {}
        for action in self.actions:
            kind = action[:2]
            if kind in latest:
                following[latest[kind]] = action
            latest[kind] = action
        return following

    def _of_optimizers(self) -> list[tuple[IntArray, ...]]:
        """Entries of the optimizer steps, one stage's after another's."""
        pieces: list[tuple[IntArray, ...]] = []
        at = self.end_of_actions + 1
        for part, _ in self.parts.values():
            ledger = part.ledger
            own = ledger.born >= part.optimizer_key
            shift = at - part.optimizer_key
            born, died = (
                (keys[own] + shift) * PLACES for keys in (ledger.born, ledger.died)
            )
            pieces.append((born, died, ledger.nbytes[own], np.zeros_like(born)))
            at = shift + ledger.end
        return pieces

    def _constant_bytes(self) -> int:
        """What is there all the time: parameters, states, the batch, buffers."""
        total, number = 0, self.schedule.num_micro_batches
        for stage, (part, _) in self.parts.items():
            total += part.always_bytes + number * part.input_bytes
            if stage < self.schedule.num_stages - 1:
                total += number * part.output_bytes  # of gradients to be received
            most = self.schedule.most_in_flight(stage)
            total += most * part.ledger.constant_bytes
        return total
