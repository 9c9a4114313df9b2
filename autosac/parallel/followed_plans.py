"""Plans of ranks in force: units, and what looks at how the model is trained.

A rank follows one plan whatever its batch, so that ranks go on running the same
collectives; what its training does otherwise is said as under `autosac.Plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from autosac.checkpointing.batch_variants import install_plans
from autosac.parallel.fsdp_hooks import PLACES
from autosac.parallel.fsdp_memory import RankTimeline
from autosac.parallel.sharding import Sharding
from autosac.planning.headroom import headroom_bytes
from autosac.planning.plan_data import PlanData
from autosac.planning.unseen_batches import UnseenBatches
from autosac.profiles.fingerprints import Fingerprint, frozen_names
from autosac.profiles.profile import Profile
from autosac.profiles.step_facts import StepFacts, step_facts
from autosac.step.batch_signatures import BatchSignature
from autosac.step.tape import CATEGORIES
from autosac.units.policies import OpPolicy


def rank_signature(profile: Profile) -> BatchSignature:
    """The signature of what a rank's model is called with, once FSDP2 has cast it."""
    dtype = profile.step.compute_dtype
    return profile.signature if dtype is None else profile.signature.cast(dtype)


def rank_facts(
    profile: Profile, timeline: RankTimeline, sharding: Sharding
) -> StepFacts:
    """What is known of a rank's step.

    Args:
        profile: The step, as it is without FSDP2.
        timeline: Its memory under a plan, with what FSDP2 makes.
        sharding: What that does.
    """
    facts = step_facts(profile, headroom_bytes(profile, timeline, PLACES))
    step = profile.step
    finds_gradients = step.adds_gradients or step.gradients_in_forward
    facts = replace(facts, finds_gradients=finds_gradients)
    return replace(facts, forward_bytes=None) if casts_alone(sharding) else facts


def casts_alone(sharding: Sharding) -> bool:
    """Whether hooks cast parameters in forward by ops as a model's own."""
    return sharding.shard_degree == 1 and sharding.param_dtype is not None


def plan_data(
    *,
    op_policies: tuple[OpPolicy, ...],
    policy: dict[str, float],
    budget_bytes: int,
    peak_bytes: int,
    composition: Mapping[str, int],
    model: Fingerprint,
    signatures: tuple[BatchSignature, ...],
    facts: StepFacts,
    **others: Any,
) -> PlanData:
    """What a rank follows, as a plan of one process.

    Args:
        op_policies: What its units do,
        policy: and the share that they recompute.
        budget_bytes: Cap on its peak.
        peak_bytes: Its peak,
        composition: and bytes by category at that, as far as they are known. What
            FSDP2 holds there does not grow with the batch.
        model: What the plan is for,
        signatures: its batch; none if that is not known,
        facts: and what is known of its step.
        others: Further attributes.
    """
    lasting = {name: composition[name] for name in CATEGORIES if name in composition}
    of_fsdp = sum(composition.values()) - sum(lasting.values())
    lasting["parameter"] = lasting.get("parameter", 0) + of_fsdp
    return PlanData(
        policy=policy,
        op_policies=op_policies,
        budget_bytes=budget_bytes,
        peak_bytes=peak_bytes,
        baseline_peak_bytes=peak_bytes,  # not known, and not asked for
        composition=lasting,
        model=model,
        signatures=signatures,
        bound_ms=0.0,
        measured_fraction=0.0,
        dry_run=False,
        **asdict(facts),
        **others,
    )


def follow(model: torch.nn.Module, plan: PlanData, num_calls: int = 1) -> None:
    """Let a rank's model follow its plan, before it is sharded.

    Args:
        model: Its tensors and sequences divided already; a stage has a part of what
            the plan is for.
        plan: As `plan_data` makes it.
        num_calls: How often a step calls the model.
    """
    unseen = UnseenBatches("recompute", plan.budget_bytes, None, may_add=False)
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    frozen = [name for name in frozen_names(plan.model) if name in own]
    install_plans(model, [plan], unseen, frozen, num_calls)
