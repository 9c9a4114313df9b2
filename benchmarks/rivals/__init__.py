"""Other ways to choose what is recomputed, as real policies on the same profile.

Every rival is a function from a `Profile` (and a parameter or a budget) to a
`Choice`, which is simulated, priced, dry-run, applied and measured like a plan of
autosac. They are given more than they have in the wild:

- ops whose results nobody needs are not rerun (`torch.utils.checkpoint` runs all);
- of a rival with a parameter, at every budget the cheapest setting counts whose
  simulated peak fits: people try a setting and see whether it runs out of memory;
- results that must not be made twice (`topk`, ...) are saved, in-place ops move with
  what they change, random states are replayed.
"""

from __future__ import annotations

from benchmarks.rivals.checkpointing import (
    every_block,
    every_kth_block,
    no_checkpointing,
    uniform_ratio,
)
from benchmarks.rivals.greedy import greedy
from benchmarks.rivals.op_lists import megatron_selective, save_matmuls
from benchmarks.rivals.settings import Rival, RivalPlan, Setting, rivals

__all__ = [
    "Rival",
    "RivalPlan",
    "Setting",
    "every_block",
    "every_kth_block",
    "greedy",
    "megatron_selective",
    "no_checkpointing",
    "rivals",
    "save_matmuls",
    "uniform_ratio",
]
