"""Drawn models under drawn ways to train them: `python -m benchmarks.recipes`.

`benchmarks.breadth` trains every model in one way. Here optimizer (every class of
``torch.optim``, with drawn options), autocast, parameters' type, frozen parameters,
micro-steps, clipping, `zero_grad` and memory format are drawn, too, with the model.
Each is planned near its floor, halfway to the plain step's peak, and once in a drawn
way to plan: offload, fewer AC units, segments, solver, any budget. With `--packages`
the models are those of the optional packages that are installed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

import autosac
from autosac.errors import AutosacError
from autosac.verification.recipes import Recipe as Steps
from autosac.verification.verifying import verify_each
from benchmarks.environment import environment
from benchmarks.judging.job import Limits
from benchmarks.models.drawn import (
    SOURCES,
    NotBuiltError,
    build_small,
    every,
    packages,
)

_RESULTS = Path(__file__).parent / "results"
_SHARES = (0.05, 0.5)  # of the way from the floor to the plain step's peak
_SPECIAL = ("LBFGS", "SparseAdam", "Muon")  # take a closure, or not every gradient
_LINES = 200
_MOST_BYTES = 8 * 2**30  # of a process


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train.

    Attributes:
        optimizer: Name of a class of ``torch.optim``; None for none.
        options: Its keyword arguments.
        autocast: As `autosac.profile` takes it.
        dtype: Of the parameters and of inputs that are floats.
        frozen: Which parameters are not trained: "" for none, "first" for the first
            half, "some" for every other one, "biases" for all but vectors.
        accumulate: As `autosac.profile` takes it,
        clip_grad_norm: likewise,
        gradients_in_forward: likewise,
        keeps_gradients: likewise.
        channels_last: Whether the model is in that memory format.
    """

    optimizer: str | None
    options: tuple[tuple[str, Any], ...]
    autocast: str | None
    dtype: str
    frozen: str
    accumulate: int
    clip_grad_norm: float | None
    gradients_in_forward: bool
    keeps_gradients: bool
    channels_last: bool

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options)
        parts = [f"{self.optimizer}({options})" if self.optimizer else "no optimizer"]
        parts += [f"{self.dtype} parameters"] if self.dtype != "float32" else []
        parts += [f"autocast {self.autocast}"] if self.autocast else []
        parts += [f"frozen: {self.frozen}"] if self.frozen else []
        parts += [f"{self.accumulate} micro-steps"] if self.accumulate > 1 else []
        parts += [f"clipped at {self.clip_grad_norm}"] if self.clip_grad_norm else []
        flags = ("gradients_in_forward", "keeps_gradients", "channels_last")
        return "; ".join([*parts, *(name for name in flags if getattr(self, name))])


def draw(seed: int) -> Way:
    """The way with a number."""
    rng = random.Random(seed)
    optimizers = sorted(
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
        and name not in _SPECIAL
    )
    optimizer = rng.choice([None, "SGD", "AdamW", *optimizers])
    options: dict[str, Any] = {}
    if optimizer is not None:
        known = inspect.signature(getattr(torch.optim, optimizer)).parameters
        if "momentum" in known and rng.random() < 0.5:
            options["momentum"] = 0.9
        if "amsgrad" in known and rng.random() < 0.3:
            options["amsgrad"] = True
        if "foreach" in known:
            kind = rng.choice(["", "foreach", "for-loop", "fused"])
            if kind == "foreach" or kind == "for-loop":
                options["foreach"] = kind == "foreach"
            elif kind == "fused" and "fused" in known:
                options["fused"] = True
        if "weight_decay" in known and rng.random() < 0.3:
            options["weight_decay"] = 0.01
    keeps = rng.random() < 0.2
    return Way(
        optimizer=optimizer,
        options=tuple(options.items()),
        autocast=rng.choice([None, None, "bfloat16", "float16"]),
        dtype=rng.choice(["float32", "float32", "float32", "bfloat16", "float64"]),
        frozen=rng.choice(["", "", "first", "some", "biases"]),
        accumulate=rng.choice([1, 1, 1, 2, 3]),
        clip_grad_norm=rng.choice([None, None, 1.0]),
        gradients_in_forward=not keeps and rng.random() < 0.2,
        keeps_gradients=keeps,
        channels_last=rng.random() < 0.3,
    )


@dataclass(frozen=True, kw_only=True)
class Planning:
    """A way to plan.

    Attributes:
        share: The budget, as a share of the way from the floor (without offload) to
            the plain peak.
        options: Other arguments of `autosac.plan`.
        num_units: How many drawn ones of the modules that are AC units near the floor
            may be any; None for all modules.
        seed: With which these are drawn.
    """

    share: float
    options: tuple[tuple[str, Any], ...]
    num_units: int | None
    seed: int

    def __str__(self) -> str:
        parts = [f"{self.share:.0%}"]
        parts += [f"{name}={value}" for name, value in self.options]
        parts += [f"of {self.num_units} units"] if self.num_units is not None else []
        return "; ".join(parts)

    def plan(
        self, profile: autosac.Profile, floor: int, units: list[str]
    ) -> autosac.Plan:
        """The plan; of the least feasible budget if the one asked for is not."""
        options = dict(self.options)
        if self.num_units is not None and units:
            names = random.Random(self.seed).sample(units, len(units))
            options["ac_units"] = names[: self.num_units]
        peak = profile.baseline_peak_bytes
        budget = floor + int(self.share * (peak - floor))
        try:
            plan = autosac.plan(profile, memory_budget=budget, **options)
        except autosac.InfeasibleBudgetError as error:
            least = error.lowest_peak_bytes
            plan = autosac.plan(profile, memory_budget=least, **options)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "plan.json"
            plan.save(path)
            return autosac.Plan.load(path)


