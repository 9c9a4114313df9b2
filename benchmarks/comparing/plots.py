"""Pictures of the results; they need no colour to be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.comparing.zoo import best_ms
from benchmarks.environment import MIB

_MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*", "<", ">")
_GREYS = ("0.1", "0.35", "0.55")
Record = dict[str, Any]


def plot(results: Record, folder: Path) -> None:
    """One picture per part that is there, as ``compare_<part>.png``."""
    for part, draw in (("zoo", _zoo), ("scale", _scale), ("frontier", _frontier)):
        if part in results:
            figure = draw(results[part])
            figure.savefig(folder / f"compare_{part}.png", dpi=120)
            plt.close(figure)


def _zoo(record: Record) -> Any:
    """Recompute time over budgets: ours, the best rival, where only we fit."""
    models = record["models"]
    columns = min(len(models), 5)
    rows = -(-len(models) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(3 * columns, 2.4 * rows),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(models) :]:
        axis.set_axis_off()
    for axis, model in zip(axes.flat, models, strict=False):
        sizes = [cell["budget_bytes"] / MIB for cell in model["cells"]]
        share = 100 / model["baseline_ms"]
        ours = [cell["recompute_ms"] * share for cell in model["cells"]]
        best = [(s, best_ms(c)) for s, c in zip(sizes, model["cells"], strict=True)]
        fitting = [(size, ms * share) for size, ms in best if ms is not None]
        axis.plot(sizes, ours, "o-", color="0.1", markersize=3, label="autosac")
        if fitting:
            axis.plot(
                *zip(*fitting, strict=True),
                "s--",
                color="0.5",
                markersize=4,
                fillstyle="none",
                label="best rival that fits",
            )
        axis.set_title(model["model"], fontsize=9)
        axis.tick_params(labelsize=7)
    axes[0, 0].legend(fontsize=7)
    figure.supxlabel("budget [MiB]", fontsize=9)
    figure.supylabel("recompute time [% of the plain step]", fontsize=9)
    return figure


def _scale(record: Record) -> Any:
    """Cold planning time and memory over the number of layers."""
    figure, (time_axis, memory_axis) = plt.subplots(
        1, 2, figsize=(8, 3.2), layout="constrained"
    )
    for (system, style), marker in zip(
        (("autosac", "-"), ("sac_milp", "--")), _MARKERS, strict=False
    ):
        of_system = [
            job
            for job in record["jobs"]
            if job["system"] == system and job["case"] == "gpt" and "error" not in job
        ]
        sizes = [job["size"] for job in of_system]
        cold = [job["statistics"]["cpu_s"] + job["plan"]["cpu_s"] for job in of_system]
        memory = [job["rss_bytes"] / MIB for job in of_system]
        line = {"color": "0.1", "marker": marker, "linestyle": style, "label": system}
        time_axis.plot(sizes, cold, **line)
        memory_axis.plot(sizes, memory, **line)
    time_axis.set(
        xlabel="layers", ylabel="cold plan [CPU s]", xscale="log", yscale="log"
    )
    memory_axis.set(xlabel="layers", ylabel="most memory [MiB]", xscale="log")
    memory_axis.set_ylim(bottom=0)
    time_axis.legend()
    return figure


def _frontier(record: Record) -> Any:
    """Real peaks and times of ours, with what others reached."""
    models = record["models"]
    figure, axes = plt.subplots(
        1,
        len(models),
        figsize=(4.4 * len(models), 3.8),
        squeeze=False,
        layout="constrained",
    )
    for axis, model in zip(axes.flat, models, strict=True):
        cells = sorted(model["ours"], key=lambda cell: cell["measured_bytes"])
        axis.plot(
            [cell["measured_bytes"] / MIB for cell in cells],
            [cell["time_ratio"] for cell in cells],
            "-",
            color="0.1",
            marker=".",
            label="autosac",
        )
        by_system: dict[str, list[Record]] = {}
        for point in model["published"]:
            if point["time_ratio"] is not None:
                by_system.setdefault(point["system"], []).append(point)
        for index, (system, points) in enumerate(by_system.items()):
            axis.plot(
                [point["peak_bytes"] / MIB for point in points],
                [point["time_ratio"] for point in points],
                linestyle="none",
                marker=_MARKERS[index + 1],
                color=_GREYS[index % len(_GREYS)],
                fillstyle="none",
                label=system,
            )
        axis.set_title(model["title"], fontsize=10)
        axis.set_xlabel("real peak above parameters [MiB]")
        axis.set_ylabel("step time over the plain step's")
        axis.legend(fontsize=7)
    return figure
