"""What tests of pipelines share to be short."""

from dataclasses import replace
from functools import partial

import pytest

from autosac.pipelines import micro_batches
from benchmarks import stage_mesh_ranks


@pytest.fixture
def short_models(monkeypatch, traced_in_test):
    """Those of `stage_mesh_ranks` have two blocks each, and are traced once."""
    recipes = stage_mesh_ranks.RECIPES
    for name, make_model in (
        ("LLAMA", partial(stage_mesh_ranks.small_llama, num_blocks=2)),
        ("ODD", partial(stage_mesh_ranks.OddGPT, num_blocks=2)),
        ("VARIED", _short_varied),
    ):
        short = replace(recipes[name], make_model=make_model)
        monkeypatch.setitem(recipes, name, short)


def _short_varied():
    model = stage_mesh_ranks.VariedGPT()
    model.h = model.h[1:3]
    return model


@pytest.fixture(scope="module")
def traced_once():
    """Traces of stages do not depend on budgets and clusters: keep them."""
    with pytest.MonkeyPatch.context() as patch:
        _keep_traces(patch)
        yield


@pytest.fixture
def traced_in_test(monkeypatch):
    """As `traced_once`, for one test."""
    _keep_traces(monkeypatch)


def _keep_traces(patch):
    for name in ("stage_step", "profile_in"):
        patch.setattr(micro_batches, name, _kept(getattr(micro_batches, name)))
    measure = micro_batches.calibrated_if_present
    patch.setattr(micro_batches, "calibrated_if_present", _measured_once(measure))


def _kept(trace):
    known = {}

    def kept(*args, **options):
        (module, received), dtypes = args[-2:], args[:-2]
        how = [str(options.get(n)) for n in ("parallel", "device", "optimizer")]
        how += [options.get("loss_fn") is None, dtypes]
        key = str((_described(module), received.shape, received.dtype, how))
        if key not in known:
            known[key] = trace(*args, **options)
        own = known[key]
        # Nor do copies know of plans that were made of it.
        return own.each(replace) if trace.__name__ == "stage_step" else replace(own)

    return kept


def _described(stage):
    """What a trace depends on: blocks, and what a rank has of them."""
    blocks = [(fqn, str(child)) for fqn, child in stage.named_children()]
    parts = [
        (fqn, getattr(p, "_local_tensor", p).shape, p.requires_grad)
        for fqn, p in stage.named_parameters()
    ]
    modes = {
        type(child.forward.mode).__name__
        for child in stage.modules()
        if hasattr(child.forward, "mode")
    }
    return blocks, parts, modes, stage._tokens_given


def _measured_once(measure):
    known = {}  # by tape; with the profile, so that no id comes again

    def measured(profile):
        key = id(profile.tape)
        if key not in known:
            known[key] = profile, measure(profile)
        return replace(known[key][1])  # knows of no plan that was made of it

    return measured
