"""Stages that FSDP2 shards: gathered at their first forward, reduced when all is done.

Each block is an FSDP unit that is not resharded after forward. So under a schedule of
one stage per rank its parameters are gathered in the first forward of a step and stay
until the last backward is over; gradients of all micro-batches add up unsharded; then
unit after unit, in the order of forward, drops its parameters and reduces its
gradients. Of several stages on a rank all are gathered before the first forward, and
each is reduced behind its own last backward.

Source: `backward_maybe_with_nosync` and `perform_reduce_grad` of
torch/distributed/pipelining/stage.py, `_add_unshard_reshard` and `_add_reduce_grad` of
schedules.py beside it, and `post_backward` of
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.fsdp_hooks import Replay
from autosac.parallel.fsdp_memory import RankSimulator
from autosac.parallel.fsdp_schedule import Hook
from autosac.parallel.sharding import Sharding, fsdp_units
from autosac.pipelines.blocks import Stage
from autosac.profiles.profile import Profile
from autosac.solvers.fsdp.collectives import Collective, Group
from autosac.solving.rules_of_thumb import Choice
from autosac.step.ledger import Ledger
from autosac.step.tape import Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """Ranks of a stage that train on batches of their own, or on parts of some.

    Attributes:
        shard_degree: Over how many of them parameters are sharded.
        replicate_degree: How many such groups hold the same.
        param_dtype: Type of gathered parameters, None for their own.
        reduce_dtype: Type in which gradients add up and are reduced; given if and only
            if `param_dtype` is.
        parts: How many neighbouring ones of those that share parameters see one batch
            together, with a part each of its sequence.
    """

    shard_degree: int = 1
    replicate_degree: int = 1
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    parts: int = 1

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        if self.param_dtype is None:
            return sizes
        return f"{sizes}, {self.param_dtype} reduced in {self.reduce_dtype}"

    @property
    def degree(self) -> int:
        """How many there are."""
        return self.shard_degree * self.replicate_degree

    @property
    def num_batches(self) -> int:
        """How many batches they train on."""
        return self.degree // self.parts

    @property
    def sizes(self) -> dict[str, int]:
        """Dimensions of a mesh that they take, outermost first."""
        shards, parts = self.shard_degree // self.parts, self.parts
        sizes = {"fsdp": shards} if shards > 1 or self.replicate_degree > 1 else {}
        if self.replicate_degree > 1:
            sizes = {"replicate": self.replicate_degree, **sizes}
        return {**sizes, "cp": parts} if parts > 1 else sizes

    def in_parts(self, parts: int) -> DataParallel:
        """As many groups of ranks that have parts in place of each of these ranks."""
        return replace(self, shard_degree=self.shard_degree * parts, parts=parts)

    def sharding(self, units: Sequence[str]) -> Sharding:
        """How a stage is sharded whose units these are."""
        return Sharding(
            units=fsdp_units(units, reshard_after_forward=False),
            shard_degree=self.shard_degree,
            replicate_degree=self.replicate_degree,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
        )

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Type of gathered parameters."""
        return None if self.param_dtype is None else getattr(torch, self.param_dtype)

    @property
    def sums_apart(self) -> bool:
        """Whether gradients add up in another type than they have.

        Each backward then makes new ones, which go as their block is done.
        """
        return self.param_dtype != self.reduce_dtype

    def fits(self, cluster: ClusterSpec, inside: int) -> bool:
        """Whether parts, shards, and all, divide a node or are whole nodes.

        Args:
            cluster: Whose nodes the ranks fill,
            inside: neighbouring ones of which are not told apart here.
        """
        node = cluster.gpus_per_node // inside
        sizes = (self.parts, self.shard_degree, self.degree)
        return not any(size % node and node % size for size in sizes)

    def least_bytes(self, own: Parameter) -> int:
        """What a rank keeps of a parameter from its first backward on, at least."""
        number = math.prod(own.shape)
        shard_bytes = number * (own.itemsize + sum(own.state_itemsizes))
        if self.degree == 1:
            return shard_bytes + number * own.itemsize * own.trained
        itemsizes = [
            own.itemsize if name is None else getattr(torch, name).itemsize
            for name in (self.param_dtype, self.reduce_dtype)
        ]
        whole_bytes = number * (itemsizes[0] + itemsizes[1] * own.trained)
        return shard_bytes // self.shard_degree + whole_bytes

    def least_exchange_ms(
        self, cluster: ClusterSpec, inside: int, parameters: Sequence[Parameter]
    ) -> tuple[float, float]:
        """Times in which a unit of some parameters is gathered and reduced, at least.

        Args:
            cluster: As in `groups`,
            inside: likewise.
            parameters: All of the unit.
        """
        sharding, gathered, reduced = self.sharding([]), 0, 0
        for own in parameters:
            number = math.prod(own.shape)
            gathered += number * sharding.gathered_itemsize(own)
            if own.gradient is not None:
                reduced += number * sharding.reduced_itemsize(own)
        nbytes = gathered, reduced, reduced // self.shard_degree
        return self.exchange_ms(cluster, inside, nbytes)

    def exchange_ms(
        self, cluster: ClusterSpec, inside: int, nbytes: tuple[int, int, int]
    ) -> tuple[float, float]:
        """Times in which a unit is gathered, and its gradients are reduced.

        Args:
            cluster: As in `groups`,
            inside: likewise.
            nbytes: What is gathered, reduced, and left of that on a rank.
        """
        shards, replicas = self.groups(cluster, inside)

        def ms(collective: Collective, ranks: Group, own_bytes: int) -> float:
            return cluster.cost(collective, ranks, own_bytes).ms(own_bytes)

        gathered, reduced, left = nbytes
        reduce_ms = ms("reduce_scatter", shards, reduced)
        reduce_ms += ms("all_reduce", replicas, left)
        return ms("all_gather", shards, gathered), reduce_ms

    def groups(self, cluster: ClusterSpec, inside: int) -> tuple[Group, Group]:
        """Ranks that share parameters, and those that hold the same ones.

        Args:
            cluster: Whose nodes the ranks fill one after the other.
            inside: Neighbouring ranks that are not told apart here.
        """
        node = cluster.gpus_per_node // inside
        per_node = min(self.shard_degree, node)
        shards = Group(ranks_per_node=per_node, num_nodes=self.shard_degree // per_node)
        apart = max(1, min(self.replicate_degree, node // self.shard_degree))
        replicas = Group(ranks_per_node=apart, num_nodes=self.replicate_degree // apart)
        return shards, replicas


ALONE = DataParallel()


def stage_units(stage: Stage) -> list[str]:
    """Blocks that are FSDP units: those with parameters that no other block has."""
    blocks = {fqn: stage.get_submodule(fqn) for fqn in stage.block_fqns}
    users = Counter(p for block in blocks.values() for p in block.parameters())
    return [
        fqn
        for fqn, block in blocks.items()
        if any(True for _ in block.parameters())
        and all(users[p] == 1 for p in block.parameters())
    ]


class ShardedStage:
    """What FSDP2 does to the memory and time of a stage's step.

    Args:
        first: The stage's step that makes gradients.
        units: Its FSDP units.
        parallel: How many ranks share its parameters.

    Raises:
        ValueError: As `RankSimulator`, and `timeline` of it.
        UnsupportedError: Likewise.
    """

    def __init__(
        self, first: Profile, units: Sequence[str], parallel: DataParallel
    ) -> None:
        self.parallel = parallel
        self._sharding = parallel.sharding(units)
        self._ranks = RankSimulator(first, adds_unsharded=True)
        self._groups = self._ranks.groups(self._sharding)

    def ledger(self, chosen: Choice) -> Ledger:
        """A ledger of the step with parameters and optimizer as large as on a rank."""
        ledger = self._ranks.simulator.ledger(chosen)
        nbytes = ledger.nbytes.copy()
        self._ranks.resize(nbytes, self.parallel.shard_degree, 0)
        return replace(ledger, nbytes=nbytes)

    def replay(
        self,
        forward: int,
        backwards: Sequence[int],
        end: int,
        unshard: int | None = None,
    ) -> tuple[Replay, list[dict[int, int]]]:
        """What FSDP2 allocates in the step of a pipeline.

        Args:
            forward: Key of the replay at which the first forward begins, less its key
                in the step,
            backwards: likewise of each micro-batch's backward,
            end: and the key at which the last one is over.
            unshard: Key at which the schedule begins to gather all units, None if each
                is gathered in the first forward.

        Returns:
            That, and of each micro-batch when gradients are freed that add up apart.
        """
        replay = Replay(list(self._groups), self._sharding, self._ranks.how)
        if unshard is not None:
            replay.at(unshard)
            replay.unshard_all()
            replay.at(forward)
            replay.wait_for_all()
        for tick, hook, i in self._forward_hooks() if unshard is None else ():
            replay.at(forward + tick * self._ranks.simulator.span)
            state = replay.states[i]
            if hook == Hook.POST_FORWARD:
                replay.post_forward(state)
            elif state.group.unsharded_bytes:
                replay.pre_forward(state)
        died: list[dict[int, int]] = []
        for backward in backwards if self.parallel.sums_apart else ():
            died.append({})
            for tick, _, i in self._backward_hooks():
                replay.at(backward + tick * self._ranks.simulator.span)
                died[-1].update(replay.add_up(replay.states[i]))
        replay.at(end)
        replay.final()
        return replay, died

    def _forward_hooks(self) -> list[tuple[int, Hook, int]]:
        """Ticks of hooks of units, in order."""
        hooks = []
        for i, group in enumerate(self._groups):
            if group.hooks is not None:
                hooks.append((group.hooks.pre_forward, Hook.PRE_FORWARD, i))
                hooks.append((group.hooks.post_forward, Hook.POST_FORWARD, i))
        return sorted(hooks)

    def _backward_hooks(self) -> list[tuple[int, int, int]]:
        """Ticks at which units are done with backward, in order: inner ones first."""
        final, hooks = self._ranks.schedule.final, []
        for i, group in enumerate(self._groups):
            if group.gradients:
                tick, enter = final, 0
                if group.hooks is not None and group.hooks.post_backward is not None:
                    tick, enter = group.hooks.post_backward, group.hooks.pre_forward
                hooks.append((tick, -enter, i))
        return sorted(hooks)

    @property
    def late_bytes(self) -> int:
        """What slow threads of gloo may hold of a unit's buffers; 0 on a GPU."""
        largest_bytes = max(group.late_bytes for group in self._groups)
        return self._ranks.late_copies(self._sharding) * largest_bytes

    def exchange_ms(self, cluster: ClusterSpec, inside: int) -> tuple[float, float]:
        """Times of a step's gathers and of its reductions, one after the other.

        Args:
            cluster: As in `DataParallel.groups`,
            inside: likewise.
        """
        gather_ms = reduce_ms = 0.0
        for own in self._groups:
            nbytes = own.gathered_bytes, own.reduced_bytes, own.output_bytes
            each = self.parallel.exchange_ms(cluster, inside, nbytes)
            gather_ms, reduce_ms = gather_ms + each[0], reduce_ms + each[1]
        return gather_ms, reduce_ms
