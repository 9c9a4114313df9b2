"""Branch and bound without cuts, by CBC: for MILPs at whose root cuts prove little.

HiGHS adds up to 2 sqrt(n) rounds of cuts at the root of a MILP of n binary variables
(`HighsMipSolverData::evaluateRootNode`), and no option says fewer. Where they do not
help, CBC, told to add none and to look for no incumbents, has often ended before.
"""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import highspy
import pulp

from .cbc_runner import cbc_path, told
from .highs import QuietHighs
from .highs_runner import as_highs_lp
from .solution import Termination

_PLAIN = ("-preprocess", "off", "-cuts", "off", "-heur", "off")
_ABOVE = 1e-6  # of a cutoff: CBC takes what lies strictly below
_INCREMENT = 1e-5  # solutions that are better by less are not looked for
_ENDS = {  # what the first line of a solution says
    "Optimal": Termination.OPTIMAL,
    "Optimal (within gap tolerance)": Termination.OPTIMAL,
    "Infeasible": Termination.INFEASIBLE,
    "Integer infeasible": Termination.INFEASIBLE,
}


class Quick(NamedTuple):
    """What a quick search came to.

    Attributes:
        termination: Optimal within the gap that was asked for, infeasible, or why it
            says nothing.
        bound: Of an optimum, in the unit of the model.
        num_nodes: That were looked at.
    """

    termination: Termination
    bound: float | None
    num_nodes: int


def run_quick_cbc(
    model: pulp.LpProblem, *, most_nodes: int, relative_gap: float, cutoff: float
) -> Quick:
    """Minimise a MILP in few nodes; its variables hold the optimum if there is one.

    Args:
        model: A minimisation.
        most_nodes: After so many nothing is said: `Termination.NO_INCUMBENT`.
        relative_gap: What an optimum may be above the bound, as a share of it.
        cutoff: Solutions above it are of no interest: without one below, infeasible.
    """
    with tempfile.TemporaryDirectory(prefix="autosac-cbc-") as folder:
        written, solved = Path(folder, "model.mps"), Path(folder, "solution.txt")
        if not _write(model, written):
            return Quick(Termination.NO_INCUMBENT, None, 0)
        command = [cbc_path(), str(written), *_PLAIN, "-maxNodes", str(most_nodes)]
        command += ["-ratioGap", repr(relative_gap), "-increment", repr(_INCREMENT)]
        if math.isfinite(cutoff):
            below = cutoff + _ABOVE * abs(cutoff) + _INCREMENT
            command += ["-cutoff", repr(below - model.objective.constant)]
        command += ["-branch", "-solution", str(solved)]
        try:
            log = subprocess.run(command, capture_output=True, text=True).stdout
        except OSError:  # an executable of another kind of machine
            return Quick(Termination.NO_INCUMBENT, None, 0)
        lines = solved.read_text().splitlines() if solved.exists() else []
    bound, num_nodes = told(log, model)
    ended = "".join(lines[:1]).partition(" - ")[0]
    termination = _ENDS.get(ended, Termination.NO_INCUMBENT)
    if termination is not Termination.OPTIMAL:
        return Quick(termination, None, num_nodes)
    _assign(model.variables(), lines[1:])
    if bound is None:
        bound = pulp.value(model.objective) - _INCREMENT
    return Quick(termination, bound, num_nodes)


def _write(model: pulp.LpProblem, path: Path) -> bool:
    highs = QuietHighs()  # type: ignore[no-untyped-call]
    if highs.passModel(as_highs_lp(model, relaxed=False)) == highspy.HighsStatus.kError:
        return False
    return bool(highs.writeModel(str(path)) != highspy.HighsStatus.kError)


def _assign(variables: Sequence[pulp.LpVariable], lines: Sequence[str]) -> None:
    """Values from lines of number, name, value and reduced cost; 0 where none is."""
    for variable in variables:
        variable.varValue = 0.0
    for line in lines:
        number, _, value, _ = line.removeprefix("**").split()
        variables[int(number)].varValue = float(value)
