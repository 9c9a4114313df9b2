"""What goes wrong when a step is built from a name."""


class NotBuiltError(Exception):
    """No step could be built; says what was tried and why it failed."""
