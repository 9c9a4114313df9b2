"""Pages of the site that are made of other files: README, tables, API reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import autosac

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
_FOLDERS = re.compile(r"\[([^\]]+)\]\((?:benchmarks/results|notebooks|examples)/\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the start page, the tables of the benchmarks and the API reference."""
    pages = {"index.md": _start(), "api.md": _reference()}
    for table in sorted((ROOT / RESULTS).glob("*.md")):
        pages[f"{RESULTS}/{table.name}"] = table.read_text(encoding="utf-8")
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for picture in sorted((ROOT / RESULTS).glob("*.png")):
        name = f"{RESULTS}/{picture.name}"
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to the tables as they lie in the site."""
    return markdown.replace(f"](../{RESULTS}/", f"]({RESULTS}/")


def _start() -> str:
    """The README, with its links as seen from the folder of the docs."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return _FOLDERS.sub(r"\1", text).replace("](docs/", "](")


def _reference() -> str:
    """All public names, each with its docstring."""
    names = sorted(name for name in autosac.__all__ if name != "plotting")
    parts = [f"::: autosac.{name}" for name in (*names, "plotting.memory")]
    return "\n\n".join(["# API", *parts]) + "\n"
