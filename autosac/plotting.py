"""The pictures of a step, its plans and its sweeps."""

from autosac.kinds import check_kind
from autosac.pictures.pictures import Picture
from autosac.planning.plotting import memory, ratios, trade_offs
from autosac.results.pictures import Rivals
from autosac.results.sweeps import Sweep

__all__ = ["budgets", "memory", "ratios", "trade_offs"]


def budgets(sweep: Sweep, *, rivals: Rivals | None = None) -> Picture:
    """The picture of a sweep: see `Sweep.picture`.

    Raises:
        ValueError: No row has a plan.
    """
    check_kind(sweep, Sweep, name="sweep", wanted="what `autosac.sweep` returns")
    return sweep.picture(rivals=rivals)
