"""CBC by PuLP: a process, whose log says what its status does not."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pulp
from pulp import constants

from .backend_answers import TERMINATIONS, Answer, Looks
from .solution import Termination

_BOUND, _NODES = "Lower bound:", "Enumerated nodes:"
_ROUNDED = 5e-4  # of a bound: CBC prints three decimals


def run_cbc(
    model: pulp.LpProblem,
    options: dict[str, Any],
    most_looks: Looks,
    *,
    relaxed: bool,
    warm_start: bool,
) -> Answer:
    if math.isfinite(most_looks.usual):  # it can only be told "enough nodes"
        options = options | {"maxNodes": max(1, int(most_looks.usual))}
    with tempfile.TemporaryDirectory(prefix="autosac-cbc-") as folder:
        log = Path(folder, "cbc.log")
        solver = pulp.COIN_CMD(
            path=cbc_path(),
            msg=False,
            mip=not relaxed,
            logPath=str(log),
            gapAbs=0.0,
            warmStart=warm_start,
            **options,
        )
        model.solve(solver)
        text = log.read_text(errors="replace")
    termination = TERMINATIONS[model.sol_status]
    # An infeasible LP has no status, but a line in the log.
    is_undefined = model.status == constants.LpStatusUndefined
    is_infeasible = model.status == constants.LpStatusInfeasible
    if is_infeasible or (is_undefined and "nfeasible" in text):
        termination = Termination.INFEASIBLE
    bound, num_nodes = told(text, model)
    if bound is None and termination is Termination.OPTIMAL:
        bound = pulp.value(model.objective)
    return termination, bound, num_nodes


def told(log: str, model: pulp.LpProblem) -> tuple[float | None, int]:
    """Bound and number of nodes in CBC's log; no bound if no gap is left."""
    bound = _last_number(log, _BOUND)
    if bound is not None:
        bound += model.objective.constant - _ROUNDED
    return bound, int(_last_number(log, _NODES) or 0)


def _last_number(text: str, label: str) -> float | None:
    """Number in the last line of a log that begins with a label; None without one."""
    lines = [line for line in text.splitlines() if line.startswith(label)]
    return float(lines[-1].removeprefix(label)) if lines else None


def cbc_path() -> str:
    """The CBC on the search path, else the one that PuLP 3 brings along."""
    path = _found_cbc()
    if path is not None:
        return path
    raise FileNotFoundError(
        "`backend`='cbc' needs the CBC executable, and none was found. Put `cbc` on"
        " the search path (apt install coinor-cbc, brew install cbc), or use"
        " `backend`='highs'."
    )


def has_cbc() -> bool:
    """Whether there is a CBC to run."""
    return _found_cbc() is not None


def _found_cbc() -> str | None:
    bundled = getattr(pulp, "PULP_CBC_CMD", None)
    for candidate in ("cbc", getattr(bundled, "pulp_cbc_path", None)):
        path = shutil.which(candidate) if candidate else None
        if path:
            return path
    return None
