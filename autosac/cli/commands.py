"""The ``autosac`` command.

Exit codes: 0 done; 1 it went wrong; 2 what was typed cannot be meant; 3 no plan fits
the budget, or the step does not fit the device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from autosac.cli import demo as demo_model
from autosac.cli import tables
from autosac.cli.models import Target, UsageError, target
from autosac.costs.devices import KNOWN_DEVICES, device_spec
from autosac.errors import AutosacError, InfeasibleBudgetError
from autosac.measuring.verifying import verify as verify_plan
from autosac.planning.checking import check
from autosac.planning.estimating import estimate_of
from autosac.planning.planning import floor, make_plan
from autosac.planning.plans import Plan
from autosac.planning.profiling import calibrate as calibrated
from autosac.planning.sweeping import sweep as sweep_budgets
from autosac.quantities import parse_bytes
from autosac.showing import plotting

EXIT_ERROR, EXIT_USAGE, EXIT_INFEASIBLE = 1, 2, 3
_EPILOG = (
    "Exit codes: 0 done, 1 error, 2 usage, 3 no plan fits the budget (or the step does"
    " not fit the device)."
)
_MODEL = (
    "package.module:factory, a function that returns (model, inputs[, loss_fn[,"
    " optimizer]]) or a dict of these; or hf:path/to/config.json."
)

app = typer.Typer(
    help="Fit a PyTorch training step into a memory budget. Planning runs nothing of"
    " the model and needs no GPU.\n\n"
    "Try it:  autosac demo\n\n"
    "A plan:  autosac plan mine.models:gpt --set layers=12 --budget 6GiB -o plan.json",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Argument(help=_MODEL, show_default=False)]
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
PlanFile = Annotated[
    Path, typer.Argument(help="A file that `autosac plan -o` wrote.", exists=True)
]
Budget = Annotated[
    str, typer.Option("--budget", "-b", help='Such as "24GiB", "24GB" or "80%".')
]


def _target(
    model: str,
    settings: list[str] | None,
    optimizer: str,
    device: str,
    on: str,
    batch: int,
    length: int,
    autocast: str,
    accumulate: int,
    exclude: list[str] | None,
) -> Target:
    """The step that the options describe."""
    if on not in ("cpu", "cuda", "meta"):
        raise UsageError(f"--on {on!r} must be cpu, cuda or meta.")
    if device not in ("", "cuda"):
        with _usage():
            device_spec(device)  # complain before anything is built
    options: dict[str, Any] = {"accumulate": accumulate}
    if exclude:
        options["exclude"] = tuple(exclude)
    if device:
        options["device"] = device
    if autocast:
        dtype = getattr(torch, autocast, None)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"--autocast {autocast!r} is no type, such as bfloat16.")
        options["autocast"] = dtype
    found = target(
        model,
        settings=settings or (),
        optimizer=optimizer,
        batch=batch,
        length=length,
        options=options,
    )
    return found.on(on)


@contextmanager
def _exit_codes(as_json: bool) -> Iterator[None]:
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
    except UsageError as error:
        _fail(str(error), "usage", EXIT_USAGE, as_json)
    except (
        AutosacError, ValueError, NotImplementedError, ImportError, OSError,
    ) as error:  # fmt: skip
        _fail(str(error), "error", EXIT_ERROR, as_json)


def _fail(
    message: str,
    kind: str,
    code: int,
    as_json: bool,
    facts: dict[str, Any] | None = None,
) -> None:
    if as_json:
        _print_json({"error": kind, "message": message, **(facts or {})})
    else:
        print(f"autosac: {message}", file=sys.stderr)
    raise typer.Exit(code=code)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, allow_nan=False))


def _show(as_json: bool, record: Callable[[], Any], shown: Any) -> None:
    if as_json:
        _print_json(record())
    else:
        Console().print(shown)


@contextmanager
def _usage() -> Iterator[None]:
    """What is wrong with a value that was typed is a matter of usage."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def _bytes(text: str, total_bytes: int | None) -> int:
    with _usage():
        return parse_bytes(text, total_bytes=total_bytes, name="--budget")


