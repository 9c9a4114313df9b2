"""What a model is made of, so that a plan knows the model it was made for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import zip_longest

import torch

from autosac.errors import PlanMismatchError

_Module = tuple[str, str, tuple[str, ...]]
Fingerprint = tuple[_Module, ...]
_FROZEN = " frozen"


def fingerprint(model: torch.nn.Module) -> Fingerprint:
    """FQN, class and parameters of every module of a model, in order."""
    return tuple(
        (
            fqn,
            type(module).__name__,
            tuple(
                f"{name} {tuple(parameter.shape)} {str(parameter.dtype)[6:]}"
                + _FROZEN * (not parameter.requires_grad)
                for name, parameter in module.named_parameters(recurse=False)
            ),
        )
        for fqn, module in model.named_modules()
    )


def first_difference(expected: Fingerprint, actual: Fingerprint) -> str | None:
    """The first module that two models do not share, in words; None if they agree.

    Which parameters are trained does not matter.
    """
    pairs = zip_longest(map(_untrained, expected), map(_untrained, actual))
    for one, other in pairs:
        if one is None or other is None:
            return (
                f"it expects {len(expected)} modules, this model has {len(actual)}; the"
                f" first that only one of them has is {_named((one or other)[0])}"
            )
        if one != other:
            return (
                f"it expects {_named(one[0])} to be a {one[1]} with"
                f" {_listed(one[2])}, this model has {_named(other[0])}, a {other[1]}"
                f" with {_listed(other[2])}"
            )
    return None


def _named(fqn: str) -> str:
    return f"`{fqn}`" if fqn else "the model itself"


def _listed(parameters: Sequence[str]) -> str:
    return f"parameters {list(parameters)}" if parameters else "no parameters"


def _untrained(module: _Module) -> _Module:
    fqn, kind, parameters = module
    return fqn, kind, tuple(text.removesuffix(_FROZEN) for text in parameters)


def parameters_of(model: Fingerprint) -> frozenset[str]:
    """Name, shape and type of each parameter of a model, in words."""
    return frozenset(
        f"{fqn}.{text}".removeprefix(".")
        for fqn, _, parameters in map(_untrained, model)
        for text in parameters
    )


def frozen_names(model: Fingerprint) -> tuple[str, ...]:
    """Names of the parameters of a model that are not trained."""
    return tuple(
        f"{fqn}.{text.split()[0]}".removeprefix(".")
        for fqn, _, parameters in model
        for text in parameters
        if text.endswith(_FROZEN)
    )


def check_model(
    expected: Fingerprint, model: torch.nn.Module, *, may_train_more: bool = False
) -> None:
    """Refuse a model that a plan was not made for.

    Args:
        expected: What the plan was made for.
        model: The model.
        may_train_more: Parameters may be trained that were frozen: whoever follows the
            plan looks at them in each step.

    Raises:
        PlanMismatchError: Names the first difference.
    """
    actual = fingerprint(model)
    difference = first_difference(expected, actual)
    if difference is None and not may_train_more:
        frozen = set(frozen_names(actual))
        thawed = [name for name in frozen_names(expected) if name not in frozen]
        if thawed:
            difference = f"it has `{thawed[0]}` frozen, this model trains it"
    if difference is not None:
        raise PlanMismatchError(
            f"The plan was made for another model: {difference}. Plan again."
        )


def digest(value: object) -> str:
    """SHA-256 of plain data, the same in every process and on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
