"""The ``autosac`` command with all of its commands."""

from autosac.cli import graph_commands, size_commands, step_commands
from autosac.cli.app import EXIT_ERROR, EXIT_INFEASIBLE, EXIT_USAGE, app

__all__ = [
    "EXIT_ERROR",
    "EXIT_INFEASIBLE",
    "EXIT_USAGE",
    "app",
    "graph_commands",
    "main",
    "size_commands",
    "step_commands",
]


def main() -> None:
    """Entry point of the console script."""
    app()
