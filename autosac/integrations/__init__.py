"""A memory budget for the training loops of other libraries, in a line each."""
