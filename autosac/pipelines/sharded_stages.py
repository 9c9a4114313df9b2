"""Stages that FSDP2 shards: gathered at their first forward, reduced when all is done.

Each block is an FSDP unit that is not resharded after forward. So under a schedule of
one stage per rank its parameters are gathered in the first forward of a step and stay
until the last backward is over; gradients of all micro-batches add up unsharded; then
unit after unit, in the order of forward, drops its parameters and reduces its
gradients.

Source: `backward_maybe_with_nosync` and `perform_reduce_grad` of
torch/distributed/pipelining/stage.py, and `post_backward` of
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.fsdp_hooks import Replay
from autosac.parallel.fsdp_memory import RankSimulator
from autosac.parallel.fsdp_schedule import Hook
from autosac.parallel.sharding import Sharding, fsdp_units
from autosac.pipelines.blocks import Stage
from autosac.profiles.profile import Profile
from autosac.solvers.fsdp.collectives import Group
from autosac.step.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """Ranks of a stage that train on batches of their own.

    Attributes:
        shard_degree: Over how many of them parameters are sharded.
        replicate_degree: How many such groups hold the same.
    """

    shard_degree: int = 1
    replicate_degree: int = 1

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.sizes.items())

    @property
    def degree(self) -> int:
        """How many there are."""
        return self.shard_degree * self.replicate_degree

    @property
    def sizes(self) -> dict[str, int]:
        """Dimensions of a mesh that they take, outermost first."""
        if self.replicate_degree > 1:
            return {"replicate": self.replicate_degree, "fsdp": self.shard_degree}
        return {"fsdp": self.shard_degree} if self.shard_degree > 1 else {}

    def sharding(self, units: Sequence[str]) -> Sharding:
        """How a stage is sharded whose units these are."""
        return Sharding(
            units=fsdp_units(units, reshard_after_forward=False),
            shard_degree=self.shard_degree,
            replicate_degree=self.replicate_degree,
        )

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
        self._ranks = RankSimulator(first)
        self._groups = self._ranks.groups(self._sharding)

    def resized(self, ledger: Ledger) -> Ledger:
        """A ledger of the step with parameters and optimizer as large as on a rank."""
        nbytes = ledger.nbytes.copy()
        self._ranks.resize(nbytes, self.parallel.shard_degree, 0)
        return replace(ledger, nbytes=nbytes)

    def replay(self, begin: int, span: int, end: int) -> Replay:
        """What FSDP2 allocates in the step of a pipeline.

        Args:
            begin: Key of the replay at which the first forward begins,
            span: its keys per tick of the tape,
            end: and that at which the last backward is over.
        """
        replay = Replay(list(self._groups), self._sharding, self._ranks.how)
        events = []
        for i, group in enumerate(self._groups):
            if group.hooks is not None:
                enter, leave = group.hooks.pre_forward, group.hooks.post_forward
                events.append((enter, Hook.PRE_FORWARD, i))
                events.append((leave, Hook.POST_FORWARD, i))
        for tick, hook, i in sorted(events):
            replay.at(begin + tick * span)
            state = replay.states[i]
            if hook == Hook.POST_FORWARD:
                replay.post_forward(state)
            elif state.group.unsharded_bytes:
                replay.pre_forward(state)
        replay.at(end)
        replay.final()
        return replay

    @property
    def late_bytes(self) -> int:
        """What slow threads of gloo may hold of what is reduced; 0 on a GPU."""
        largest_bytes = max(group.reduced_bytes for group in self._groups)
        return self._ranks.late_copies(self._sharding) * largest_bytes

    def gather_ms(self, cluster: ClusterSpec, inside: int) -> float:
        """Time of a step's gathers, one after the other; see `DataParallel.groups`."""
        shards, _ = self.parallel.groups(cluster, inside)
        sizes = [group.gathered_bytes for group in self._groups]
        return sum(cluster.cost("all_gather", shards, n).ms(n) for n in sizes if n)

    def reduce_ms(self, cluster: ClusterSpec, inside: int) -> float:
        """Time of its reductions, likewise."""
        shards, replicas = self.parallel.groups(cluster, inside)
        total_ms = 0.0
        for group in self._groups:
            whole, part = group.reduced_bytes, group.output_bytes
            if whole:
                total_ms += cluster.cost("reduce_scatter", shards, whole).ms(whole)
                total_ms += cluster.cost("all_reduce", replicas, part).ms(part)
        return total_ms
