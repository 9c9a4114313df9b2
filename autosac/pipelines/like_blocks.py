"""Blocks that do the same: stages of as many like blocks need one trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from autosac.profiles.profile import Profile


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
    block_kinds: list[Hashable] = []
    for fqn, block in zip(fqns, blocks, strict=True):
        key = keys.get(tree.index[fqn])
        is_alone = key is None or any(users[p] > 1 for p in block.parameters())
        block_kinds.append(
            fqn if is_alone else (key, block.training, _tensors_of(block))
        )
    return block_kinds


def _tensors_of(block: torch.nn.Module) -> tuple[Any, ...]:
    named = [*block.named_parameters(), *block.named_buffers()]
    return tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in named)
