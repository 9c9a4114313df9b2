"""The app that all commands belong to, its exit codes, and what commands share.

Exit codes: 0 done; 1 it went wrong; 2 what was typed cannot be meant; 3 no plan fits
the budget, or the step does not fit the device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from autosac.cli.usage import UsageError, as_typed, usage
from autosac.errors import AutosacError, InfeasibleBudgetError, Interrupted
from autosac.quantities import parse_bytes

EXIT_ERROR, EXIT_USAGE, EXIT_INFEASIBLE = 1, 2, 3
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
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Say which one this is."
        ),
    ] = False,
) -> None:
    """What comes before the name of a command."""


Model = Annotated[str, typer.Argument(help=MODEL, show_default=False)]
Options = dict[str, Any]  # those of `takes_step`, by name
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
PlanFile = Annotated[
    Path, typer.Argument(help="A file that `autosac plan -o` wrote.", exists=True)
]
Budget = Annotated[
    str, typer.Option("--budget", "-b", help='Such as "24GiB", "24GB" or "80%".')
]


@contextmanager
def exit_codes(as_json: bool) -> Iterator[None]:
    """Turn errors into one sentence and an exit code."""
    try:
        yield
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
        _fail(str(error), "error", EXIT_ERROR, as_json)


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
    if as_json:
        print_json(record())
    elif isinstance(shown, str):
        print(shown)  # as it is: Rich would take [brackets] for its own
    else:
        Console().print(shown)


def wrote(*paths: Path | None) -> None:
    """Name the files that were written, beside what machines read."""
    for path in paths:
        if path is not None:
            print(f"autosac: wrote {path}", file=sys.stderr)


def budget_bytes_of(text: str, total_bytes: int | None) -> int:
    """What was typed as --budget, in bytes."""
    with usage():
        return parse_bytes(text, total_bytes=total_bytes, name="--budget")
