"""A tape in, AC units and their trade-off curves out."""
