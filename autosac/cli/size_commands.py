"""Commands that ask how much fits: batch sizes and many GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    write,
    wrote,
)
from autosac.cli.step_options import (
    Cluster,
    CpMethod,
    GlobalBatch,
    HostBudget,
    LossParallel,
    Mesh,
    MicroBatches,
    Offload,
    ParamDtype,
    ReduceDtype,
    Schedules,
    StagesPerRank,
    TpPlan,
    asks_for_stages,
    read_mesh,
    takes_step,
    takes_units,
)
from autosac.cli.usage import UsageError, check_files, check_needed, usage

if TYPE_CHECKING:
    from autosac.parallel.plans import ParallelPlan
    from autosac.pipelines.plans import PipelinePlan

_PANEL = "How much fits"


@app.command("batch-size", epilog=EPILOG, rich_help_panel=_PANEL)
@takes_step("batch")
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
@takes_step("device", "expandable_segments")
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
    cp_method: CpMethod = "ulysses",
    loss_parallel: LossParallel = False,
    global_batch: GlobalBatch = None,
    micro_batches: MicroBatches = None,
    schedule: Schedules = None,
    stages_per_rank: StagesPerRank = None,
    param_dtype: ParamDtype = "",
    reduce_dtype: ReduceDtype = "",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the plan file here.")
    ] = None,
    offload: Offload = False,
    host_budget: HostBudget = None,
    as_json: Json = False,
) -> None:
    """Plan FSDP2, tensor parallelism, stages and recomputation of many GPUs."""
    with exit_codes(as_json):
        check_files(out)
        check_needed("--host-budget", host_budget, "--offload", offload)
        step = cli.models.asked(model, **options)
        typed: dict[str, Any] = {
            "cluster": cluster, "num_gpus": gpus, "memory_budget": budget,
            "mesh": read_mesh(mesh), "tp_plan": tp_plan or None,
            "loss_parallel": loss_parallel, "cp_method": cp_method,
            "param_dtype": param_dtype or None, "reduce_dtype": reduce_dtype or None,
        }  # fmt: skip
        plan: ParallelPlan | PipelinePlan
        with usage():
            stages = _stages(
                typed["mesh"],
                given,
                global_batch,
                micro_batches,
                schedule,
                stages_per_rank,
            )
            far: dict[str, Any] = {"offload": offload, "host_budget": host_budget}
            if stages is None:
                plan = autosac.plan_parallel(
                    **step.parts(), **step.options, **given, **typed, **far
                )
            else:
                _check_slices(typed["mesh"], cluster, gpus)
                plan = autosac.plan_pipeline(
                    **step.pipeline(), **typed, **stages, **far
                )
        write(out, plan.save)
        wrote(out)
        show(as_json, lambda: cli.tables.cluster_record(plan), str(plan))


def _stages(
    mesh: dict[str, int | None] | None,
    given: dict[str, Any],
    global_batch: int | None,
    micro_batches: list[int] | None,
    schedules: list[str] | None,
    stages_per_rank: list[int] | None,
) -> dict[str, Any] | None:
    """Arguments of a pipeline, or None if none is asked for.

    Raises:
        UsageError: Some are given that do not go together.
    """
    typed = {
        "micro_batches": micro_batches,
        "schedule": schedules,
        "stages_per_rank": stages_per_rank,
    }
    if not asks_for_stages(mesh, global_batch=global_batch, **typed):
        return None
    if any(given.values()):
        raise UsageError(
            "--ac-units and --fsdp-units are not for stages, whose units are chosen:"
            " leave them out."
        )
    stages: dict[str, Any] = {"global_batch": global_batch}
    if micro_batches:
        stages["num_micro_batches"] = micro_batches
    if schedules:
        stages["schedules"] = schedules
    if stages_per_rank:
        stages["stages_per_rank"] = stages_per_rank
    return stages


def _check_slices(
    mesh: dict[str, int | None] | None, cluster: str, num_gpus: int | None
) -> None:
    """Refuse slices that fit no node, before a factory is asked for a target."""
    # With torch, which is slow to import.
    from autosac.parallel.mesh_racing import read_degrees
    from autosac.parallel.preparing import cluster_of

    spec = cluster_of(cluster, num_gpus)
    read_degrees((mesh or {}).get("tp", 1), None, False, spec)


@app.command("min-gpus", epilog=EPILOG, rich_help_panel=_PANEL)
@takes_step("device", "expandable_segments")
@takes_units
def min_gpus(
    model: Model,
    budget: Budget,
    options: Options,
    given: Options,
    cluster: Cluster = "hgx-h100",
    mesh: Mesh = "",
    tp_plan: TpPlan = "",
    cp_method: CpMethod = "ulysses",
    loss_parallel: LossParallel = False,
    global_batch: GlobalBatch = None,
    micro_batches: MicroBatches = None,
    schedule: Schedules = None,
    stages_per_rank: StagesPerRank = None,
    param_dtype: ParamDtype = "",
    reduce_dtype: ReduceDtype = "",
    as_json: Json = False,
) -> None:
    """Say how many GPUs it takes at least: sharing parameters, or with stages."""
    with exit_codes(as_json):
        step = cli.models.asked(model, **options)
        typed: dict[str, Any] = {
            "cluster": cluster, "memory_budget": budget,
            "param_dtype": param_dtype or None, "reduce_dtype": reduce_dtype or None,
        }  # fmt: skip
        degrees = read_mesh(mesh)
        with usage():
            stages = _stages(
                degrees, given, global_batch, micro_batches, schedule, stages_per_rank
            )
            is_divided = tp_plan or loss_parallel or cp_method != "ulysses"
            if stages is None and (mesh or is_divided):
                raise UsageError(
                    "--mesh of min-gpus has pp, such as --mesh pp=any,fsdp=any,tp=any;"
                    " without it all GPUs share the parameters."
                )
            if stages is None:
                fewest = autosac.min_gpus(
                    **step.parts(), **step.options, **given, **typed
                )
            else:
                _check_slices(degrees, cluster, None)
                fewest = autosac.min_gpus(
                    **step.pipeline(), **typed, **stages, mesh=degrees,
                    tp_plan=tp_plan or None, loss_parallel=loss_parallel,
                    cp_method=cp_method,
                )  # fmt: skip
        said = "no number of GPUs is enough" if fewest is None else f"{fewest} GPUs"
        show(as_json, lambda: {"min_gpus": fewest}, said)
        if fewest is None:
            raise typer.Exit(code=EXIT_INFEASIBLE)
