"""The ``autosac`` command."""

from __future__ import annotations

import typer
from rich.console import Console

from autosac import demo as demo_model

app = typer.Typer(
    help="Fit a PyTorch training step into a memory budget.", no_args_is_help=True
)


@app.callback()
def _root() -> None:
    """Fit a PyTorch training step into a memory budget."""


@app.command()
def demo() -> None:
    """Plan a small GPT at three budgets, train it for real and compare."""
    if not demo_model.run(Console(width=130)):
        raise typer.Exit(code=1)


def main() -> None:
    """Entry point of the console script."""
    app()
