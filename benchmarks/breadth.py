"""Models that nobody chose by hand, planned and really trained.

    python -m benchmarks.breadth [--sources torchvision,modules] [--jobs 2]
    python -m benchmarks.breadth --models timm/dla,transformers/bart --work FOLDER
    python -m benchmarks.breadth --packages [monai diffusers ...]
    python -m benchmarks.breadth --device cuda --jobs 13

With `--packages` models of other packages are drawn, each from the package's own list:
of those that are named, or of all in `benchmarks.models.drawn.packages` that are
installed. None is needed for anything else; their page is results/packages.md.

What is done is not done again: every model leaves a file in the folder of work, and the
page is of all files that are there. The records lie beside the page, too: what they
have is put into the folder first, so that a run goes on where the last one ended. Name
models, or verdicts to `--again`, to judge them anew. The exit code tells whether the
page shows what is asked for.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shlex
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_tables
from benchmarks.environment import environment
from benchmarks.judging import job, verdicts
from benchmarks.models.drawn import SEED, SOURCES, every, packages

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
_WALL_OF_CPU = 4  # a process may wait this many times as long as it may work
Record = dict[str, Any]
_ON_GPU = "Breadth on a GPU: models that nobody chose by hand"
_LEAST_ON_GPU = 40  # as many as fit into the time that there was
_DEVICES = {
    "cpu": "CPU, fp32, one thread",
    "cuda": "GPU, fp32, deterministic kernels where there are any",
}


def main(arguments: list[str] | None = None) -> int:
    """Judge what is not judged yet, and write the page."""
    options = _options(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("AUTOSAC_CACHE_DIR", str(options.work / "cache"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _restore(options)
    names = options.models or _drawn(options.sources)
    left = [name for name in names if _is_left(_path(options, name), options.again)]
    if options.render:
        left = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, record in pool.map(lambda name: _judged(name, options), left):
            text = f"{name}: {verdicts.verdict(record)}"
            print(text, verdicts.why(record)[:200], flush=True)
            _write(options)
    return 0 if all(kept for *_, kept in _write(options)) else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.breadth")

    def words(text: str) -> list[str]:
        return text.split(",")

    work = Path(tempfile.gettempdir()) / "autosac-breadth"
    parser.add_argument("--sources", type=words, default=list(SOURCES))
    parser.add_argument("--packages", nargs="*", help="optional; default: all there")
    parser.add_argument("--models", type=words, help="such as timm/dla; default: all")
    parser.add_argument("--again", type=words, default=[], help="verdicts to redo")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="models side by side")
    parser.add_argument("--work", type=Path, default=work, help="files of models, kept")
    parser.add_argument("--memory-gib", type=float, default=8.0, help="of a process")
    parser.add_argument("--cpu-s", type=int, default=600, help="of a process")
    parser.add_argument("--render", action="store_true", help="only write the page")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.given = sys.argv[1:] if arguments is None else arguments
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("`--device cuda` needs a GPU, which is not here")
    known, options.page = list(SOURCES), "breadth"
    if options.packages is not None:
        known, options.page = packages.installed(), "packages"
        options.sources = options.packages or known
        options.work /= options.page
    if options.device == "cuda":
        options.page += "_gpu"
        options.work /= options.page
    if unknown := sorted(set(options.sources) - set(known)):
        parser.error(f"unknown {unknown}; known are {known}")
    return options


def _drawn(sources: list[str]) -> list[str]:
    """All names of some sources in an order that is drawn by number."""
    names = [name for source in sources for name in every(source)]
    return random.Random(SEED).sample(names, len(names))


def _path(options: argparse.Namespace, name: str) -> Path:
    folder: Path = options.work
    return folder / f"{name.replace('/', '-')}.json"


def _restore(options: argparse.Namespace) -> None:
    """Records of earlier runs, where the folder of work has none, as files."""
    known = options.output / f"{options.page}.json"
    if not known.exists():
        return
    for record in json.loads(known.read_text()):
        path = _path(options, record["model"])
        if not path.exists() and record["model"] not in (options.models or ()):
            path.write_text(json.dumps(record) + "\n")


def _is_left(path: Path, again: list[str]) -> bool:
    if not path.exists():
        return True
    record = json.loads(path.read_text())
    return record["status"] == "unfinished" or verdicts.verdict(record) in again


def _judged(name: str, options: argparse.Namespace) -> tuple[str, Record]:
    """The record of a model that a process of its own judges, limited in its work."""
    path = _path(options, name)
    memory_bytes = int(options.memory_gib * GIB) if options.device == "cpu" else None
    limits = job.Limits(memory_bytes=memory_bytes, cpu_s=options.cpu_s)
    # A server that has imported what all models need forks a process for each.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.judging.job", "timm", "transformers"])
    process = context.Process(target=job.run, args=(name, path, limits, options.device))
    process.start()
    process.join(options.cpu_s * _WALL_OF_CPU)
    if process.is_alive():
        process.kill()
        process.join()
    record: Record = {"model": name, "status": "unfinished"}
    if path.exists():
        record = json.loads(path.read_text())
    if record["status"] == "unfinished":
        record |= _ending(process.exitcode, options)
    record["date"] = environment()["date"]
    path.write_text(json.dumps(record) + "\n")
    return name, record


def _ending(code: int | None, options: argparse.Namespace) -> Record:
    """Why a process that was ended left its record unfinished."""
    late = {-signal.SIGXCPU, -signal.SIGKILL}
    if code in late:
        return {"status": "ended", "reason": f"not done in {options.cpu_s} s of work"}
    return {"status": "raw error", "reason": f"the process died with code {code}"}


def _write(options: argparse.Namespace) -> list[tuple[str, str, bool]]:
    """The page of all models that are judged so far."""
    paths = sorted(options.work.glob("*.json"))
    records = [json.loads(path.read_text()) for path in paths]
    records = [record for record in records if record["status"] != "unfinished"]
    where = gpu_tables.environment(options.device)
    draw = verdicts.LIBRARIES
    if options.device == "cuda":
        draw = replace(draw, title=_ON_GPU, least_judged=_LEAST_ON_GPU)
    if options.packages is not None:
        draw = _draw_of_packages(options.sources)
        where |= {name: packages.version(name) for name in options.sources}
    whole = {
        "device": _DEVICES[options.device],
        "records": records,
        "num_names": sum(len(every(source)) for source in options.sources),
        "where": where,
        "command": _command(options.given),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    page = "\n".join(verdicts.page(whole, draw))
    (options.output / f"{options.page}.md").write_text(page)
    lines = ",\n".join(map(json.dumps, records))
    (options.output / f"{options.page}.json").write_text(f"[\n{lines}\n]\n")
    return verdicts.summary(records, draw.least_judged)


def _draw_of_packages(names: list[str]) -> verdicts.Draw:
    return verdicts.Draw(
        title="Breadth: models of packages that nobody tuned for",
        text=(
            f"Of each package {packages.LEAST} models or one in {packages.SHARE}, drawn"
            " by number from its own list of classes, small, on batches that their"
            " signatures allow."
            " Losses are those of the package where it has one, else the mean squares"
            " of the outputs. The packages are optional: what is installed is drawn."
        ),
        sources=tuple(names),
        least_judged=packages.LEAST_JUDGED,
    )


def _command(given: list[str]) -> str:
    """The command as it would be given elsewhere: without folders of this machine."""
    skipped = {"--work", "--output"}
    kept = [
        word
        for before, word in zip(["", *given], given, strict=False)
        if not {before, word} & skipped and word != "--render"
    ]
    return shlex.join(["python", "-m", "benchmarks.breadth", *kept])


if __name__ == "__main__":
    sys.exit(main())
