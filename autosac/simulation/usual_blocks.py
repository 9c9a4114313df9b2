"""How large the blocks of a step usually are under a plan, where a GPU allocates them.

What is left of a large block stays with it, and which allocation gets such a block
depends on all that was allocated before. The MILP cannot replay that: it adds up sizes
that are the same whatever is chosen, those of the plain step's blocks. A plan frees
other blocks in another order, and where most plans differ from the plain step alike,
the MILP sees more memory than there is, or less, by the same bytes. So a few choices
are replayed: some say how large blocks usually are, the others whether that foretells
peaks any better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autosac.simulation.simulator import Simulator
from autosac.step.tape import IntArray
from autosac.units.policies import Policy
from autosac.units.unit import Unit

_MOST_REPLAYS = 12  # half of them to learn from


def in_usual_blocks(
    simulator: Simulator, choices: Sequence[Mapping[Unit, Policy]]
) -> Simulator | None:
    """The simulator with each allocation as large as its block is likely to be.

    Args:
        simulator: Of the step.
        choices: Some for it, in the order of what they free.

    Returns:
        None if the blocks of the plain step foretell peaks no worse.
    """
    if simulator.tape.device_type != "cuda":
        return None
    last = len(choices) - 1
    number = min(last, simulator.num_replays(_MOST_REPLAYS))
    few = [choices[last * k // number] for k in range(1, number + 1)]
    others = few[1::2]
    true_bytes = [simulator.allocator_peak_bytes(c, "allocated") for c in others]

    def error_bytes(guess: Simulator) -> int:
        pairs = zip(others, true_bytes, strict=True)
        return sum(abs(guess.peak_bytes(choice) - true) for choice, true in pairs)

    plain_error_bytes = error_bytes(simulator.in_blocks)
    if not plain_error_bytes:
        return None
    of_plain = simulator.block_bytes({})
    replayed = np.array([simulator.block_bytes(choice) for choice in few[::2]])
    sizes = _guesses(simulator, np.where(replayed > 0, replayed, of_plain))
    best = min(map(simulator.resized, sizes), key=error_bytes)
    return best if error_bytes(best) < plain_error_bytes else None


def _guesses(simulator: Simulator, sizes: IntArray) -> list[IntArray]:
    """Sizes of blocks by those in some replays.

    Their means, alone and of all that request as much, and their medians.
    """
    means = sizes.mean(axis=0)
    _, kind, counts = np.unique(
        simulator.requested_bytes, return_inverse=True, return_counts=True
    )
    of_kinds = np.bincount(kind, means) / counts
    guesses = (means, of_kinds[kind], np.median(sizes, axis=0))
    return [guess.astype(np.int64) for guess in guesses]
