"""The ``autosac`` command."""
