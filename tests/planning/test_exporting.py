"""Other tools' settings: the peak that is told is that of the model under them."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)

import autosac
from autosac.planning.export_targets import frequencies, of_megatron
from autosac.planning.exporting import time_ms
from autosac.planning.selective_targets import axolotl_lists, of_automodel

WIDTH, NUM_LAYERS, NUM_MEGATRON_LAYERS = 32, 6, 4


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


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.core_attention, self.proj = nn.Softmax(-1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.proj(self.core_attention(x @ x.T) @ x)


class MegatronLayer(nn.Module):
    """Its parts have the names of Megatron-Core's, and it returns a pair as those."""

    def __init__(self):
        super().__init__()
        self.self_attention, self.mlp = Attention(), Layer()

    def forward(self, x, context=None):
        return x + self.mlp(x + self.self_attention(x)), context


class Megatron(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(
            MegatronLayer() for _ in range(NUM_MEGATRON_LAYERS)
        )

    def forward(self, x):
        x, context = self.embedding(x), None
        for layer in self.decoder.layers:
            output = layer(x, context=context)
            x, context = output if isinstance(output, tuple) else (output, context)
        return x


def loss_fn(output):
    return output.square().mean()


def profiled(model):
    inputs = torch.ones(256, WIDTH)
    return autosac.profile(model, inputs, optimizer="adamw", loss_fn=loss_fn)


def planned(profile):
    floor, baseline = autosac.floor(profile), profile.baseline_peak_bytes
    return autosac.plan(profile, memory_budget=(floor + 2 * baseline) // 3)


@pytest.mark.slow
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
        peaks[every], times[every] = step.baseline_peak_bytes, time_ms(step, profile)
    fitting = [every for every in peaks if peaks[every] <= plan.budget_bytes]
    best = min(fitting, key=lambda every: (times[every], -every))
    assert export.fits
    assert export.peak_bytes == peaks[best]
    assert export.step_ms == pytest.approx(times[best])
    assert plan.step_ms <= export.step_ms
    assert f'selective_ac_option = "{best}"' in export.settings
    assert all(type(layer) is Layer for layer in model.layers.values())


def megatron_settings():
    """All that Megatron's flags can say, as traced: words -> peak and time."""
    results, plain = {}, profiled(Megatron())
    for family in of_megatron(Megatron()):
        for setting in family.settings:
            model = Megatron()
            setting.switch(model)
            step = profiled(model)
            results[setting.words] = step.baseline_peak_bytes, time_ms(step, plain)
    return results


@pytest.mark.slowest
def test_megatron_gets_the_fastest_flags_that_fit_with_their_own_peak():
    profile, settings = profiled(Megatron()), megatron_settings()
    floor, baseline = autosac.floor(profile), profile.baseline_peak_bytes
    kinds = set()
    for share in (0.02, 0.6, 0.95):
        budget = int(floor + share * (baseline - floor))
        plan = autosac.plan(profile, memory_budget=budget)
        export = plan.export("megatron", profile)

        peak_bytes, step_ms = settings[export.settings]
        assert (export.peak_bytes, export.step_ms) == (peak_bytes, step_ms)
        fitting = [ms for nbytes, ms in settings.values() if nbytes <= budget]
        assert export.fits == bool(fitting)
        if export.fits:
            assert export.step_ms == min(fitting)
            assert plan.step_ms <= export.step_ms
        else:
            assert export.peak_bytes == min(nbytes for nbytes, _ in settings.values())
        kinds.add(export.settings.partition("--recompute-num")[0])
    assert len(kinds) >= 2
    assert "--recompute-granularity full --recompute-method block " in kinds


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "words",
    [
        "--recompute-granularity selective --recompute-modules core_attn mlp",
        "--recompute-granularity full --recompute-method block"
        " --recompute-num-layers 2",
        "--recompute-granularity full --recompute-method uniform"
        " --recompute-num-layers 2",
    ],
)
def test_a_model_under_megatrons_flags_really_has_the_peak_and_the_same_gradients(
    words,
):
    (setting,) = [
        setting
        for family in of_megatron(Megatron())
        for setting in family.settings
        if setting.words == words
    ]
    x, plain, switched = torch.ones(256, WIDTH), Megatron(), Megatron()
    switched.load_state_dict(plain.state_dict())
    names = [name for name, _ in switched.named_parameters()]
    parameters = dict(switched.named_parameters())
    setting.switch(switched)
    for model in (plain, switched):
        loss_fn(model(x)).backward()
    for name in names:
        assert torch.equal(parameters[name].grad, plain.get_parameter(name).grad)

    def make_model():
        model = Megatron()
        setting.switch(model)
        return model

    step = profiled(make_model())
    verification = autosac.verify(
        autosac.plan(step, memory_budget="1GiB"),
        make_model,
        lambda: x,
        make_optimizer="adamw",
        loss_fn=loss_fn,
        timing_rounds=0,
    )
    assert verification.identical
    assert 0 <= step.baseline_peak_bytes - verification.baseline_peak_bytes <= 1024


def test_a_budget_that_the_plain_step_keeps_asks_for_nothing():
    profile = profiled(Titan())
    export = autosac.plan(profile, memory_budget="1GiB").export("torchtitan", profile)

    assert export.settings == "nothing: the plain step fits"
    assert export.peak_bytes == profile.baseline_peak_bytes


@pytest.mark.slow
def test_settings_that_do_not_fit_are_those_of_least_peak_and_say_so():
    profile = profiled(Titan())
    floor = autosac.floor(profile)
    export = autosac.plan(profile, memory_budget=floor).export("torchtitan", profile)

    assert not export.fits
    assert export.peak_bytes > floor
    assert "does not fit" in str(export)


TOKENS = {
    name: torch.ones(4, 64, dtype=torch.int64) for name in ("input_ids", "labels")
}


def llama(**options):
    transformers = pytest.importorskip("transformers")
    known = {
        "num_hidden_layers": 3,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 50,
        "use_cache": False,
    }
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**known, **options})
    )
    if not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("this version of transformers has no `every_n_layers`")
    return model


