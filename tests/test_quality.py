import os
import subprocess
import sys
from pathlib import Path

import pytest

import autosac
from benchmarks import house

ROOT = Path(__file__).parents[1]
_SLOWEST = pytest.mark.slowest


@pytest.mark.parametrize(
    "tool",
    ["ruff check .", "ruff format --check .", pytest.param("mypy", marks=_SLOWEST)],
    ids=str,
)
def test_the_repository_is_clean(tool):
    result = subprocess.run(
        [sys.executable, "-m", *tool.split()], cwd=ROOT, capture_output=True, text=True
    )

    assert result.returncode == 0, result.stdout + result.stderr


def test_solvers_import_neither_torch_nor_autosac():
    code = "import solvers, sys; print({'torch', 'autosac'} & set(sys.modules))"

    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )

    assert result.stdout == "set()\n", result.stderr


def test_no_folder_imports_one_above_it():
    assert house.upward() == []


def test_no_file_imports_one_that_imports_it():
    assert house.circles() == []


def test_the_design_page_names_every_folder():
    folders = {path.parent.name for path in (ROOT / "autosac").glob("*/__init__.py")}

    assert folders == set(house.layers())


def test_a_users_own_solvers_folder_hides_nothing(tmp_path):
    (tmp_path / "solvers").mkdir()
    (tmp_path / "solvers" / "__init__.py").write_text("OWN = True\n")
    code = (
        "import solvers; from autosac.solvers import sac;"
        " print(solvers.OWN, sac.Solver.__name__)"
    )

    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )

    assert result.stdout == "True Solver\n", result.stderr


def test_importing_autosac_loads_nothing_heavy():
    heavy = {"torch", "numpy", "pulp", "matplotlib", "plotly"}
    code = f"import autosac, sys; print({heavy} & set(sys.modules))"

    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )

    assert result.stdout == "set()\n", result.stderr


def test_help_needs_no_pytorch():
    code = (
        "import sys; from autosac.cli import commands; sys.argv[1:] = ['--help']\n"
        "try: commands.main()\n"
        "except SystemExit: print({'torch', 'numpy'} & set(sys.modules))"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )

    assert result.stdout.endswith("set()\n"), result.stdout + result.stderr


def test_every_public_name_loads():
    assert all(getattr(autosac, name) is not None for name in autosac.__all__)
    assert set(autosac.__all__) <= set(dir(autosac))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = autosac.nothing
