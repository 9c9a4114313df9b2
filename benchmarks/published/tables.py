"""The page, the records and the picture of published figures against predicted ones."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure

from benchmarks.environment import environment, package_version

Record = dict[str, Any]
_MIB = 2**20
_LARGE_MIB = 4096  # of what is in use; below it the constant is most of the error
_MOST_DRAWN = 20  # percent of error
_ABOUT = """\
Figures that others measured, their models rebuilt from public code on the meta device
and predicted on a machine without a GPU. What is in use on a device (the driver's
figure) is what PyTorch reserves and a constant: context, kernels, libraries. It is
fitted for each GPU, as the median over all points of BERT, of whatever precision:
{constants}.
Nothing else is fitted.

*Peak* is the error of predicted bytes, in the median and at worst, over batches of at
least 4 GiB in use; *slope* that of bytes a sample between the smallest and the largest
of these. Times have [their own page](published_times.md).
milabench's figures of March and April 2025 are of torch 2.6 and transformers 4.49,
whose code decides what T5 keeps: its series are predicted where `transformers==4.49.*`
is installed, those of Llama under a version of today. Under version 5 T5 is 2 % too
low."""


def write(records: Sequence[Record], not_rebuilt: list[Record], folder: Path) -> None:
    """Write ``published.md``, ``published.json`` and ``published.png``.

    Args:
        records: Series with what is predicted for each point.
        not_rebuilt: Rows without a prediction.
        folder: Where to.
    """
    constants = _constants(records)
    rows = [_row(series, constants) for series in records]
    page = _page(rows, constants, not_rebuilt)
    (folder / "published.md").write_text(page)
    plain = [
        {
            **series,
            "points": [
                {name: value for name, value in point.items() if name != "ops"}
                for point in series["points"]
            ],
        }
        for series in records
    ]
    lines = ",\n".join(map(json.dumps, plain))
    (folder / "published.json").write_text(f"[\n{lines}\n]\n")
    _draw(records, constants).savefig(folder / "published.png", dpi=120)


def _constants(records: Sequence[Record]) -> dict[str, float]:
    """MiB that are in use on each GPU besides what PyTorch reserves, from BERT."""
    apart: dict[str, list[float]] = {}
    for series in records:
        if series["model"].startswith("bert"):
            apart.setdefault(series["gpu"], []).extend(
                point["mib"] - point["predicted_reserved_bytes"] / _MIB
                for point in series["points"]
            )
    return {gpu: statistics.median(values) for gpu, values in apart.items()}


def predicted_mib(series: Record, point: Record, constants: dict[str, float]) -> float:
    """What the published figure counts, as predicted."""
    if series["memory"] == "allocated":
        return float(point["predicted_allocated_bytes"]) / _MIB
    reserved = float(point["predicted_reserved_bytes"]) / _MIB
    return reserved + constants[series["gpu"]]


def _row(series: Record, constants: dict[str, float]) -> Record:
    points = series["points"]
    large = [p for p in points if p["mib"] >= _LARGE_MIB] or points
    errors = [predicted_mib(series, p, constants) / p["mib"] - 1 for p in large]
    first, last = large[0], large[-1]
    slope = None
    if last["batch"] > first["batch"]:
        grown = [predicted_mib(series, p, constants) for p in (first, last)]
        slope = (grown[1] - grown[0]) / (last["mib"] - first["mib"]) - 1
    return {
        "model": series["model"],
        "gpu": series["gpu"],
        "memory": series["memory"],
        "batches": f"{points[0]['batch']}-{last['batch']}" if slope else last["batch"],
        "published": last["mib"],
        "predicted": predicted_mib(series, last, constants),
        "median": statistics.median(map(abs, errors)),
        "worst": max(errors, key=abs),
        "slope": slope,
        "source": series["source"],
        "note": series.get("note", ""),
        "transformers": series["transformers"],
    }


def _page(
    rows: list[Record], constants: dict[str, float], not_rebuilt: list[Record]
) -> str:
    fitted = ", ".join(f"{gpu} {value:,.0f} MiB" for gpu, value in constants.items())
    lines = ["# Published figures, predicted", "", _ABOUT.format(constants=fitted), ""]
    lines += ["![Published and predicted](published.png)", ""]
    lines += _summary(rows)
    lines += [
        "| model | GPU | kind | batches | published | predicted | peak: median | worst"
        " | slope | source |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        source = row["source"] + (f"; {row['note']}" if row["note"] else "")
        lines.append(
            f"| {row['model']} | {row['gpu']} | {row['memory']} | {row['batches']}"
            f" | {row['published']:,.0f} MiB | {row['predicted']:,.0f} MiB"
            f" | {row['median']:.2%} | {row['worst']:+.2%} | {_percent(row['slope'])}"
            f" | {source} |"
        )
    lines += ["", "Not rebuilt:", "", "| model | GPU | figures | why |"]
    lines += ["| --- | --- | --- | --- |"]
    lines += [
        f"| {row['model']} | {row['gpu']} | {row['figures']} | {row['why']} |"
        for row in not_rebuilt
    ]
    versions = {row["transformers"] for row in rows}
    where = {**environment(), "timm": package_version("timm")}
    where["transformers"] = " and ".join(sorted(versions))
    lines += ["", *(f"- {name}: {value}" for name, value in where.items())]
    return "\n".join([*lines, "- command: `python -m benchmarks.published`", ""])


def _summary(rows: list[Record]) -> list[str]:
    kinds = {"fp32": "float32", "tf32": "TensorFloat-32", "fp16": "float16 autocast"}
    lines = ["| rows | series | peak: median | worst | slope: worst |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    groups = {
        f"BERT, {name}": [r for r in rows if r["model"] == f"bert-{kind}"]
        for kind, name in kinds.items()
    }
    for name, prefix in (
        ("ResNet-50", "resnet"),
        ("ConvNeXt-L", "convnext"),
        ("RegNetY-128GF", "regnet"),
        ("FocalNet-B", "focalnet"),
        ("Whisper-tiny", "whisper"),
        ("T5-small", "t5"),
        ("Llama-3.2", "llama"),
    ):
        groups[name] = [r for r in rows if r["model"].startswith(prefix)]
    for vendor, starts in (("NVIDIA", ""), ("AMD", "mi")):
        for name, group in groups.items():
            chosen = [r for r in group if r["gpu"].startswith("mi") == bool(starts)]
            if chosen:
                worst = max((r["worst"] for r in chosen), key=abs)
                slopes = [r["slope"] for r in chosen if r["slope"] is not None]
                slope = max(slopes, key=abs) if slopes else None
                median = statistics.median(r["median"] for r in chosen)
                lines.append(
                    f"| {name}, {vendor} | {len(chosen)} | {median:.2%} | {worst:+.2%}"
                    f" | {_percent(slope)} |"
                )
    return [*lines, ""]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.2%}"


def _draw(
    records: Sequence[Record], constants: dict[str, float]
) -> matplotlib.figure.Figure:
    """Published against predicted bytes, and the error of each."""
    figure = matplotlib.figure.Figure(figsize=(11, 4.5), layout="constrained")
    both, errors = figure.subplots(1, 2)
    for gpu in dict.fromkeys(series["gpu"] for series in records):
        pairs = [
            (point["mib"] / 1024, predicted_mib(series, point, constants) / 1024)
            for series in records
            if series["gpu"] == gpu
            for point in series["points"]
        ]
        published, predicted = zip(*pairs, strict=True)
        shares = [100 * (p / q - 1) for q, p in pairs]
        shares = [max(min(s, _MOST_DRAWN), -_MOST_DRAWN) for s in shares]
        both.scatter(published, predicted, s=14, label=gpu)
        errors.scatter(published, shares, s=14, label=gpu)
    ends = [1, 300]
    both.plot(ends, ends, color="black", linewidth=0.7)
    both.set(xscale="log", yscale="log", xlabel="published, GiB", ylabel="predicted")
    errors.axhspan(-1, 1, color="black", alpha=0.1)
    errors.set(xscale="log", xlabel="published, GiB")
    errors.set_ylabel(f"error, % (grey: 1 %; {_MOST_DRAWN} and more: at the edge)")
    both.legend(fontsize=8)
    return figure
