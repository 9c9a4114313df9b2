"""A plan: what to recompute in a model so that a step fits a budget."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autosac.checkpointing import batch_variants
from autosac.costs.host import time_notes
from autosac.errors import ArgumentError
from autosac.kinds import check_kind, new_file
from autosac.plan_kinds import check_consistent, loaded, plan_record
from autosac.planning import offload_advice, plan_files
from autosac.planning.plan_data import PlanData
from autosac.planning.unseen_batches import UnseenBatches, largest
from autosac.profiles.fingerprints import check_model, frozen_names
from autosac.profiles.mistakes import check_unplanned, hints, unknown_optimizer
from autosac.profiles.profile import Profile
from autosac.profiles.traced_step import TracedStep
from autosac.quantities import format_bytes, format_ms
from autosac.step import arguments
from autosac.summaries import Summarized, Summary, Table, equal_rows_once
from autosac.whole_files import write_whole

if TYPE_CHECKING:
    from autosac.planning.exporting import Export
    from autosac.planning.reporting import Report

LARGE_GAP = 0.05  # worth a warning
# Of a step, which older files do not tell.
_LATER_FIELDS = (
    *("autocast", "forward_bytes", "keeps_graph", "calls_again", "trains_inputs"),
    *("backends", "headroom_bytes"),
)
_NOT_CALIBRATED = (
    ", as is memory inside kernels: leave a margin, or `autosac.calibrate` where the"
    " device is"
)
_MUCH_UNSTEADY = 0.1  # of the measured time


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(PlanData, Summarized):
    """Which modules are AC units, and what each of them recomputes.

    Attributes:
        policy: FQN of each AC unit -> share (0 to 1) of its activation memory that
            is recomputed instead of saved. A slice of an `nn.Sequential` is named by
            its first and last layer, as ``features.0-features.4``.
        op_policies: What happens to every op of each unit.
        budget_bytes: The cap that was asked for.
        peak_bytes: Predicted peak of what the budget caps, of a step with the plan,
            simulated on the tape.
        baseline_peak_bytes: Predicted peak of a step without it.
        recompute_ms: Predicted time a step spends on recomputation, and on waiting for
            what was offloaded; on the CPU with what the program takes to follow units;
            on a GPU that is here what the plan adds to `step_ms`.
        step_ms: Predicted time of a step's kernels, recomputation included; on a GPU
            that is here of each pass the time of kernels or host, whichever is longer.
        bound_ms: Proven lower bound on `recompute_ms` over the candidate units and
            their Pareto-optimal save sets, in the MILP's memory model: on the CPU that
            of the tape, on a GPU with blocks as large as the allocator's in the plain
            step (as small as they can be if the plan would not fit in these, and
            beats all that do), but for choices that break the budget where they are
            replayed. Of a streamed model no more than what is proven of all streaming.
        composition: Bytes alive at the peak per category.
        device: Name of the device that times are for.
        calibrated: Times and workspaces were measured, not modelled.
        model: Fingerprint of the model the plan is for.
        torch_version: PyTorch that the model was traced with.
        measured_fraction: Share of the step's time that is measured, not modelled.
        reserved_bytes: What PyTorch's allocator is predicted to reserve for a step
            with the plan; None on the CPU, where it reserves nothing.
        dry_run: A dry run of the applied model, up to the optimizer, confirmed the
            memory of this very plan, not only its simulation.
        signatures: Of the batches that it is for, that of the traced one first.
        cap: What the budget caps on a GPU: "allocated" is what PyTorch's allocator
            hands out, "reserved" all that it takes.
        num_batches: How many of them were looked at.
        opening: Names of the first ops of forward, up to the one that tells these
            batches from others of their signature; empty if there are none.
        on_mismatch: What becomes of a batch of another signature: see `autosac.plan`.
        offloaded_bytes: Bytes of arguments and saved results of units, or of the
            model's saved tensors, that lie in far memory between forward and backward,
            added up over the step,
        exposed_ms: and the time of `recompute_ms` that it waits for their copies.
        far_state_bytes: Bytes of the optimizer's state that lie there between updates.
        finds_gradients: Those of earlier steps are there as the step begins.
        autocast: Type that forward and loss autocast to, such as ``bfloat16``; '' for
            none, None if it is not known.
        forward_bytes: What the ops of the model's forward make, added up; None if it is
            not known, or batches alone vary it; at most where draws or training do.
        headroom_bytes: What its peak leaves to another loss: see `headroom.py`.
        keeps_graph: Some backward pass of the step keeps its graph,
        calls_again: or it calls the model several times,
        trains_inputs: or inputs require gradients; None if that is not known.
        backends: Settings of ``torch.backends`` that its kernels depend on; None if
            they are not known.
        offload_dir: Directory of the CPU's far memory; None for the system's temporary
            one.
        variants: The plans for several kinds of batches, that of the highest peak
            first. Times of the whole are then means over all batches, all else is that
            of the first. Empty if there is one kind.
        traced: The step it was made for, as plain data, for reports.
        replan: Plans for a batch that comes later; it holds loss and optimizer. Like
            `traced` it is not part of a plan file, nor of a copy: there it is None.
        frugal: The plan of least memory for the step, for processes that do not know
            `traced`; not part of a plan file.
    """

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make the model train under the budget, in place.

        Parameter and module names stay as they are. The plan is in force while the
        model is in the mode (train or eval) that it was traced in. Every call of it
        follows the plan for the signature of its arguments; other ones are treated as
        `on_mismatch` says. A backward pass that was not part of the planned step gets
        the right gradients, and its memory is not known.

        Returns:
            The model.

        Raises:
            PlanMismatchError: The plan was made for another model; names the first
                difference.
            ArgumentError: A plan is applied already, or the model is compiled, scripted
                or wrapped.
        """
        arguments.check_kind(model)
        check_unplanned(model)
        check_model(self.model, model, may_train_more=True)
        if self.on_mismatch == "replan" and self.replan is None:
            arguments.warn(
                "A plan from a file knows neither loss nor optimizer, which"
                " `on_mismatch`='replan' takes: batches that it is not for are"
                " recomputed. Plan again to plan for these as they come."
            )
        unseen = UnseenBatches(self.on_mismatch, self.budget_bytes, self.replan)
        # What a larger batch may need is kept with the model.
        kept = largest(self.each) if self.on_mismatch == "recompute" else ()
        each = [p if p in kept else replace(p, traced=None) for p in self.each]
        frozen = frozen_names(self.model)
        batch_variants.install_plans(model, each, unseen, frozen)
        return model

    def unapply(self, model: torch.nn.Module) -> torch.nn.Module:
        """Undo `apply`; a model without a plan stays as it is.

        Returns:
            The model.
        """
        check_kind(model, torch.nn.Module, name="model", wanted="a torch.nn.Module")
        batch_variants.remove_plans(model)
        return model

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; a file that is there is replaced in one step."""
        text = plan_files.write(self._record(), summary=str(self).splitlines())
        write_whole(new_file(path), text)

    def _record(self) -> dict[str, Any]:
        """All that a plan file holds."""
        record = {**vars(self), "variants": [one._record() for one in self.variants]}
        left_out = ["traced", "replan", "frugal"]
        if not self.offloads:  # others read such files, too
            left_out += ["offloaded_bytes", "exposed_ms", "offload_dir"]
        for name in ("far_state_bytes", "finds_gradients"):
            left_out += () if record[name] else (name,)
        left_out += [name for name in _LATER_FIELDS if record[name] is None]
        return {n: value for n, value in record.items() if n not in left_out}

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote, and check that it is whole.

        Warns if another PyTorch runs now than the plan was made with. Its model is
        checked by `apply`, what a step of it really does by `autosac.check`.

        Raises:
            ArgumentError: The file is no such plan, was changed, or contradicts itself.
        """
        whole = plan_record(path, wanted="Plan", format_version=plan_files.FORMAT)
        try:
            record = plan_files.read(whole)
        except ValueError as error:
            raise ArgumentError(f"{path} {error}.") from error
        plan = loaded(cls, path, record)
        check_consistent(path, plan_files.problem(plan))
        if _release(plan.torch_version) != _release(torch.__version__):
            warnings.warn(
                f"{path} was planned with torch {plan.torch_version}, this is torch"
                f" {torch.__version__}, which may run other ops. `autosac.check` with a"
                " profile of the model, or `autosac verify` on the command line, tells"
                " whether the plan holds; or plan again.",
                stacklevel=2,
            )
        return plan

    def report(self, profile: TracedStep | None = None) -> Report:
        """The plan explained: print it, or its ``str()``.

        Of a plan for several batches it is that of the highest peak, or of the profile.

        Args:
            profile: The step that the plan is for. Needed only for a plan from a file,
                which knows no ops: without it the report says what is missing.

        Raises:
            PlanMismatchError: The profile is of another step.
        """
        from autosac.planning.reporting import report

        return report(self.shown(profile), profile)

    def to_html(
        self,
        path: str | Path,
        profile: TracedStep | None = None,
        *,
        interactive: bool = False,
    ) -> None:
        """Write the report with its pictures as one HTML file that needs no other.

        Args:
            path: Where to.
            profile: As in `report`.
            interactive: Pictures that answer the mouse, by Plotly: 5 MB more, and
                scripts. Otherwise they are drawn by Matplotlib.

        Raises:
            ImportError: Matplotlib, or Plotly, is not installed.
            PlanMismatchError: The profile is of another step.
        """
        from autosac.planning.html_report import page  # like `report`

        named = new_file(path)
        text = page(self.shown(profile), profile, interactive=interactive)
        named.write_text(text, encoding="utf-8")

    def export(self, target: str, profile: Profile) -> Export:
        """The best that another tool's own settings can do under this plan's budget.

        Settings are less than a plan, so each is traced with the tool's checkpointing
        on, and the answer says the peak and time that it really gives.

        Args:
            target: "transformers" (`every_n_layers` of its models), "axolotl" (the
                same in its YAML, or its lists of saved ops), "automodel" (NeMo's
                selective or full), "torchtitan" (selective checkpointing of every k-th
                layer) or "megatron" (Megatron-Core's ``--recompute-...`` flags).
            profile: The step that the plan is for, with the model.

        Raises:
            ArgumentError: The target is none of these, or the model not of its kind.
            UnsupportedError: It is "compile": says why, and what to use.
        """
        from autosac.planning.exporting import export  # like `report`

        own = self.peak_bytes, self.step_ms
        return export(target, profile, budget_bytes=self.budget_bytes, plan=own)

    def summary(self) -> Summary:
        """Budget, peak, time, and what is recomputed of each AC unit."""
        gap = f"{100 * self.optimality_gap:.1f} %"
        facts = [
            (
                "budget",
                f"{format_bytes(self.budget_bytes)}"
                f"{' of what PyTorch reserves' if self.cap == 'reserved' else ''}",
            ),
            (
                "peak",
                f"{format_bytes(self.peak_bytes)} predicted,"
                f" {format_bytes(self.baseline_peak_bytes)} without the plan",
            ),
        ]
        if self.reserved_bytes is not None:
            reserved = f"{format_bytes(self.reserved_bytes)} predicted"
            facts.append(("reserved", reserved))
        facts += [
            (
                "time",
                f"{format_ms(self.step_ms)} a step on {self.device},"
                f" {format_ms(self.recompute_ms)} of it recomputation (gap {gap})",
            ),
            (
                "measured",
                f"{self.measured_fraction:.1%} of the step's time, the rest is"
                f" modelled{'' if self.calibrated else _NOT_CALIBRATED}",
            ),
            *self._notes(gap),
        ]
        notes = self.notes()
        rows = [
            (fqn, f"{ratio:.1%}", notes.get(fqn, ""))
            for fqn, ratio in self.policy.items()
        ]
        units = Table(
            heads=("AC unit", "recomputed", ""),
            rows=equal_rows_once(rows),
            left=frozenset({0, 2}),
        )
        return Summary(title="Plan", facts=tuple(facts), tables=(units,))

    def _notes(self, gap: str) -> Iterator[tuple[str, str]]:
        """What there is to say of some plans only."""
        if self.offloaded_bytes:
            yield (
                "offload",
                f"{format_bytes(self.offloaded_bytes)} to"
                f" {'a file' if self.device == 'cpu' else 'the host'},"
                f"{' back one by one,' if self.is_streamed else ''}"
                f" {format_ms(self.exposed_ms)} of the recomputation is waiting for it",
            )
        if self.far_state_bytes:
            yield (
                "state",
                f"{format_bytes(self.far_state_bytes)} of the optimizer in"
                f" {'a file' if self.device == 'cpu' else 'the host'} between updates",
            )
        for one in self.variants:
            yield "batches", one._of_batches()
        if not self.dry_run:
            yield "checked", "by simulation, without a dry run of its own"
        if self.optimality_gap > LARGE_GAP:
            yield self._why_dear(gap)
        if self.traced is not None:
            yield from self._notes_on_step(self.traced)

    def _notes_on_step(self, traced: TracedStep) -> Iterator[tuple[str, str]]:
        host = self.host_ms or 0.0
        yield from time_notes(self.step_ms, host, traced.device, self.calibrated)
        unsteady = traced.calibration.unsteady_fraction
        if unsteady >= _MUCH_UNSTEADY:
            yield (
                "unsteady",
                f"{unsteady:.0%} of the measured time is of ops whose runs disagree;"
                " is the machine busy? `calibrate` runs them again",
            )
        if any(op.decides for op in traced.tape.ops):
            yield (
                "values",
                "of a batch decide sizes in this step; the peak is that of the traced"
                " batch, others may need a little more or less",
            )
        from autosac.planning import allocator_advice  # like `report`

        yield from unknown_optimizer(traced.tape, traced.optimizer)
        one = self.each[0]
        figures = one.budget_bytes, one.recompute_ms, one.step_ms
        told = [*hints(traced.units.refused), *allocator_advice.lines(self)]
        told += offload_advice.lines(traced, *figures)
        yield from (("hint", hint) for hint in told)

    def _why_dear(self, gap: str) -> tuple[str, str]:
        """Of a plan that takes much more time than is proven to be needed."""
        has_room = self.peak_bytes < self.budget_bytes
        if has_room and self.traced is not None and self.traced.redrawn:
            left = format_bytes(self.budget_bytes - self.peak_bytes)
            return (
                "room",
                f"{left} are left for steps of other draws or later in the training;"
                f" up to {gap} of the recomputation is for that",
            )
        if self.is_streamed:
            return (
                "warning",
                f"up to {gap} of the waiting may be avoidable, as far as its simple"
                " bound can tell; plan with a little more memory",
            )
        allocator = None if self.traced is None else self.traced.allocator
        if self.device != "cpu" and not (allocator and allocator.expandable_segments):
            return (
                "warning",
                f"up to {gap} of the recomputation may be avoidable, as far as a bound"
                " can tell that does not know how full the allocator's blocks get; plan"
                " with a little more memory, or for full ones: run with"
                " PYTORCH_ALLOC_CONF=expandable_segments:True and plan with"
                " `allocator`=autosac.AllocatorSettings(expandable_segments=True)",
            )
        return (
            "warning",
            f"up to {gap} of the recomputation may be avoidable; plan with"
            " `time_limit_s`=60 to search longer, or with a little more memory",
        )

    def _of_batches(self) -> str:
        return (
            f"{self.signatures[0]} ({self.num_batches}):"
            f" {format_bytes(self.peak_bytes)}, {format_ms(self.step_ms)} a step,"
            f" {format_ms(self.recompute_ms)} of it recomputation"
        )


def _release(version: str) -> str:
    """A version without the build it is of: 2.15.0 of 2.15.0+cu130."""
    return version.partition("+")[0]
