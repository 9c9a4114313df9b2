"""One model: planned at three budgets, and each plan really trained.

What is known is written down as each phase begins, so that a process that is ended
leaves where it was.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import re
import resource
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

import autosac
from autosac.errors import AutosacError, SolverError
from autosac.verification.verifying import (
    Recipe,
    Verification,
    verify_each,
)
from benchmarks.environment import cpu_s
from benchmarks.models.drawn import NotBuiltError, build_small
from benchmarks.models.workload import Workload, on_device, profile_of

Record = dict[str, Any]
SHARES = (0.05, 0.4, 0.8)  # of the way from the floor to the plain step's peak
# Phases, in the order of their work.
BUILD, TRACE, CALIBRATE, FLOOR, PLANS, STEPS = (
    *("build", "trace", "calibrate", "floor", "plans", "real steps"),
)
PLANNING = (TRACE, CALIBRATE, FLOOR, PLANS)
_HOSTS = re.compile(r"https?://[^\s'\"]+|(?<=host=)'[^']+'")
_INSTALLED = re.compile(r"\S*/(site-packages|lib/python3\.\d+)/")
_MEMORY = re.compile(r"can't allocate memory|not enough memory", re.IGNORECASE)
_MOST_WARNINGS, _LONGEST = 4, 300
_OWN = (str(Path(__file__).parents[1]), str(Path(autosac.__file__).parent))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a process may take.

    Attributes:
        memory_bytes: Of its data; None for any, as a GPU's driver maps much of it.
        cpu_s: Of work; a busy machine does not matter.
    """

    memory_bytes: int | None
    cpu_s: int

    def impose(self) -> None:
        """Set them for this process: what goes on is ended by the system."""
        limits = {resource.RLIMIT_CPU: self.cpu_s}
        if self.memory_bytes is not None:
            limits[resource.RLIMIT_DATA] = self.memory_bytes
        for kind, most in limits.items():
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


@dataclass(frozen=True)
class _NoPlan:
    """What `verify_each` takes for a plain step."""

    peak_bytes: int

    @property
    def budget_bytes(self) -> int:
        return self.peak_bytes

    def apply(self, model: torch.nn.Module) -> None:
        """Leave the model as it is."""


class _Notes:
    """What is known of a model, written to a file as it grows."""

    def __init__(self, name: str, path: Path) -> None:
        self.path = path
        self.record: Record = {"model": name, "status": "unfinished", "cpu_s": {}}
        self.write()

    def write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.record) + "\n")
        part.replace(self.path)  # whoever reads it finds all of it

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A stretch of work, with its CPU time and its warnings."""
        self.record["phase"] = name
        self.write()
        begun = cpu_s()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            finally:
                spent = cpu_s() - begun
                before = self.record["cpu_s"].get(name, 0.0)
                self.record["cpu_s"][name] = round(before + spent, 3)
                self._keep(caught)

    def _keep(self, caught: list[warnings.WarningMessage]) -> None:
        # Ours name the line that calls us, which is most often one of a benchmark.
        own = [str(w.message) for w in caught if w.filename.startswith(_OWN)]
        kept = self.record.setdefault("warnings", [])
        for text in dict.fromkeys(own):
            if len(kept) < _MOST_WARNINGS and text[:_LONGEST] not in kept:
                kept.append(text[:_LONGEST])


def run(
    name: str, path: Path, limits: Limits | None = None, device: str = "cpu"
) -> None:
    """Judge one model; its file says what came of it.

    Args:
        name: Of `benchmarks.models.drawn.every`.
        path: The file.
        limits: What this process may take; None for what it has.
        device: Where it is planned and trained: "cpu" or "cuda".
    """
    if limits is not None:  # a process of its own
        limits.impose()
        gc.freeze()  # libraries make many objects, and collections would look at all
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    if device == "cuda":  # most kernels that add in any order have others that do not
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    notes = _Notes(name, path)
    with _errors_in(notes.record):
        _judge(name, notes, device)
        notes.record["status"] = "done"
    notes.write()


@contextmanager
def _errors_in(record: Record) -> Iterator[None]:
    """What is raised inside becomes the model's status and its reason."""
    try:
        yield
    except NotBuiltError as error:
        record |= {"status": "not built", "reason": _sentence(error)}
    except (SolverError, AssertionError) as error:  # our own mistakes
        record |= {"status": "raw error", "reason": _sentence(error)} | _trace(error)
    except AutosacError as error:
        is_plain = record.get("phase") == BUILD
        status = "not built" if is_plain else "refused"
        record |= {"status": status, "reason": _sentence(error)}
    except Exception as error:  # that is the finding
        record |= {"status": _status(record, error), "reason": _sentence(error)}
        record |= _trace(error)


