"""Ways to divide a model or a sequence among ranks, planned one after the other.

Ranks of one tensor-parallel group lie in one node and see one batch together, like
those of one context-parallel group, so that a step of theirs trains on as many times
fewer batches. Plans are compared by the time of a batch on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import nn
from torch.distributed import is_initialized

from autosac.errors import ArgumentError, AutosacError, InfeasibleBudgetError
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.context_parallel import WHOLE_SEQUENCE, ContextParallel
from autosac.parallel.tp_checks import check
from autosac.parallel.tp_finding import find_styles, with_divided_loss
from autosac.parallel.tp_styles import WHOLE, TensorParallel, expanded
from autosac.quantities import format_bytes, format_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """Slices of tensors, and parts of the sequence of one batch.

    Attributes:
        tensor: How neighbouring ranks share slices.
        context: How groups of these share the sequence.
    """

    tensor: TensorParallel
    context: ContextParallel

    @property
    def degree(self) -> int:
        """How many ranks see one batch together."""
        return self.tensor.degree * self.context.degree


Division = TensorParallel | ContextParallel | Both
TpPlan = Mapping[str, str] | Literal["tensor", "sequence", "expert"] | None


def division_of(tensor: TensorParallel, context: ContextParallel) -> Division:
    """How ranks see one batch together."""
    if context.degree == 1:
        return tensor
    if tensor.degree == 1:
        return context
    return Both(tensor=tensor, context=context)


def parts_of(division: Division) -> tuple[TensorParallel, ContextParallel]:
    """What a division does to tensors, and to the sequence."""
    if isinstance(division, Both):
        return division.tensor, division.context
    if isinstance(division, ContextParallel):
        return WHOLE, division
    return division, WHOLE_SEQUENCE


class MeshPlan(Protocol):
    """A plan of a step whose ranks share slices of tensors, or a sequence."""

    @property
    def step_ms(self) -> float:
        """Time of the step."""

    @property
    def division(self) -> Division:
        """How they do."""


_Plan = TypeVar("_Plan", bound=MeshPlan)


@dataclass(frozen=True, slots=True)
class Lost(Generic[_Plan]):
    """A division that was not taken.

    Attributes:
        division: Which.
        reason: Why it lost.
        plan: Its plan, None if there is none.
    """

    division: Division
    reason: str
    plan: _Plan | None = None


def read_dimensions(
    mesh: Mapping[str, int | None] | None, known: Mapping[str, int | None]
) -> dict[str, int | None]:
    """Degree of each dimension of a mesh.

    Args:
        mesh: Degrees by dimension, as in `plan_parallel`.
        known: Those that there may be, with the degree if `mesh` does not say.

    Raises:
        ArgumentError: A dimension is not known.
    """
    if not isinstance(mesh, Mapping | None):
        raise ArgumentError(
            f"`mesh` must be degrees by dimension, such as {{'tp': 8}}, got {mesh!r}."
        )
    asked = dict(mesh or {})
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise ArgumentError(
            f"`mesh` has {', '.join(map(repr, unknown))}, and its dimensions are"
            f" {', '.join(map(repr, known))}; sharding degrees of FSDP2 are the"
            " `degrees` of `plan_parallel`, and 'fsdp' in `plan_pipeline`."
        )
    for name, degree in asked.items():
        if degree is not None and type(degree) is not int:
            raise ArgumentError(
                f"`mesh` has {name}={degree!r}, which must be a whole number of at"
                " least 1, or None to try all that fit."
            )
    return {**known, **asked}


def read_degrees(
    degree: Any, tp_plan: Any, loss_parallel: bool, spec: ClusterSpec
) -> tuple[int, ...]:
    """Degrees of tensor parallelism to look at, least first.

    Args:
        degree: One, or None for all that divide a node.
        tp_plan: Styles, which need a degree,
        loss_parallel: and so do divided logits.
        spec: The cluster.

    Raises:
        ArgumentError: The degree does not fit a node, or there is none for the styles.
    """
    node = spec.gpus_per_node
    if degree is None:
        return tuple(n for n in range(1, node + 1) if node % n == 0)
    if not isinstance(degree, int) or degree < 1 or node % degree:
        raise ArgumentError(
            f"`mesh` has tp={degree!r}, which must divide the {node} GPUs of a node;"
            " None tries all that do."
        )
    if degree == 1 and (tp_plan is not None or loss_parallel):
        name = "loss_parallel" if tp_plan is None else "tp_plan"
        raise ArgumentError(
            f"`{name}` is given, and `mesh` asks for no tensor parallelism: pass"
            " mesh={'tp': 2}, or {'tp': None} to try all degrees of a node."
        )
    return (degree,)


def check_no_group(degrees: Sequence[int]) -> None:
    """Refuse to plan such degrees of tensor parallelism on a rank.

    Raises:
        ArgumentError: The process is a rank already.
    """
    if is_initialized() and max(degrees) > 1:
        raise ArgumentError(
            "Tensor parallelism is planned in a group that stands for the ranks,"
            " and this process has a real one: plan before `init_process_group`,"
            " save the plan, and load it on every rank."
        )


@dataclass
class MeshRace(Generic[_Plan]):
    """Divisions one after the other, those whose batches may be cheapest first.

    Attributes:
        planned: Plans a division.
        least_ms: No batch takes less on a GPU with a division.
        best: The cheapest plan so far.
        least: The least peak of a division that does not fit, with the division.
        others: Plans that lost.
        slower: Divisions that their bounds rule out, with these.
        misfits: Divisions that do not fit, with why.
        refused: Divisions that cannot be, with why.
        bounded: Divisions that take part, with their bounds.
    """

    planned: Callable[[Any], _Plan]
    least_ms: Callable[[Any], float] = lambda _: 0.0
    best: _Plan | None = None
    least: tuple[InfeasibleBudgetError, Division] | None = None
    others: list[_Plan] = field(default_factory=list)
    slower: list[tuple[float, Division]] = field(default_factory=list)
    misfits: list[Lost[_Plan]] = field(default_factory=list)
    refused: list[tuple[Division, Exception]] = field(default_factory=list)
    bounded: list[tuple[float, Division]] = field(default_factory=list)

    def run(
        self,
        model: nn.Module,
        degrees: Sequence[int],
        tp_plan: TpPlan,
        loss_parallel: bool,
        beside: Callable[[int], Sequence[ContextParallel]] = lambda _: [WHOLE_SEQUENCE],
    ) -> None:
        """Plan all divisions of a model's tensors.

        Args:
            model: Undivided.
            degrees: Over how many ranks.
            tp_plan: Styles; or which to find, None for both kinds.
            loss_parallel: Logits stay divided.
            beside: Such a degree -> how groups of so many ranks may share a sequence.

        Raises:
            ArgumentError: The process is a rank already.
        """
        check_no_group(degrees)
        for degree in degrees:
            try:
                tensors = divisions(model, degree, tp_plan, loss_parallel)
            except AutosacError as error:
                self.refused.append((TensorParallel(degree=degree), error))
                continue
            for context in beside(degree):
                for tensor in tensors:
                    self.add(division_of(tensor, context))
        self.finish()

    def add(self, division: Division) -> None:
        """Let one more division take part."""
        try:
            self.bounded.append((self.least_ms(division), division))
        except (AutosacError, ValueError) as error:
            self.refused.append((division, error))

    def finish(self) -> None:
        """Plan the divisions that were added."""
        for least_ms, division in sorted(self.bounded, key=itemgetter(0)):
            self._enter(division, least_ms)

    def _enter(self, division: Division, least_ms: float) -> None:
        """Plan one more division, and compare it with the best so far.

        Args:
            division: Which.
            least_ms: Its batches take no less, so that it may be lost before.
        """
        if self.best is not None and least_ms >= batch_ms(self.best):
            self.slower.append((least_ms, division))
            return
        try:
            plan = self.planned(division)
        except InfeasibleBudgetError as error:
            lowest = error.lowest_peak_bytes
            if self.least is None or lowest < self.least[0].lowest_peak_bytes:
                self.least = error, division
            why = f"its least peak is {format_bytes(lowest)}"
            self.misfits.append(Lost(division, why))
            return
        except (AutosacError, ValueError) as error:
            self.refused.append((division, error))
            return
        if self.best is None:
            self.best = plan
        elif batch_ms(plan) < batch_ms(self.best):
            self.others.append(self.best)
            self.best = plan
        else:
            self.others.append(plan)

    def lost(self) -> list[Lost[_Plan]]:
        """All divisions that were not taken, and why."""
        assert self.best is not None
        best_ms = batch_ms(self.best)
        return [
            *(
                Lost(
                    other.division,
                    _dearer(other.step_ms, other.division, best_ms),
                    other,
                )
                for other in self.others
            ),
            *(
                Lost(
                    division,
                    _dearer(
                        least_ms / division.degree,
                        division,
                        best_ms,
                        at_least=" at least",
                    ),
                )
                for least_ms, division in self.slower
            ),
            *self.misfits,
            *(Lost(division, str(error)) for division, error in self.refused),
        ]


def batch_ms(plan: MeshPlan) -> float:
    """Time of one batch on one GPU."""
    return plan.step_ms * plan.division.degree


def _dearer(
    step_ms: float, division: Division, best_ms: float, *, at_least: str = ""
) -> str:
    """What a batch takes on a GPU with a division, beside the best plan's."""
    own_ms, shared = step_ms * division.degree, ""
    if division.degree > 1:
        shared = f" ({division.degree} ranks share each step of {format_ms(step_ms)})"
    return (
        f"a batch takes {format_ms(own_ms)} of a GPU{at_least}{shared},"
        f" {own_ms / best_ms - 1:.1%} more than the {format_ms(best_ms)} here"
    )