@app.command(epilog=_EPILOG)
def demo() -> None:
    """Plan a small GPT at three budgets, train it for real and compare."""
    if not demo_model.run(Console(width=130)):
        raise typer.Exit(code=EXIT_ERROR)


@app.command(epilog=_EPILOG)
def plan(
    model: Model,
    budget: Budget,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the plan file here.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the report with pictures here.")
    ] = None,
    gap: Annotated[
        float, typer.Option(min=0.0, help="Stop when proven this close to the best.")
    ] = 0.005,
    settings: Settings = None,
    optimizer: Optimizer = "",
    device: Device = "",
    on: Build = "cpu",
    batch: Batch = 1,
    length: Length = 512,
    autocast: Autocast = "",
    accumulate: Accumulate = 1,
    exclude: Exclude = None,
    as_json: Json = False,
) -> None:
    """Find the cheapest plan that fits a budget."""
    with _exit_codes(as_json):
        step = _target(
            model, settings, optimizer, device, on, batch, length, autocast,
            accumulate, exclude,
        )  # fmt: skip
        made = step.calibrated()
        budget_bytes = _bytes(budget, made.device.memory_bytes)
        found = make_plan(made, budget_bytes, relative_gap=gap)
        if out is not None:
            found.save(out)
        if html is not None:
            found.to_html(html)
        _show(as_json, lambda: tables.plan_record(found), str(found))


@app.command(epilog=_EPILOG)
def sweep(
    model: Model,
    budgets: Annotated[
        list[str] | None,
        typer.Option("--budget", "-b", help="A budget; repeat for more."),
    ] = None,
    n: Annotated[
        int, typer.Option(min=2, help="Or so many from the floor to the plain peak.")
    ] = 9,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write a picture: .png, .html …")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table here.")] = None,
    settings: Settings = None,
    optimizer: Optimizer = "",
    device: Device = "",
    on: Build = "cpu",
    batch: Batch = 1,
    length: Length = 512,
    autocast: Autocast = "",
    accumulate: Accumulate = 1,
    exclude: Exclude = None,
    as_json: Json = False,
) -> None:
    """Plan for many budgets: what a byte of memory costs in time."""
    with _exit_codes(as_json):
        step = _target(
            model, settings, optimizer, device, on, batch, length, autocast,
            accumulate, exclude,
        )  # fmt: skip
        made = step.calibrated()
        wanted = [_bytes(text, made.device.memory_bytes) for text in budgets or ()]
        found = sweep_budgets(
            made, memory_budgets=wanted or None, n=None if wanted else n
        )
        if out is not None:
            plotting.budgets(found).save(out)
        if csv is not None:
            found.to_dataframe().to_csv(csv, index=False)
        rows = tables.sweep_table(found)
        _show(as_json, lambda: tables.sweep_record(found), rows)
        if not any(row.feasible for row in found.rows):
            raise typer.Exit(code=EXIT_INFEASIBLE)


@app.command(epilog=_EPILOG)
def estimate(
    model: Model,
    fits: Annotated[
        str,
        typer.Option(help="Exit with 3 unless the plain step fits: a device or bytes."),
    ] = "",
    settings: Settings = None,
    optimizer: Optimizer = "",
    device: Device = "",
    on: Build = "cpu",
    batch: Batch = 1,
    length: Length = 512,
    autocast: Autocast = "",
    accumulate: Accumulate = 1,
    as_json: Json = False,
) -> None:
    """Say what a plain step takes: peak, where, and of what."""
    with _exit_codes(as_json):
        step = _target(
            model, settings, optimizer, device, on, batch, length, autocast,
            accumulate, None,
        )  # fmt: skip
        made = step.calibrated()
        found = estimate_of(made)
        with _usage():
            does_fit = found.fits(fits or None)
        least = floor(made)

        def record() -> dict[str, Any]:
            facts = tables.estimate_record(found)
            return {**facts, "fits": does_fit, "floor_bytes": least}

        shown = f"{found}\n\n{tables.floor_line(found, least)}"
        _show(as_json, record, shown)
        if fits and not does_fit:
            raise typer.Exit(code=EXIT_INFEASIBLE)


