"""Trade-off curves of single modules: to look at, and for statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autosac.errors import ArgumentError
from autosac.optional import needed
from autosac.pictures.panels import Line, Panel
from autosac.pictures.pictures import Picture
from autosac.quantities import byte_unit
from autosac.solvers.curves.curve import FittedCurve, TradeoffCurve
from autosac.statistics.by_module import ModuleStatistics, Statistics
from autosac.statistics.trade_offs import with_trade_off
from autosac.step.tape import Tape
from autosac.units.curves import UnitCurve
from autosac.units.unit import Unit


@dataclass(frozen=True, kw_only=True)
class ModuleCurve:
    """What it takes to keep less of one module's activation memory.

    Ratios are shares of its activation memory that are recomputed instead of saved, as
    in `Plan.policy`; slopes and intercepts are in milliseconds by ratio.

    Attributes:
        fqn: The module.
        activation_bytes: What a ratio of 1 recomputes.
        points: Every Pareto point that is known: freed bytes and recompute time.
        fit: The curve in few linear segments (pwlf), nowhere below a point. Its
            breakpoints are points that plans choose from.
    """

    fqn: str
    activation_bytes: int
    points: TradeoffCurve
    fit: FittedCurve

    @property
    def ratios(self) -> tuple[float, ...]:
        """The ratio of each point."""
        return tuple(self._ratio(freed) for freed in self.points.freed_bytes)

    @property
    def n_segments(self) -> int:
        """Number of segments of the fit."""
        return self.fit.num_segments

    @property
    def breakpoints(self) -> tuple[float, ...]:
        """Ratios at which the fit's segments begin, and where the last one ends."""
        return tuple(self._ratio(freed) for freed in self.fit.freed_bytes)

    @property
    def slopes(self) -> tuple[float, ...]:
        """What each segment rises by, in milliseconds from ratio 0 to 1."""
        return tuple(slope * self.activation_bytes for slope in self.fit.slopes)

    @property
    def intercepts(self) -> tuple[float, ...]:
        """Milliseconds of the line through each segment at ratio 0."""
        return self.fit.intercepts

    @property
    def max_error_ms(self) -> float:
        """The most that the fit overstates a point by."""
        points = zip(self.points.freed_bytes, self.points.recompute_ms, strict=True)
        return max(self.fit.time_at(freed) - ms for freed, ms in points)

    def _ratio(self, freed: int) -> float:
        return freed / self.activation_bytes

    def to_dataframe(self) -> Any:
        """The points as a pandas table: ratio, freed bytes, times of point and fit.

        Raises:
            ImportError: pandas is not installed.
        """
        pandas = needed("pandas", "`ModuleCurve.to_dataframe`")
        freed = self.points.freed_bytes
        return pandas.DataFrame(
            {
                "ratio": self.ratios,
                "freed_bytes": freed,
                "recompute_ms": self.points.recompute_ms,
                "fitted_ms": [self.fit.time_at(nbytes) for nbytes in freed],
                "is_breakpoint": [nbytes in self.fit.freed_bytes for nbytes in freed],
            }
        )

    def picture(self) -> Picture:
        """Points and fit as a picture, whose ``save`` writes a file."""
        unit, size = byte_unit(self.activation_bytes)
        lines = [
            Line(
                label="Pareto points",
                x=tuple(nbytes / size for nbytes in self.points.freed_bytes),
                y=self.points.recompute_ms,
                dash="none",
                marker="o",
                grey=0.55,
                size=3.0,
            ),
            Line(
                label=f"fit, {self.n_segments} segment" + "s" * (self.n_segments != 1),
                x=tuple(nbytes / size for nbytes in self.fit.freed_bytes),
                y=self.fit.recompute_ms,
                marker="s",
                grey=0.3,
            ),
        ]
        panel = Panel(
            title=self.fqn or "the model itself",
            x_label=f"memory freed [{unit}]",
            y_label="recomputation [ms]",
            lines=tuple(lines),
            x_min=0.0,
        )
        return Picture(title="What freed memory costs", panels=(panel,))

    def plot(self, axes: Any = None) -> Any:
        """Draw the picture with Matplotlib.

        Args:
            axes: Axes to draw on; None for new ones.

        Returns:
            The axes.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        return self.picture().plot(axes)


Curves = Mapping[str, tuple[Unit, UnitCurve | None]]


def curve_of(
    fqn: str, curves: Curves, refused: Mapping[str, str], tape: Tape, num_segments: int
) -> ModuleCurve:
    """The curve of a module.

    Args:
        fqn: The module.
        curves: Modules that can be AC units, each with its curve if it frees memory.
        refused: Why others cannot.
        tape: Of the step.
        num_segments: Most segments of the fit.

    Raises:
        ArgumentError: It has none; says why.
    """
    if fqn not in tape.modules.index:
        raise ArgumentError(
            f"`fqn`={fqn!r} is no name in `named_modules()` of the model. Modules that"
            f" have a trade-off curve are {_some(list(curves))}."
        )
    if fqn not in curves:
        raise ArgumentError(
            f"{f'`{fqn}`' if fqn else 'The model itself'} has no trade-off curve:"
            f" {refused.get(fqn) or _why_none(fqn, tape)}. Modules that have one are"
            f" {_some(list(curves))}."
        )
    _, curve = curves[fqn]
    if curve is None:
        raise ArgumentError(
            f"`{fqn}` has no trade-off curve: rerunning it frees no memory, as others"
            " keep what it saves in any case."
        )
    return ModuleCurve(
        fqn=fqn,
        activation_bytes=curve.most_bytes,
        points=curve.known_points,
        fit=curve.fit(num_segments),
    )


def _why_none(fqn: str, tape: Tape) -> str:
    """Why a module that is not refused has no curve."""
    if not fqn:
        return "only modules inside it are AC units"
    module = tape.modules.index[fqn]
    if not any(call.module == module for call in tape.calls):
        return "it is never called in the step, as a list of modules is not"
    return "nothing inside it saves for backward what it made"


def _some(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown or "none"


def with_curves(statistics: Statistics, curves: Curves) -> Statistics:
    """Statistics of a tape with the trade-off curves of its modules.

    Shares are of `candidate_bytes` and `forward_ms`, as PyTorch's are of what its
    estimator counts in their place. Of a module that is called several times none.
    """

    def completed(module: ModuleStatistics) -> ModuleStatistics:
        _, curve = curves.get(module.fqn, (None, None))
        if curve is None or module.calls != 1:
            return module
        return _with_curve(module, curve.known_points)

    return replace(statistics, modules=tuple(map(completed, statistics.modules)))


def _with_curve(module: ModuleStatistics, curve: TradeoffCurve) -> ModuleStatistics:
    saved, candidates = module.activation_bytes or 0, module.candidate_bytes or 0
    if not saved or not module.forward_ms:
        return module
    rest = max(0, candidates - saved)
    ms_of: dict[int, float] = {}
    for freed, ms in zip(curve.freed_bytes, curve.recompute_ms, strict=True):
        ms_of.setdefault(rest + min(freed, saved), ms)  # the fastest comes first
    total = rest + saved
    return with_trade_off(
        module,
        [(nbytes / total, ms / module.forward_ms) for nbytes, ms in ms_of.items()],
        sac_memory=total,
        sac_runtime=module.forward_ms,
        max_ratio=max(ms_of) / total,
    )
