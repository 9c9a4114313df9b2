"""A plan: what to recompute in a model so that a step fits a budget."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from autosac import applying
from autosac.errors import PlanMismatchError
from autosac.policies import OpPolicy
from autosac.quantities import format_bytes, format_ms

_FORMAT_VERSION = 1

Fingerprint = tuple[tuple[str, str, tuple[str, ...]], ...]


def fingerprint(model: torch.nn.Module) -> Fingerprint:
    """FQN, class and parameter shapes of every module of a model, in order."""
    return tuple(
        (
            fqn,
            type(module).__name__,
            tuple(
                f"{name} {tuple(parameter.shape)} {str(parameter.dtype)[6:]}"
                for name, parameter in module.named_parameters(recurse=False)
            ),
        )
        for fqn, module in model.named_modules()
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which modules are AC units, and what each of them recomputes.

    Attributes:
        policy: FQN of each AC unit -> share (0 to 1) of its activation memory that
            is recomputed instead of saved. A slice of an `nn.Sequential` is named by
            its first and last layer, as ``features.0-features.4``.
        op_policies: What happens to every op of each unit.
        budget_bytes: The cap that was asked for.
        peak_bytes: Predicted peak of a step with the plan, simulated on the tape.
        baseline_peak_bytes: Predicted peak of a step without it.
        recompute_ms: Predicted time a step spends on recomputation.
        step_ms: Predicted time of a step, recomputation included.
        bound_ms: Proven lower bound on `recompute_ms` over the candidate units and
            their Pareto-optimal save sets, in the MILP's memory model.
        composition: Bytes alive at the peak per category.
        device: Name of the device that times are for.
        calibrated: Times and workspaces were measured, not modelled.
        model: Fingerprint of the model the plan is for.
        torch_version: PyTorch that the model was traced with.
        measured_fraction: Share of the step's time that is measured, not modelled.
        reserved_bytes: What PyTorch's allocator is predicted to reserve for a step
            with the plan; None on the CPU, where it reserves nothing.
        dry_run: A dry run of the applied model confirmed the peak of this very plan,
            not only its simulation.
    """

    policy: dict[str, float]
    op_policies: tuple[OpPolicy, ...]
    budget_bytes: int
    peak_bytes: int
    baseline_peak_bytes: int
    recompute_ms: float
    step_ms: float
    bound_ms: float
    composition: dict[str, int]
    device: str
    calibrated: bool
    model: Fingerprint
    torch_version: str
    measured_fraction: float = 0.0
    reserved_bytes: int | None = None
    dry_run: bool = True  # as every plan was before this was saved

    @property
    def optimality_gap(self) -> float:
        """``(recompute_ms - bound_ms) / recompute_ms``, 0.0 without recomputation."""
        if self.recompute_ms == 0.0:
            return 0.0
        return max(0.0, (self.recompute_ms - self.bound_ms) / self.recompute_ms)

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make the model train under the budget, in place.

        Parameter and module names stay as they are. The plan is in force while the
        model is in the mode (train or eval) that it was traced in.

        Returns:
            The model.

        Raises:
            PlanMismatchError: The plan was made for another model; names the first
                difference.
            ValueError: A plan is applied already.
        """
        check_model(self.model, model)
        check_unplanned(model)
        applying.install(model, self.op_policies)
        return model

    def unapply(self, model: torch.nn.Module) -> torch.nn.Module:
        """Undo `apply`.

        Returns:
            The model.
        """
        applying.remove(model)
        return model

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        record = {"format": _FORMAT_VERSION, **asdict(self)}
        Path(path).write_text(json.dumps(record, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            ValueError: The file is not such a plan.
        """
        record = read_record(path, _FORMAT_VERSION, "plan")
        try:
            return cls(
                **{
                    **record,
                    "op_policies": tuple(map(read_op_policy, record["op_policies"])),
                    "model": read_model(record["model"]),
                }
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}. Plan again.") from error

    def report(self) -> str:
        """The plan as a table for people."""
        gap = f"{100 * self.optimality_gap:.1f} %"
        lines = [
            f"budget    {format_bytes(self.budget_bytes)}",
            f"peak      {format_bytes(self.peak_bytes)} predicted,"
            f" {format_bytes(self.baseline_peak_bytes)} without the plan",
            f"time      {format_ms(self.step_ms)} a step on {self.device},"
            f" {format_ms(self.recompute_ms)} of it recomputation (gap {gap})",
            f"measured  {self.measured_fraction:.1%} of the step's time, the rest is"
            " modelled",
        ]
        if self.reserved_bytes is not None:
            reserved = f"reserved  {format_bytes(self.reserved_bytes)} predicted"
            lines.insert(2, reserved)
        if not self.dry_run:
            lines.append("checked   by simulation, without a dry run of its own")
        width = max(map(len, self.policy), default=0)
        notes = self._notes()
        lines += [
            f"{fqn:{width}}  {ratio:6.1%}  {notes.get(fqn, '')}".rstrip()
            for fqn, ratio in self.policy.items()
        ]
        return "\n".join(lines)

    def _notes(self) -> dict[str, str]:
        """Which chain or nest an AC unit belongs to, if it does."""
        chains: dict[str, list[str]] = {}
        for one in self.op_policies:
            if one.chain:
                chains.setdefault(one.chain, []).append(one.fqn)
        return {
            one.fqn: f"part of {one.around}"
            if one.around
            else f"input made again from {chains[one.chain][0]}"
            for one in self.op_policies
            if one.around or one.position
        }

    def __str__(self) -> str:
        return self.report()


def check_model(expected: Fingerprint, model: torch.nn.Module) -> None:
    """Refuse a model that a plan was not made for.

    Raises:
        PlanMismatchError: Names the first difference.
    """
    found = fingerprint(model)
    for (fqn, class_name, parameters), other in zip(expected, found, strict=False):
        if other != (fqn, class_name, parameters):
            raise PlanMismatchError(
                f"The plan was made for another model: it expects `{fqn}` to be a"
                f" {class_name} with parameters {list(parameters)}, this model has"
                f" `{other[0]}`, a {other[1]} with {list(other[2])}. Plan again."
            )
    if len(found) != len(expected):
        raise PlanMismatchError(
            f"The plan was made for a model of {len(expected)} modules, this one"
            f" has {len(found)}. Plan again."
        )


def check_unplanned(model: torch.nn.Module) -> None:
    """Refuse a model that has AC units already.

    Raises:
        ValueError: Names one.
    """
    units = applying.installed(model)
    if units:
        raise ValueError(
            f"`model` has a plan already (`{units[0]}` is an AC unit); call"
            " `plan.unapply(model)` first."
        )


def read_record(path: str | Path, version: int, kind: str) -> dict[str, Any]:
    """The JSON object of a saved plan without its format.

    Raises:
        ValueError: The file is no such plan, or of another format.
    """
    try:
        record: dict[str, Any] = json.loads(Path(path).read_text())
        found = record.pop("format")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is not a {kind} saved by autosac.") from error
    if found != version:
        raise ValueError(
            f"{path} has {kind} format {found}; this autosac reads format"
            f" {version}. Plan again, or use the autosac it was made with."
        )
    return record


def read_model(record: list[Any]) -> Fingerprint:
    """A fingerprint as JSON has it."""
    return tuple(
        (fqn, class_name, tuple(parameters)) for fqn, class_name, parameters in record
    )


def read_op_policy(record: dict[str, Any]) -> OpPolicy:
    """An op policy as JSON has it."""
    return OpPolicy(**{**record, "names": tuple(record["names"])})
