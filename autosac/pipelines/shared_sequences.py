"""How ranks share the sequence of a chain of blocks, and whether they can.

Blocks that need positions take them (`sequence_parts.positions_argument`): a stage
gives them those of its part.
"""

from __future__ import annotations

from autosac.errors import UnsupportedError
from autosac.parallel import cp_tracing
from autosac.parallel.context_parallel import (
    WHOLE_SEQUENCE,
    ContextParallel,
    Method,
)
from autosac.parallel.sequence_parts import positions_argument
from autosac.pipelines.micro_batches import MicroBatch


def context_of(base: MicroBatch, degree: int, method: Method) -> ContextParallel:
    """How so many ranks share a sequence.

    Args:
        base: The model undivided.
        degree: How many.
        method: How attention sees the whole.

    Raises:
        ArgumentError: They cannot share the heads of attention.
        UnsupportedError: No block takes positions, or none runs a kernel of attention.
    """
    if degree == 1:
        return WHOLE_SEQUENCE
    blocks = (base.model.get_submodule(fqn) for fqn in base.chain)
    if not any(map(positions_argument, blocks)):
        raise UnsupportedError(
            "No block's forward has an argument `position_ids`, and a rank of context"
            " parallelism has a part of the sequence: let those blocks that need"
            " positions take it, of shape (1, tokens), and count them only where it is"
            " None; or plan without 'cp'."
        )
    tape = base.whole.tape
    attentions = cp_tracing.attentions_of(base.whole)
    if method == "ulysses":
        cp_tracing.check_heads(tape, degree)
    return ContextParallel(degree=degree, method=method, attentions=attentions)


def check_parts(own: MicroBatch) -> None:
    """Refuse a model that a rank cannot run on its part.

    Args:
        own: The first rank's, of whole tensors: slices add ops of their own; with as
            many rows as undivided.

    Raises:
        ArgumentError: The sequence or the heads cannot be cut evenly.
        UnsupportedError: As `cp_tracing.check_parts`.
    """
    assert own.undivided is not None
    cp_tracing.check_parts(own.undivided.whole.tape, own.whole.tape, own.context)
