"""What tests of pipelines share to be short."""

from dataclasses import replace
from functools import partial

import pytest

from autosac.pipelines import micro_batches
from benchmarks import stage_mesh_ranks


@pytest.fixture
def short_models(monkeypatch):
    """Those of `stage_mesh_ranks` have two blocks each."""
    recipes = stage_mesh_ranks.RECIPES
    for name, make_model in (
        ("LLAMA", stage_mesh_ranks.small_llama),
        ("ODD", stage_mesh_ranks.OddGPT),
    ):
        short = replace(recipes[name], make_model=partial(make_model, num_blocks=2))
        monkeypatch.setitem(recipes, name, short)


@pytest.fixture(scope="module")
def traced_once():
    """Traces of stages do not depend on budgets and clusters: keep them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stage_step", "profile_in"):
            patch.setattr(micro_batches, name, _kept(getattr(micro_batches, name)))
        yield


def _kept(trace):
    known = {}

    def kept(*args, **options):
        (module, received), dtypes = args[-2:], args[:-2]
        blocks = [(fqn, str(child)) for fqn, child in module.named_children()]
        how = options.get("parallel"), options.get("loss_fn") is None, dtypes
        key = str((blocks, received.shape, received.dtype, how))
        if key not in known:
            known[key] = trace(*args, **options)
        own = known[key]
        return replace(own) if trace.__name__ == "stage_step" else own

    return kept
