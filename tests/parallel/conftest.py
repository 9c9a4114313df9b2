"""What tests of many GPUs share to be short."""

import pytest

from benchmarks import mesh_ranks
from tests.parallel import short_models as models


@pytest.fixture
def short_models(monkeypatch):
    """Those of `mesh_ranks` have two blocks each, on ranks too."""
    for name, recipe in models.RECIPES.items():
        monkeypatch.setitem(mesh_ranks.RECIPES, name, recipe)
    monkeypatch.setattr(mesh_ranks, "_run_all", models.run_all)
