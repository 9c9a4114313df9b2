"""Run all notebooks, or some, and keep what they show: ``python notebooks/renew.py``.

python notebooks/renew.py 1 7  # those whose names begin so
"""

from __future__ import annotations

import base64
import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parent
_COLORS = 96  # of a picture in a notebook


def renew(path: Path) -> None:
    """Run a notebook from its beginning, and write it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, coalesce_streams=True, record_timing=False
    )
    client.execute()
    notebook.metadata.pop("widgets", None)  # their state; they need a live kernel
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            _shrink(output.get("data", {}))
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)


def _shrink(data: Any) -> None:
    """Draw a picture anew with few colors."""
    if "image/png" in data:
        few, file = io.BytesIO(base64.b64decode(data["image/png"])), io.BytesIO()
        with Image.open(few) as image:
            image.convert("RGB").quantize(_COLORS).save(file, "PNG", optimize=True)
        data["image/png"] = base64.b64encode(file.getvalue()).decode()


def main(*beginnings: str) -> None:
    """Renew the notebooks whose names begin so."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not beginnings or path.name.startswith(beginnings):
            start = time.perf_counter()
            renew(path)
            print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
