"""Benchmarks of autosac: real training steps under budgets, and its rivals."""
