"""Libraries that only some functions need: imported when these are called."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "pandas": "pandas",
    "pyarrow": "pyarrow",
    "matplotlib": "Matplotlib",
    "plotly": "Plotly",
}


def needed(module: str, caller: str) -> Any:
    """Import a library of the extra ``explore``.

    Args:
        module: What to import, such as ``matplotlib.figure``.
        caller: What needs it, for the message.

    Raises:
        ImportError: It is not installed; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = _NAMES[module.partition(".")[0]]
        raise ImportError(
            f"{caller} needs {name}: pip install 'autosac[explore]'."
        ) from error
