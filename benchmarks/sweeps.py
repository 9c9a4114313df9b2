"""Ten models, three batch sizes, sixteen budgets: `python -m benchmarks.sweeps`.

Budgets are spread from the floor of each cell to its plain peak. With ``--directory``
an interrupted run goes on where it stopped. ``--backend dask`` or ``ray`` runs the
cells on a local cluster; ``--csv`` writes the table, the same with each of them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import joblib
from joblib.externals.loky import get_reusable_executor

import autosac
from benchmarks.environment import environment, package_version
from benchmarks.models import diffusion, language, vision

RESULT = Path(__file__).parent / "results" / "sweeps.md"
SMALL = {"layers": 4, "width": 96, "vocabulary": 512, "length": 128}
MODELS = (
    "gpt2", "llama", "qwen3", "mistral", "bert", "albert", "vit", "swin", "convnext",
    "dit",
)  # fmt: skip
BATCH_SIZES, NUM_BUDGETS = (2, 4, 8), 16


def make_step(model: str, batch_size: int) -> dict[str, Any]:
    """A model of the benchmarks at a batch size."""
    module = {"dit": diffusion}.get(
        model, vision if model in ("vit", "swin", "convnext") else language
    )
    sizes: dict[str, Any] = SMALL if model in ("gpt2", "llama", "bert") else {}
    if model == "vit":
        sizes = {"layers": 4, "width": 96, "pixels": 64}
    work = getattr(module, model)(batch=batch_size, **sizes)
    built = work.make_model()
    return {
        "model": built,
        "inputs": work.make_inputs(),
        "loss_fn": work.loss_fn,
        "optimizer": work.make_optimizer(built),
    }


@contextmanager
def cluster(backend: str, n_jobs: int) -> Iterator[None]:
    """A local cluster of so many workers."""
    if backend == "dask":
        from distributed import Client

        with (
            Client(n_workers=n_jobs, threads_per_worker=1, dashboard_address=None),
            joblib.parallel_config("dask"),
        ):
            yield
    elif backend == "ray":
        import ray
        from ray.util.joblib import register_ray

        ray.init(num_cpus=n_jobs, include_dashboard=False)
        register_ray()
        try:
            with joblib.parallel_config("ray"):
                yield
        finally:
            ray.shutdown()
    else:
        yield
        get_reusable_executor().shutdown(wait=True)  # its CPU time counts then


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--backend", choices=("loky", "dask", "ray"), default="loky")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--output", type=Path, default=RESULT)
    chosen = parser.parse_args()
    load, begin = os.getloadavg()[0], time.perf_counter()
    with cluster(chosen.backend, chosen.jobs):
        swept = autosac.sweep_grid(
            make_step,
            {"model": chosen.models.split(","), "batch_size": BATCH_SIZES},
            n=NUM_BUDGETS,
            n_jobs=chosen.jobs,
            directory=chosen.directory,
        )
    wall_s = time.perf_counter() - begin
    used = [resource.getrusage(who) for who in (0, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in used)
    if chosen.csv is not None:
        swept.to_csv(chosen.csv)
    text = _page(swept, wall_s, cpu_s, load, f"{chosen.jobs} {chosen.backend} workers")
    chosen.output.write_text(text)
    print(text)


def _page(
    swept: autosac.Sweep, wall_s: float, cpu_s: float, load: float, how: str
) -> str:
    where = {**environment(), "joblib": package_version("joblib"), "load average": load}
    cells = [
        (cell, list(rows))
        for cell, rows in itertools.groupby(swept, key=lambda row: row.cell)
    ]
    counts = [
        sum(row.status == kind for row in swept.rows)
        for kind in ("planned", "infeasible", "failed")
    ]
    lines = [
        "# A grid of steps: models, batch sizes, budgets\n",
        ", ".join(f"{name} {value}" for name, value in where.items()),
        f"\n{len(cells)} cells of {NUM_BUDGETS} budgets each, {how}:"
        f" {wall_s:.0f} s of wall clock, {cpu_s:.0f} s of CPU time, imports of workers"
        f" included. {counts[0]} plans, {counts[1]} infeasible, {counts[2]} failed. The"
        " load average is that before the run, of others alone.\n",
        "Budgets are spread evenly from the floor to the plain peak; times are modelled"
        " for the nominal CPU. The gap is the worst of a cell: a solve ends at 1 % or"
        " after 200 nodes.\n",
        "| model | batch | floor MiB | plain MiB | recompute at floor | worst gap |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for cell, rows in cells:
        planned = [row for row in rows if row.status == "planned"]
        if not planned:
            reason = rows[0].reason
            lines.append(f"| {cell['model']} | {cell['batch_size']} | {reason} | | | |")
            continue
        first = planned[0]
        assert first.floor_bytes and first.baseline_peak_bytes and first.step_ms
        share = (first.recompute_ms or 0.0) / first.step_ms
        worst = max(row.optimality_gap or 0.0 for row in planned)
        lines.append(
            f"| {cell['model']} | {cell['batch_size']}"
            f" | {first.floor_bytes / 2**20:.1f}"
            f" | {first.baseline_peak_bytes / 2**20:.1f}"
            f" | {share:.1%} of the step | {worst:.1%} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