def draw_planning(seed: int) -> Planning:
    """The way to plan with a number."""
    rng = random.Random(f"plan {seed}")
    options: dict[str, Any] = {}
    if (offload := rng.choice([False, True, "auto"])) is not False:
        options["offload"] = offload
    if rng.random() < 0.3:
        options["segments"] = rng.choice([1, 2, 4])
    if rng.random() < 0.2:
        options["backend"] = "cbc"
    num_units = rng.choice([None, None, 1, 3, 8])
    share = rng.uniform(-0.3, 1.0)
    chosen = tuple(options.items())
    return Planning(share=share, options=chosen, num_units=num_units, seed=seed)


def _prepared(make_model: Callable[[], nn.Module], way: Way) -> nn.Module:
    model = make_model().to(getattr(torch, way.dtype))
    parameters = list(model.parameters())
    for number, parameter in enumerate(parameters):
        is_frozen = {
            "": False,
            "first": number < len(parameters) // 2,
            "some": number % 2 == 0,
            "biases": parameter.ndim > 1,
        }[way.frozen]
        if is_frozen:
            parameter.requires_grad_(False)
    if way.channels_last:
        model = model.to(memory_format=torch.channels_last)
    random.seed(0)  # steps draw the same of Python's and NumPy's numbers
    numpy.random.seed(0)
    return model


