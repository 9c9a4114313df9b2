"""What products of whole experts cost a rank: rows as if all experts had equally many.

A rank's experts are called with all rows, and their products skip those of other ranks'
experts (`tp_experts`). How many these are is up to the router: bytes do not depend on
it, times do. A trace counts all rows, so that times are those of the rank's even share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from autosac.costs import roofline
from autosac.parallel.tp_checks import WHOLE_EXPERTS
from autosac.parallel.tp_styles import TensorParallel
from autosac.profiles.profile import Profile
from autosac.step.op_signatures import Signature, layouts
from autosac.step.tape import Op

_PRODUCT = "aten._grouped_mm.default"


def own_products(profile: Profile, tensor: TensorParallel) -> Iterator[tuple[int, Op]]:
    """Products of whole experts: their places, and what they are with a rank's rows.

    Args:
        profile: The step of one of the ranks.
        tensor: What is divided, and over how many.
    """
    tree = profile.tape.modules
    whole = {
        i for i in range(len(tree)) if tensor.styles.get(tree[i].fqn) == WHOLE_EXPERTS
    }
    for i, op in enumerate(profile.tape.ops):
        if op.name == _PRODUCT and op.module in whole:
            yield i, _with_own_rows(op, tensor.degree)


def own_ms(op: Op, own: Op, op_ms: float, profile: Profile) -> float:
    """Time of a product with a rank's rows, from that of all rows."""
    device = profile.device
    return op_ms * roofline.op_ms(own, device) / roofline.op_ms(op, device)


def _with_own_rows(op: Op, degree: int) -> Op:
    """The weights, or their gradient, count whole."""
    assert isinstance(op.signature, Signature)
    left, right, *_ = layouts(op.signature)
    sizes = [math.prod(x.size) * x.dtype.itemsize for x in (left, right)]
    weight_bytes = next(
        (size for x, size in zip((left, right), sizes, strict=True) if len(x.size) > 2),
        op.moved_bytes - sum(sizes),
    )
    row_bytes = op.moved_bytes - weight_bytes
    return replace(
        op,
        flops=op.flops // degree,
        moved_bytes=weight_bytes + row_bytes // degree,
    )
