"""The parameters of times on GPUs, fitted to published steps, and how good they are.

A step takes as long as its kernels or as the host that issues them, whichever is longer
(`autosac.costs.roofline`, `DeviceSpec`). Fitted in logarithms: for each chip the shares
of its data sheet's rates that matmuls reach in each precision and that memory reaches,
and one time for which the host issues an op.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from autosac.costs.kernels import Kernel, kernel_ms
from autosac.devices.specs import DeviceSpec, device_spec
from benchmarks.environment import environment

Record = dict[str, Any]
Array = npt.NDArray[np.float64]
# One chip under several names reaches the same shares.
CHIPS = {"h100": "hopper", "h200": "hopper", "a100": "ampere", "l40s": "ada"}
CHIPS["mi325x"] = "cdna3"
MEMORY = {"h200": "hbm3e"}  # The same chip before faster memory.
_FITTED = ("bert", "t5", "llama")  # matmuls, attention and kernels bound by memory
_NOT_FITTED = ("convnext", "focalnet", "regnet")
_NAMES = {"float16": "half", "bfloat16": "half"}  # what a rate's share is called
_NAMES |= {"tfloat32": "tfloat32", "float32": "float32"}
_WHY_NOT = {
    "convnext-large": "cuDNN chooses kernels by the batch: TensorFloat-32 on an H100"
    " falls from 201 images/s at batch 64 to 157 at 160 and is at 240 at 224",
    "regnet-y-128gf": "likewise: 233 images/s at batch 80, 178 at 136 (H100)",
    "focalnet-base": "a loader of images, besides",
    "resnet50": "no prediction: bound by its input, 2,682 images/s where the same"
    " source has 4,199 with a synthetic one (H100, batch 512)",
    "whisper-tiny": "no prediction: 1,000 samples/s on H100 and H200 at every batch,"
    " where the step alone makes 1,380 on an H100 ([measured](gpu_published.md))",
}
_WAITING = 1.5
_START = {"half": 0.76, "tfloat32": 0.54, "float32": 0.74, "memory": 0.95, "host": 0.03}


@dataclass(frozen=True, kw_only=True)
class Step:
    """A published step.

    Attributes:
        series: Model and GPU.
        batch: Its batch.
        published_ms: What it took.
        device: The GPU.
        ops: Its distinct ops: kernel, FLOPs, bytes and how many.
        waits: Part of it was waiting for the host: it took less than `_WAITING` times
            what a step of one sample did.
    """

    series: tuple[str, str]
    batch: int
    published_ms: float
    device: DeviceSpec
    ops: list[tuple[Kernel, int, int, int]]
    waits: bool


def steps(records: Iterable[Record], models: tuple[str, ...] = _FITTED) -> list[Step]:
    """Published steps with a time, of models whose names begin so."""
    chosen = [
        (series, point)
        for series in records
        if series["model"].startswith(models)
        for point in series["points"]
        if "samples_per_s" in point
    ]
    return [_step(series, point) for series, point in chosen]


def _step(series: Record, point: Record) -> Step:
    published_ms = 1e3 * point["samples"] / point["samples_per_s"]
    single_ms = [1e3 / p["samples_per_s"] for p in series["points"] if p["batch"] == 1]
    waits = bool(single_ms) and published_ms < _WAITING * single_ms[0]
    gpu = series["gpu"]
    return Step(
        series=(series["model"], gpu),
        batch=point["batch"],
        published_ms=published_ms,
        waits=waits,
        device=device_spec(gpu),
        ops=[(Kernel(kind, rate), *sizes) for kind, rate, *sizes in point["ops"]],
    )


def step_ms(step: Step, values: dict[str, float]) -> float:
    """Predicted time of a step with parameters: of its kernels or the host."""
    return max(kernels_ms(step, values), host_ms(step, values))


def host_ms(step: Step, values: dict[str, float]) -> float:
    """Time in which the host issues a step's ops."""
    return values["host"] * sum(op[-1] for op in step.ops)


def kernels_ms(step: Step, values: dict[str, float]) -> float:
    """Time of a step's kernels."""
    chip = CHIPS[step.series[1]]
    device = dataclasses.replace(
        step.device,
        matmul_efficiency={
            rate: values.get(f"{chip} {name}", 1.0) for rate, name in _NAMES.items()
        },
        bandwidth_efficiency=values[_memory(step)],
    )
    return sum(
        count * kernel_ms(kernel, flops, nbytes, device)
        for kernel, flops, nbytes, count in step.ops
    )


