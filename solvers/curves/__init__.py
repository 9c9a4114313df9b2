"""What freeing the activation memory of one AC unit costs: Pareto fronts and fits."""
