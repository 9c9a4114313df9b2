"""A profile and a budget in, a plan out: formulate, solve, simulate, dry-run."""
