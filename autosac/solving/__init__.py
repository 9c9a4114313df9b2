"""A profile's curves and a budget in, the units and what they recompute out: a MILP."""
