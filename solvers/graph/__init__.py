"""Which forward values of one joint graph to keep: a MILP, and Capuchin's greedy."""

from .least_peak import lowest
from .solver import GraphSolution, solve

__all__ = ["GraphSolution", "lowest", "solve"]
