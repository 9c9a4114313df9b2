"""Commands about graphs: what modules keep for backward, and compiled budgets."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

import autosac
from autosac import cli
from autosac.cli.app import EPILOG, Budget, Json, Model, Options, app, exit_codes, show
from autosac.cli.step_options import HostBudget, Offload, takes_step
from autosac.cli.usage import check_needed, usage

_PANEL = "Graphs"
_OF_PLANS = ("exclude", "opaque", "expandable_segments")  # options of plans of modules


@app.command("graph-info", epilog=EPILOG, rich_help_panel=_PANEL)
@takes_step("optimizer", "accumulate", *_OF_PLANS)
def graph_info(model: Model, options: Options, as_json: Json = False) -> None:
    """Say what forward keeps and backward needs, module by module."""
    with exit_codes(as_json):
        step = cli.models.asked(model, **options)
        parts = step.parts()
        info = autosac.graph_info(
            parts["model"], parts["inputs"], loss_fn=parts.get("loss_fn"),
            device=step.options.get("device"), autocast=step.options.get("autocast"),
        )  # fmt: skip
        show(as_json, lambda: [asdict(one) for one in info.modules], str(info))


@app.command("compile", epilog=EPILOG, rich_help_panel=_PANEL)
@takes_step("optimizer", "device", "autocast", "accumulate", *_OF_PLANS)
def compile_model(
    model: Model,
    budget: Budget,
    options: Options,
    backend: Annotated[str, typer.Option(help="aot_eager or inductor.")] = "aot_eager",
    strategy: Annotated[str, typer.Option(help="milp or capuchin.")] = "milp",
    offload: Offload = False,
    host_budget: HostBudget = None,
    as_json: Json = False,
) -> None:
    """Compile forward and loss under a budget, run them once, and show the plan."""
    with exit_codes(as_json):
        check_needed("--host-budget", host_budget, "--offload", offload)
        parts = cli.models.asked(model, **options).parts()
        with usage():
            plan = cli.compiled.plan_of(
                parts, memory_budget=budget, backend=backend, strategy=strategy,
                offload=offload, host_budget=host_budget,
            )  # fmt: skip
        show(as_json, lambda: cli.tables.compiled_record(plan), str(plan))
