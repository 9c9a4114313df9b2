"""The pictures of a step, its plans and its sweeps."""

from autosac.planning.plotting import memory, ratios, trade_offs
from autosac.results.pictures import picture_of as budgets

__all__ = ["budgets", "memory", "ratios", "trade_offs"]
