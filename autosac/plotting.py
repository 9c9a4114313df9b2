"""The pictures of a step, its plans and its sweeps."""

from autosac.planning.plotting import budgets, memory, ratios, trade_offs

__all__ = ["budgets", "memory", "ratios", "trade_offs"]
