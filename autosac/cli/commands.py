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
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import autosac
from autosac import cli
from autosac.cli.step_options import (
    Cluster,
    HostBudget,
    Mesh,
    Offload,
    ParamDtype,
    ReduceDtype,
    TpPlan,
    read_mesh,
    takes_step,
    takes_units,
)
from autosac.cli.usage import OPTIONS, UsageError, check_folders, usage
from autosac.devices.specs import KNOWN_DEVICES
from autosac.errors import AutosacError, InfeasibleBudgetError
from autosac.quantities import parse_bytes

if TYPE_CHECKING:
    from autosac.results.rows import Sweep

EXIT_ERROR, EXIT_USAGE, EXIT_INFEASIBLE = 1, 2, 3
_EPILOG = (
    "Exit codes: 0 done, 1 error, 2 usage, 3 no plan fits the budget (or the step does"
    " not fit the device)."
)
_MODEL = (
    "package.module:factory, a function that returns (model, inputs[, loss_fn[,"
    " optimizer]]) or a dict of these; or hf:path/to/config.json."
)

_OF_A_GRID = "(with --grid)"
_GRID = (
    "Values of an argument of the factory, as --set takes them, or of one of these"
    f" options: {', '.join(OPTIONS)}. Repeat for more axes."
)

app = typer.Typer(
    help="Fit a PyTorch training step into a memory budget. Planning"
    " needs no GPU.\n\n"
    "Try it:  autosac demo\n\n"
    "A plan:  autosac plan mine.models:gpt --set layers=12 --budget 6GiB -o plan.json",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"autosac {metadata.version('autosac')}")
        raise typer.Exit


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


Model = Annotated[str, typer.Argument(help=_MODEL, show_default=False)]
Options = dict[str, Any]  # those of `takes_step`, by name
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
PlanFile = Annotated[
    Path, typer.Argument(help="A file that `autosac plan -o` wrote.", exists=True)
]
Budget = Annotated[
    str, typer.Option("--budget", "-b", help='Such as "24GiB", "24GB" or "80%".')
]


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
    except (AutosacError, ValueError, ImportError, OSError) as error:
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


def _bytes(text: str, total_bytes: int | None) -> int:
    with usage():
        return parse_bytes(text, total_bytes=total_bytes, name="--budget")


@app.command(epilog=_EPILOG)
def demo() -> None:
    """Plan a small GPT at three budgets, train it for real and compare.

    On one thread, unless OMP_NUM_THREADS says on how many.
    """
    if not cli.demo.run(Console(width=130)):
        raise typer.Exit(code=EXIT_ERROR)


@app.command(epilog=_EPILOG)
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
    gap: Annotated[
        float, typer.Option(min=0.0, help="Stop when proven this close to the best.")
    ] = 0.005,
    offload: Offload = False,
    host_budget: HostBudget = None,
    as_json: Json = False,
) -> None:
    """Find the cheapest plan that fits a budget."""
    how: Options = {"relative_gap": gap, "offload": offload, "host_budget": host_budget}
    with _exit_codes(as_json):
        check_folders(out, html)
        step = cli.models.asked(model, **options)
        parts = step.parts()
        if step.has_several(parts):
            asked = {**parts, **step.options, **given, **how}
            cheapest = autosac.plan(**asked, memory_budget=budget)
        else:
            traced = step.calibrated(parts)
            budget_bytes = _bytes(budget, traced.device.memory_bytes)
            cheapest = autosac.plan(traced, memory_budget=budget_bytes, **given, **how)
        if out is not None:
            cheapest.save(out)
        if html is not None:
            cheapest.to_html(html)
        _show(as_json, lambda: cli.tables.plan_record(cheapest), str(cheapest))