def fit(train: Sequence[Step]) -> dict[str, float]:
    """Parameters of least robust error; a series weighs as much as another one.

    A step that waits for the host says how long that takes if it is of one sample; how
    much of a larger one is waiting is not known, and it is left out.

    A weak pull to the start decides what steps do not tell apart: a single series
    says what matmuls and memory take together.
    """
    train = [step for step in train if not step.waits or step.batch == 1]
    needed = {name for step in train for name in _used(step)}
    names = sorted(needed)
    start = np.log([_START[name.split()[-1]] for name in names])
    sizes = {one: sum(step.series == one for step in train) for one in _series(train)}
    weights = np.array([sizes[step.series] ** -0.5 for step in train])

    def errors(logs: Array) -> Array:
        values = dict(zip(names, np.exp(logs), strict=True))
        apart = [np.log(step_ms(step, values) / step.published_ms) for step in train]
        return np.concatenate([weights * np.array(apart), (logs - start) / 20])

    # No share is above one, nor does the host take a millisecond for an op.
    solution = least_squares(
        errors, start, loss="soft_l1", f_scale=0.15, bounds=(-np.inf, 0.0)
    )
    return dict(zip(names, np.exp(solution.x).tolist(), strict=True))


def _used(step: Step) -> set[str]:
    """Parameters that a step's time depends on."""
    rates = {kernel.rate for kernel, flops, _, _ in step.ops if flops}
    if step.device.vendor == "amd":  # hipBLASLt did not use it
        rates = {"float32" if rate == "tfloat32" else rate for rate in rates}
    chip = CHIPS[step.series[1]]
    names = {_NAMES[rate] for rate in rates if rate in _NAMES}
    return {"host", _memory(step), *(f"{chip} {name}" for name in names)}


def _memory(step: Step) -> str:
    gpu = step.series[1]
    return f"{MEMORY.get(gpu, CHIPS[gpu])} memory"


def _series(some: Iterable[Step]) -> list[tuple[str, str]]:
    return list(dict.fromkeys(step.series for step in some))


def without_each(all_steps: Sequence[Step]) -> list[float]:
    """Error of each step with parameters fitted without it."""
    errors = []
    for step in all_steps:
        values = fit([one for one in all_steps if one is not step])
        errors.append(_error(step, values))
    return errors


def _error(step: Step, values: dict[str, float]) -> float:
    """Error of a step's time; NaN if nothing says what its chip reaches."""
    if not _used(step) <= values.keys():
        return float("nan")
    return step_ms(step, values) / step.published_ms - 1


def without_its_series(all_steps: Sequence[Step]) -> list[float]:
    """Error of each step with parameters fitted without its model on its GPU."""
    fits = {
        one: fit([step for step in all_steps if step.series != one])
        for one in _series(all_steps)
    }
    return [_error(step, fits[step.series]) for step in all_steps]


def without_its_chip(all_steps: Sequence[Step]) -> list[float]:
    """Error of each step with geometric means of NVIDIA's other chips."""
    errors = {}
    for chip in dict.fromkeys(CHIPS.values()):
        of_chip = [step for step in all_steps if CHIPS[step.series[1]] == chip]
        others = [step for step in all_steps if step not in of_chip]
        values = fit(others) if others else {}
        means = _means(values)
        values |= {f"{chip} {kind}": mean for kind, mean in means.items()}
        values |= {_memory(step): means["memory"] for step in of_chip if means}
        for step in of_chip:
            errors[id(step)] = _error(step, values)
    return [errors[id(step)] for step in all_steps]


def _means(values: dict[str, float]) -> dict[str, float]:
    """Geometric mean of each share over NVIDIA's chips."""
    shares: dict[str, list[float]] = {}
    for name, value in values.items():
        chip, _, kind = name.partition(" ")
        if kind and not chip.startswith("cdna"):
            shares.setdefault(kind, []).append(value)
    return {kind: statistics.geometric_mean(some) for kind, some in shares.items()}