@app.command(epilog=_EPILOG)
def verify(
    plan_file: PlanFile,
    model: Model,
    settings: Settings = None,
    optimizer: Optimizer = "",
    on: Build = "cpu",
    batch: Batch = 1,
    length: Length = 512,
    autocast: Autocast = "",
    accumulate: Accumulate = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each kind.")] = 2,
    as_json: Json = False,
) -> None:
    """Really train with and without a plan: peak, time, every bit of the state."""
    with _exit_codes(as_json):
        step = _target(
            model, settings, optimizer, "", on, batch, length, autocast, accumulate,
            None,
        )  # fmt: skip
        loaded = Plan.load(plan_file)
        parts = step.parts()
        maker = parts.get("optimizer")
        if isinstance(maker, torch.optim.Optimizer):
            raise UsageError(
                "verify builds models anew: the factory must return a callable on the"
                " parameters as optimizer, not an instance; or use --optimizer."
            )
        found = verify_plan(
            loaded,
            lambda: step.parts()["model"],
            lambda: step.parts()["inputs"],
            make_optimizer=maker and (lambda built: maker(built.parameters())),
            loss_fn=parts.get("loss_fn"),
            steps=steps,
            autocast=step.options.get("autocast"),
            accumulate=accumulate,
        )
        _show(as_json, lambda: tables.verification_record(found), str(found))
        if not (found.identical and found.within_budget):
            raise typer.Exit(code=EXIT_ERROR)


@app.command(epilog=_EPILOG)
def report(
    plan_file: PlanFile,
    model: Annotated[
        str, typer.Argument(help=f"For all that a plan file lacks: {_MODEL}")
    ] = "",
    html: Annotated[
        Path | None, typer.Option(help="Write it with pictures here instead.")
    ] = None,
    settings: Settings = None,
    optimizer: Optimizer = "",
    device: Device = "",
    on: Build = "cpu",
    batch: Batch = 1,
    length: Length = 512,
    autocast: Autocast = "",
    accumulate: Accumulate = 1,
    exclude: Exclude = None,
) -> None:
    """Explain a plan: why each module is recomputed, what more memory buys."""
    with _exit_codes(as_json=False):
        loaded = Plan.load(plan_file)
        made = None
        if model:
            step = _target(
                model, settings, optimizer, device, on, batch, length, autocast,
                accumulate, exclude,
            )  # fmt: skip
            made = step.calibrated() if loaded.calibrated else step.profile()
            check(loaded, made)
        if html is None:
            Console().print(loaded.report(made))
        else:
            loaded.to_html(html, made)


@app.command(epilog=_EPILOG)
def devices(as_json: Json = False) -> None:
    """List the devices that can be planned for without being present."""
    records = [tables.device_record(spec) for spec in KNOWN_DEVICES.values()]
    _show(as_json, lambda: records, tables.device_table(KNOWN_DEVICES.values()))


@app.command(epilog=_EPILOG)
def calibrate(
    model: Model,
    refresh: Annotated[
        bool, typer.Option(help="Measure again what is known from before.")
    ] = False,
    settings: Settings = None,
    optimizer: Optimizer = "",
    on: Build = "cpu",
    batch: Batch = 1,
    length: Length = 512,
    autocast: Autocast = "",
    as_json: Json = False,
) -> None:
    """Measure every distinct op of a step here; figures are kept for later plans."""
    with _exit_codes(as_json):
        step = _target(
            model, settings, optimizer, "", on, batch, length, autocast, 1, None
        )
        found = calibrated(step.profile(), refresh=refresh).calibration
        _show(as_json, lambda: asdict(found), str(found))


def main() -> None:
    """Entry point of the console script."""
    app()
