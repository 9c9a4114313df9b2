"""Promises and tables of `benchmarks.gpu_validation`."""

from __future__ import annotations

import copy
import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import environment as machine
from benchmarks.environment import package_version

GIB = 2**30
CALIBRATED_ERROR, LENS_ERROR = 0.01, 0.03  # largest of a predicted peak
RESERVED_ERROR = 0.02
LEFT_BYTES = 2**20

Record = dict[str, Any]
Verdict = bool | None  # None: nothing to judge


def environment(device: str) -> Record:
    """Where, when and with what settings the figures were taken."""
    found = machine.environment() | {
        "python": platform.python_version(),
        "timm": package_version("timm"),
        "torch": torch.__version__,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "gpu GiB": round(properties.total_memory / GIB, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _driver(),
            "cuda": torch.version.cuda or torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "float32 precision": f"matmul {torch.backends.cuda.matmul.fp32_precision},"
            f" cuDNN {torch.backends.cudnn.conv.fp32_precision}",
        }
        names = ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF")
        found |= {name: os.environ.get(name, "not set") for name in names}
    return found


@functools.cache
def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return said.stdout.strip().splitlines()[0] if said.stdout.strip() else "unknown"


# --- promises ---------------------------------------------------------------------


def error_of(cell: Record, predicted: str, measured: str) -> float | None:
    """Predicted over measured, less one."""
    if not cell.get(predicted) or not cell.get(measured):
        return None
    return float(cell[predicted] / cell[measured] - 1)


def _with_own(model: Record) -> Record:
    """A model with what each run itself took, without what was left before it.

    Workspaces of libraries that were there before are the step's: it uses them.
    """
    model = copy.deepcopy(model)
    cells = [*model.get("cells", []), model.get("offload", {})]
    cells.append(model.get("lens", {}).get("plan", {}))
    libraries = sum(model.get("library_bytes", ()))
    for cell in cells:
        left = max(0, cell.get("held_bytes", 0) - libraries)
        for name in ("allocated", "reserved"):
            if cell.get(f"{name}_bytes"):
                cell[f"own_{name}_bytes"] = cell[f"{name}_bytes"] - left
    return model


def _within(predicted: str, measured: str, limit: float) -> Callable[[Record], Verdict]:
    def check(cell: Record) -> Verdict:
        found = error_of(cell, predicted, measured)
        return None if found is None else abs(found) <= limit

    return check


def _in_budget(cell: Record) -> Verdict:
    if "own_allocated_bytes" not in cell:
        return None
    return bool(cell["own_allocated_bytes"] <= cell["budget_bytes"])


def _same_bits(cell: Record) -> Verdict:
    return cell["state"]["verdict"] != "differs" if "state" in cell else None


def _ran(cell: Record) -> Verdict:
    return None if "skipped" in cell else "error" not in cell


PROMISES: dict[str, Callable[[Record], Verdict]] = {
    "the planned step runs": _ran,
    "never over budget": _in_budget,
    f"calibrated peak within {CALIBRATED_ERROR:.0%} of max_memory_allocated": _within(
        "predicted_bytes", "own_allocated_bytes", CALIBRATED_ERROR
    ),
    f"lens-only peak within {LENS_ERROR:.0%} of max_memory_allocated": _within(
        "lens_bytes", "own_allocated_bytes", LENS_ERROR
    ),
    f"reserved within {RESERVED_ERROR:.0%} of max_memory_reserved": _within(
        "predicted_reserved_bytes", "own_reserved_bytes", RESERVED_ERROR
    ),
    "bit-identical, or as far off as two plain runs": _same_bits,
}


def verdicts(record: Record) -> dict[str, list[bool]]:
    """What was found about each promise, model by model and budget by budget."""
    models = [*map(_with_own, record.get("models", {}).values())]
    cells = [cell for model in models for cell in model.get("cells", [])]
    found: dict[str, list[bool]] = {}
    for name, check in PROMISES.items():
        judged = (check(cell) for cell in cells)
        found[name] = [verdict for verdict in judged if verdict is not None]
    exact = [
        m["deterministic"] for m in models if "state" in m.get("deterministic", {})
    ]
    found["bit-identical on deterministic kernels"] = [
        cell["state"]["verdict"] == "identical" for cell in exact
    ]
    alone = [m.get("lens", {}).get("plan", {}) for m in models]
    found[f"a plan made without the GPU keeps its budget but for {LENS_ERROR:.0%}"] = [
        cell["own_allocated_bytes"] <= (1 + LENS_ERROR) * cell["budget_bytes"]
        for cell in alone
        if "own_allocated_bytes" in cell
    ]
    far = [m["offload"] for m in models if "allocated_bytes" in m.get("offload", {})]
    found["with offload: never over budget, bits as above"] = [
        bool(_in_budget(cell) and _same_bits(cell)) for cell in far
    ]
    found["nothing is left on the device when a run begins"] = [
        cell["held_bytes"] - sum(m["library_bytes"]) <= LEFT_BYTES
        for m in models
        for cell in m.get("cells", [])
        if "held_bytes" in cell
    ]
    limit = record.get("memory_limit", {})
    found["under a cap the plain step dies and the planned one trains"] = (
        [limit["passed"]] if "passed" in limit else []
    )
    found["every model was validated without a failure"] = [
        m["status"] == "ok" for m in models if m["status"] != "skipped"
    ]
    return found


def all_kept(record: Record) -> bool:
    """Whether no promise is broken."""
    return all(all(each) for each in verdicts(record).values())


# --- the page ---------------------------------------------------------------------


def page(record: Record) -> Iterator[str]:
    """The results as Markdown."""
    yield "# Predictions against a real GPU\n"
    where = record.get("environment", {})
    yield ", ".join(f"{name} {value}" for name, value in where.items())
    yield ""
    yield from summary(record)
    yield from _limit(record.get("memory_limit"))
    for name, model in record.get("models", {}).items():
        yield from _model(name, _with_own(model))


def summary(record: Record) -> Iterator[str]:
    """The promises."""
    yield "| promise | kept |"
    yield "| --- | --- |"
    for name, found in verdicts(record).items():
        word = "PASS" if all(found) else "**FAIL**"
        yield f"| {name} | {f'{word} {sum(found)}/{len(found)}' if found else '-'} |"


def _limit(limit: Record | None) -> Iterator[str]:
    if limit is None:
        return
    yield "\n## Under a memory cap\n"
    if "error" in limit:
        yield f"{limit['model']}: {limit['error']}"
        return
    yield (
        f"{limit['model']}, capped at {_gib(limit['cap_bytes'])} reserved; predicted"
        f" {_gib(limit['predicted_reserved_bytes'])} reserved with the plan (peak"
        f" {_gib(limit['predicted_peak_bytes'])}), peak"
        f" {_gib(limit['predicted_plain_bytes'])} without.\n"
    )
    for kind in ("planned", "plain"):
        found = limit[kind]
        yield (
            f"- {kind}: {found['outcome']}, reserved"
            f" {_gib(found.get('reserved_bytes'))}, allocated"
            f" {_gib(found.get('allocated_bytes'))}, allocator retries"
            f" {found.get('retries', '-')}. {found.get('message', '')}"
        )


def _model(name: str, model: Record) -> Iterator[str]:
    yield f"\n## {name}\n"
    if model.get("error"):
        yield f"{model['status']}: {_one_line(model['error'])}\n"
    if not model.get("cells"):
        return
    plain = model.get("plain", {})
    spent = ", ".join(f"{k} {v:.0f} s" for k, v in model.get("seconds", {}).items())
    yield (
        f"{model['parameters'] / 1e6:.0f} M parameters; floor"
        f" {_gib(model['floor_bytes'])}, plain peak predicted"
        f" {_gib(model['baseline_bytes'])}, measured"
        f" {_gib(plain.get('allocated_bytes'))}; plain step predicted"
        f" {model['baseline_ms']:.1f} ms, measured {plain.get('step_ms', 0.0):.1f} ms;"
        f" {model['measured_share']:.0%} of its time calibrated. Libraries hold"
        f" {_gib(sum(model['library_bytes']))}; before the run the process held"
        f" {_gib(plain.get('held_bytes'))}. Kernels:"
        f" {', '.join(model['kernels']) or 'none of note'}. ({spent})\n"
    )
    yield f"Lens: {_lens(model.get('lens', {}))}\n"
    yield f"Offload: {_offload(model.get('offload', {}), plain)}\n"
    yield f"Two plain runs: {_state(plain.get('again'))}."
    yield f"Deterministic kernels: {_exact(model.get('deterministic', {}))}.\n"
    yield f"| {' | '.join(_COLUMNS)} |"
    yield f"|{' ---: |' * len(_COLUMNS)}"
    for cell in model["cells"]:
        yield _row(cell, plain)


_COLUMNS = (
    "share",
    "budget GiB",
    "predicted",
    "measured",
    "error",
    "lens error",
    "block error",
    "reserved",
    "error",
    "within",
    "state",
    "step ms",
    "predicted",
    "step time",
    "units",
)


def _row(cell: Record, plain: Record) -> str:
    measured, block = cell.get("own_allocated_bytes"), "predicted_block_bytes"
    slower = None
    if cell.get("step_ms") and plain.get("step_ms"):
        slower = cell["step_ms"] / plain["step_ms"]
    within = {None: "-", True: "yes", False: "**NO**"}[_in_budget(cell)]
    state = cell.get("state", {}).get("verdict", "-")
    if "error" in cell or "skipped" in cell:
        state = _one_line(cell.get("error") or cell["skipped"])
    fields = (
        f"{cell['share']:.2f}",
        f"{cell['budget_bytes'] / GIB:.3f}",
        f"{cell['predicted_bytes'] / GIB:.3f}",
        "-" if measured is None else f"{measured / GIB:.3f}",
        _percent(error_of(cell, "predicted_bytes", "own_allocated_bytes")),
        _percent(error_of(cell, "lens_bytes", "own_allocated_bytes")),
        _percent(error_of(cell, block, "own_allocated_bytes")),
        _gib(cell.get("own_reserved_bytes")),
        _percent(error_of(cell, "predicted_reserved_bytes", "own_reserved_bytes")),
        within,
        state,
        f"{cell.get('step_ms', 0.0):.1f}",
        f"{cell['predicted_ms']:.1f}",
        "-" if slower is None else f"x{slower:.2f}",
        f"{cell['num_units']}",
    )
    return f"| {' | '.join(fields)} |"


def _lens(lens: Record) -> str:
    for word in ("refused", "failed"):
        if word in lens:
            return f"{word}: {_one_line(lens[word])}"
    if not lens:
        return "-"
    plan = lens.get("plan", {})
    parts = lens["first_difference"] or "none"
    words = [
        f"floor {_gib(lens['floor_bytes'])}, plain peak {_gib(lens['baseline_bytes'])},"
        f" {lens['baseline_ms']:.1f} ms; first difference of ops: {parts}"
    ]
    if "error" in plan:
        words.append(f"its own plan: {_one_line(plan['error'])}")
    elif "allocated_bytes" in plan:
        error = error_of(plan, "predicted_bytes", "own_allocated_bytes")
        words.append(
            f"its own plan: predicted {_gib(plan['predicted_bytes'])}"
            f" ({_percent(error)}), budget {_gib(plan['budget_bytes'])},"
            f" state {_state(plan.get('state'))}"
        )
    return "; ".join(words)


def _offload(far: Record, plain: Record) -> str:
    if "error" in far:
        return _one_line(far["error"])
    if "allocated_bytes" not in far:
        return "-"
    error = _percent(error_of(far, "predicted_bytes", "own_allocated_bytes"))
    return (
        f"floor {_gib(far['floor_bytes'])}; under {_gib(far['budget_bytes'])}"
        f" {_gib(far['offloaded_bytes'])} in far memory, peak {error}, within"
        f" {'yes' if _in_budget(far) else '**NO**'}, state {_state(far['state'])}, step"
        f" {far['step_ms']:.1f} ms (predicted {far['predicted_ms']:.1f}, plain"
        f" {plain.get('step_ms', 0.0):.1f})"
    )


def _exact(found: Record) -> str:
    if "error" in found:
        return f"not possible: {_one_line(found['error'])}"
    if not found:
        return "-"
    return (
        f"two plain runs {_state(found['again'])}; with a plan of {found['num_units']}"
        f" units {_state(found['state'])}"
    )


def _state(found: Record | None) -> str:
    if not found:
        return "-"
    if found["verdict"] == "identical":
        return "identical"
    first = found["differences"][0] if found["differences"] else ""
    return f"{found['verdict']} (gradients {found['distance']:.1e} apart; {first})"


def short(name: str, model: Record) -> Iterator[str]:
    """One model in a few lines, for the terminal."""
    yield f"{name}: {model['status']} {model.get('error', '')}".rstrip()
    for cell in _with_own(model).get("cells", []):
        yield "  " + _row(cell, model.get("plain", {}))


def _one_line(text: str) -> str:
    """The last line of an error, for a cell of a table."""
    lines = text.strip().splitlines() or [""]
    return lines[-1].strip().replace("|", "/")[:200]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2%}"


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / GIB:.3f} GiB"
