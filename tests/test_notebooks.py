"""Notebooks teach; what they show must be true, and is asserted here."""

import ast
import contextlib
import inspect
import io
import warnings
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from torch.distributed._tools.sac_estimator import SACEstimator

from benchmarks.rank_server import run_processes

_KNOWS_DATASHEETS = "gpu_type" in inspect.signature(SACEstimator).parameters
NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
_MOST_BYTES = 150_000  # of a notebook with its outputs
HOLDS = {  # notebook -> what holds of the names that its cells leave behind
    "1_first_plan": (
        "_.identical and _.within_budget",  # the last result: `verify`
        "abs(_.prediction_error) < 0.01",
        "floor < plan.peak_bytes <= plan.budget_bytes < baseline",
    ),
    "2_llama_70b": (
        "num_parameters > 70e9",
        "all(parameter.is_meta for parameter in model.parameters())",
        "plan.peak_bytes <= 72 * GIB < baseline and plan.policy",
        "plan.reserved_bytes < 80 * GIB",
        "_.peak_bytes <= 74 * GIB and _.mesh_shape == (fewest,)",
    ),
    "3_trade_off_curves": (
        "all(row.peak_bytes <= row.budget_bytes for row in (*exact, *fitted))",
        "exact[-1].recompute_ms <= exact[0].recompute_ms",
        "curve.max_error_ms < 0.1 * whole_ms",
    ),
    "4_budgets": (
        "all(row.feasible and row.peak_bytes <= row.budget_bytes for row in sweep)",
        "all(row.bound_ms <= row.recompute_ms for row in sweep)",
        "[*sweep] == sorted(sweep, key=lambda row: -row.recompute_ms)",
        "sweep[-1].recompute_ms == 0.0 < sweep[0].recompute_ms",
        "'<svg' in show(highest).svg()",  # what the slider does
    ),
    "5_batch_size": (
        "best.samples_per_s > 1.03 * plain.samples_per_s",  # recomputation wins
        "best.plan.recompute_ms > 0.0 and best.batch_size < largest.batch_size",
        "best.samples_per_s >= max(row.samples_per_s or 0 for row in best.trials)",
        "max(best.plan.peak_bytes, largest.plan.peak_bytes) <= 0.95 * 2**30",
    ),
    "6_fine_tuning": (
        "budget.plan.recompute_ms > 0.0",
        "budget.plan.peak_bytes <= 80 * 2**20 < budget.plan.baseline_peak_bytes",
        "len({str([e['loss'] for e in log if 'loss' in e])"
        " for log in (plain_log, planned_log)}) == 1",
        "all(map(torch.equal, plain_model.parameters(), planned_model.parameters()))",
    ),
    "7_infeasible_budget": (
        "infeasible.lowest_peak_bytes > 80 * MIB >= plan.peak_bytes",
        "sum(infeasible.composition.values()) == infeasible.lowest_peak_bytes",
        "chunked.status == 'planned'",
        "torch.allclose(plain(**inputs), chunked_model(**inputs))",
    ),
    "8_pytorch_trackers": (
        "plan.peak_bytes <= budget and exact.peak_bytes <= exact.budget_bytes",
        "plan.recompute_ms <= 1.05 * recompute_ms + 0.01",  # it rounds, within 5 %
    ),
}


def cells_of(path):
    notebook = nbformat.read(path, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _run(_, path, claims):
    """Run a notebook's cells, then claims, in an interpreter of its own."""
    warnings.simplefilter("ignore")
    shell = InteractiveShell.instance()
    sources = [cell.source for cell in cells_of(path)]
    with contextlib.redirect_stdout(io.StringIO()):
        for source in [*sources, *(f"assert {claim}" for claim in claims)]:
            shell.run_cell(source, store_history=True).raise_error()


@pytest.mark.slowest_but_first
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_shows_what_holds(path):
    if path.stem == "8_pytorch_trackers" and not _KNOWS_DATASHEETS:
        pytest.skip("this PyTorch's estimators ask for an accelerator")
    run_processes(_run, 1, path, HOLDS[path.stem])


def test_every_notebook_has_claims():
    assert [path.stem for path in NOTEBOOKS] == sorted(HOLDS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_with_all_of_its_outputs_and_is_small(path):
    cells = cells_of(path)

    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell.outputs for cell in cells)
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert "error" not in kinds
    assert path.stat().st_size < _MOST_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_teaches_in_short_cells_without_asserts(path):
    for cell in cells_of(path):
        tree = ast.parse(cell.source)
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree))
        assert len(cell.source.splitlines()) <= 40
    assert len(cells_of(path)) <= 20
