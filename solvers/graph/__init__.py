"""Which forward values of one joint graph to keep: a MILP, and Capuchin's greedy."""

from .solver import GraphSolution, lowest, solve

__all__ = ["GraphSolution", "lowest", "solve"]
