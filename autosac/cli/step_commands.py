"""Commands that plan, explain and check one step."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import autosac
from autosac import cli
from autosac.cli.app import (
    EPILOG,
    EXIT_ERROR,
    EXIT_INFEASIBLE,
    MODEL,
    Budget,
    Json,
    Model,
    Options,
    PlanFile,
    app,
    budget_bytes_of,
    exit_codes,
    show,
    write,
    wrote,
)
from autosac.cli.step_options import (
    HostBudget,
    Interactive,
    Offload,
    given_options,
    takes_step,
    takes_units,
)
from autosac.cli.usage import (
    OPTIONS,
    UsageError,
    check_files,
    check_needed,
    typed_bytes,
    usage,
)
from autosac.devices.specs import KNOWN_DEVICES
from autosac.pictures.pictures import check_suffix

if TYPE_CHECKING:
    from autosac.results.sweeps import Sweep

_LEAST_DIGITS = 6  # of bytes that a step may fit; names of devices have fewer
_OF_A_GRID = "(with --grid)"
_GRID = (
    "Values of an argument of the factory, as --set takes them, or of one of these"
    f" options: {', '.join(OPTIONS)}. Repeat for more axes."
)


@app.command(epilog=EPILOG)
def demo() -> None:
    """Plan a small GPT at three budgets, train it for real and compare.

    On one thread, unless OMP_NUM_THREADS says on how many.
    """
    if not cli.demo.run(Console(width=130)):
        raise typer.Exit(code=EXIT_ERROR)


@app.command(epilog=EPILOG)
@takes_step()
@takes_units
def plan(
    model: Model,
    budget: Budget,
    options: Options,
    given: Options,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the plan file here.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the report with pictures here.")
    ] = None,
    interactive: Interactive = False,
    gap: Annotated[
        float, typer.Option(min=0.0, help="Stop when proven this close to the best.")
    ] = 0.005,
    offload: Offload = False,
    host_budget: HostBudget = None,
    as_json: Json = False,
) -> None:
    """Find the cheapest plan that fits a budget."""
    how: Options = {"relative_gap": gap, "offload": offload, "host_budget": host_budget}
    with exit_codes(as_json):
        check_files(out, html)
        check_needed("--interactive", interactive, "--html", html)
        check_needed("--host-budget", host_budget, "--offload", offload)
        step = cli.models.asked(model, **options)
        parts = step.parts()
        if step.has_several(parts):
            asked = {**parts, **step.options, **given, **how}
            cheapest = autosac.plan(**asked, memory_budget=budget)
        else:
            traced = step.calibrated(parts)
            budget_bytes = budget_bytes_of(budget, traced.device.memory_bytes)
            with usage():  # names of AC units, and the budget of the host
                cheapest = autosac.plan(
                    traced, memory_budget=budget_bytes, **given, **how
                )
        write(out, cheapest.save)
        write(html, partial(cheapest.to_html, interactive=interactive))
        wrote(out, html)
        show(as_json, lambda: cli.tables.plan_record(cheapest), str(cheapest))


@app.command(epilog=EPILOG)
@takes_step()
@takes_units
def sweep(
    model: Model,
    options: Options,
    given: Options,
    budgets: Annotated[
        list[str] | None,
        typer.Option(
            *("--budget", "-b"),
            parser=typed_bytes,
            metavar="BYTES",
            help="A budget; repeat for more.",
        ),
    ] = None,
    n: Annotated[
        int,
        typer.Option(
            "--n", "-n", min=2, help="Or so many from the floor to the plain peak."
        ),
    ] = 9,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write a picture: .png, .html …")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table here.")] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,VALUE", help=f"{_GRID} {_OF_A_GRID}"),
    ] = None,
    jobs: Annotated[int, typer.Option(help=f"Cells at a time. {_OF_A_GRID}")] = 1,
    directory: Annotated[
        Path | None,
        typer.Option(help=f"Keep finished cells here, to go on later. {_OF_A_GRID}"),
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option(help=f"Write the table here. {_OF_A_GRID}")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option(help=f"Measure the steps that are here. {_OF_A_GRID}")
    ] = False,
    as_json: Json = False,
) -> None:
    """Plan for many budgets, and a grid of steps: what a byte costs in time."""
    with exit_codes(as_json):
        check_files(out, csv, parquet)
        if out is not None:
            with usage():
                check_suffix(out)
        if grid:
            step = cli.grids.GridStep(model=model, options=options)
            cells = cli.grids.swept(
                step, grid, budgets=budgets or (), n=n, calibrate=calibrate,
                jobs=jobs, directory=directory, given=given,
            )  # fmt: skip
            _show_sweep(cells, out, csv, parquet, as_json)
            return
        if directory or calibrate or jobs != 1:
            raise UsageError("--jobs, --directory and --calibrate need --grid.")
        traced = cli.models.asked(model, **options).calibrated()
        wanted = [
            budget_bytes_of(text, traced.device.memory_bytes) for text in budgets or ()
        ]
        with usage():  # names of AC units
            rows = autosac.sweep(
                traced, memory_budgets=wanted or None, n=None if wanted else n, **given
            )
        _show_sweep(rows, out, csv, parquet, as_json)


def _show_sweep(
    rows: Sweep,
    out: Path | None,
    csv: Path | None,
    parquet: Path | None,
    as_json: bool,
) -> None:
    """Write the files, then show the table; exit with a code if nothing is planned."""
    write(csv, rows.to_csv)
    write(parquet, rows.to_parquet)
    kinds = {row.status for row in rows}
    out = out if "planned" in kinds else None
    write(out, lambda path: rows.picture().save(path))
    wrote(csv, parquet, out)
    show(as_json, lambda: cli.tables.sweep_record(rows), cli.tables.sweep_table(rows))
    if "planned" not in kinds:
        code = EXIT_INFEASIBLE if "infeasible" in kinds else EXIT_ERROR
        raise typer.Exit(code=code)


@app.command(epilog=EPILOG)
@takes_step()
def estimate(
    model: Model,
    options: Options,
    fits: Annotated[
        str,
        typer.Option(help="Exit with 3 unless the plain step fits: a device or bytes."),
    ] = "",
    as_json: Json = False,
) -> None:
    """Say what a plain step takes: peak, where, and of what."""
    with exit_codes(as_json):
        step = cli.models.asked(model, **options)
        traced = step.calibrated()
        plain_estimate = autosac.estimate(traced)
        with usage(device="fits"):
            does_fit = plain_estimate.fits(_device_or_bytes(fits))
        least = autosac.floor(traced)

        def record() -> dict[str, Any]:
            facts = cli.tables.estimate_record(plain_estimate)
            return {**facts, "fits": does_fit, "floor_bytes": least}

        shown = f"{plain_estimate}\n\n{cli.tables.floor_line(plain_estimate, least)}"
        if fits:
            line = cli.tables.fits_line(plain_estimate, least, fits, does_fit)
            shown += f"\n{line}"
        show(as_json, record, shown)
        if fits and not does_fit:
            raise typer.Exit(code=EXIT_INFEASIBLE)


def _device_or_bytes(typed: str) -> int | str | None:
    """What was typed as --fits: digits alone are bytes, unless few as of a 4090."""
    return typed_bytes(typed) if len(typed) >= _LEAST_DIGITS else typed or None


@app.command(epilog=EPILOG)
@takes_step()
def advise(
    model: Model,
    options: Options,
    budget: Annotated[
        str,
        typer.Option(
            *("--budget", "-b"),
            parser=typed_bytes,
            metavar="BYTES",
            help="Plan each change for it.",
        ),
    ] = "",
    csv: Annotated[Path | None, typer.Option(help="Write the table here.")] = None,
    as_json: Json = False,
) -> None:
    """Say what else would lower the peak, each change simulated, cheapest first."""
    with exit_codes(as_json):
        check_files(csv)
        traced = cli.models.asked(model, **options).calibrated()
        wanted = (
            budget_bytes_of(budget, traced.device.memory_bytes)
            if budget != ""
            else None
        )
        advice = autosac.advise(traced, memory_budget=wanted)
        write(csv, advice.to_csv)
        wrote(csv)
        show(as_json, lambda: cli.tables.advice_record(advice), str(advice))


@app.command(epilog=EPILOG)
@takes_step()
def export(
    model: Model,
    budget: Budget,
    options: Options,
    to: Annotated[
        str,
        typer.Option(help="transformers, axolotl, automodel, torchtitan or megatron."),
    ],
    as_json: Json = False,
) -> None:
    """Say what another tool's own settings can do under a budget, and their peak."""
    # Imports torch, which `--help` goes without.
    from autosac.planning.exporting import check_target

    with exit_codes(as_json):
        with usage():
            check_target(to)
        traced = cli.models.asked(model, **options).calibrated()
        budget_bytes = budget_bytes_of(budget, traced.device.memory_bytes)
        best = autosac.plan(traced, memory_budget=budget_bytes).export(to, traced)
        record = {**asdict(best), "fits": best.fits}
        show(as_json, lambda: record, str(best))
        if not best.fits:
            raise typer.Exit(code=EXIT_INFEASIBLE)