@app.command(epilog=_EPILOG)
@takes_step()
@takes_units
def sweep(
    model: Model,
    options: Options,
    given: Options,
    budgets: Annotated[
        list[str] | None,
        typer.Option("--budget", "-b", help="A budget; repeat for more."),
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
    with _exit_codes(as_json):
        check_folders(out, csv, parquet)
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
        wanted = [_bytes(text, traced.device.memory_bytes) for text in budgets or ()]
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
    if csv is not None:
        rows.to_csv(csv)
    if parquet is not None:
        rows.to_parquet(parquet)
    kinds = {row.status for row in rows}
    if out is not None and "planned" in kinds:
        rows.picture().save(out)
    _show(as_json, lambda: cli.tables.sweep_record(rows), cli.tables.sweep_table(rows))
    if "planned" not in kinds:
        code = EXIT_INFEASIBLE if "infeasible" in kinds else EXIT_ERROR
        raise typer.Exit(code=code)


@app.command(epilog=_EPILOG)
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
    with _exit_codes(as_json):
        step = cli.models.asked(model, **options)
        traced = step.calibrated()
        plain_estimate = autosac.estimate(traced)
        with usage():
            does_fit = plain_estimate.fits(fits or None)
        least = autosac.floor(traced)

        def record() -> dict[str, Any]:
            facts = cli.tables.estimate_record(plain_estimate)
            return {**facts, "fits": does_fit, "floor_bytes": least}

        shown = f"{plain_estimate}\n\n{cli.tables.floor_line(plain_estimate, least)}"
        _show(as_json, record, shown)
        if fits and not does_fit:
            raise typer.Exit(code=EXIT_INFEASIBLE)


@app.command(epilog=_EPILOG)
@takes_step()
def advise(
    model: Model,
    options: Options,
    budget: Annotated[
        str, typer.Option("--budget", "-b", help="Plan each change for it.")
    ] = "",
    csv: Annotated[Path | None, typer.Option(help="Write the table here.")] = None,
    as_json: Json = False,
) -> None:
    """Say what else would lower the peak, each change simulated, cheapest first."""
    with _exit_codes(as_json):
        check_folders(csv)
        traced = cli.models.asked(model, **options).calibrated()
        wanted = _bytes(budget, traced.device.memory_bytes) if budget else None
        advice = autosac.advise(traced, memory_budget=wanted)
        if csv is not None:
            advice.to_csv(csv)
        _show(as_json, lambda: cli.tables.advice_record(advice), str(advice))


@app.command(epilog=_EPILOG)
@takes_step()
def export(
    model: Model,
    budget: Budget,
    options: Options,
    to: Annotated[str, typer.Option(help="transformers or torchtitan.")],
    as_json: Json = False,
) -> None:
    """Say what another tool's own settings can do under a budget, and their peak."""
    with _exit_codes(as_json):
        traced = cli.models.asked(model, **options).calibrated()
        budget_bytes = _bytes(budget, traced.device.memory_bytes)
        best = autosac.plan(traced, memory_budget=budget_bytes).export(to, traced)
        record = {**asdict(best), "fits": best.fits}
        _show(as_json, lambda: record, str(best))
        if not best.fits:
            raise typer.Exit(code=EXIT_INFEASIBLE)


@app.command(epilog=_EPILOG)
@takes_step("device", "exclude", "opaque")
def verify(
    plan_file: PlanFile,
    model: Model,
    options: Options,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each kind.")] = 2,
    as_json: Json = False,
) -> None:
    """Really train with and without a plan: peak, time, every bit of the state."""
    with _exit_codes(as_json):
        step = cli.models.asked(model, **options)
        loaded = autosac.Plan.load(plan_file)
        parts = step.parts()
        maker = parts.get("optimizer")
        if cli.models.is_optimizer(maker):
            raise UsageError(
                "verify builds models anew: the factory must return a callable on the"
                " parameters as optimizer, not an instance; or use --optimizer."
            )
        verification = autosac.verify(
            loaded,
            lambda: step.parts()["model"],
            lambda: step.parts()["inputs"],
            make_optimizer=maker and (lambda built: maker(built.parameters())),
            loss_fn=parts.get("loss_fn"),
            steps=steps,
            autocast=step.options.get("autocast"),
            accumulate=options["accumulate"],
        )
        _show(
            as_json,
            lambda: cli.tables.verification_record(verification),
            str(verification),
        )
        if not (verification.identical and verification.within_budget):
            raise typer.Exit(code=EXIT_ERROR)


@app.command(epilog=_EPILOG)
@takes_step()
def report(
    plan_file: PlanFile,
    options: Options,
    model: Annotated[
        str, typer.Argument(help=f"For all that a plan file lacks: {_MODEL}")
    ] = "",
    html: Annotated[
        Path | None, typer.Option(help="Write it with pictures here instead.")
    ] = None,
) -> None:
    """Explain a plan: why each module is recomputed, what more memory buys."""
    with _exit_codes(as_json=False):
        check_folders(html)
        loaded = autosac.Plan.load(plan_file)
        traced = None
        if model:
            step = cli.models.asked(model, **options)
            traced = step.calibrated() if loaded.calibrated else step.profile()
            autosac.check(loaded, traced)
        if html is None:
            Console().print(loaded.report(traced))
        else:
            loaded.to_html(html, traced)


@app.command(epilog=_EPILOG)
def devices(as_json: Json = False) -> None:
    """List the devices that can be planned for without being present."""
    records = [cli.tables.device_record(spec) for spec in KNOWN_DEVICES.values()]
    _show(as_json, lambda: records, cli.tables.device_table(KNOWN_DEVICES.values()))


@app.command(epilog=_EPILOG)
@takes_step("device", "exclude", "opaque")
def calibrate(
    model: Model,
    options: Options,
    refresh: Annotated[
        bool, typer.Option(help="Measure again what is known from before.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure every distinct op of a step here; figures are kept for later plans."""
    with _exit_codes(as_json):
        step = cli.models.asked(model, **options)
        calibration = autosac.calibrate(step.profile(), refresh=refresh).calibration
        _show(as_json, lambda: asdict(calibration), str(calibration))


@app.command("batch-size", epilog=_EPILOG)
@takes_step()
@takes_units
def batch_size(
    model: Model,
    budget: Budget,
    options: Options,
    given: Options,
    argument: Annotated[
        str, typer.Option(help="Argument of the factory that is the batch size.")
    ] = "batch_size",
    best: Annotated[
        bool, typer.Option("--best", help="Of most samples a second, not the largest.")
    ] = False,
    most: Annotated[int, typer.Option(min=1, help="Largest to look at.")] = 2**16,
    as_json: Json = False,
) -> None:
    """Find the largest batch that fits a budget under a plan, or the fastest."""
    with _exit_codes(as_json):
        batches = cli.models.Batches(model, options, argument)
        search = autosac.best_batch_size if best else autosac.max_batch_size
        best_batch = search(
            batches.model, batches.inputs, make_loss_fn=batches.make_loss_fn,
            memory_budget=budget, most=most, **batches.options, **given,
        )  # fmt: skip

        def record() -> dict[str, Any]:
            return {
                "batch_size": best_batch.batch_size,
                **cli.tables.plan_record(best_batch.plan),
                "trials": best_batch.trials.records(),
            }

        text = f"batch size  {best_batch.batch_size}\n{best_batch.plan}"
        _show(as_json, record, text)


@app.command(epilog=_EPILOG)
@takes_step("device")
@takes_units
def parallel(
    model: Model,
    budget: Budget,
    options: Options,
    given: Options,
    cluster: Cluster = "hgx-h100",
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs to use. [default: all of them]")
    ] = None,
    mesh: Mesh = "",
    tp_plan: TpPlan = "",
    param_dtype: ParamDtype = "",
    reduce_dtype: ReduceDtype = "",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the plan file here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan FSDP2, tensor parallelism and recomputation of many GPUs together."""
    with _exit_codes(as_json):
        check_folders(out)
        step = cli.models.asked(model, **options)
        with usage():
            cluster_plan = autosac.plan_parallel(
                **step.parts(), **step.options, cluster=cluster, num_gpus=gpus,
                memory_budget=budget, param_dtype=param_dtype or None,
                reduce_dtype=reduce_dtype or None, **given, mesh=read_mesh(mesh),
                tp_plan=tp_plan or None,  # type: ignore[arg-type]
            )  # fmt: skip
        if out is not None:
            cluster_plan.save(out)
        _show(
            as_json,
            lambda: cli.tables.parallel_record(cluster_plan),
            str(cluster_plan),
        )


@app.command("min-gpus", epilog=_EPILOG)
@takes_step("device")
@takes_units
def min_gpus(
    model: Model,
    budget: Budget,
    options: Options,
    given: Options,
    cluster: Cluster = "hgx-h100",
    param_dtype: ParamDtype = "",
    reduce_dtype: ReduceDtype = "",
    as_json: Json = False,
) -> None:
    """Say how many GPUs it takes at least, all of them sharing the parameters."""
    with _exit_codes(as_json):
        step = cli.models.asked(model, **options)
        with usage():
            fewest = autosac.min_gpus(
                **step.parts(), **step.options, **given, cluster=cluster,
                memory_budget=budget, param_dtype=param_dtype or None,
                reduce_dtype=reduce_dtype or None,
            )  # fmt: skip
        said = "no number of GPUs is enough" if fewest is None else f"{fewest} GPUs"
        _show(as_json, lambda: {"min_gpus": fewest}, said)
        if fewest is None:
            raise typer.Exit(code=EXIT_INFEASIBLE)


def main() -> None:
    """Entry point of the console script."""
    app()
