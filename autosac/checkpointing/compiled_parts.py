"""What is said of a planned model that is compiled, whole or in part.

A compiler fuses ops, saves what it likes and rounds otherwise: neither the peak nor the
bits of a plan would hold.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from autosac import _compat_compiler, _compat_dispatch
from autosac.errors import UnsupportedError

_ADVICE = (
    "torch.compile and torch.export make ops of their own, which no plan knows. Call"
    " `plan.unapply(model)` first; `autosac.compile(model, memory_budget=...)` compiles"
    " under a budget."
)
_REFUSAL = f"A planned model is about to be compiled, but {_ADVICE}"


@_compat_dispatch.called_at_run_time(_REFUSAL)
def refuse(fqn: str) -> NoReturn:
    """Say that a module of a plan is about to be compiled; '' for the whole model."""
    if not fqn:
        raise UnsupportedError(_REFUSAL)
    raise UnsupportedError(
        f"AC unit `{fqn}` of a plan is about to be compiled, but {_ADVICE}"
    )


def check_error(error: Exception) -> None:
    """Refuse again, by our own error, where Dynamo's gives `refuse` as its reason.

    Raises:
        UnsupportedError: It does.
    """
    if _REFUSAL in str(error):
        raise UnsupportedError(_REFUSAL) from error


def check(model: torch.nn.Module) -> None:
    """Refuse a step of a planned model that is compiled, or a part of it.

    Raises:
        UnsupportedError: Names the part.
    """
    if torch.compiler.is_compiling():
        refuse("")
    if any(map(_compat_compiler.is_compiled, model.modules())):
        parts = model.named_modules()
        fqn = next(fqn for fqn, part in parts if _compat_compiler.is_compiled(part))
        name = f"`{fqn}` of a planned model" if fqn else "A planned model"
        raise UnsupportedError(f"{name} is compiled, but {_ADVICE}")
