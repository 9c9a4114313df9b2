"""What tests of pipelines share to be short."""

from dataclasses import replace
from functools import partial

import pytest

from benchmarks import stage_mesh_ranks, stage_models
from benchmarks.kept_traces import kept_traces


@pytest.fixture
def short_models(monkeypatch, traced_in_test):
    """Those of `stage_mesh_ranks` have two blocks each, and are traced once."""
    recipes = stage_mesh_ranks.RECIPES
    for name, make_model in (
        ("LLAMA", partial(stage_models.small_llama, num_blocks=2)),
        ("ODD", partial(stage_models.OddGPT, num_blocks=2)),
        ("VARIED", _short_varied),
    ):
        short = replace(recipes[name], make_model=make_model)
        monkeypatch.setitem(recipes, name, short)


def _short_varied():
    model = stage_models.VariedGPT()
    model.h = model.h[1:3]
    return model


@pytest.fixture(scope="module")
def traced_once():
    """Traces of stages do not depend on budgets and clusters: keep them."""
    with kept_traces():
        yield


@pytest.fixture
def traced_in_test():
    """As `traced_once`, for one test."""
    with kept_traces():
        yield