def _status(record: Record, error: Exception) -> str:
    if record["phase"] == BUILD:
        return "not built"
    if isinstance(error, MemoryError) or _MEMORY.search(str(error)):
        return "too large"
    return "raw error"


def _trace(error: Exception) -> Record:
    lines = "".join(traceback.format_exception(error))
    return {"traceback": _without_places(lines)[-3000:]}


def _without_places(text: str) -> str:
    """A text with files by their place in their package, and no hosts."""
    text = _INSTALLED.sub("", text).replace(f"{Path.cwd()}/", "")
    return _HOSTS.sub("(a host)", text).replace(str(Path.home()), "~")


def _sentence(error: Exception) -> str:
    """An error in one line; files by their place in their package."""
    text = _without_places(" ".join(str(error).split()))
    if type(error).__module__.startswith("autosac") and not isinstance(
        error, SolverError
    ):
        return text
    return f"{type(error).__name__}: {text}"


def _judge(name: str, notes: _Notes, device: str) -> None:
    record = notes.record
    with notes.phase(BUILD):
        work = on_device(build_small(name), device)
        record["title"] = work.name
    profile = _profiled(work, notes)
    record["num_ops"] = len(profile.tape.ops)
    with notes.phase(FLOOR):
        floor_bytes = autosac.floor(profile)
        baseline_bytes = profile.baseline_peak_bytes
    record |= {"floor_bytes": floor_bytes, "baseline_bytes": baseline_bytes}
    plans = []
    with notes.phase(PLANS):
        for share in SHARES:
            budget_bytes = floor_bytes + int(share * (baseline_bytes - floor_bytes))
            plans.append(autosac.plan(profile, memory_budget=budget_bytes))
    record["num_units"] = [len(plan.policy) for plan in plans]
    record["recompute_ms"] = [plan.recompute_ms for plan in plans]
    record["gaps"] = [round(plan.optimality_gap, 5) for plan in plans]
    del profile
    with notes.phase(STEPS):
        _train(work, baseline_bytes, plans, notes)


def _profiled(work: Workload, notes: _Notes) -> autosac.Profile:
    with notes.phase(TRACE):
        profile = profile_of(work)
    with notes.phase(CALIBRATE):
        return autosac.calibrate(profile, progress=False)


def _train(
    work: Workload, baseline_bytes: int, plans: list[autosac.Plan], notes: _Notes
) -> None:
    """Two steps plain, two steps plain once more, and two under each plan."""
    recipe = Recipe(
        make_model=partial(_seeded, work.make_model),
        make_inputs=work.make_inputs,
        make_optimizer=work.make_optimizer,
        loss_fn=work.loss_fn,
        extra_bytes=work.loss_bytes,
        timing_rounds=0,
    )
    plain, *planned = verify_each((_NoPlan(baseline_bytes), *plans), recipe)
    notes.record |= {"plain": _cell(plain), "cells": [_cell(cell) for cell in planned]}


def _seeded(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """A model whose steps draw the same of Python's and NumPy's numbers."""
    model = make()
    random.seed(0)
    numpy.random.seed(0)
    return model


def _cell(verification: Verification) -> Record:
    return {
        "budget_bytes": verification.budget_bytes,
        "predicted_bytes": verification.predicted_peak_bytes,
        "measured_bytes": verification.measured_peak_bytes,
        "plain_bytes": verification.baseline_peak_bytes,
        "differences": list(verification.differences),
    }
