"""autosac against everything else, side by side: `python -m benchmarks.compare`.

    python -m benchmarks.compare [--parts zoo,scale] [--budgets 16] [--full]
    python -m benchmarks.compare --parts settings [--work FOLDER] [--jobs 2]

zoo: every rival on one profile at equal budgets and equal peaks; scale: planning time
and memory against PyTorch's own chain; frontier: real peaks and times on the models
that other systems were measured on; real: real steps of every rival. Results of each
part are written as soon as it is done, beside those of parts that are not run.
settings, which runs for hours and only when it is named: the zoo and sixty drawn models
on CPU and GPU in two precisions, see `benchmarks.comparing.settings`; on a page of its
own. With `--models` (and `--settings`) only these rows of it are made again.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparing import (
    frontier,
    real,
    scale,
    settings,
    settings_job,
    settings_page,
    zoo,
)
from benchmarks.environment import environment
from benchmarks.models import workloads
from benchmarks.models import zoo as models_of_zoo

RESULTS = Path(__file__).parent / "results"
Record = dict[str, Any]
# One part: more of its record each time something is done.
Part = Callable[[argparse.Namespace], Iterator[Record]]


def _zoo(options: argparse.Namespace) -> Iterator[Record]:
    models = []
    names = list(options.models or models_of_zoo())
    with ProcessPoolExecutor(
        options.jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_quiet,
        initargs=(options.threads,),
    ) as pool:
        for model in pool.map(zoo.run, names, [options.budgets] * len(names)):
            models.append(model)
            print(*zoo.losses(model), zoo.row(model), sep="\n", flush=True)
            yield {"num_budgets": options.budgets, "models": models}


def _scale(options: argparse.Namespace) -> Iterator[Record]:
    stored = _stored(options.output).get("scale", {"jobs": []})["jobs"]
    known = {scale.key(job): job for job in stored}
    for job in scale.jobs(options.full):  # others stay as they are
        record = {**scale.run(*job), "date": environment()["date"]}
        known[scale.key(record)] = record
        print(scale.row(record), flush=True)
        yield {"jobs": sorted(known.values(), key=scale.place)}


def _frontier(options: argparse.Namespace) -> Iterator[Record]:
    record = _stored(options.output).get("frontier", {"models": []})
    models = {model["model"]: model for model in record["models"]}
    for name in options.frontier_models:  # others stay as they are
        taken = {"environment": environment(), "rounds": options.rounds}
        result = frontier.run(name, options.frontier_budgets, options.rounds)
        models[name] = {**result, **taken}
        gc.collect()
        print(f"frontier of {name} done", flush=True)
        yield {"models": [models[n] for n in frontier.subjects() if n in models]}


def _real(options: argparse.Namespace) -> Iterator[Record]:
    models = []
    for name in options.real_models:
        models.append(real.run(name, options.rounds))
        gc.collect()
        print(f"real steps of {name} done", flush=True)
        yield {"rounds": options.rounds, "models": models}


def _settings(options: argparse.Namespace) -> Iterator[Record]:
    jobs = settings.Jobs(
        folder=options.work,
        num_budgets=options.settings_budgets,
        num_at_once=options.jobs,
        timeout_s=options.job_timeout,
        calibrate=options.calibrate,
        settings=tuple(options.settings),
    )
    drawn = {library: options.draw for library in settings.QUOTAS}
    quotas = settings.QUOTAS if options.draw is None else drawn
    models = settings.fixed_models()
    if options.models:  # those and no drawn ones
        models, quotas = options.models, {}
    # With models that are named, other rows stay as they are.
    whole = _stored_settings(options.output) if options.models else {}
    whole = whole or {
        "num_budgets": jobs.num_budgets,
        "calibrated": jobs.calibrate,
        "command": f"python -m benchmarks.compare {_without_paths(options.given)}",
        "minutes": 0.0,
        "where": environment(),
        "records": [],
    }
    started, before = time.perf_counter(), whole["minutes"]
    for of_model in settings.run(jobs, models, quotas):
        date = environment()["date"][: len("2026-01-01")]
        records = [{**settings.compact(job), "date": date} for job in of_model]
        for record in records:
            print(settings_page.row(record), flush=True)
        whole["records"] = settings.replaced(whole["records"], records)
        whole["minutes"] = before + (time.perf_counter() - started) / 60
        _write_settings(whole, options.output)
        yield {"summary": settings_page.summary(whole["records"])}


def _stored_settings(folder: Path) -> Record:
    """The part `settings` of an earlier run."""
    path = folder / "settings.json"
    record: Record = json.loads(path.read_text()) if path.exists() else {}
    return record


def _without_paths(given: Sequence[str]) -> str:
    """Arguments as they would be given elsewhere: without folders of this machine."""
    kept = [
        word
        for before, word in zip(["", *given], given, strict=False)
        if not {before, word} & {"--work", "--output"}
    ]
    return shlex.join(kept)


def _write_settings(record: Record, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = settings_page.page(record)
    (folder / "settings.md").write_text("\n".join(lines))
    (folder / "settings.json").write_text(json.dumps(record) + "\n")


PARTS: dict[str, tuple[Part, Callable[[Record], Iterator[str]]]] = {
    "zoo": (_zoo, zoo.page),
    "scale": (_scale, scale.page),
    "frontier": (_frontier, frontier.page),
    "real": (_real, real.page),
    "settings": (_settings, settings_page.short_page),
}
_WHEN_NAMED = ("settings",)


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; the exit code tells whether they showed what is asked for."""
    options = _options(arguments)
    _quiet(options.threads)
    results = _stored(options.output)
    if options.render:
        _write(results, options.output)
        return 0
    for part in options.parts:
        started = time.perf_counter()
        for record in PARTS[part][0](options):
            where = environment()
            minutes = (time.perf_counter() - started) / 60
            results[part] = {"environment": where, "minutes": minutes, **record}
            _write(results, options.output)
    judged = []
    if "zoo" in options.parts:
        judged += zoo.summary(results["zoo"]["models"])
    if "settings" in options.parts:
        judged += results["settings"]["summary"]
    return 0 if all(kept for *_, kept in judged) else 1


