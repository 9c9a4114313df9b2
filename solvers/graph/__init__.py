"""Which forward values of one joint graph to keep: a MILP, and Capuchin's greedy."""

from .least_peak import lowest
from .search import GraphSolution
from .solver import solve

__all__ = ["GraphSolution", "lowest", "solve"]
