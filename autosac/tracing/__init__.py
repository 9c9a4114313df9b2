"""A training step in, a tape of it out: one run under fake tensors."""
