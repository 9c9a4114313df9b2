import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "tool",
    ["ruff check .", "ruff format --check .", pytest.param("mypy", marks=_SLOW)],
    ids=str,
)
def test_the_repository_is_clean(tool):
    found = subprocess.run(
        [sys.executable, "-m", *tool.split()], cwd=ROOT, capture_output=True, text=True
    )

    assert found.returncode == 0, found.stdout + found.stderr


def test_solvers_import_neither_torch_nor_autosac():
    code = "import solvers, sys; print({'torch', 'autosac'} & set(sys.modules))"

    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )

    assert found.stdout == "set()\n", found.stderr
