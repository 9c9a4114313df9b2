"""Parameters that meet a part of what they meet in one process, and nothing sums that.

A parameter that no style divides is whole on every rank that shares slices. Where what
it is combined with is a rank's part, so is its gradient: of an activation with weights
of its own between two products that are cut, or of a factor of a block whose sequence
is cut. So the ops of a rank's step are held beside those of the whole: what a whole
parameter makes together with something else must be as large. Ops that do not
correspond are passed over: this finds mistakes, and is no proof that there is none.
"""

from __future__ import annotations

from math import prod

from autosac.errors import ArgumentError
from autosac.parallel.sequence_mixing import op_pairs
from autosac.parallel.tp_styles import TensorParallel
from autosac.step.tape import Op, Tape


def check_gradients_whole(whole: Tape, rank: Tape, tensor: TensorParallel) -> None:
    """Refuse styles under which a whole parameter gets a part of its gradient.

    Args:
        whole: The step without slices.
        rank: That of a rank that has some.
        tensor: What is divided.

    Raises:
        ArgumentError: Names the parameter and the op.
    """
    made_of = {  # storage -> the whole parameter that it is, or is made of alone
        parameter.storage: parameter.fqns[0]
        for parameter in rank.parameters
        if parameter.trained and not any(map(tensor.divides, parameter.fqns))
    }
    for _, long, short in op_pairs(whole, rank):
        read = [made_of.get(storage) for storage in short.reads]
        fqn = next((name for name in read if name is not None), None)
        if fqn is None:
            continue
        if None not in read:
            made_of.update(dict.fromkeys(short.creates, fqn))
        elif _size(short) < _size(long):
            raise ArgumentError(
                f"`{fqn}` meets a part of what it meets in one process"
                f" ({short.name}), so that its gradients must be summed over the ranks,"
                " and no style says so: leave the modules around it out of `tp_plan`"
                " (or give the module that has it 'replicated_with_grad_allreduce', if"
                " it is a norm of heads)."
            )


def _size(op: Op) -> int:
    return sum(map(prod, op.shapes))
