"""Sweeps over anything that changes a step: grids of cells, done in parallel."""
