"""The options that describe a step: many commands have them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Argument of the factory, or entry of the config; repeat for more.",
    ),
]
Optimizer = Annotated[
    str, typer.Option(help="Class of torch.optim by name, such as adamw.")
]
Device = Annotated[
    str,
    typer.Option(
        help="Device to plan for, present or not: see `autosac devices`."
        " [default: where the model is built]"
    ),
]
Build = Annotated[
    str, typer.Option("--on", help="Where to build the model: cpu, cuda or meta.")
]
Batch = Annotated[int, typer.Option(min=1, help="Batch size of an hf: model.")]
Length = Annotated[int, typer.Option(min=1, help="Tokens per sequence of one.")]
Autocast = Annotated[str, typer.Option(help="Type to autocast to, such as bfloat16.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Micro-steps per optimizer step.")]
Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="FQN", help="Module that must be no AC unit; repeatable."),
]
Opaque = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FQN",
        help="Module that is never run again, nor cut inside, such as a router, by"
        " name or pattern (*.gate); repeatable.",
    ),
]

AcUnits = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FQN",
        help="Module that may be an AC unit, by name or pattern (blocks.*), if only"
        " some may; repeatable.",
    ),
]
FsdpUnits = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FQN",
        help="Module that will be an FSDP unit, likewise: none around it may be an AC"
        " unit; repeatable.",
    ),
]


def _step_options(
    settings: Settings = None,
    optimizer: Optimizer = "",
    device: Device = "",
    on: Build = "cpu",
    batch: Batch = 1,
    length: Length = 512,
    autocast: Autocast = "",
    accumulate: Accumulate = 1,
    exclude: Exclude = None,
    opaque: Opaque = None,
) -> None:
    """A command that takes all of them."""


def takes_step(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options, which it gets as the dict ``options``.

    Args:
        without: Names of those that it does not take.
    """
    own = inspect.signature(_step_options, eval_str=True).parameters
    shared = {name: option for name, option in own.items() if name not in without}

    def given(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        rest = [p for name, p in signature.parameters.items() if name != "options"]
        parameters = [*rest, *shared.values()]

        @wraps(command)
        def run(**values: Any) -> None:
            options = {name: values.pop(name) for name in shared}
            command(**values, options=options)

        vars(run)["__signature__"] = signature.replace(parameters=parameters)
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return given
