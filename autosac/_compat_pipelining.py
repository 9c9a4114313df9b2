"""Private PyTorch APIs of pipelines (torch 2.10 to 2.15).

A schedule of torch.distributed.pipelining runs on stages of a process group. What each
rank computes under it, and in which order, follows from numbers alone: schedules of one
stage per rank run here on a stage that only notes what it is asked for, and the others
work their order out on a namespace. (The former have a `pipeline_order` as well, which
they do not run by: that of 1F1B numbers micro-batches of the last rank from 1.)

Source: torch/distributed/pipelining/schedules.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, schedules

from autosac._compat_distributed import local
from autosac.step.arguments import warn

# From torch 2.15 on what is received has memory only while it is needed, and what was
# sent is let go of when it has arrived.
HOLDS_LESS = hasattr(schedules, "_PendingSendTracker")

Computation = tuple[bool, int, int]  # is forward, stage, micro-batch


def compute_order(
    name: str,
    rank: int,
    *,
    num_ranks: int,
    stages_per_rank: int,
    num_micro_batches: int,
) -> list[Computation]:
    """What a rank computes under a schedule, in order.

    Args:
        name: Of the schedule, as in `get_schedule_class`.
        rank: The rank.
        num_ranks: Ranks of the pipeline.
        stages_per_rank: 1 for GPipe and 1F1B.
        num_micro_batches: Of a step.
    """
    schedule: Any = schedules.get_schedule_class(name)
    if issubclass(schedule, schedules.PipelineScheduleSingle):
        return _noted(schedule, rank, num_ranks, num_micro_batches)
    num_rounds = max(1, num_micro_batches // num_ranks)
    numbers = SimpleNamespace(
        pp_group_size=num_ranks,
        n_local_stages=stages_per_rank,
        _n_microbatches=num_micro_batches,
        number_of_rounds=num_rounds,
        microbatches_per_round=num_micro_batches // num_rounds,
    )
    forward = schedules._ComputationType.FORWARD
    return [
        (action.computation_type is forward, action[0], action[2])
        for action in schedule._calculate_single_rank_operations(numbers, rank)
        if action is not None
    ]


class Stage(PipelineStage):
    """A stage as its plan knows it, whichever schedule runs it.

    Its parameters may be slices: each rank scales what it has. PyTorch scales gradients
    as distributed tensors, which torch 2.10 does not do in place where one is a part of
    a sum.

    Attributes:
        most_in_flight: Micro-batches that the plan knows to have gone forward, and not
            yet all the way backward.
    """

    def __init__(self, *args: Any, most_in_flight: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.most_in_flight = most_in_flight
        self._in_flight: set[int] = set()
        self._has_warned = False

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients; a pipeline does so at the end of a step."""
        for parameter in self.submod.parameters():
            if parameter.grad is not None and grad_scale_factor != 1:
                local(parameter.grad).div_(grad_scale_factor)

    def clear_runtime_states(self) -> None:
        """Called as a step begins."""
        self._in_flight.clear()
        super().clear_runtime_states()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Run a micro-batch forward."""
        if torch.is_grad_enabled():
            self._in_flight.add(fwd_chunk_id)
        number = len(self._in_flight)
        if number > self.most_in_flight and not self._has_warned:
            self._has_warned = True
            warn(
                f"Stage {self.stage_index} has {number} micro-batches in flight, and"
                f" its plan knows {self.most_in_flight}: the peak may be above the"
                " budget. Run the schedule that `plan.schedule(stages, loss_fn)` gives."
            )
        return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Run a micro-batch backward, all the way or for its inputs alone."""
        result = super().backward_one_chunk(
            bwd_chunk_id, loss, full_backward, *args, **options
        )
        if full_backward:
            self._in_flight.discard(bwd_chunk_id)
        return result

    def backward_weight_one_chunk(
        self, bwd_chunk_id: int, *args: Any, **options: Any
    ) -> Any:
        """Run a micro-batch backward for the weights."""
        result = super().backward_weight_one_chunk(bwd_chunk_id, *args, **options)
        self._in_flight.discard(bwd_chunk_id)
        return result


class _NotingStage:
    """Stands for a stage: it sends, receives and computes nothing."""

    def __init__(self, rank: int) -> None:
        self.stage_index, self.is_last = rank, False
        self.order: list[Computation] = []

    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> None:
        self.order.append((True, self.stage_index, number))

    def backward_one_chunk(self, number: int, **_: Any) -> None:
        self.order.append((False, self.stage_index, number))

    def no_ops(self, _: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = no_ops
    get_bwd_recv_ops = get_bwd_send_ops = no_ops

    def nothing(self, _: int) -> None:
        pass

    perform_reduce_grad = release_fwd_send_outputs = nothing


def _noted(
    schedule: Any, rank: int, num_ranks: int, num_micro_batches: int
) -> list[Computation]:
    class Noting(schedule):  # type: ignore[misc]
        def __init__(self) -> None:
            self._stage = _NotingStage(rank)
            self._num_stages, self._n_microbatches = num_ranks, num_micro_batches
            self._internal_losses: list[Any] = []
            self._has_backward, self._loss_fn, self.scale_grads = True, None, True
            self._finalize_gradients = True

        def _initialize_stage(self, *_: Any, **__: Any) -> None:
            pass

    noting = Noting()
    noting._step_microbatches()
    return noting._stage.order
