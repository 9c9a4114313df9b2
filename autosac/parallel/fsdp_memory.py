"""Memory of one rank of a step under FSDP2, from the tape of the unsharded step.

The tape has every op, activation and gradient of the step as one process without
sharding runs it. A rank does the same on its own batch, so only this changes:
    - a parameter takes one padded chunk, its optimizer state the rows of the rank;
    - gathered parameters come and go with the hooks of `fsdp_hooks`, at the places that
      `fsdp_schedule` finds on the tape, and so do the buffers of collectives;
    - an unsharded gradient is freed when it is reduced, and a sharded one stays;
    - what the optimizer makes of parameters has the size of the rank's rows.
AC policies change lifetimes as in `simulating`; reruns find parameters gathered, as
FSDP2 gathers before the first op of backward of a module that is unit of both kinds.

Per position of the step, memory is linear in the choice of units. Let unit u have P_u
bytes of parameters in the gathered type and G_u of gradients in the reduced one (both
padded), y_u = 1 if u is a unit and k_u = 1 if it is kept after forward. It adds
    always: its chunks P_u / degree (in their own type) and state;
    in forward of u: 2 P_u, the parameters and the buffer they were gathered in. The
        buffer goes when the next unit's is full, so at the entry of u it meets that of
        the unit before, and before torch 2.15 the parameters of u as well; with gloo
        once more P_u there, with a cast P_u / degree;
    from then until backward of u: k_u P_u;
    in backward of the unit after u: (1 - k_u) P_u, the buffer of the prefetch;
    at the entry of backward of u: (1 - k_u) 2 P_u for an instant;
    in backward of u: P_u, and its gradients as they are made;
    at the end of backward of u: G_u for the input of reduce-scatter while the gradients
        live, then G_u + G_u / degree (with gloo 2 G_u + G_u / degree), and before torch
        2.15 with it the last gradient, all of G_u if there is one only; P_u is gone;
    until the end of backward of the unit before u: G_u, an input that is kept;
    from the end of its backward on: G_u / degree, its sharded gradients. With those
        of earlier micro-steps in place, these are there always, and it is for an
        instant.
Parameters that no chosen unit holds are those of the model itself, P - sum of y_u P_u,
kept after forward by default and reduced at the very end of backward, with all their
gradients alive until then. Before and after are meant in the order of forward. So each
position has one term in y_u and one in k_u for every unit that is near it; where the
neighbour depends on the choice, charge the prefetch to the unit in whose backward it
falls, with the size of the largest possible neighbour, and let the simulation correct.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from autosac import _compat
from autosac._compat_distributed import is_collective
from autosac.parallel.fsdp_checks import (
    check_inputs,
    check_outputs,
    check_reads,
    check_step,
    check_types,
)
from autosac.parallel.fsdp_hooks import PLACES, Collectives, Group, Replay, make_group
from autosac.parallel.fsdp_optimizer import Shards, find_shards
from autosac.parallel.fsdp_schedule import Hook, Schedule
from autosac.parallel.rank_blocks import (
    excess_bytes,
    reserved_bytes,
    whole_sizes,
)
from autosac.parallel.sharding import (
    Sharding,
    check_ac_units,
    chunk_numel,
    mesh_bytes,
    owned_parameters,
)
from autosac.profiles.profile import Profile
from autosac.simulation.allocator_steps import FirstStep, first_step
from autosac.simulation.simulator import Simulator
from autosac.step.ledger import Ledger, Timeline
from autosac.step.tape import CATEGORIES, IntArray, Tape
from autosac.units.policies import Policy
from autosac.units.unit import Unit

GLOO_THREADS = 2  # of a process group, unless its options say otherwise


@dataclass(frozen=True, kw_only=True)
class RankTimeline(Timeline):
    """Live memory of one rank.

    Attributes:
        rank: Its place among those that share the parameters.
        ledger: What it allocates,
        composition: and bytes alive at the peak, per category.
    """

    rank: int
    ledger: Ledger
    composition: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class _Sharded:
    """What a sharding does to a step, whatever is recomputed."""

    groups: tuple[Group, ...]
    born: IntArray
    died: IntArray
    nbytes: IntArray
    category: tuple[str, ...]
    stream: IntArray
    gradients: IntArray
    gradients_died: IntArray


class RankSimulator:
    """Replays a tape as the ranks of FSDP2 run it.

    Args:
        profile: The traced step; for a mixed-precision policy traced with
            `profiles.compute_dtype.in_compute_dtype`.
        copies: Collectives copy what they send. By default they do on the CPU, as gloo
            does, and not on a GPU, as NCCL does not.
        adds_unsharded: Gradients of several micro-batches add up before they are
            reduced.
        num_slices: Ranks of a whole mesh that each rank of a sharding stands for: those
            that share slices. The mesh then counts as well; None if others count it.

    Raises:
        ValueError: The trace begins with gradients of earlier steps.
        UnsupportedError: The step steps its optimizer in backward, or has optimizer
            state that is not shaped like its parameter.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        copies: bool | None = None,
        adds_unsharded: bool = False,
        num_slices: int | None = None,
    ) -> None:
        check_step(profile)
        self.profile, self._num_slices = profile, num_slices
        self.tape = _in_real_types(profile)
        same = self.tape is profile.tape
        self.simulator = profile.simulator if same else Simulator(self.tape)
        self.schedule = Schedule(self.tape)
        on_cpu = profile.device.type == "cpu"
        self.how = Collectives(
            granularity_bytes=profile.step.granularity_bytes,
            on_cpu=on_cpu,
            copies=on_cpu if copies is None else copies,
            frees_before_copy_out=_compat.FSDP_FREES_BEFORE_COPY_OUT,
            holds_last_gradient=_compat.FSDP_HOLDS_LAST_GRADIENT,
            adds_gradients=profile.step.adds_gradients,
            keeps_gradients=profile.step.gradients_in_forward,
            adds_unsharded=adds_unsharded,
        )
        self.shards: Shards = find_shards(self.tape)
        self._sharded: dict[Sharding, _Sharded] = {}

    def peak_bytes(
        self, sharding: Sharding, chosen: Mapping[Unit, Policy] | None = None
    ) -> int:
        """Peak of the rank whose peak is highest, which is the first one."""
        return self.timeline(sharding, chosen).peak_bytes

    def reserved_bytes(
        self, sharding: Sharding, chosen: Mapping[Unit, Policy]
    ) -> int | None:
        """What the allocator of a GPU reserves for that rank; None on the CPU."""
        if self.how.on_cpu:
            return None
        ledger = self.timeline(sharding, chosen).ledger
        return reserved_bytes(ledger, self._first_step, self._whole_sizes)

    def late_bytes(self, sharding: Sharding) -> int:
        """What a step may take beyond its peak when threads of gloo are slow.

        0 on a GPU; else `late_copies` of the largest buffer of a unit.
        """
        groups = self._shard(sharding).groups
        return self.late_copies(sharding) * max(group.late_bytes for group in groups)

    def late_copies(self, sharding: Sharding) -> int:
        """How many units' buffers threads of gloo may hold when they are slow.

        FSDP2 waits for each collective, so that each of the two threads of a process
        group may still hold the last that it ran (`ProcessGroupGloo::runLoop`), also
        when the loop has dropped it: among ranks that share parameters the gathered
        buffer, or a copy of the gradients, and among replicas the reduced gradients,
        of which a rank has one in `shard_degree` parts.
        """
        if not self.how.copies:
            return 0
        degree = sharding.shard_degree
        is_replicated = sharding.replicate_degree > 1
        num_gathered = GLOO_THREADS if degree > 1 else 0
        return num_gathered + is_replicated * -(-GLOO_THREADS // degree)

    def timeline(
        self,
        sharding: Sharding,
        chosen: Mapping[Unit, Policy] | None = None,
        *,
        rank: int = 0,
        workspaces: bool = True,
    ) -> RankTimeline:
        """Live memory of one rank.

        Args:
            sharding: How the model is sharded.
            chosen: AC units and their policies.
            rank: Its place among the ranks that share parameters.
            workspaces: Count what nobody asks for as well: what kernels allocate inside
                themselves, and what the allocator of a GPU adds.

        Raises:
            ValueError: The sharding does not fit the model, the types of the trace or
                the AC units; names what does not.
            UnsupportedError: A unit is called several times, or gets arguments that
                FSDP2 would cast.
        """
        chosen = chosen or {}
        if not 0 <= rank < sharding.shard_degree:
            raise ValueError(
                f"`rank`={rank} must be at least 0 and less than the shard degree"
                f" {sharding.shard_degree}."
            )
        sharded = self._shard(sharding)
        check_ac_units(sharding, chosen)
        base = self.simulator.ledger(chosen, workspaces=workspaces)
        num_storages = len(self.tape.storages)
        nbytes = base.nbytes.copy()
        self.resize(nbytes, sharding.shard_degree, rank)
        died = base.died * PLACES
        died[sharded.gradients] = sharded.gradients_died
        born = np.concatenate([base.born * PLACES, sharded.born])
        end = base.end * PLACES
        died = np.concatenate([died, np.where(sharded.died < 0, end, sharded.died)])
        mesh_bytes = self.mesh_bytes(sharding.num_ranks)
        ledger = Ledger(
            born=born,
            died=died,
            nbytes=np.concatenate([nbytes, sharded.nbytes]),
            end=end,
            constant_bytes=base.constant_bytes + mesh_bytes,
            stream=np.concatenate([np.zeros_like(base.born), sharded.stream]),
        )
        if workspaces and not self.how.on_cpu:
            left_over = excess_bytes(ledger, self._first_step, self._whole_sizes)
            ledger = replace(ledger, constant_bytes=ledger.constant_bytes + left_over)
        timeline = ledger.timeline()
        composition = self._composition(
            ledger, timeline.peak_key, sharded, num_storages, len(base.nbytes)
        )
        if mesh_bytes:
            composition["temporary"] -= mesh_bytes
            composition["mesh"] = mesh_bytes
        return RankTimeline(
            keys=timeline.keys,
            live_bytes=timeline.live_bytes,
            rank=rank,
            ledger=ledger,
            composition=composition,
        )

    def mesh_bytes(self, num_ranks: int) -> int:
        """What the mesh of a sharding of so many ranks holds, if that counts here."""
        num_slices = self._num_slices or 0
        return mesh_bytes(num_slices * num_ranks, self.profile.device.type)

    def base_by_tick(self, degree: int) -> IntArray:
        """Bytes alive on the first rank after every tick, whatever the units are.

        That is without gathered parameters, gradients and the buffers of collectives,
        and with nothing recomputed.

        Args:
            degree: Ranks over which parameters are sharded.

        Returns:
            Shape (num_ticks + 1,).
        """
        base = self.simulator.ledger({})
        nbytes = base.nbytes.copy()
        self.resize(nbytes, degree, 0)
        trained = [p for p in self.tape.parameters if p.gradient is not None]
        nbytes[[p.gradient for p in trained]] = 0
        by_tick = replace(base, nbytes=nbytes).after_ticks(
            self.tape.num_ticks, self.simulator.span
        )
        earlier_bytes = sum(chunk_numel(p, degree) * p.itemsize for p in trained)
        if self.how.adds_gradients:
            by_tick += earlier_bytes
        elif self.how.keeps_gradients:
            by_tick[: self.tape.phases["backward"]] += earlier_bytes
        return by_tick

    def _shard(self, sharding: Sharding) -> _Sharded:
        if sharding not in self._sharded:
            self._sharded[sharding] = self._replay(sharding)
        return self._sharded[sharding]

    def groups(self, sharding: Sharding) -> tuple[Group, ...]:
        """What the units of a sharding gather and reduce, in the order of modules.

        Raises:
            ValueError: As `timeline`, or a unit that is to reshard must not.
            UnsupportedError: As `timeline`.
        """
        check_types(self.profile, sharding)
        owned = owned_parameters(self.tape, sharding)
        check_reads(self.schedule.reads, owned)
        index = self.tape.modules.index
        units = sorted(sharding.units, key=lambda unit: index[unit.fqn])
        groups = []
        for unit in units:
            module = index[unit.fqn]
            hooks = self.schedule.hooks(module)
            if unit.fqn and sharding.reshards_to(unit) is not None:
                check_outputs(self.schedule, module)
            if owned[unit.fqn] and hooks is not None:
                check_inputs(self.tape, sharding, module, self.schedule.call(module))
            groups.append(
                make_group(
                    sharding,
                    unit,
                    module,
                    hooks,
                    owned[unit.fqn],
                    self.how,
                    self._undivided,
                )
            )
        return tuple(groups)

    @cached_property
    def _first_step(self) -> FirstStep:
        return first_step(self.tape, self.simulator.span * PLACES)

    @cached_property
    def _whole_sizes(self) -> IntArray:
        return whole_sizes(self.tape, self.profile.device.memory_bytes)

    @cached_property
    def _undivided(self) -> dict[int, int]:
        """Gradients that tensor-parallel ranks have whole, or as parts of a sum.

        With the elements that they have.
        """
        storages = self.tape.storages
        gradients = {
            p.gradient: p for p in self.tape.parameters if p.gradient is not None
        }
        whole = {
            g
            for g, p in gradients.items()
            if storages[g].nbytes > self.how.rounded(prod(p.shape) * p.traced_itemsize)
        }
        summed = {
            storage
            for op in self.tape.ops
            if op.phase == "optimizer" and is_collective(op.name)
            for storage in op.reads
        }
        return {
            g: storages[g].nbytes // gradients[g].traced_itemsize
            for g in whole | (summed & gradients.keys())
        }

    def _replay(self, sharding: Sharding) -> _Sharded:
        groups = self.groups(sharding)
        replay = Replay(list(groups), sharding, self.how)
        self._run_hooks(replay)
        died = replay.gradient_died
        return _Sharded(
            groups=groups,
            born=np.array(replay.born, dtype=np.int64),
            died=np.array(replay.died, dtype=np.int64),
            nbytes=np.array(replay.nbytes, dtype=np.int64),
            category=tuple(replay.category),
            stream=np.array(replay.stream, dtype=np.int64),
            gradients=np.array(list(died), dtype=np.int64),
            gradients_died=np.array(list(died.values()), dtype=np.int64),
        )

    def _run_hooks(self, replay: Replay) -> None:
        events: list[tuple[int, Hook, int, int, int]] = [
            (self.schedule.final, Hook.FINAL, 0, 0, 0),
            (self.tape.phases["backward"] - 1, Hook.ZERO_GRADIENTS, 0, 0, 0),
        ]
        for i, state in enumerate(replay.states):
            hooks = state.group.hooks
            if hooks is None:
                continue
            enter, leave = hooks.pre_forward, hooks.post_forward
            events.append((enter, Hook.PRE_FORWARD, 0, 0, i))
            events.append((leave, Hook.POST_FORWARD, 0, 0, i))
            # Inner modules end backward first. They begin it last, but where both have
            # one output: then theirs is its first hook.
            if (tick := hooks.post_backward) is not None:
                events.append((tick, Hook.POST_BACKWARD, -enter, 0, i))
            if (tick := hooks.pre_backward) is not None:
                events.append((tick, Hook.PRE_BACKWARD, -hooks.last_op, leave, i))
        for tick, hook, _, _, i in sorted(events):
            replay.at(tick * self.simulator.span)
            state = replay.states[i]
            if hook == Hook.FINAL:
                replay.final()
            elif hook == Hook.ZERO_GRADIENTS:
                replay.zero_gradients()
            elif hook == Hook.POST_FORWARD:
                replay.post_forward(state)
            elif not state.group.unsharded_bytes:
                continue
            elif hook == Hook.PRE_FORWARD:
                replay.pre_forward(state)
            elif hook == Hook.PRE_BACKWARD:
                replay.pre_backward(state)
            else:
                replay.post_backward(state)

    def resize(self, nbytes: IntArray, degree: int, rank: int) -> None:
        """Parameters and what the optimizer makes of them, as large as on the rank."""
        for p in self.tape.parameters:
            chunk_bytes = chunk_numel(p, degree) * p.itemsize
            nbytes[p.storage] = self.how.rounded(chunk_bytes)
        local = self.shards.local_numel(degree, rank)
        sizes = local[self.shards.owners] * self.shards.itemsizes
        grain = self.how.granularity_bytes
        nbytes[self.shards.storages] = -(-sizes // grain) * grain

    def _composition(
        self,
        ledger: Ledger,
        key: int,
        sharded: _Sharded,
        num_storages: int,
        num_base: int,
    ) -> dict[str, int]:
        """Bytes alive at an instant per category; reruns count as activations."""
        total = dict.fromkeys(CATEGORIES, 0)
        total["temporary"] += ledger.constant_bytes
        gradients = set(sharded.gradients.tolist())
        for i in np.flatnonzero(ledger.alive(key)).tolist():
            if i in gradients:
                category = "unsharded gradient"
            elif i < num_storages:
                category = self.tape.storages[i].category
            elif i < num_base:
                category = "activation"
            else:
                category = sharded.category[i - num_base]
            total[category] = total.get(category, 0) + int(ledger.nbytes[i])
        return total


def _in_real_types(profile: Profile) -> Tape:
    """The tape, with room for the optimizer's kernels to work in the real types.

    What these allocate inside themselves is known for the types of the trace only. It
    grows with the type at most in proportion.
    """
    tape = profile.tape
    wider = max((p.itemsize // p.traced_itemsize for p in tape.parameters), default=1)
    if wider <= 1:
        return tape
    ops = (
        replace(op, workspace_bytes=op.workspace_bytes * wider)
        if op.phase == "optimizer" and op.workspace_bytes
        else op
        for op in tape.ops
    )
    return replace(tape, ops=tuple(ops))
