"""The mathematics of autosac: numbers in, numbers out, no PyTorch."""
