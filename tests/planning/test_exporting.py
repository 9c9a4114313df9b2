"""Other tools' settings: the peak that is told is that of the model under them."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)

import autosac
from autosac.planning.exporting import _frequencies

WIDTH, NUM_LAYERS = 32, 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Titan(nn.Module):
    """Its blocks are in `layers`, as torchtitan's are."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(NUM_LAYERS)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def loss_fn(output):
    return output.square().mean()


def profiled(model):
    inputs = torch.ones(256, WIDTH)
    return autosac.profile(model, inputs, optimizer="adamw", loss_fn=loss_fn)


def planned(profile):
    floor, baseline = autosac.floor(profile), profile.baseline_peak_bytes
    return autosac.plan(profile, memory_budget=(floor + 2 * baseline) // 3)


def test_torchtitan_gets_the_fewest_layers_that_fit_with_their_own_peak():
    model = Titan()
    profile = profiled(model)
    plan = planned(profile)
    export = plan.export("torchtitan", profile)

    peaks, times = {}, {}
    for every in range(1, NUM_LAYERS + 1):
        wrapped = Titan()
        for number, (name, layer) in enumerate(list(wrapped.layers.items()), 1):
            if number % every == 0:
                wrapped.layers[name] = checkpoint_wrapper(layer)
        step = profiled(wrapped)
        peaks[every], times[every] = step.baseline_peak_bytes, step.baseline_ms
    fitting = [every for every in peaks if peaks[every] <= plan.budget_bytes]
    best = min(fitting, key=lambda every: (times[every], -every))
    assert export.fits
    assert export.peak_bytes == peaks[best]
    assert export.step_ms == pytest.approx(times[best])
    assert plan.step_ms <= export.step_ms
    assert f'selective_ac_option = "{best}"' in export.settings
    assert all(type(layer) is Layer for layer in model.layers.values())


def test_settings_that_do_not_fit_are_those_of_least_peak_and_say_so():
    profile = profiled(Titan())
    floor = autosac.floor(profile)
    export = autosac.plan(profile, memory_budget=floor).export("torchtitan", profile)

    assert not export.fits
    assert export.peak_bytes > floor
    assert "does not fit" in str(export)


@pytest.mark.slow
def test_transformers_gets_a_call_whose_real_step_has_the_peak():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=48,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        use_cache=False,
    )
    ids = torch.ones(4, 64, dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids}
    model = transformers.LlamaForCausalLM(config)
    if not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("this version of transformers has no `every_n_layers`")
    profile = autosac.profile(model, inputs, optimizer="adamw")
    plan = planned(profile)
    export = plan.export("transformers", profile)

    assert not model.is_activation_checkpointing
    assert not model.get_input_embeddings()._forward_hooks
    assert export.fits
    exec(export.settings, {"model": model})
    step = autosac.profile(model, inputs, optimizer="adamw")
    assert export.peak_bytes == step.baseline_peak_bytes
    plain = autosac.plan(step, memory_budget="1GiB")

    def make_model():
        made = transformers.LlamaForCausalLM(config)
        exec(export.settings, {"model": made})
        return made

    verification = autosac.verify(
        plain, make_model, lambda: inputs, make_optimizer="adamw"
    )
    assert verification.identical
    assert 0 <= export.peak_bytes - verification.baseline_peak_bytes <= 1024


def test_what_cannot_be_exported_says_what_can():
    profile = profiled(nn.Sequential(Layer(), Layer()))
    plan = planned(profile)

    with pytest.raises(ValueError, match="'transformers', 'torchtitan'"):
        plan.export("megatron", profile)
    with pytest.raises(ValueError, match="without `layers`"):
        plan.export("torchtitan", profile)
    with pytest.raises(ValueError, match="activation_checkpointing_enable"):
        plan.export("transformers", profile)


@pytest.mark.parametrize("num_layers", range(1, 20))
def test_every_number_of_layers_that_can_be_had_is_tried_once(num_layers):
    tried = _frequencies(num_layers)

    assert tried == sorted(tried, reverse=True)
    every = range(1, num_layers + 1)
    for count in (lambda k: num_layers // k, lambda k: -(-num_layers // k)):
        assert {count(k) for k in tried} == {count(k) for k in every}
