"""A model and its inputs in, a profile out: the tape, and all that is asked of it."""