def write(records: Sequence[Record], folder: Path) -> None:
    """Write ``published_times.md``: parameters, and every step without its row."""
    all_steps = steps(records)
    values = fit(all_steps)
    by_row, by_series = without_each(all_steps), without_its_series(all_steps)
    lines = ["# Times of published steps, predicted", "", _ABOUT, ""]
    lines += ["| parameter | fitted | steps |", "| --- | ---: | ---: |"]
    for name, value in values.items():
        num_steps = sum(name in _used(step) for step in all_steps)
        unit = f"{1e3 * value:.0f} us an op" if name == "host" else f"{value:.2f}"
        lines.append(f"| {name} | {unit} | {num_steps} |")
    for kind, mean in _means(values).items():
        lines.append(f"| mean {kind} | {mean:.2f} | |")
    lines += ["", "| fitted without | bound by | GPU | steps | median error | worst |"]
    lines.append("| --- | --- | --- | ---: | ---: | ---: |")
    of_host = [s.waits or kernels_ms(s, values) < host_ms(s, values) for s in all_steps]
    left_out = {"the step": by_row, "its series": by_series}
    left_out["its chip"] = without_its_chip(all_steps)
    for name, errors in left_out.items():
        pairs = list(zip(all_steps, errors, strict=True))
        kernels = [p for p, is_host in zip(pairs, of_host, strict=True) if not is_host]
        host = [p for p, is_host in zip(pairs, of_host, strict=True) if is_host]
        lines += _summary(kernels, f"{name} | kernels")
        lines += _summary(host, f"{name} | the host")[:1]
    lines += ["", "| model | GPU | batch | published | predicted | without the step |"]
    lines[-1] += " without the series |"
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for step, row, series in zip(all_steps, by_row, by_series, strict=True):
        lines.append(
            f"| {step.series[0]} | {step.series[1]} | {step.batch}"
            f" | {step.published_ms:.1f} ms | {step_ms(step, values):.1f} ms"
            f" | {_percent(row)} | {_percent(series)} |"
        )
    lines += _others(steps(records, _NOT_FITTED), values)
    lines += ["", *(f"- {name}: {value}" for name, value in environment().items())]
    lines += ["- command: `python -m benchmarks.published --parts time`", ""]
    (folder / "published_times.md").write_text("\n".join(lines))


def _others(some: Sequence[Step], values: dict[str, float]) -> list[str]:
    """Steps that are not fitted, predicted by parameters of those that are."""
    lines = [
        "",
        "Not fitted, as much of their time is of convolutions, with the shares above:",
    ]
    lines += ["", "| model | GPU | steps | median error | worst |"]
    lines.append("| --- | --- | ---: | ---: | ---: |")
    for model, gpu in _series(some):
        errors = [
            step_ms(step, values) / step.published_ms - 1
            for step in some
            if step.series == (model, gpu)
        ]
        median, worst = statistics.median(errors), max(errors, key=abs)
        lines.append(
            f"| {model} | {gpu} | {len(errors)} | {median:+.0%} | {worst:+.0%} |"
        )
    return [*lines, "", *(f"- {model}: {why}" for model, why in _WHY_NOT.items())]


def _summary(pairs: Sequence[tuple[Step, float]], head: str) -> list[str]:
    """Rows of errors, of all GPUs together and of each."""
    pairs = [(step, error) for step, error in pairs if not np.isnan(error)]
    gpus = list(dict.fromkeys(step.series[1] for step, _ in pairs))
    lines = []
    for name in ("all", *gpus):
        errors = [e for step, e in pairs if name in ("all", step.series[1])]
        if errors:
            median = statistics.median(map(abs, errors))
            worst = max(errors, key=abs)
            lines.append(
                f"| {head} | {name} | {len(errors)} | {median:.1%} | {worst:+.0%} |"
            )
    return lines


def _percent(share: float) -> str:
    return "nothing else of its kind" if np.isnan(share) else f"{share:+.0%}"


_ABOUT = """\
Steps that others measured (sources: `figures.json`, [the table of
memory](published.md)), of models that consist of matmuls, attention and kernels bound
by memory. Parameters are shares of the data sheet's rates that matmuls and pointwise
kernels reach; other kernels reach less by ratios measured on one H100
(`autosac/costs/kernels.py`), on AMD's GPUs as much. `autosac/devices/specs.py` has them
rounded. Errors are of predicted times, with parameters fitted without the
step, of which other batches stay, or without its series, so that only other models on
this chip, or the model on its sister, say what it reaches. A series that is the only
one of its precision on its chip cannot be left out. Steps of one sample are bound by
the host: whose it is, is not said, and hosts differ."""