@app.command(epilog=EPILOG)
@takes_step("device", "exclude", "opaque", "expandable_segments")
def verify(
    plan_file: PlanFile,
    model: Model,
    options: Options,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each kind.")] = 2,
    as_json: Json = False,
) -> None:
    """Really train with and without a plan: peak, time, every bit of the state."""
    with exit_codes(as_json):
        step = cli.models.asked(model, **options)
        loaded = autosac.Plan.load(plan_file)
        parts = step.parts()
        if step.has_several(parts):
            raise UsageError(
                f"{model} makes several batches, and `verify` trains on one: name a"
                " factory that makes one of them."
            )
        given = {name for name, part in parts.items() if part is not None}
        del parts
        last: Options = {}  # parts of the model that was built last, without it

        def make_model() -> Any:
            parts = step.parts()
            built = parts.pop("model")
            last.update(parts)
            return built

        def make_optimizer(built: Any) -> Any:
            return cli.models.optimizer_of(built, last.pop("optimizer"))

        verification = autosac.verify(
            loaded,
            make_model,
            lambda: last["inputs"],
            make_optimizer=make_optimizer if "optimizer" in given else None,
            loss_fn=(lambda out: last["loss_fn"](out)) if "loss_fn" in given else None,
            steps=steps,
            autocast=step.options.get("autocast"),
            accumulate=options["accumulate"],
        )
        show(
            as_json,
            lambda: cli.tables.verification_record(verification),
            str(verification),
        )
        if not (verification.identical and verification.within_budget):
            raise typer.Exit(code=EXIT_ERROR)