def _stored(output: Path) -> Record:
    """Results of earlier runs."""
    path = output / "compare.json"
    record: Record = json.loads(path.read_text()) if path.exists() else {}
    return record


def _quiet(num_threads: int) -> None:
    """Set up a process."""
    torch.set_num_threads(num_threads)
    warnings.filterwarnings("ignore")  # of rivals and of models, about themselves
    logging.disable(logging.ERROR)  # sac_milp logs what its result says anyway


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare")

    def names(text: str) -> list[str]:
        return text.split(",")

    usual = [part for part in PARTS if part not in _WHEN_NAMED]
    parser.add_argument("--parts", type=names, default=usual)
    parser.add_argument("--models", type=names, help="of the zoo; default: all")
    parser.add_argument("--budgets", type=int, default=16, help="per model of the zoo")
    parser.add_argument("--jobs", type=int, default=1, help="models of the zoo at once")
    _add_settings(parser, names)
    parser.add_argument("--real-models", type=names, default=list(real.MODELS))
    parser.add_argument(
        "--frontier-models", type=names, default=list(frontier.subjects())
    )
    parser.add_argument("--frontier-budgets", type=int, default=6, help="beside theirs")
    parser.add_argument("--rounds", type=int, default=5, help="of timed steps")
    parser.add_argument("--full", action="store_true", help="scale up to 126 layers")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--render", action="store_true", help="only write page again")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.given = sys.argv[1:] if arguments is None else arguments
    of_zoo = [] if options.parts == ["settings"] else options.models or []
    for given, known in (
        (options.parts, list(PARTS)),
        (of_zoo, list(models_of_zoo())),
        (options.settings, list(settings_job.SETTINGS)),
        (options.real_models, list(workloads())),
        (options.frontier_models, list(frontier.subjects())),
    ):
        unknown = sorted(set(given) - set(known))
        if unknown:
            parser.error(f"unknown {unknown}; known are {known}")
    if options.budgets < 2:
        parser.error("`--budgets` must be at least 2: the floor and the baseline")
    return options


def _add_settings(
    parser: argparse.ArgumentParser, names: Callable[[str], list[str]]
) -> None:
    """What the part `settings` takes; its `--models` are as in zoo/gpt2, timm/dla34."""
    group = parser.add_argument_group("settings")
    work = Path(tempfile.gettempdir()) / "autosac-settings"
    group.add_argument("--settings", type=names, default=list(settings_job.SETTINGS))
    group.add_argument("--settings-budgets", type=int, default=32, help="of each row")
    group.add_argument("--draw", type=int, help="models of each library; default: 60")
    group.add_argument("--work", type=Path, default=work, help="files of jobs, kept")
    group.add_argument("--job-timeout", type=float, default=1800.0, help="in seconds")
    group.add_argument("--calibrate", action="store_true", help="time the CPU's ops")


def _write(results: Record, folder: Path) -> None:
    """The table, the figures and the pictures of all parts that are known."""
    # Not at the top: matplotlib is optional, and tests do without pictures.
    from benchmarks.comparing.plots import plot

    lines = ["# autosac and the others\n"]
    for part, (_, page) in PARTS.items():
        if part in results:
            where = results[part]["environment"]
            lines += page(results[part])
            lines.append(
                f"\nTaken in {results[part]['minutes']:.0f} minutes: "
                + ", ".join(f"{name} {value}" for name, value in where.items())
                + ".\n"
            )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.md").write_text("\n".join(lines))
    (folder / "compare.json").write_text(json.dumps(results) + "\n")
    plot(results, folder)


if __name__ == "__main__":
    sys.exit(main())
