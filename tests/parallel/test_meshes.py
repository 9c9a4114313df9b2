"""Tensor parallelism: which models can be divided, and plans of FSDP2 with it."""

import itertools
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

import autosac
from autosac._compat_distributed import fake_group
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import cluster_spec
from autosac.parallel.tp_finding import find_styles, with_divided_loss
from autosac.parallel.tp_styles import TensorParallel, apply, check
from benchmarks import allocator_shim, mesh_ranks
from benchmarks.kept_promises import KINDS
from benchmarks.rank_server import run_ranks
from tests.parallel.gradients import gradients_off

VOCABULARY, LENGTH, WIDTH = 64, 16, 32
SPEC = replace(cluster_spec("pcie-l40s", num_gpus=4), device=device_spec("cpu"))


def config(kind, **more):
    return kind(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **{"max_position_embeddings": 32, **more},
    )


def llama(**more):
    more = {"num_key_value_heads": 2, "use_cache": False, **more}
    return transformers.LlamaForCausalLM(config(transformers.LlamaConfig, **more))


def qwen3():
    more = {"num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
    return transformers.Qwen3ForCausalLM(config(transformers.Qwen3Config, **more))


def phi3():
    """Its packed projections are gathered, and what follows gets them whole."""
    more = {"num_key_value_heads": 2, "use_cache": False}
    return transformers.Phi3ForCausalLM(config(transformers.Phi3Config, **more))


def olmo2():
    """Its queries and keys are gathered for norms over all heads."""
    more = {"num_key_value_heads": 2, "use_cache": False}
    return transformers.Olmo2ForCausalLM(config(transformers.Olmo2Config, **more))


def bert():
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(config(transformers.BertConfig, **none))


def vit():
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
        )
    )


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=WIDTH,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            vocab_size=VOCABULARY,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


class TitanAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = 8
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, 16, bias=False) for _ in range(2))

    def forward(self, x, scale):
        batch, length, _ = x.shape
        query, key, value = (
            part(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for part in (self.wq, self.wk, self.wv)
        )
        key, value = (part.repeat_interleave(2, 1) for part in (key, value))
        mixed = functional.scaled_dot_product_attention(
            query * scale, key, value, is_causal=True
        )
        return self.wo(mixed.transpose(1, 2).flatten(2))


class TitanMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 64, bias=False) for _ in range(2))
        self.w2 = nn.Linear(64, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class TitanBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = TitanAttention(), TitanMlp()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x, scale):
        x = x + self.attention(self.attention_norm(x), scale)
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    """A decoder with the names of torchtitan."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, LENGTH)[:, None])
        self.layers = nn.ModuleDict({str(i): TitanBlock() for i in range(2)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.scale)
        return self.output(self.norm(x))


def labelled():
    ids = {"input_ids": (2, LENGTH), "labels": (2, LENGTH)}
    return {name: torch.randint(VOCABULARY, size) for name, size in ids.items()}


def pictures():
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.arange(2) % 2}


def tokens():
    return torch.randint(VOCABULARY, (2, LENGTH))


def partly_labelled():
    inputs = labelled()
    inputs["labels"][:, 3:7] = -100  # ignored
    return inputs


def tied_llama():
    return llama(tie_word_embeddings=True)


BOTH = (False, True)  # with parts of the sequence between blocks
LOSS = "loss"  # and with logits that stay divided
# torch 2.10 mixes up two kinds of divided embeddings in one process.
FAMILIES = {
    "padded": (
        *((llama, labelled, sequence) for sequence in BOTH),
        *((tied_llama, labelled, sequence) for sequence in BOTH),
        (qwen3, labelled, True),
        (bert, labelled, False),
        (vit, pictures, False),
    ),
    "gathered": tuple((make, labelled, s) for make in (phi3, olmo2) for s in BOTH),
    "T5": ((t5, labelled, False),),
    "torchtitan": tuple((Titan, tokens, sequence) for sequence in BOTH),
    "loss": tuple((make, partly_labelled, LOSS) for make in (llama, tied_llama)),
    "GPT": tuple((mesh_ranks.GPT, tokens, sequence) for sequence in BOTH),
}


def loss_of(model, inputs):
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    loss = getattr(output, "loss", None)
    return functional.softplus(output).mean() if loss is None else loss


def _seeded(make, seed):
    torch.manual_seed(seed)
    return make()


def _hold_against_whole(rank, name):
    mesh = init_device_mesh("cpu", (2,))
    for make, make_inputs, sequence in FAMILIES[name]:
        whole, divided = (_seeded(make, 0).train() for _ in range(2))
        inputs = _seeded(make_inputs, 1)
        styles = find_styles(divided, sequence=bool(sequence))
        apply(divided, mesh, with_divided_loss(styles) if sequence == LOSS else styles)
        with loss_parallel():
            losses = [loss_of(model, inputs) for model in (whole, divided)]
            for loss in losses:
                loss.backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6), make
        off = gradients_off(whole, divided)
        assert all(share <= 1e-5 for share in off.values()), (make, sequence, off)


@pytest.mark.slowest_but_first
@pytest.mark.parametrize("name", FAMILIES)
def test_models_that_are_divided_by_found_styles_train_as_whole_ones(name):
    run_ranks(_hold_against_whole, 2, name)


def test_the_plan_that_a_model_brings_along_is_taken():
    model = llama()
    styles = find_styles(model)
    for pattern, style in model.tp_plan.items():
        fqn = pattern.replace("*", "1")
        if fqn in dict(model.named_modules()):
            assert styles[fqn] == style
    assert styles["model.layers.0.self_attn"] == "whole_input"
    assert styles["model.layers.0.mlp"] == "whole_input"


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)


class Counting(TitanAttention):
    def __init__(self):
        super().__init__()
        self.n_heads = 4

    def forward(self, x):
        return self.wo(self.wq(x).view(*x.shape[:2], self.n_heads, -1).flatten(2))


def _normed():
    attention = TitanAttention()
    attention.q_norm = nn.RMSNorm(8)
    return attention


CUT = {"wq": "colwise", "wo": "rowwise"}
REFUSED = (
    (Packed, {"qkv": "colwise"}, 2, "packs several projections"),
    (TitanAttention, CUT, 8, "4 heads of 8, which tp=8 does not divide"),
    (Counting, CUT, 2, "reads `n_heads`, which counts all heads"),
    (_normed, CUT, 2, "`q_norm` sees some of the heads"),
    (Titan, {"output": "colwise_gather_output"}, 3, "64 outputs, .* make that 66"),
    (Titan, {"output": "loss_parallel"}, 3, "64 outputs, .* make that 66"),
    (Titan, {"tok_embeddings": "embedding_rowwise"}, 5, "64 entries"),
    (Titan, {"norm": "colwise"}, 2, "is for torch.nn.Linear"),
    (Titan, {"layers.0.feed_forward.w2": "rowwise"}, 5, "64 inputs"),
)


@pytest.mark.parametrize(("make", "styles", "degree", "why"), REFUSED)
def test_what_cannot_be_divided_is_refused(make, styles, degree, why):
    with pytest.raises(autosac.ArgumentError, match=why):
        check(make(), styles, degree)


def test_a_parameter_that_is_divided_in_two_ways_is_refused():
    with fake_group(2), pytest.raises(autosac.ArgumentError, match="are one parameter"):
        mesh = init_device_mesh("cpu", (2,))
        apply(tied_llama(), mesh, {"lm_head": "colwise_gather_output"})


def test_frozen_parameters_stay_frozen():
    model = Titan().requires_grad_(False)
    with fake_group(2):
        apply(model, init_device_mesh("cpu", (2,)), find_styles(model, sequence=True))
    assert not any(parameter.requires_grad for parameter in model.parameters())


def plan_of(model, inputs, **options):
    return autosac.plan_parallel(
        model,
        inputs,
        **{"cluster": "hgx-h100", "num_gpus": 8, "memory_budget": "1GiB", **options},
    )


def softplus(output):
    return functional.softplus(output).mean()


MISUSED = (
    ({"mesh": {"pp": 2}}, autosac.UnsupportedError, "plan_pipeline.*num_ranks=2"),
    ({"mesh": {"ep": 2}}, autosac.ArgumentError, "'ep'"),
    ({"mesh": {"tp": 3}}, autosac.ArgumentError, "must divide the 8 GPUs"),
    ({"tp_plan": "tensor"}, autosac.ArgumentError, "asks for no tensor parallelism"),
    ({"mesh": {"tp": 2}, "tp_plan": "rows"}, autosac.ArgumentError, "'rows'"),
    ({"mesh": {"tp": 2}, "tp_plan": {"x": "colwise"}}, autosac.ArgumentError, "'x'"),
    ({"mesh": {"tp": 8}}, autosac.ArgumentError, "does not divide"),
    (
        {"mesh": {"tp": 2}, "clip_grad_norm": 1.0},
        autosac.UnsupportedError,
        "clip_grad_norm",
    ),
)


@pytest.mark.parametrize(("options", "error", "why"), MISUSED)
def test_what_a_mesh_cannot_be_is_refused(options, error, why):
    with pytest.raises(error, match=why):
        plan_of(Titan(), tokens(), loss_fn=softplus, **options)


def test_a_process_that_is_a_rank_plans_no_mesh():
    with fake_group(2), pytest.raises(autosac.ArgumentError, match="before"):
        plan_of(Titan(), tokens(), loss_fn=softplus, mesh={"tp": 2})


@pytest.fixture(scope="module")
def profile():
    return autosac.profile(Titan(), tokens(), loss_fn=softplus, optimizer="adamw")


def cpu_plan(profile, cap, **options):
    return autosac.plan_parallel(profile, cluster=SPEC, memory_budget=cap, **options)


def test_no_mesh_is_a_mesh_of_one(profile):
    plans = [cpu_plan(profile, "1GiB", mesh=m) for m in (None, {"tp": 1, "pp": 1})]
    assert plans[0] == plans[1]
    assert plans[0].mesh_dim_names == ("shard",)


@pytest.mark.slow
def test_the_cheapest_batch_wins_and_the_plan_says_what_lost(profile, tmp_path):
    plan = cpu_plan(profile, "1GiB", mesh={"tp": None})
    assert plan.tensor.degree == 1  # everything fits: nothing is to be exchanged
    degrees = [other.tp_degree for other in plan.alternatives if other.tp_degree > 1]
    assert degrees == [2, 2, 4]  # four ranks would part the heads of keys
    assert "a batch takes" in str(plan)
    assert "does not divide" in str(plan)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert autosac.ParallelPlan.load(path) == plan


@pytest.mark.slow
def test_less_memory_is_what_division_is_for(profile):
    with pytest.raises(autosac.InfeasibleBudgetError) as caught:
        cpu_plan(profile, 1000)
    whole_bytes = caught.value.lowest_peak_bytes
    with pytest.raises(autosac.InfeasibleBudgetError) as caught:
        cpu_plan(profile, 1000, mesh={"tp": 2})
    least_bytes = caught.value.lowest_peak_bytes
    assert least_bytes < whole_bytes
    with pytest.raises(autosac.InfeasibleBudgetError):
        cpu_plan(profile, least_bytes - 1, mesh={"tp": 2})
    plan = cpu_plan(profile, least_bytes, mesh={"tp": None})
    assert plan.tensor.degree == 2
    assert "a step of one batch for every 2 ranks: " in str(plan)
    assert plan.highest_peak_bytes <= least_bytes
    assert plan.mesh_dim_names == ("shard", "tp")
    assert plan.num_gpus == 4
    assert 0 < plan.exchange_ms <= plan.compute_ms
    assert any("least peak" in other.reason for other in plan.alternatives)


@pytest.mark.slow
def test_more_memory_is_never_slower(profile):
    with pytest.raises(autosac.InfeasibleBudgetError) as caught:
        cpu_plan(profile, 1000, mesh={"tp": 2})
    least = caught.value.lowest_peak_bytes
    caps = [int(least * share) for share in (1, 1.1, 1.25, 1.5, 2, 4)]
    plans = [cpu_plan(profile, cap, mesh={"tp": 2}) for cap in caps]
    times = [plan.step_ms for plan in plans]
    assert all(fast <= slow for slow, fast in itertools.pairwise(times))
    assert all(
        plan.highest_peak_bytes <= cap for plan, cap in zip(plans, caps, strict=True)
    )


@pytest.mark.slow
def test_a_model_for_gpus_is_planned_on_the_meta_device():
    with torch.device("meta"):
        model, inputs = Titan().to(torch.bfloat16), tokens()
    plan = plan_of(
        model,
        inputs,
        loss_fn=softplus,
        optimizer=torch.optim.AdamW,
        mesh={"tp": 2},
        tp_plan="sequence",
    )
    assert plan.tensor.cuts_sequences
    assert plan.mesh_shape[-1] == 2
    assert not any(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.slow
def test_only_steps_that_draw_ask_for_equal_seeds(profile):
    plan = cpu_plan(profile, "1GiB", mesh={"tp": 2})
    assert not plan.tensor.draws  # though an attention could have dropout

    class Dropping(Titan):
        def forward(self, tokens):
            return functional.dropout(super().forward(tokens), 0.1)

    plan = plan_of(Dropping(), tokens(), loss_fn=softplus, mesh={"tp": 2})
    assert plan.tensor.draws


@pytest.mark.slow
def test_mixed_precision_is_traced_in_the_gathered_type():
    options = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    profile = autosac.profile(llama(), labelled(), optimizer="adamw", device="h100")
    plans = [plan_of(profile, None, mesh={"tp": 2}, **o) for o in ({}, options)]
    assert plans[1].exchange_ms < plans[0].exchange_ms  # half the bytes
    assert plans[1].sharding.param_dtype == "bfloat16"


def _with_other_seeds(rank):
    tensor = TensorParallel(degree=2, styles=find_styles(Titan()), draws=True)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(rank)
    with pytest.raises(autosac.ArgumentError, match="have seeds"):
        tensor.apply(Titan(), mesh)
    torch.manual_seed(0)
    tensor.apply(Titan(), mesh)


@pytest.mark.slow
def test_ranks_that_must_draw_alike_have_one_seed():
    run_ranks(_with_other_seeds, 2)


@pytest.mark.slowest
@pytest.mark.skipif(allocator_shim.library() is None, reason="needs a C compiler")
@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # oneDNN is switched off
def test_real_ranks_keep_cap_prediction_and_gradients(short_models):
    # A tight cap without parts of the sequence between blocks, a loose one with them;
    # parts all the time, and divided logits, are in `test_context_parallel`.
    tight, *_, loose = mesh_ranks.planned("GPT", 4, 2, KINDS)
    cells = [tight, loose]
    assert all(cell.plan.policy for cell in cells)
    for row in mesh_ranks.run_ranks(cells, 4):
        assert row.is_kept, row
