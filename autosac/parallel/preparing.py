"""What a parallel plan begins with: the cluster, the traced step, its units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from autosac._compat_distributed import are_distributed
from autosac.errors import ArgumentError, UnsupportedError
from autosac.parallel.clusters import ClusterSpec, cluster_spec
from autosac.parallel.formulating import ParallelFormulation, Setting
from autosac.parallel.fsdp_candidates import with_parameters
from autosac.parallel.fsdp_checks import OF_FULLY_SHARD
from autosac.parallel.sharding import Sharding, fsdp_units
from autosac.parallel.solving import ParallelChooser
from autosac.profiles.compute_dtype import as_sharded, in_compute_dtype
from autosac.profiles.given import check_names, profile_of
from autosac.profiles.profile import Profile, calibrate
from autosac.profiles.restricting import restricted
from autosac.step.arguments import check_no_synced_norms
from autosac.step.marks import Marks, marked, marks_of
from autosac.tracing.collecting import no_collections

_OFFLOAD = ("offload", "host_budget", "offload_dir")


def cluster_of(cluster: str | ClusterSpec, num_gpus: int | None) -> ClusterSpec:
    """The cluster that was passed or named, with so many GPUs."""
    if not isinstance(cluster, ClusterSpec):
        return cluster_spec(cluster, num_gpus=num_gpus)
    return cluster if num_gpus is None else cluster.resized(num_gpus)


def check_no_offload(options: Mapping[str, Any]) -> None:
    """Refuse options of plans with offload where many plans are compared."""
    for name in _OFFLOAD:
        if name in options:
            raise UnsupportedError(
                f"`{name}` is for single plans: leave it out, or make the plan by"
                " `plan_parallel` or `plan_pipeline`."
            )


@no_collections()
def chooser_of(profile: Profile, setting: Setting) -> ParallelChooser:
    """The chooser for a setting; the profile keeps it."""
    if setting not in profile.parallel:
        if setting.link is None:
            plain: ParallelChooser | None = None
            form = ParallelFormulation(in_gathered_type(profile, setting), setting)
        else:
            plain = chooser_of(profile, replace(setting, link=None, host_bytes=None))
            known = plain.form
            form = ParallelFormulation(known.profile, setting, known.ranks)
        profile.parallel[setting] = ParallelChooser(form, plain)
    chooser: ParallelChooser = profile.parallel[setting]
    return chooser


def with_given_units(
    profile: Profile,
    setting: Setting,
    ac_units: Marks | None,
    fsdp_units: Marks | None,
) -> tuple[Profile, Setting]:
    """Both with the only units that there may be, as in `plan_parallel`.

    Of what a pattern or a class stands for, modules with parameters of their own are
    meant; a name means its module, whatever that has.
    """
    if fsdp_units is not None:
        tree = profile.tape.modules
        marks = marks_of(fsdp_units)
        meant = marked(marks, tree, name="fsdp_units")
        named = {tree.index[mark] for mark in marks if mark in tree.index}
        own = named | with_parameters(profile.tape, meant)
        if meant and not own:
            raise ArgumentError(
                "`fsdp_units` stands for modules without parameters alone, which are no"
                " FSDP units: name modules that have some."
            )
        setting = replace(setting, fsdp_units=frozenset(tree[i].fqn for i in own))
    only = None if ac_units is None else marks_of(ac_units)
    return restricted(profile, only), setting


def profile_for(
    spec: ClusterSpec,
    model: torch.nn.Module | Profile,
    inputs: Any,
    options: dict[str, Any],
    function: Callable[..., object],
) -> Profile:
    """The profile that was passed, or a new one, on a GPU of the cluster.

    Args:
        spec: The cluster.
        model: What was passed,
        inputs: with it,
        options: and besides.
        function: To which.
    """
    check_no_offload(options)
    check_names(options, function, advice=OF_FULLY_SHARD)
    if "device" in options:
        raise ArgumentError("`device` is that of `cluster`; leave it out.")
    own = model.step.model if isinstance(model, Profile) else model
    if isinstance(own, torch.nn.Module):
        check_no_synced_norms(own)
    if isinstance(model, Profile):
        profile = profile_of(model, inputs, options)
        if profile.device.name != spec.device.name:
            raise ArgumentError(
                f"The profile is for {profile.device.name!r}, and cluster"
                f" {spec.name!r} has {spec.device.name!r}; profile the model with that"
                " device."
            )
    else:
        profile = profile_of(model, inputs, {**options, "device": spec.device})
    assert isinstance(profile, Profile)
    if profile.far_state_bytes:
        raise UnsupportedError(
            "An `OffloadedOptimizer` is not planned for many GPUs: pass the optimizer"
            " that it is made of."
        )
    if are_distributed(map(type, profile.step.model.parameters())):
        raise UnsupportedError(
            "`model` has parameters that are distributed tensors: FSDP2 on top of that"
            " is not modelled. Pass the model as it was before, and `mesh`; or plan"
            " recomputation on one of its ranks with `autosac.plan`."
        )
    return profile


def in_gathered_type(profile: Profile, setting: Setting) -> Profile:
    """The step as FSDP2 runs it: under a mixed-precision policy, gradients sharded."""
    if profile.step.finds_gradients:
        sharded = as_sharded(profile)
        return in_gathered_type(
            calibrate(sharded) if profile.calibrated else sharded, setting
        )
    dtype = gathered_dtype(setting)
    if dtype is None or profile.step.compute_dtype is not None:
        return profile
    typed = in_compute_dtype(profile, dtype)
    return calibrate(typed) if profile.calibrated else typed


def gathered_dtype(setting: Setting) -> torch.dtype | None:
    """Type of gathered parameters, None for their own.

    Raises:
        ValueError: A name of a type means nothing, or the two do not go together.
        UnsupportedError: Gradients are reduced in a narrower type.
    """
    Sharding(  # which checks the names
        units=fsdp_units([]),
        shard_degree=1,
        param_dtype=setting.param_dtype,
        reduce_dtype=setting.reduce_dtype,
    )
    name = setting.param_dtype
    return None if name is None else getattr(torch, name)
