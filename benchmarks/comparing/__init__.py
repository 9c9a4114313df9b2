"""The parts of `python -m benchmarks.compare`."""
