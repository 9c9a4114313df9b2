"""The app that all commands belong to, its exit codes, and what commands share.

Exit codes: 0 done; 1 it went wrong; 2 what was typed cannot be meant; 3 no plan fits
the budget, or the step does not fit the device.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from autosac.cli.usage import (
    UsageError,
    as_typed,
    know_options,
    plain_warnings,
    typed_bytes,
    usage,
    writing,
)
from autosac.errors import AutosacError, InfeasibleBudgetError, Interrupted
from autosac.quantities import parse_bytes

EXIT_ERROR, EXIT_USAGE, EXIT_INFEASIBLE = 1, 2, 3
_STDOUT = "stdout"  # as errors call it
EPILOG = (
    "Exit codes: 0 done, 1 error, 2 usage, 3 no plan fits the budget (or the step does"
    " not fit the device)."
)
MODEL = (
    "package.module:factory, a function that returns (model, inputs[, loss_fn[,"
    " optimizer]]) or a dict of these, in which target may be the second argument of"
    " loss_fn; or hf:path/to/config.json."
)

app = typer.Typer(
    help="Fit a PyTorch training step into a memory budget. Planning"
    " needs no GPU.\n\n"
    "Try it:  autosac demo\n\n"
    "A plan:  autosac plan mine.models:gpt --set layers=12 --budget 6GiB -o plan.json",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"autosac {_installed_version()}")
        raise typer.Exit


def _installed_version() -> str:
    try:
        return metadata.version("autosac")
    except metadata.PackageNotFoundError:
        return f"is not installed: run from {Path(__file__).parents[2]}"


@app.callback()
def _command(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Say which one this is."
        ),
    ] = False,
) -> None:
    """What comes before the name of a command."""
    commands: Any = context.command
    know_options(commands.commands[context.invoked_subcommand].params)


Model = Annotated[str, typer.Argument(help=MODEL, show_default=False)]
Options = dict[str, Any]  # those of `takes_step`, by name
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
PlanFile = Annotated[
    Path, typer.Argument(help="A file that `autosac plan -o` wrote.", exists=True)
]
Budget = Annotated[
    str,  # or the bytes that a text of digits says
    typer.Option(
        *("--budget", "-b"),
        parser=typed_bytes,
        metavar="BYTES",
        help='Such as "24GiB", "24GB" or "80%"; digits alone are bytes.',
    ),
]


@contextmanager
def exit_codes(as_json: bool) -> Iterator[None]:
    """Turn errors into one sentence and an exit code."""
    try:
        with plain_warnings():
            yield
    except BrokenPipeError:  # who reads the output has read enough
        raise
    except InfeasibleBudgetError as error:
        facts = {
            "budget_bytes": error.budget_bytes,
            "lowest_peak_bytes": error.lowest_peak_bytes,
            "composition": error.composition,
        }
        _fail(str(error), "infeasible", EXIT_INFEASIBLE, as_json, facts)
    except Interrupted as stop:
        if as_json:
            print_json({"error": "interrupted", "rows": stop.done.records()})
        else:
            print(f"autosac: {stop.args[0].partition(':')[0]}.", file=sys.stderr)
            print(stop.done)
        raise
    except UsageError as error:
        _fail(str(error), "usage", EXIT_USAGE, as_json)
    except (AutosacError, ValueError, ImportError, OSError) as error:
        can_print = getattr(error, "filename", None) != _STDOUT
        _fail(str(error), "error", EXIT_ERROR, as_json and can_print)


def _fail(
    message: str,
    kind: str,
    code: int,
    as_json: bool,
    facts: dict[str, Any] | None = None,
) -> None:
    message = as_typed(message)
    if as_json:
        print_json({"error": kind, "message": message, **(facts or {})})
    else:
        print(f"autosac: {message}", file=sys.stderr)
    raise typer.Exit(code=code)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, allow_nan=False))


def show(as_json: bool, record: Callable[[], Any], shown: Any) -> None:
    """Print a record for machines, or what people read."""
    with _stdout_named():
        if as_json:
            print_json(record())
        elif isinstance(shown, str):
            print(shown)  # as it is: Rich would take [brackets] for its own
        else:
            Console().print(shown)


@contextmanager
def _stdout_named() -> Iterator[None]:
    """Write to the standard output now; an error of that names it."""
    try:
        with writing(_STDOUT):
            yield
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:  # what is left cannot be written as Python ends, either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def write(path: Path | None, save: Callable[[Path], object]) -> None:
    """Write a file if one is asked for."""
    if path is not None:
        with writing(path):
            save(path)


def wrote(*paths: Path | None) -> None:
    """Name the files that were written, beside what machines read."""
    for path in paths:
        if path is not None:
            print(f"autosac: wrote {path}", file=sys.stderr)


def budget_bytes_of(typed: int | str, total_bytes: int | None) -> int:
    """What was typed as --budget, in bytes."""
    with usage():
        return parse_bytes(typed, total_bytes=total_bytes)
