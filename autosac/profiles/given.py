"""The profile that was passed in place of a model, or a new one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

import torch

from autosac.errors import ArgumentError
from autosac.kinds import check_function
from autosac.profiles.profile import Profile, calibrate, profile
from autosac.profiles.traced_step import TracedStep
from autosac.statistics.by_module import Statistics
from autosac.step.training_step import LossFn

MakeLoss = Callable[[Any], LossFn]


def check_names(
    options: Iterable[str],
    function: Callable[..., object],
    also: Iterable[str] = (),
    advice: Mapping[str, str] | None = None,
) -> None:
    """Refuse arguments that a function which hands its options to `profile` lacks.

    Args:
        options: Names of what it was given besides the arguments that it names.
        function: The function that was called.
        also: Other options that it takes.
        advice: What to do instead, by names that it does not take.

    Raises:
        ArgumentError: Names the function, the argument, and one of a like name.
    """
    accepted = {*argument_names(profile), *also}
    for name in options:
        if name not in accepted:
            known = [*accepted, *argument_names(function)]
            said = (advice or {}).get(name)
            raise unknown_name(name, function.__name__, known, said)


def argument_names(function: Callable[..., object]) -> list[str]:
    """Names of the arguments that a function names."""
    parameters = signature(function).parameters.values()
    return [one.name for one in parameters if one.kind is not Parameter.VAR_KEYWORD]


def unknown_name(
    name: str, owner: str, known: Iterable[str], advice: str | None = None
) -> ArgumentError:
    """The error for an argument of a name that means nothing.

    Args:
        name: What was passed.
        owner: What takes no such argument.
        known: Names that it takes.
        advice: What to do instead; None for the one of the likest name.
    """
    if advice is None:
        close = get_close_matches(name, sorted(known), n=1)
        advice = f"do you mean `{close[0]}`?" if close else "leave it out."
    return ArgumentError(f"`{owner}` takes no `{name}`: {advice}")


def check_make_loss_fn(make_loss_fn: object, options: Mapping[str, Any]) -> None:
    """Refuse what makes no loss function of inputs, or a loss that is given twice.

    Raises:
        ArgumentError: Says what to pass.
    """
    if make_loss_fn is None:
        return
    wanted = "a function of the inputs that returns `loss_fn`"
    check_function(make_loss_fn, name="make_loss_fn", wanted=wanted)
    if options.get("loss_fn") is not None:
        raise ArgumentError(
            "`loss_fn` and `make_loss_fn` both say what the loss is: pass one of them."
        )


def with_loss(
    model: Any, inputs: Any, options: dict[str, Any], make_loss_fn: MakeLoss | None
) -> dict[str, Any]:
    """The options of a profile, with the loss that is made for its inputs.

    Raises:
        ArgumentError: The model is a profile, whose loss is known; or no inputs are
            given.
    """
    if make_loss_fn is None:
        return options
    if isinstance(model, TracedStep):
        raise _known_already("make_loss_fn")
    if inputs is None:
        raise _no_inputs()
    return {**options, "loss_fn": make_loss_fn(inputs)}


def _known_already(*names: str) -> ArgumentError:
    return ArgumentError(
        "A profile knows its inputs and options already: leave out"
        f" {' and '.join(f'`{name}`' for name in names)}, or pass the model in place of"
        " the profile."
    )


def _no_inputs() -> ArgumentError:
    return ArgumentError("`inputs` is missing: pass what the model is called with.")


def profile_of(model: Any, inputs: Any, options: dict[str, Any]) -> TracedStep:
    """The profile that was passed, or a new one, calibrated where the model lies."""
    if isinstance(model, Statistics):
        raise ArgumentError(
            "`model` is statistics, which hold no ops to simulate: `autosac.plan` and"
            " `autosac.policy` take them, all else needs the model or its profile."
        )
    if isinstance(model, TracedStep):
        names = [*(["inputs"] if inputs is not None else []), *options]
        if names:
            raise _known_already(*names)
        return model
    refuse_plan(model)
    if inputs is None:
        raise _no_inputs()
    return calibrated_if_present(profile(model, inputs, **options))


def is_plan(model: object) -> bool:
    """Whether it is a plan, which has its step as an attribute."""
    is_step = isinstance(model, (torch.nn.Module, TracedStep))
    return not is_step and hasattr(model, "traced")


def refuse_plan(model: Any, *, name: str = "model") -> None:
    """Refuse a plan where a step is asked for.

    Raises:
        ArgumentError: It is one; names the step that it was made for.
    """
    if not is_plan(model):
        return
    traced = "`plan.traced`, the step it was made for"
    raise ArgumentError(
        f"`{name}` is a {type(model).__name__}, and a step is needed: pass"
        f" {traced if model.traced is not None else 'the model, or its profile'}."
    )


def calibrated_if_present(
    profile: Profile, *, progress: bool | None = None, real_step: bool = True
) -> Profile:
    """The profile with measured figures if its model lies here, or as it is.

    What is not here cannot be measured; what is, must keep its promise.

    Args:
        profile: The profile.
        progress: As in `calibrate`,
        real_step: likewise.
    """
    is_meta = any(parameter.is_meta for parameter in profile.step.model.parameters())
    if profile.step.lens is not None or is_meta:
        return profile
    return calibrate(profile, progress=progress, real_step=real_step)