def _cast(inputs: Any, way: Way) -> Any:
    """Inputs whose floats have the parameters' type."""

    def cast(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point():
            value = value.to(getattr(torch, way.dtype))
        if way.channels_last and value.ndim == 4:
            value = value.contiguous(memory_format=torch.channels_last)
        return value

    return torch.utils._pytree.tree_map(cast, inputs)


def _drawn(name: str, way: Way, planning: Planning) -> dict[str, Any]:
    return {"model": name, "way": str(way), "planning": str(planning)}


def judge(name: str, way: Way, planning: Planning) -> dict[str, Any]:
    """Plan a model at some budgets and really train each plan."""
    record = _drawn(name, way, planning) | {"status": "done"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    phase = "build"
    try:
        work = build_small(name)
        make_model = partial(_prepared, work.make_model, way)

        def make_inputs() -> Any:
            return _cast(work.make_inputs(), way)

        def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
            trained = [p for p in model.parameters() if p.requires_grad]
            kind = getattr(torch.optim, way.optimizer or "")
            return kind(trained, lr=1e-4, **dict(way.options))  # type: ignore[no-any-return]

        of_way: dict[str, Any] = {
            "loss_fn": work.loss_fn,
            "autocast": way.autocast,
            "accumulate": way.accumulate,
            "clip_grad_norm": way.clip_grad_norm,
            "gradients_in_forward": way.gradients_in_forward,
            "keeps_gradients": way.keeps_gradients,
        }
        steps = Steps(
            make_model=make_model,
            make_inputs=make_inputs,
            make_optimizer=make_optimizer if way.optimizer else None,
            extra_bytes=work.loss_bytes,
            timing_rounds=0,
            **of_way | {"autocast": way.autocast and getattr(torch, way.autocast)},
        )
        phase = "plain step"
        (plain,) = verify_each((_Plain(),), steps)
        phase = "plan"
        torch.manual_seed(0)
        model = make_model()
        profile = autosac.profile(
            model,
            make_inputs(),
            optimizer=make_optimizer(model) if way.optimizer else None,
            **of_way,
        )
        profile = autosac.calibrate(profile, progress=False)
        floor, peak = autosac.floor(profile), profile.baseline_peak_bytes
        plans = [
            autosac.plan(profile, memory_budget=floor + int(share * (peak - floor)))
            for share in _SHARES
        ]
        phase = "drawn plan"
        plans.append(planning.plan(profile, floor, sorted(plans[0].policy)))
        phase = "real steps"
        done = verify_each(plans, steps)
    except NotBuiltError as error:
        return record | {"status": "not built", "reason": _line(error)}
    except Exception as error:  # that is the finding
        status = "refused" if isinstance(error, AutosacError) else "raw error"
        if phase in ("build", "plain step"):  # nor does it train without a plan
            status = "not built"
        return record | {"status": status, "phase": phase, "reason": _line(error)}
    labels = [*(f"{share:.0%}" for share in _SHARES), "as drawn"]
    cells = [("plain", peak, peak, plain.measured_peak_bytes, plain.differences)]
    cells += [
        (label, plan.budget_bytes, plan.peak_bytes, one.measured_peak_bytes,
         one.differences)
        for label, plan, one in zip(labels, plans, done, strict=True)
    ]  # fmt: skip
    names = ("budget", "budget_bytes", "predicted_bytes", "measured_bytes")
    record["cells"] = [
        dict(zip((*names, "differences"), cell, strict=True)) for cell in cells
    ]
    return record


class _Plain:
    """What `verify_each` takes for a step without a plan."""

    peak_bytes = budget_bytes = 1

    def apply(self, model: nn.Module) -> None:
        """Leave the model as it is."""


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def verdict(record: dict[str, Any]) -> str:
    """What came of a model, in words."""
    if record["status"] != "done":
        return str(record["status"])
    plain, *cells = record["cells"]
    if plain["differences"]:
        return "two plain runs differ"
    if any(cell["differences"] for cell in cells):
        return "other bits"
    if any(cell["measured_bytes"] > cell["budget_bytes"] for cell in cells):
        return "over budget"
    pairs = [(c["predicted_bytes"], c["measured_bytes"]) for c in record["cells"]]
    if all(abs(said - seen) <= max(64, 0.002 * seen) for said, seen in pairs):
        return "exact"
    return f"off by {max(said / seen - 1 for said, seen in pairs):+.1%}"


def _run(seeds: range, sources: Iterable[str], work: Path, limit_s: int) -> None:
    """Judge the models with some numbers, each in a process of its own."""
    names = [name for source in sources for name in every(source)]
    for seed in seeds:
        path = work / f"{seed}.json"
        if path.exists():
            continue
        name = random.Random(seed).choice(names)
        drawn = _drawn(name, draw(seed), draw_planning(seed))
        command = [sys.executable, "-m", "benchmarks.recipes", "--one", str(seed), name]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=limit_s, check=False
            )
            lines = [s for s in ended.stdout.splitlines() if s.startswith("{")]
            died = {"status": "died", "reason": ended.stderr[-400:]}
            record = json.loads(lines[-1]) if lines else drawn | died
        except subprocess.TimeoutExpired:
            record = drawn | {"status": "out of time"}
        path.write_text(json.dumps(record | {"seed": seed}) + "\n")
        parts = (f"{seed} {name}", record["way"], record["planning"], verdict(record))
        print(*parts, sep=" | ", flush=True)


def _page(work: Path, options: str) -> str:
    files = sorted(work.glob("*.json"), key=lambda path: int(path.stem))
    records = [json.loads(path.read_text()) for path in files]
    first = files[0].stem
    taken = ", ".join(f"{name} {value}" for name, value in environment().items())
    verdicts = [verdict(record) for record in records]
    tried = [v for v in verdicts if v not in ("not built", "two plain runs differ")]
    counts = {v: tried.count(v) for v in dict.fromkeys(tried)}
    rows = [
        f"| {r['seed']} | {r['model']} | {r['way']} | {r['planning']} | {v} |"
        f" {_reason(r)} |"
        for r, v in zip(records, verdicts, strict=True)
        if v != "not built"
    ]
    return "\n".join(
        [
            "# Ways to train: drawn models with drawn optimizers, types and loops",
            "",
            f"`python -m benchmarks.recipes{options} --first {first} --num"
            f" {len(records)}`, {taken}.",
            f"{len(tried)} judged (the others cannot be trained in the way drawn): "
            + ", ".join(f"{v} {n}" for v, n in counts.items())
            + ". Exact: every predicted peak, that of the plain step too, is within"
            " 0.2 % (or 64 bytes) of the allocator's, in the second step: RAdam is"
            " predicted as it is from its sixth step on.",
            "",
            "| seed | model | way | plan | found | |",
            "| ---: | --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _reason(record: dict[str, Any]) -> str:
    text: str = record.get("reason", "").replace("|", "\\|")
    return text if len(text) < _LINES else text[:_LINES] + " ..."


def main() -> None:
    """Run, resume and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=100, help="models to draw")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    work = Path(tempfile.gettempdir()) / "autosac_recipes"
    parser.add_argument("--work", type=Path, default=work, help="files of models, kept")
    parser.add_argument("--limit-s", type=int, default=600, help="of a model")
    parser.add_argument("--one", nargs=2, metavar=("SEED", "MODEL"))
    parser.add_argument("--packages", action="store_true", help="models of these")
    parser.add_argument("--output", type=Path, help="page; default: among the results")
    options = parser.parse_args()
    if options.one:
        seed = int(options.one[0])
        Limits(memory_bytes=_MOST_BYTES, cpu_s=options.limit_s).impose()
        print(json.dumps(judge(options.one[1], draw(seed), draw_planning(seed))))
        return
    sources: Iterable[str] = SOURCES
    given, name = "", "recipes"
    if options.packages:
        sources, given, name = packages.installed(), " --packages", "recipes_packages"
        options.work /= name
    options.work.mkdir(exist_ok=True, parents=True)
    seeds = range(options.first, options.first + options.num)
    _run(seeds, sources, options.work, options.limit_s)
    page = options.output or _RESULTS / f"{name}.md"
    page.write_text(_page(options.work, given))


if __name__ == "__main__":
    main()
