"""Blocks that do the same: stages of as many like blocks need one trace.

Nor need all blocks run to find out what each of them does at another size, or divided:
one of each kind does, in the order in which kinds are met first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from autosac.pipelines.blocks import Passed
from autosac.profiles.profile import Profile


@dataclass(frozen=True, slots=True)
class BlockKinds:
    """Which blocks of a chain do the same.

    Attributes:
        kinds: A kind for each block, equal for blocks that do the same.
        firsts: One block of each kind which can run one after the other, in order; all
            blocks if they cannot.
    """

    kinds: tuple[Hashable, ...]
    firsts: tuple[int, ...]

    @property
    def stands_for(self) -> list[int]:
        """Place among `firsts` of the block that stands for each one."""
        if len(self.firsts) == len(self.kinds):
            return list(range(len(self.kinds)))
        place = {self.kinds[i]: number for number, i in enumerate(self.firsts)}
        return [place[kind] for kind in self.kinds]


def block_kinds(kinds: Sequence[Hashable], chain: Mapping[str, Passed]) -> BlockKinds:
    """Blocks of these kinds, and those that can stand for all.

    Args:
        kinds: Of each block.
        chain: What each of them hands on.
    """
    handed_on = list(chain.values())
    firsts = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())
    fits = all(handed_on[before] == handed_on[i - 1] for before, i in pairwise(firsts))
    return BlockKinds(tuple(kinds), tuple(firsts if fits else range(len(kinds))))


def kinds(
    whole: Profile, model: torch.nn.Module, fqns: Sequence[str]
) -> list[Hashable]:
    """A kind for each block, equal for blocks that do the same.

    Two blocks do the same if their AC units have one key, which says all that the trace
    has of their forward and backward passes, and if their parameters and buffers are
    alike. A block that is no unit, or shares a parameter, is like no other.

    Args:
        whole: The step of the whole model.
        model: The model.
        fqns: Its blocks.
    """
    blocks = [model.get_submodule(fqn) for fqn in fqns]
    tree = whole.tape.modules
    keys = {unit.module: unit.key for unit in whole.units.candidates}
    users = Counter(p for block in blocks for p in block.parameters())
    found: list[Hashable] = []
    for fqn, block in zip(fqns, blocks, strict=True):
        key = keys.get(tree.index[fqn])
        is_alone = key is None or any(users[p] > 1 for p in block.parameters())
        found.append(fqn if is_alone else (key, block.training, _tensors_of(block)))
    return found


def with_styles(
    kinds: Sequence[Hashable], fqns: Sequence[str], styles: Mapping[str, str]
) -> list[Hashable]:
    """Kinds of blocks whose modules have styles: like ones have the same."""
    own: dict[str, list[tuple[str, str]]] = {fqn: [] for fqn in fqns}
    for name, style in styles.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            fqn = ".".join(parts[:end])
            if fqn in own:
                own[fqn].append((".".join(parts[end:]), style))
    return [
        (kind, tuple(sorted(own[fqn]))) for kind, fqn in zip(kinds, fqns, strict=True)
    ]


def _tensors_of(block: torch.nn.Module) -> tuple[Any, ...]:
    named = [*block.named_parameters(), *block.named_buffers()]
    return tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in named)
