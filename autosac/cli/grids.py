"""Grids of `autosac sweep`: values of what the factory or the options take."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosac.cli.models import Target, asked, factory_of, hf_path
from autosac.cli.usage import OPTIONS, UsageError, usage
from autosac.results.sweeps import Sweep
from autosac.sweeps.cell_facts import code_of
from autosac.sweeps.grids import sweep_grid


@dataclass(frozen=True, kw_only=True)
class GridStep:
    """Builds the step of a cell; goes to workers as the texts that were typed.

    Attributes:
        model: As on the command line.
        options: What `asked` takes besides it, for all cells.
    """

    model: str
    options: Mapping[str, Any]

    def target(self, values: Mapping[str, Any]) -> Target:
        """The step of a cell.

        Raises:
            UsageError: A value cannot be meant.
        """
        options = dict(self.options)
        settings = list(options.pop("settings") or ())
        own = _arguments(self.model)
        for name, value in values.items():
            if name in OPTIONS and name not in own:
                options[name] = "" if value is None else value
            else:
                settings.append(f"{name}={value!r}")
        for name in ("accumulate", "batch", "length"):
            if name in values and name not in own and not isinstance(values[name], int):
                raise UsageError(f"--grid {name} must be whole numbers.")
        return asked(self.model, settings=settings, **options)

    def __call__(self, **values: Any) -> dict[str, Any]:
        """Model, inputs and options of `autosac.profile`."""
        target = self.target(values)
        return {**target.parts(), **target.options}


def swept(
    step: GridStep,
    texts: Sequence[str],
    *,
    budgets: Sequence[str],
    n: int,
    calibrate: bool,
    jobs: int,
    directory: Path | None,
    given: Mapping[str, Any],
) -> Sweep:
    """Sweep over the grid that was typed.

    Args:
        step: Builds steps.
        texts: ``name=value,value`` of each axis.
        budgets: As typed; `n` is for none.
        n: Number of budgets of each cell.
        calibrate: As in `sweep_grid`, like what follows.
        jobs: How many cells at a time.
        directory: Where finished cells are kept.
        given: AC units and FSDP units, by the names of these arguments.

    Raises:
        UsageError: Something cannot be meant.
    """
    axes = [_axis(text) for text in texts]
    grid = dict(axes)
    if len(grid) < len(axes):
        raise UsageError("--grid names an axis twice; give all its values at once.")
    for values in itertools.product(*grid.values()):
        step.target(dict(zip(grid, values, strict=True)))  # complain now
    path = hf_path(step.model)
    code = code_of(factory_of(step.model)) if path is None else path.read_text()
    with usage():
        return sweep_grid(
            step,
            grid,
            memory_budgets=budgets or None,
            n=None if budgets else n,
            calibrate=calibrate,
            n_jobs=jobs,
            directory=directory,
            version=code,
            **given,
        )


def _axis(text: str) -> tuple[str, list[Any]]:
    """Name and values of ``name=1,2,4``."""
    name, equals, rest = text.partition("=")
    if not equals or not name.isidentifier() or not rest:
        raise UsageError(
            f"--grid {text!r} must be name=value,value, such as batch_size=1,2,4."
        )
    try:
        return name, list(ast.literal_eval(f"({rest},)"))
    except (ValueError, SyntaxError):  # words are texts, as with --set
        return name, [_value(word) for word in rest.split(",")]


def _value(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def _arguments(model: str) -> frozenset[str]:
    """Names of a factory's own arguments."""
    if hf_path(model) is not None:
        return frozenset()
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(factory_of(model)).parameters.values()
    return frozenset(p.name for p in parameters if p.kind in kinds)