@app.command(epilog=EPILOG)
@takes_step()
def report(
    plan_file: PlanFile,
    options: Options,
    model: Annotated[
        str, typer.Argument(help=f"For all that a plan file lacks: {MODEL}")
    ] = "",
    html: Annotated[
        Path | None, typer.Option(help="Write it with pictures here instead.")
    ] = None,
    interactive: Interactive = False,
) -> None:
    """Explain a plan: why each module is recomputed, what more memory buys."""
    with exit_codes(as_json=False):
        check_files(html)
        check_needed("--interactive", interactive, "--html", html)
        for option in given_options(options):
            check_needed(option, True, "a model", model)
        loaded = autosac.Plan.load(plan_file)
        traced = None
        if model:
            step = cli.models.asked(model, **options)
            traced = step.calibrated() if loaded.calibrated else step.profile()
            autosac.check(loaded, traced)
        if html is None:
            show(False, dict, loaded.report(traced))
        else:
            save = partial(loaded.to_html, profile=traced, interactive=interactive)
            write(html, save)
            wrote(html)


@app.command(epilog=EPILOG)
def devices(as_json: Json = False) -> None:
    """List the devices that can be planned for without being present."""
    records = [cli.tables.device_record(spec) for spec in KNOWN_DEVICES.values()]
    with exit_codes(as_json):
        show(as_json, lambda: records, cli.tables.device_table(KNOWN_DEVICES.values()))


@app.command(epilog=EPILOG)
@takes_step("device", "exclude", "opaque", "expandable_segments")
def calibrate(
    model: Model,
    options: Options,
    refresh: Annotated[
        bool, typer.Option(help="Measure again what is known from before.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure every distinct op of a step here; figures are kept for later plans."""
    with exit_codes(as_json):
        step = cli.models.asked(model, **options)
        calibration = autosac.calibrate(step.profile(), refresh=refresh).calibration
        show(as_json, lambda: asdict(calibration), str(calibration))