def divisions(
    model: nn.Module, degree: int, tp_plan: TpPlan, loss_parallel: bool
) -> list[TensorParallel]:
    """The ways to divide a model among so many ranks.

    Raises:
        AutosacError: None can be.
    """
    if degree == 1:
        return [TensorParallel()]
    found: list[dict[str, str]] = []
    if isinstance(tp_plan, Mapping):
        found.append(expanded(tp_plan, model))
    elif tp_plan in (None, "tensor"):
        found.append(find_styles(model))
    elif tp_plan == "sequence":
        found.append(find_styles(model, sequence=True))
    elif tp_plan == "expert":
        found.append(find_styles(model, whole_experts=True))
        found += _if_known(model, sequence=True, whole_experts=True)
    else:
        raise ArgumentError(
            f"`tp_plan` must be a dict of styles, 'tensor', 'sequence' or 'expert', got"
            f" {tp_plan!r}; leave it out to try all."
        )
    if tp_plan is None:
        found += _if_known(model, sequence=True)
        found += _if_known(model, whole_experts=True)
        found += _if_known(model, sequence=True, whole_experts=True)
    if loss_parallel:
        found = list(map(with_divided_loss, found))
    tensors = [TensorParallel(degree=degree, styles=styles) for styles in found]
    if not any(tensor.divides_experts for tensor in tensors):
        for styles in found:
            check(model, styles, degree)
    return tensors  # those of experts may be divisible in one way only: ranks see


def _if_known(model: nn.Module, **kind: bool) -> list[dict[str, str]]:
    """Styles of a kind, as `find_styles` takes it, if they are known."""
    try:
        return [find_styles(model, **kind)]
    except ArgumentError:
        return []