@pytest.mark.slow
def test_layers_that_save_some_ops_really_have_the_peak_and_the_same_gradients():
    settings = [
        setting
        for family in [*of_automodel(llama()), *axolotl_lists(llama())]
        for setting in family.settings
    ]
    peaks = {}
    for setting in settings:

        def make_model(setting=setting):
            model = llama(num_hidden_layers=2)
            setting.switch(model)
            return model

        step = autosac.profile(make_model(), TOKENS, optimizer="adamw")
        verification = autosac.verify(
            autosac.plan(step, memory_budget="1GiB"),
            make_model,
            lambda: TOKENS,
            make_optimizer="adamw",
            timing_rounds=0,
        )
        above = step.baseline_peak_bytes - verification.baseline_peak_bytes
        assert verification.identical
        assert 0 <= above <= 1024
        peaks[setting.words] = step.baseline_peak_bytes
    selective, full, *lists = peaks.values()
    plain = autosac.profile(llama(num_hidden_layers=2), TOKENS, optimizer="adamw")
    assert full < selective < plain.baseline_peak_bytes
    assert lists == sorted(lists, reverse=True)
    assert lists[-1] > full  # it saves attention besides


def backward_names(switch):
    """Names of ops that backward of one layer runs, with those that run again."""
    model = llama(num_hidden_layers=1)
    switch(model)
    tape = autosac.profile(model, TOKENS).tape
    begin = tape.phases["model backward"]
    return [
        op.name
        for op in tape.ops
        if op.start > begin and tape.modules[op.module].fqn.startswith("model.layers.0")
    ]


@pytest.mark.slow
def test_automodel_reruns_every_other_matmul_and_no_attention():
    selective, full = (f.settings[0].switch for f in of_automodel(llama()))
    forward_only = {"aten.rsqrt.default", "aten.silu.default"}

    assert forward_only <= set(backward_names(selective))
    # Seven in forward; backward has two for each, and the rerun stops at its last need.
    num_matmuls = [
        backward_names(switch).count("aten.mm.default") for switch in (selective, full)
    ]
    assert num_matmuls == [14 + 3, 14 + 6]
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert attention in backward_names(full)
    assert attention not in backward_names(selective)


