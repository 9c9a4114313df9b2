"""The cheapest mesh of FSDP2 and tensor parallelism: each degree is planned and priced.

Ranks of one tensor-parallel group lie in one node and see one batch together, so that a
step of theirs trains on as many times fewer batches. Meshes are compared by the time of
a batch on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch.distributed import is_initialized

from autosac.errors import (
    ArgumentError,
    AutosacError,
    InfeasibleBudgetError,
    UnsupportedError,
)
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.formulating import Setting
from autosac.parallel.plans import Alternative, ParallelPlan
from autosac.parallel.racing import LATE
from autosac.parallel.tp_finding import find_styles
from autosac.parallel.tp_styles import TensorParallel, check, expanded
from autosac.parallel.tp_tracing import draws, exchange_ms, late_bytes, rank_profile
from autosac.profiles.profile import Profile
from autosac.quantities import format_bytes, format_ms, format_parts

TpPlan = Mapping[str, str] | Literal["tensor", "sequence"] | None
# Profile, cluster of one rank of each group, budget -> the best plan.
MakePlan = Callable[[Profile, ClusterSpec, int], ParallelPlan]


def read_mesh(
    mesh: Mapping[str, int | None] | None, tp_plan: Any, spec: ClusterSpec
) -> tuple[int, ...]:
    """Degrees of tensor parallelism to look at, least first.

    Args:
        mesh: Degrees by dimension, as in `plan_parallel`.
        tp_plan: Styles, which need a degree.
        spec: The cluster.

    Raises:
        ArgumentError: A dimension is not known, or a degree does not fit a node.
        UnsupportedError: Stages of pipelines are asked for.
    """
    asked = dict(mesh or {})
    pipeline, degree = asked.pop("pp", 1), asked.pop("tp", 1)
    if asked:
        raise ArgumentError(
            f"`mesh` has {', '.join(map(repr, asked))}, and its dimensions are 'tp' and"
            " 'pp'; sharding degrees of FSDP2 are given as `degrees`."
        )
    if pipeline not in (1, None):
        raise UnsupportedError(
            f"`mesh` asks for {pipeline} stages, and a mesh of a pipeline with FSDP2 or"
            " tensor parallelism is not planned: use `autosac.plan_pipeline`."
        )
    node = spec.gpus_per_node
    if degree is None:
        return tuple(n for n in range(1, node + 1) if node % n == 0)
    if not isinstance(degree, int) or degree < 1 or node % degree:
        raise ArgumentError(
            f"`mesh` has tp={degree!r}, which must divide the {node} GPUs of a node;"
            " None tries all that do."
        )
    if tp_plan is not None and degree == 1:
        raise ArgumentError(
            "`tp_plan` is given, and `mesh` asks for no tensor parallelism: pass"
            " mesh={'tp': 2}, or {'tp': None} to try all degrees of a node."
        )
    return (degree,)


def cheapest_mesh(
    profile: Profile,
    spec: ClusterSpec,
    budget_bytes: int,
    degrees: tuple[int, ...],
    tp_plan: TpPlan,
    setting: Setting,
    make_plan: MakePlan,
) -> ParallelPlan:
    """The plan whose batches take least time on a GPU.

    Args:
        profile: The step of the whole model.
        spec: The cluster.
        budget_bytes: Cap on the peak of a rank.
        degrees: Of tensor parallelism.
        tp_plan: Styles; or which to find, None for both kinds.
        setting: What is decided already.
        make_plan: Plans FSDP2 and recomputation.

    Raises:
        AutosacError: No degree divides the model; says why the first one does not.
        InfeasibleBudgetError: No mesh fits.
    """
    if is_initialized() and max(degrees) > 1:
        raise ArgumentError(
            "Tensor parallelism is planned in a group that stands for the ranks, and"
            " this process has a real one: plan before `init_process_group`, save the"
            " plan, and load it on every rank."
        )
    search = _Search(profile, spec, budget_bytes, setting, make_plan)
    for degree in degrees:
        for tensor in _divisions(profile, degree, tp_plan, search):
            search.enter(tensor)
    if search.best is not None:
        return replace(
            search.best,
            alternatives=(*search.best.alternatives, *search.lost()),
        )
    if search.least is not None:
        raise _infeasible(search.least, budget_bytes, spec, degrees)
    raise search.refused[0][1]


def _divisions(
    profile: Profile, degree: int, tp_plan: TpPlan, search: _Search
) -> list[TensorParallel]:
    """The ways to divide a model among so many ranks; others are noted as refused."""
    if degree == 1:
        return [TensorParallel()]
    model = profile.step.model
    found: list[dict[str, str]] = []
    try:
        if isinstance(tp_plan, Mapping):
            found.append(expanded(tp_plan, model))
        elif tp_plan in (None, "tensor"):
            found.append(find_styles(model))
        elif tp_plan == "sequence":
            found.append(find_styles(model, sequence=True))
        else:
            raise ArgumentError(
                f"`tp_plan` must be a dict of styles, 'tensor' or 'sequence', got"
                f" {tp_plan!r}."
            )
        if tp_plan is None:
            found += _if_known(profile)
        for styles in found:
            check(model, styles, degree)
    except AutosacError as error:
        search.refused.append((TensorParallel(degree=degree), error))
        return []
    return [
        TensorParallel(degree=degree, styles=styles, draws=draws(profile))
        for styles in found
    ]


def _if_known(profile: Profile) -> list[dict[str, str]]:
    """Styles with parts of the sequence between blocks, if they are known."""
    try:
        return [find_styles(profile.step.model, sequence=True)]
    except ArgumentError:
        return []


@dataclass
class _Search:
    """Meshes one after the other.

    Attributes:
        profile: The step of the whole model,
        spec: the cluster,
        budget_bytes: and the cap on the peak of a rank.
        setting: What is decided already.
        make_plan: Plans FSDP2 and recomputation.
        best: The cheapest plan so far.
        least: The least peak of a mesh that does not fit, with its division.
        others: Plans that lost.
        misfits: Divisions that do not fit, with why.
        refused: Divisions that cannot be, with why.
    """

    profile: Profile
    spec: ClusterSpec
    budget_bytes: int
    setting: Setting
    make_plan: MakePlan
    best: ParallelPlan | None = None
    least: tuple[InfeasibleBudgetError, TensorParallel] | None = None
    others: list[ParallelPlan] = field(default_factory=list)
    misfits: list[Alternative] = field(default_factory=list)
    refused: list[tuple[TensorParallel, Exception]] = field(default_factory=list)

    def enter(self, tensor: TensorParallel) -> None:
        """Plan one more mesh, and compare it with the best so far."""
        try:
            plan = self._planned(tensor)
        except InfeasibleBudgetError as error:
            lowest = error.lowest_peak_bytes
            if self.least is None or lowest < self.least[0].lowest_peak_bytes:
                self.least = error, tensor
            why = f"its least peak is {format_bytes(lowest)}"
            self.misfits.append(_unplanned(tensor, why))
            return
        except (AutosacError, ValueError) as error:
            self.refused.append((tensor, error))
            return
        if self.best is None:
            self.best = plan
        elif _batch_ms(plan) < _batch_ms(self.best):
            self.others.append(self.best)
            self.best = plan
        else:
            self.others.append(plan)

    def lost(self) -> list[Alternative]:
        """All meshes that were not taken, and why."""
        assert self.best is not None
        return [
            *(_dearer(other, self.best) for other in self.others),
            *self.misfits,
            *(_unplanned(tensor, str(error)) for tensor, error in self.refused),
        ]

    def _planned(self, tensor: TensorParallel) -> ParallelPlan:
        if tensor.degree == 1:
            return self.make_plan(self.profile, self.spec, self.budget_bytes)
        _check_step(self.profile)
        per_node = self.spec.gpus_per_node // tensor.degree
        others = replace(self.spec, gpus_per_node=per_node)
        rank = rank_profile(self.profile, tensor, self.spec, self.setting)
        late = late_bytes(rank, tensor.degree)
        try:
            plan = self.make_plan(rank, others, self.budget_bytes - late)
        except InfeasibleBudgetError as error:
            raise _with_late(error, late) from error
        return replace(
            plan,
            tensor=tensor,
            exchange_ms=exchange_ms(rank, tensor.degree),
            budget_bytes=self.budget_bytes,
            late_bytes=plan.late_bytes + late,
            model=self.profile.model,
            alternatives=tuple(
                replace(
                    other,
                    tp_degree=tensor.degree,
                    sequence_parallel=tensor.cuts_sequences,
                )
                for other in plan.alternatives
            ),
        )


def _unplanned(tensor: TensorParallel, why: str) -> Alternative:
    return Alternative(
        shard_degree=0,
        replicate_degree=0,
        tp_degree=tensor.degree,
        sequence_parallel=tensor.cuts_sequences,
        reason=why,
    )


def _batch_ms(plan: ParallelPlan) -> float:
    """Time of one batch on one GPU."""
    return plan.step_ms * plan.tensor.degree


def _dearer(plan: ParallelPlan, best: ParallelPlan) -> Alternative:
    more = _batch_ms(plan) / _batch_ms(best) - 1
    return Alternative(
        shard_degree=plan.sharding.shard_degree,
        replicate_degree=plan.sharding.replicate_degree,
        tp_degree=plan.tensor.degree,
        sequence_parallel=plan.tensor.cuts_sequences,
        reason=f"a batch takes {more:.1%} more: {format_ms(plan.step_ms)} a step",
        step_ms=plan.step_ms,
        peak_bytes=plan.peak_bytes,
    )


def _with_late(error: InfeasibleBudgetError, late: int) -> InfeasibleBudgetError:
    """The same, with what threads of gloo may hold of what ranks exchanged."""
    held = error.composition.get(LATE, 0) + late
    return InfeasibleBudgetError(
        str(error),
        budget_bytes=error.budget_bytes + late,
        lowest_peak_bytes=error.lowest_peak_bytes + late,
        composition={**error.composition, **({LATE: held} if held else {})},
    )


def _check_step(profile: Profile) -> None:
    if profile.step.clip_grad_norm is not None:
        raise UnsupportedError(
            "`clip_grad_norm` with tensor parallelism is not modelled, as PyTorch takes"
            " no norm of gradients on different meshes; leave one of them out."
        )


def _infeasible(
    least: tuple[InfeasibleBudgetError, TensorParallel],
    budget_bytes: int,
    spec: ClusterSpec,
    degrees: tuple[int, ...],
) -> InfeasibleBudgetError:
    error, tensor = least
    lowest = error.lowest_peak_bytes
    return InfeasibleBudgetError(
        f"No plan fits `memory_budget`={budget_bytes} ({format_bytes(budget_bytes)}) on"
        f" {spec.num_gpus} GPUs with tp of {', '.join(map(str, degrees))}: the lowest"
        f" peak of a rank is {lowest} bytes ({format_bytes(lowest)}) with"
        f" tp={tensor.degree}, made of {format_parts(error.composition)}. Raise the"
        " budget to that, or use more GPUs.",
        budget_bytes=budget_bytes,
        lowest_peak_bytes=lowest,
        composition=error.composition,
    )
