"""Commands that ask how much fits: batch sizes and many GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import autosac
from autosac import cli
from autosac.cli.app import (
    EPILOG,
    EXIT_INFEASIBLE,
    Budget,
    Json,
    Model,
    Options,
    app,
    exit_codes,
    show,
    wrote,
)
from autosac.cli.step_options import (
    Cluster,
    HostBudget,
    LossParallel,
    Mesh,
    Offload,
    ParamDtype,
    ReduceDtype,
    TpPlan,
    read_mesh,
    takes_step,
    takes_units,
)
from autosac.cli.usage import check_folders, usage

_PANEL = "How much fits"


@app.command("batch-size", epilog=EPILOG, rich_help_panel=_PANEL)
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
    with exit_codes(as_json):
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
        show(as_json, record, text)


@app.command(epilog=EPILOG, rich_help_panel=_PANEL)
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
    loss_parallel: LossParallel = False,
    param_dtype: ParamDtype = "",
    reduce_dtype: ReduceDtype = "",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the plan file here.")
    ] = None,
    offload: Offload = False,
    host_budget: HostBudget = None,
    as_json: Json = False,
) -> None:
    """Plan FSDP2, tensor parallelism and recomputation of many GPUs together."""
    with exit_codes(as_json):
        check_folders(out)
        step = cli.models.asked(model, **options)
        with usage():
            cluster_plan = autosac.plan_parallel(
                **step.parts(), **step.options, cluster=cluster, num_gpus=gpus,
                memory_budget=budget, param_dtype=param_dtype or None,
                reduce_dtype=reduce_dtype or None, **given, mesh=read_mesh(mesh),
                tp_plan=tp_plan or None,  # type: ignore[arg-type]
                loss_parallel=loss_parallel,
                offload=offload, host_budget=host_budget,
            )  # fmt: skip
        if out is not None:
            cluster_plan.save(out)
        wrote(out)
        show(
            as_json,
            lambda: cli.tables.parallel_record(cluster_plan),
            str(cluster_plan),
        )


@app.command("min-gpus", epilog=EPILOG, rich_help_panel=_PANEL)
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
    with exit_codes(as_json):
        step = cli.models.asked(model, **options)
        with usage():
            fewest = autosac.min_gpus(
                **step.parts(), **step.options, **given, cluster=cluster,
                memory_budget=budget, param_dtype=param_dtype or None,
                reduce_dtype=reduce_dtype or None,
            )  # fmt: skip
        said = "no number of GPUs is enough" if fewest is None else f"{fewest} GPUs"
        show(as_json, lambda: {"min_gpus": fewest}, said)
        if fewest is None:
            raise typer.Exit(code=EXIT_INFEASIBLE)
