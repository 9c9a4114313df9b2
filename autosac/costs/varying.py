"""Ops that make something else when they run again on equal data.

Of one that is not PyTorch's own nobody knows: it may count its calls, or have a random
generator where nobody sees it. What a rerun makes of such an op is not what forward
had.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy.typing as npt
import torch

from autosac import _compat, _compat_dispatch
from autosac.costs import synthetic_inputs
from autosac.step.arguments import warn
from autosac.step.equal_results import differ, filled_memory, numbers_in
from autosac.step.op_signatures import Signature
from autosac.step.random_streams import random_streams_kept
from autosac.step.reaching import op_generators_kept


def varying(signatures: Iterable[Signature], *, device: torch.device) -> set[Signature]:
    """Ops that are not PyTorch's own and vary on made-up data; a warning names them.

    Args:
        signatures: Ops that run there.
        device: Where.
    """
    foreign = [s for s in signatures if _compat.is_foreign(s.func)]
    if not foreign:
        return set()
    with _compat_dispatch.as_a_step_begins(), _compat.no_modes():
        varied = {signature for signature in foreign if _varies(signature, device)}
    if varied:
        names = ", ".join(sorted({f"`{signature.func}`" for signature in varied}))
        warn(
            f"Run twice on equal data, {names} made other results: a plan keeps them,"
            " and never runs them again. If they draw random numbers, let them draw"
            " from PyTorch's default generators."
        )
    return varied


def _varies(signature: Signature, device: torch.device) -> bool:
    # It ran before; memory may have run short since.
    with suppress(RuntimeError):
        return differ(_results(signature, device), _results(signature, device))
    return False


def _results(signature: Signature, device: torch.device) -> list[npt.NDArray[Any]]:
    """What an op makes or changes."""
    func = signature.func
    with (
        torch.no_grad(),
        random_streams_kept(),
        op_generators_kept([func]),
        filled_memory(),
    ):
        args, kwargs = synthetic_inputs.arguments(signature, device)
        out = func(*args, **kwargs)
    return numbers_in((out, args, kwargs))
