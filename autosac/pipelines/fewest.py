"""The fewest GPUs on which a step fits, with stages of a pipeline or without."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from autosac.errors import ArgumentError, InfeasibleBudgetError
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.fewest import fewest_gpus
from autosac.parallel.formulating import Setting
from autosac.parallel.fsdp_checks import OF_FULLY_SHARD
from autosac.parallel.preparing import (
    check_no_offload,
    chooser_of,
    cluster_of,
    profile_for,
    with_given_units,
)
from autosac.pipelines.asked_meshes import AskedMesh
from autosac.pipelines.mesh_choosing import MeshSearch, parts
from autosac.pipelines.planning import given_batch
from autosac.profiles.given import check_names
from autosac.profiles.profile import Profile
from autosac.quantities import parse_bytes, whole_number
from autosac.step.arguments import read_fsdp_dtypes
from autosac.step.marks import Marks


def min_gpus(
    model: torch.nn.Module | Profile,
    inputs: Any = None,
    *,
    cluster: str | ClusterSpec,
    memory_budget: int | str,
    most_gpus: int = 65_536,
    mesh: Mapping[str, int | None] | None = None,
    param_dtype: torch.dtype | str | None = None,
    reduce_dtype: torch.dtype | str | None = None,
    ac_units: Marks | None = None,
    fsdp_units: Marks | None = None,
    **options: Any,
) -> int | None:
    """Fewest GPUs on which a step fits the budget.

    Without `mesh` all GPUs share all parameters. Sizes are parts of one node, then
    whole nodes.

    Args:
        model: As in `plan_parallel`, like all that follows; with `mesh` as in
            `plan_pipeline`.
        inputs: Of one rank; with `mesh` any rows, which stand for all.
        cluster: Says what nodes are like; how many it has does not matter.
        memory_budget: Cap on the peak of a rank.
        most_gpus: Where to stop looking.
        mesh: Meshes with stages that come into question, such as ``{"pp": None,
            "fsdp": None, "tp": None}``; `target`, `loss_fn` and `global_batch` of
            `plan_pipeline` are needed then, and its other arguments taken.
        param_dtype: Type in which parameters are gathered, such as ``torch.bfloat16``
            or ``"bf16"``.
        reduce_dtype: Type in which gradients are reduced, likewise.
        ac_units: The only modules that may be AC units.
        fsdp_units: The FSDP units besides the model itself.
        options: As in `profile`, but `device`.

    Returns:
        That number, or None if `most_gpus` are not enough.

    Raises:
        ValueError: An argument cannot be read.
        UnsupportedError: The memory of such a step is not modelled.
    """
    whole_number(most_gpus, name="most_gpus")
    spec = cluster_of(cluster, None)
    if mesh is not None:
        if isinstance(model, Profile) or (ac_units, fsdp_units) != (None, None):
            raise ArgumentError(
                "Pipelines take no profile, nor `ac_units` and `fsdp_units`: pass the"
                " model alone, or no `mesh`."
            )
        check_no_offload(options)
        asked_names = {field.name for field in fields(AskedMesh)}
        check_names(options, min_gpus, {"target", *asked_names}, OF_FULLY_SHARD)
        target, loss_fn = options.pop("target", None), options.pop("loss_fn", None)
        if loss_fn is None:
            raise ArgumentError(
                "`mesh` asks for stages, and `loss_fn` is missing: pass a function of"
                " output and target, and `target`."
            )
        names = asked_names & options.keys()
        asked = AskedMesh(
            mesh=mesh,
            memory_budget=memory_budget,
            **read_fsdp_dtypes(param_dtype, reduce_dtype),
            **{name: options.pop(name) for name in names},
        )
        most = _at_most(spec, most_gpus)
        given = given_batch(model, inputs, target, loss_fn, most, options)
        return _fewest(asked.search(given))
    profile = profile_for(spec, model, inputs, options, min_gpus)
    setting = Setting(**read_fsdp_dtypes(param_dtype, reduce_dtype))
    chooser = chooser_of(*with_given_units(profile, setting, ac_units, fsdp_units))
    budget_bytes = parse_bytes(memory_budget, total_bytes=spec.device.memory_bytes)
    return fewest_gpus(chooser, spec, budget_bytes, most_gpus=most_gpus)


def _at_most(spec: ClusterSpec, most_gpus: int) -> ClusterSpec:
    """The largest cluster of so many GPUs."""
    nodes = most_gpus // spec.gpus_per_node
    return spec.resized(nodes * spec.gpus_per_node or most_gpus)


def _fewest(search: MeshSearch) -> int | None:
    """Fewest GPUs of which some make up a mesh that fits.

    What fits on some GPUs fits on more, of which it leaves the others idle: sizes are
    doubled until a plan fits, from the first one on that what ranks keep all the time
    does not rule out, and then halved.
    """
    sizes = list(parts(search.cluster))[::-1]
    searches = [replace(search, cluster=cluster) for cluster in sizes]
    first = next((i for i, one in enumerate(searches) if one.can_fit()), None)
    if first is None:
        return None
    tried, place, step = first, first, 1
    while not _fits(searches[place]):
        tried = place + 1
        if tried == len(searches):
            return None
        place, step = min(place + step, len(searches) - 1), 2 * step
    place = bisect_left(searches, True, tried, place, key=_fits)
    return sizes[place].num_gpus


def _fits(search: MeshSearch) -> bool:
    try:
        search.run()
    except InfeasibleBudgetError:
        return False
    return True
