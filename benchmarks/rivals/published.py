"""What other systems reached on three models, measured earlier.

Measured once on two CPU cores, one thread, torch 2.15, with Rockmate 2.0 ported to that
version and `torch.compile` with ``torch._functorch.config.activation_memory_budget``
(dp solver, flops estimator). Times are CPU seconds relative to the plain eager step of
the same process, good to about 6 %; peaks are those of the C++ allocator's events,
above parameters and inputs. Which of Rockmate's solvers found a plan is said where it
is known. Points that were measured twice are listed twice.
"""

from __future__ import annotations

from dataclasses import dataclass

_MB, _MIB = 10**6, 2**20


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting of one system.

    Attributes:
        system: Its name.
        peak_bytes: Peak above parameters and inputs.
        time_ratio: Step time over the eager one's; None where it was not measured.
    """

    system: str
    peak_bytes: int
    time_ratio: float | None


def _points(
    system: str, unit: int, *figures: tuple[float, float | None]
) -> tuple[Point, ...]:
    return tuple(
        Point(system=system, peak_bytes=round(size * unit), time_ratio=ratio)
        for size, ratio in figures
    )


def _without_times(*sizes: float) -> tuple[tuple[float, None], ...]:
    return tuple((size, None) for size in sizes)


# Forward, loss and backward; gradients count.
GPT = (
    *_points("every block (torch.utils.checkpoint)", _MB, (189.0, 1.21)),
    *_points("save matmuls and attention (torch)", _MB, (478.7, 1.03)),
    # Budgets of 0.8, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2 and 0.17 of the plain activations.
    *_points(
        "Rockmate",
        _MB,
        *((567, 1.02), (437, 1.08), (374, 1.07), (311, 1.19)),
        *((252, 1.20), (257, 1.21), (228, 1.25), (203, 1.46)),
    ),
    # The lower of them once more.
    *_points("Rockmate", _MIB, (296.5, 1.19), (240.5, 1.16), (217, 1.27), (193, 1.45)),
    *_points(
        "torch.compile (aot_eager)",
        _MB,
        *_without_times(648, 442, 420, 441, 437, 391, 336, 399, 781),
    ),
    *_points(
        "torch.compile (inductor)",
        _MB,
        *_without_times(589, 396, 391, 429, 425, 349, 315, 370, 588),
    ),
)
GPT_EAGER_BYTES = round(646.7 * _MB)

LLAMA = (
    *_points("every block (torch.utils.checkpoint)", _MB, (191.2, 1.32)),
    *_points(
        "Rockmate (rotor)",
        _MB,
        *((534, 1.09), (433, 1.10), (318, 1.17), (292, 1.22), (229, 1.24), (187, 1.41)),
    ),
    *_points("torch.compile (least of its budgets)", _MB, *_without_times(307)),
)
LLAMA_EAGER_BYTES = round(642.5 * _MB)

# The module alone; gradients are allocated beforehand and do not count. What the plain
# step peaked at is known of one model only.
GPT_ALONE = _points("Rockmate", _MIB, (112, 1.22), (84, 1.38))
LLAMA_ALONE = _points("Rockmate", _MIB, (108, 1.36))
RESNET50 = (
    *_points("Rockmate", _MIB, (157, 1.20), (116, 1.27), (74, 1.40)),
    *_points("torch.compile (least of its budgets)", _MIB, (206, 1.76)),
)
RESNET50_EAGER_BYTES = round(229.7 * _MIB)
