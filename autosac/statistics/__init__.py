"""A tape in, figures per module out; or the same figures from PyTorch's trackers."""
