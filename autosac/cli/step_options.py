"""The options that describe a step: many commands have them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Annotated, Any

import typer

from autosac.cli.usage import UsageError, typed_bytes

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
Batch = Annotated[
    int | None, typer.Option(min=1, help="Batch size of an hf: model. [default: 1]")
]
Length = Annotated[
    int | None, typer.Option(min=1, help="Tokens per sequence of one. [default: 512]")
]
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
ExpandableSegments = Annotated[
    bool,
    typer.Option(
        "--expandable-segments",
        help="The GPU's program has PYTORCH_ALLOC_CONF=expandable_segments:True.",
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
Mesh = Annotated[
    str,
    typer.Option(
        metavar="DIM=N,...",
        help="tp=N: ranks of a node share slices of tensors. cp=N: ranks share a"
        " sequence. pp=N: stages of a"
        " pipeline, with fsdp=N and replicate=N for ranks of each. Without N, or with"
        " N any, all are tried.",
    ),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option(
        min=1, help="Rows of a step of all ranks together; with pp in --mesh."
    ),
]
MicroBatches = Annotated[
    list[int] | None,
    typer.Option(
        min=1, metavar="N", help="Micro-batches of a step of stages; repeat to choose."
    ),
]
Schedules = Annotated[
    list[str] | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="1F1B, GPipe or Interleaved1F1B, of stages; repeat to choose. [default:"
        " the first two]",
    ),
]
StagesPerRank = Annotated[
    list[int] | None,
    typer.Option(
        min=2,
        metavar="N",
        help="Stages of a rank under Interleaved1F1B; repeat to choose. [default: 2]",
    ),
]
TpPlan = Annotated[
    str,
    typer.Option(help="Which slices: tensor, sequence, expert. [default: the best]"),
]
CpMethod = Annotated[
    str,
    typer.Option(help="How attention sees the sequences that cp shares: ulysses, ring"),
]
LossParallel = Annotated[
    bool,
    typer.Option("--loss-parallel", help="Logits stay divided as well, for the loss."),
]
FsdpUnits = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FQN",
        help="Module that will be an FSDP unit, likewise: none around it may be an AC"
        " unit; repeatable.",
    ),
]

Offload = Annotated[
    bool, typer.Option(help="Let what is kept for backward lie in far memory as well.")
]
HostBudget = Annotated[
    str | None,
    typer.Option(
        parser=typed_bytes,
        metavar="BYTES",
        help='Cap on what lies there, such as "64GiB"; digits alone are bytes.',
    ),
]

Interactive = Annotated[
    bool, typer.Option("--interactive", help="Pictures of --html answer the mouse.")
]

Cluster = Annotated[
    str, typer.Option(help="A known cluster, such as hgx-h100: GPUs, links, nodes.")
]
ParamDtype = Annotated[
    str, typer.Option(help="Gather parameters in this type, such as bfloat16.")
]
ReduceDtype = Annotated[str, typer.Option(help="Reduce gradients in this type.")]


_TYPED = {"settings": "set"}  # where an option has another name


def _step_options(
    settings: Settings = None,
    optimizer: Optimizer = "",
    device: Device = "",
    on: Build = "cpu",
    batch: Batch = None,
    length: Length = None,
    autocast: Autocast = "",
    accumulate: Accumulate = 1,
    exclude: Exclude = None,
    opaque: Opaque = None,
    expandable_segments: ExpandableSegments = False,
) -> None:
    """A command that takes all of them."""


def _unit_options(ac_units: AcUnits = None, fsdp_units: FsdpUnits = None) -> None:
    """A command that takes these."""


Command = Callable[..., None]


def given_options(options: Mapping[str, Any]) -> list[str]:
    """What was typed for a step, as far as it is no default."""
    own = inspect.signature(_step_options).parameters
    names = [key for key, value in options.items() if value != own[key].default]
    return [f"--{_TYPED.get(key, key).replace('_', '-')}" for key in names]


def takes_step(*without: str) -> Callable[[Command], Command]:
    """Give a command these options, which it gets as the dict ``options``.

    Args:
        without: Names of those that it does not take.
    """
    return _taking(_step_options, "options", without)


def takes_units(command: Command) -> Command:
    """Give a command the options for given units, which it gets as ``given``."""
    return _taking(_unit_options, "given", ())(command)


def _taking(
    source: Command, name: str, without: Collection[str]
) -> Callable[[Command], Command]:
    """Let a command get the options of another one as a dict."""
    own = inspect.signature(source, eval_str=True).parameters
    shared = {key: option for key, option in own.items() if key not in without}

    def with_options(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        rest = [p for key, p in signature.parameters.items() if key != name]
        parameters = [*rest, *shared.values()]

        @wraps(command)
        def run(**values: Any) -> None:
            taken = {key: values.pop(key) or shared[key].default for key in shared}
            command(**values, **{name: taken})

        vars(run)["__signature__"] = signature.replace(parameters=parameters)
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return with_options


def read_mesh(typed: str) -> dict[str, int | None] | None:
    """Degrees by dimension, of what was typed for `Mesh`.

    Raises:
        UsageError: It cannot be read.
    """
    degrees: dict[str, int | None] = {}
    for part in filter(None, typed.split(",")):
        dimension, equals, size = part.partition("=")
        is_open = size in ("", "any")
        if not equals or not (is_open or size.isdecimal()):
            raise UsageError(f"--mesh {typed}: write tp=8, or tp=any.")
        name = dimension.strip()
        if name not in _DIMENSIONS:
            raise UsageError(
                f"--mesh {typed}: its dimensions are {', '.join(_DIMENSIONS)}, and"
                f" {name!r} is none of them."
            )
        degrees[name] = None if is_open else int(size)
    return degrees or None


_OF_STAGES = ("pp", "replicate", "fsdp")
_DIMENSIONS = (*_OF_STAGES, "cp", "tp")


def asks_for_stages(mesh: dict[str, int | None] | None, **only_then: Any) -> bool:
    """Whether a mesh has stages of a pipeline.

    Args:
        mesh: As typed.
        only_then: What is typed for these alone, by the name of the option.

    Raises:
        UsageError: They are given without stages.
    """
    of_stages = [name for name in _OF_STAGES if name in (mesh or {})]
    if of_stages and "pp" not in of_stages:
        names = " and ".join(of_stages)
        raise UsageError(
            f"--mesh has {names}, for ranks of a pipeline's stage: add pp, such as"
            " --mesh pp=any,fsdp=any,tp=any. Without pp, leave"
            f" {names} out: all GPUs share the parameters."
        )
    if of_stages:
        return True
    for name, value in only_then.items():
        if value:
            option = name.replace("_", "-")
            raise UsageError(
                f"--{option} is for stages of a pipeline: add pp to --mesh, such as"
                " --mesh pp=any,fsdp=any,tp=any."
            )
    return False
