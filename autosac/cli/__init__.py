"""The ``autosac`` command."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autosac.cli import compiled, demo, grids, models, tables

__all__ = ["compiled", "demo", "grids", "models", "tables"]


def __getattr__(name: str) -> ModuleType:
    """Import what brings PyTorch when a command needs it: help needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module 'autosac.cli' has no attribute {name!r}")
    return import_module(f"autosac.cli.{name}")
