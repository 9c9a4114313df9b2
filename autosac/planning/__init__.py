"""A profile and a budget in, a plan out: choose, dry-run, apply, explain."""