@pytest.mark.slow
def test_what_automodel_checkpoints_by_rules_of_its_own_is_refused():
    frozen, sharing = llama(), llama(num_kv_shared_layers=2)
    frozen.model.layers[0].requires_grad_(False)
    two = llama()
    two.vision = nn.ModuleList(llama().model.layers)

    for model, words in (
        (frozen, "layers without trained parameters"),
        (sharing, "shares keys and values among layers"),
        (two, "layers in `model.layers`, `vision`, which"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            of_automodel(model)


@pytest.mark.slowest
def test_transformers_gets_a_call_whose_real_step_has_the_peak():
    inputs, model = TOKENS, llama()
    profile = autosac.profile(model, inputs, optimizer="adamw")
    plan = planned(profile)
    export = plan.export("transformers", profile)

    assert not model.is_activation_checkpointing
    assert not model.get_input_embeddings()._forward_hooks
    assert export.fits
    axolotl = plan.export("axolotl", profile)
    assert axolotl.settings.startswith("gradient_checkpointing: true\n")
    assert axolotl.fits
    assert axolotl.step_ms <= export.step_ms  # it can do the same, and more
    automodel = plan.export("automodel", profile)
    assert automodel.settings.startswith("distributed:\n  activation_checkpointing: ")
    megatron = plan.export("megatron", profile)
    assert megatron.fits
    assert "--recompute-granularity" in megatron.settings
    exec(export.settings, {"model": model})
    step = autosac.profile(model, inputs, optimizer="adamw")
    assert export.peak_bytes == step.baseline_peak_bytes
    plain = autosac.plan(step, memory_budget="1GiB")

    def make_model():
        made = llama()
        exec(export.settings, {"model": made})
        return made

    verification = autosac.verify(
        plain, make_model, lambda: inputs, make_optimizer="adamw", timing_rounds=0
    )
    assert verification.identical
    assert 0 <= export.peak_bytes - verification.baseline_peak_bytes <= 1024


def test_what_cannot_be_exported_says_what_can():
    profile = profiled(nn.Sequential(Layer(), Layer()))
    plan = planned(profile)

    with pytest.raises(ValueError, match="'transformers', 'torchtitan', 'megatron'"):
        plan.export("deepspeed", profile)
    with pytest.raises(ValueError, match="`ModuleList` named `layers`"):
        plan.export("megatron", profile)
    with pytest.raises(NotImplementedError, match=r"autosac.compile\(model, mem"):
        plan.export("compile", profile)
    with pytest.raises(ValueError, match="without `layers`"):
        plan.export("torchtitan", profile)
    with pytest.raises(ValueError, match="activation_checkpointing_enable"):
        plan.export("transformers", profile)


@pytest.mark.parametrize("num_layers", range(1, 20))
def test_every_number_of_layers_that_can_be_had_is_tried_once(num_layers):
    tried = frequencies(num_layers)

    assert tried == sorted(tried, reverse=True)
    every = range(1, num_layers + 1)
    for count in (lambda k: num_layers // k, lambda k: -(-num_layers // k)):
        assert {count(k) for k in tried} == {count(k) for k in every}


@pytest.mark.parametrize("number", [1, 2])
def test_checkpointed_layers_take_of_the_program_what_units_do(number):
    model = Titan()
    for name in [*model.layers][:number]:
        model.layers[name] = checkpoint_wrapper(model.layers[name])
    step, plain = profiled(model), profiled(Titan())
    unit = next(u for u in plain.units.candidates if u.fqn == "layers.0")

    priced_ms = time_ms(step, plain) - step.baseline_ms

    rerun = [plain.tape.ops[i] for i in unit.ops if not plain.tape.ops[i].is_view]
    most_ms = unit.followed_ms + len(rerun) * plain.device.program.rerun_ms
    assert number * plain.device.program.unit_ms < priced_ms <= number * most_ms
    assert time_ms(plain, plain) == plain.baseline_ms
