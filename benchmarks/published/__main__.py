"""Predictions for GPUs held against figures that others measured and published.

    python -m benchmarks.published [--series bert-fp32-h100] [--jobs 2] [--render]
        [--parts memory,time,checkpointing]

Rebuilds every model of ``figures.json`` beside this file on the meta device, predicts
its steps and writes published against predicted, in a table and a picture. Every series
is predicted in a process of its own and leaves a file in the folder of work: what is
done is not done again. The part *time* fits the parameters of times on GPUs and says
how good they are; *checkpointing* is about steps with it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.published import checkpointed, predict, tables, times

RESULTS = Path(__file__).parents[1] / "results"


def main(arguments: list[str] | None = None) -> int:
    """Predict what is not predicted yet, and write the page."""
    options = _options(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    all_series = predict.figures()["series"]
    left = [s for s in all_series if not _path(options, s).exists()]
    if options.series:
        left = [s for s in left if predict.key(s) in options.series]
    of_series = {"memory", "time"} & set(options.parts)
    if options.render or not of_series:
        left = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.published.predict"])

    def run(series: dict[str, Any]) -> None:
        process = context.Process(
            target=predict.predict, args=(series, _path(options, series))
        )
        process.start()
        process.join()
        ending = "done" if process.exitcode == 0 else f"died: {process.exitcode}"
        print(predict.key(series), ending, flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, left))
    options.output.mkdir(parents=True, exist_ok=True)
    if "checkpointing" in options.parts:
        checkpointed.write(predict.figures()["checkpointed"], options.output)
    paths = [_path(options, series) for series in all_series]
    records = [json.loads(path.read_text()) for path in paths if path.exists()]
    if "memory" in options.parts:
        tables.write(records, predict.figures()["not_rebuilt"], options.output)
    if "time" in options.parts:
        times.write(records, options.output)
    return 0 if not of_series or len(records) == len(all_series) else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published")
    work = Path(tempfile.gettempdir()) / "autosac-published"

    def words(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--series", type=words, help="such as bert-fp32-h100")
    parser.add_argument("--jobs", type=int, default=1, help="series side by side")
    parser.add_argument("--work", type=Path, default=work, help="files of series, kept")
    parser.add_argument("--render", action="store_true", help="only write the page")
    parts = ["memory", "time", "checkpointing"]
    parser.add_argument("--parts", type=words, default=parts, help="of the page")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def _path(options: argparse.Namespace, series: dict[str, Any]) -> Path:
    folder: Path = options.work
    return folder / f"{predict.key(series)}.json"


if __name__ == "__main__":
    sys.exit(main())
