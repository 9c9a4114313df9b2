"""Time and workspace of every op: measured here, or modelled for a known device."""
