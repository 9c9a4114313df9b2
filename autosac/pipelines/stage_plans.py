"""What a plan of a pipeline says of one of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autosac.parallel.followed_plans import plan_data
from autosac.pipelines.blocks import Passed
from autosac.planning.plan_data import PlanData
from autosac.profiles.step_facts import StepFacts
from autosac.step.batch_signatures import signature_of
from autosac.units.policies import OpPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage of a pipeline.

    Attributes:
        fqns: Its blocks, in order.
        policy: FQN of each AC unit -> share (0 to 1) of its activation memory that is
            recomputed instead of saved.
        op_policies: What happens to every op of each AC unit.
        peak_bytes: Predicted peak of its rank, replayed.
        forward_ms: Predicted time of one micro-batch forward,
        backward_ms: and backward, recomputation included,
        recompute_ms: of which this is recomputation,
        exchange_ms: and what of both, recomputation apart, ranks that share slices or
            a sequence spend on collectives.
        gather_ms: Predicted time in which FSDP2 gathers its parameters, once in a step,
        reduce_ms: and reduces its gradients, likewise.
        late_bytes: What a rank may hold besides while slow threads of gloo still have
            what these ranks have exchanged and reduced; 0 on a GPU.
        received: What it gets,
        sent: and what it hands on.
        waits_ms: What of its recomputation is waiting for far memory.
        far_bytes: Most bytes that it has there, of all its micro-batches in flight.
        state_bytes: What a rank keeps of the optimizer's state for it; None in older
            files,
        facts: and what else is known of the step of a micro-batch.
    """

    fqns: tuple[str, ...]
    policy: dict[str, float]
    op_policies: tuple[OpPolicy, ...]
    peak_bytes: int
    forward_ms: float
    backward_ms: float
    recompute_ms: float
    exchange_ms: float
    gather_ms: float
    reduce_ms: float
    late_bytes: int
    received: Passed
    sent: Passed
    waits_ms: float = 0.0
    far_bytes: int = 0
    state_bytes: int | None = None
    facts: StepFacts = field(default_factory=StepFacts)

    def data(self, of_all: Mapping[str, Any]) -> PlanData:
        """What the stage follows.

        Args:
            of_all: What all stages of its plan have in common.
        """
        signature = signature_of((self.received.example("meta"),), {}, ("x",))
        state = {} if self.state_bytes is None else {"optimizer": self.state_bytes}
        return plan_data(
            op_policies=self.op_policies,
            policy=self.policy,
            peak_bytes=self.peak_bytes,
            composition=state,
            signatures=(signature,),
            facts=self.facts,
            recompute_ms=self.recompute_ms,
            offloaded_bytes=self.far_bytes,
            **of_all,
        )
