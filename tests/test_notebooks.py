from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own, in this process
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_its_asserts_hold(path):
    notebook = nbformat.read(path, as_version=4)

    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)

    assert not any(cell.get("outputs") for cell in notebook.cells)
