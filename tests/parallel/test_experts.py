"""Mixtures of experts that ranks of a tensor-parallel group share."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama4 import modeling_llama4
from transformers.models.mixtral import modeling_mixtral

import autosac
from autosac._compat import TORCH_VERSION
from autosac.devices.specs import device_spec
from autosac.parallel import tp_checks
from autosac.parallel.clusters import cluster_spec
from autosac.parallel.formulating import Setting
from autosac.parallel.tp_checks import check
from autosac.parallel.tp_finding import find_styles
from autosac.parallel.tp_styles import TensorParallel, apply, expanded
from autosac.parallel.tp_tracing import rank_profile
from benchmarks import allocator_shim, mesh_ranks
from benchmarks.mesh_ranks import planned
from benchmarks.rank_server import run_ranks
from tests.parallel.gradients import gradients_off

SPEC = replace(cluster_spec("pcie-l40s", num_gpus=4), device=device_spec("cpu"))
pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 14),
    reason="experts are traced on real tensors, and parts of them are not gathered",
)
VOCABULARY, LENGTH, WIDTH = 64, 16, 32
_SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "use_cache": False,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def moe(name, **more):
    """A mixture of Transformers by the prefix of its classes."""
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **more})
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def mixtral(**more):
    return moe("Mixtral", **{"num_local_experts": 4, **more})


def routed_mixtral():
    return mixtral(output_router_logits=True, router_aux_loss_coef=0.1)


def qwen3_moe():
    return moe("Qwen3Moe", num_experts=4, head_dim=8, mlp_only_layers=[1])


def qwen2_moe():
    return moe("Qwen2Moe", num_experts=4, shared_expert_intermediate_size=32)


def deepseek(name="DeepseekV3"):
    more = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "n_group": 2}
    more |= {"v_head_dim": 8, "qk_nope_head_dim": 8, "topk_group": 1}
    more |= {"n_routed_experts": 4, "first_k_dense_replace": 1}
    return moe(name, **more)


def deepseek_v2():
    return deepseek("DeepseekV2")


def olmoe():
    return moe("Olmoe", num_experts=4)


def gpt_oss():
    return moe("GptOss", num_local_experts=4, head_dim=8)


class Llama4(nn.Module):
    """Experts of Llama 4 alone, each of which gets all tokens."""

    def __init__(self):
        super().__init__()
        config = transformers.Llama4TextConfig(**_SIZES, num_local_experts=4)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.experts = modeling_llama4.Llama4TextExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, input_ids, labels):
        tokens = self.embed(input_ids).flatten(0, 1)
        loss = self.experts(tokens.repeat(4, 1)).square().mean()
        return CausalLMOutput(loss=loss)


def labelled():
    ids = {"input_ids": (2, LENGTH), "labels": (2, LENGTH)}
    return {name: torch.randint(VOCABULARY, size) for name, size in ids.items()}


TENSOR, SEQUENCE = {}, {"sequence": True}
EXPERT = {"whole_experts": True}
LLAMA4 = {
    "experts": "moe_tp_experts",
    "experts.gate_up_proj": "packed_rowwise",
    "experts.down_proj": "colwise",
}
FAMILIES = (
    *((mixtral, kind) for kind in (TENSOR, SEQUENCE, EXPERT, SEQUENCE | EXPERT)),
    *((routed_mixtral, kind) for kind in (SEQUENCE, SEQUENCE | EXPERT)),
    *((qwen3_moe, kind) for kind in (SEQUENCE, EXPERT)),
    *((qwen2_moe, kind) for kind in (TENSOR, SEQUENCE | EXPERT)),
    *((deepseek, kind) for kind in (TENSOR, EXPERT)),
    *((deepseek_v2, kind) for kind in (TENSOR, SEQUENCE | EXPERT)),
    *((olmoe, kind) for kind in (TENSOR, SEQUENCE)),
    (gpt_oss, EXPERT),
    (Llama4, LLAMA4),
)


def _seeded(make, seed):
    torch.manual_seed(seed)
    return make()


def _hold_against_whole(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    for make, kind in FAMILIES:
        whole, divided = (_seeded(make, 0) for _ in range(2))
        inputs = _seeded(labelled, 1)
        is_given = kind is LLAMA4
        apply(
            divided,
            mesh,
            expanded(kind, divided) if is_given else find_styles(divided, **kind),
        )
        losses = [model(**inputs).loss for model in (whole, divided)]
        for loss in losses:
            loss.backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6), make
        off = gradients_off(whole, divided)
        assert all(share <= 1e-5 for share in off.values()), (make, kind, off)


@pytest.mark.slowest
def test_shared_experts_train_as_whole_ones():
    run_ranks(_hold_against_whole, 4, 4)


def _of_one_layer():
    return mixtral(num_hidden_layers=1)


def _sharded(seed, mesh, kind):
    model = _seeded(_of_one_layer, seed)
    apply(model, mesh["tp"], find_styles(model, **kind))
    return fully_shard(model, mesh=mesh["shard"])


def _check_checkpoints(rank, directory):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    whole = _seeded(_of_one_layer, 0).state_dict()
    for kind in (TENSOR, EXPERT):
        checkpoint.save(_sharded(0, mesh, kind).state_dict(), checkpoint_id=directory)
        alone = _seeded(_of_one_layer, 1).state_dict()
        checkpoint.load(alone, checkpoint_id=directory, no_dist=True)
        parts, full = (_sharded(seed, mesh, kind) for seed in (2, 3))
        state = parts.state_dict()
        checkpoint.load(state, checkpoint_id=directory)
        parts.load_state_dict(state)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(full, dict(whole), options=options)
        for fqn, wanted in whole.items():
            assert torch.equal(alone[fqn], wanted), (kind, fqn)
            for model in (parts, full):
                own = model.get_parameter(fqn).full_tensor()
                assert torch.equal(own, wanted), (kind, fqn)


def _stepped(model):
    """An optimizer that has taken a step."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(**_seeded(labelled, 1)).loss.backward()
    optimizer.step()
    return optimizer


def _whole_states(model, optimizer):
    return {
        (fqn, name): getattr(value, "full_tensor", value.clone)()
        for fqn, parameter in model.named_parameters()
        for name, value in optimizer.state[parameter].items()
    }


def _check_states(rank, directory):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    divided, whole = _sharded(0, mesh, TENSOR), _seeded(_of_one_layer, 0)
    for saved in (divided, whole):
        own = _stepped(saved)
        truth, where = _whole_states(saved, own), f"{directory}/{saved is whole}"
        state = get_optimizer_state_dict(saved, own)
        if saved is divided or rank == 0:
            checkpoint.save(state, checkpoint_id=where, no_dist=saved is whole)
        torch.distributed.barrier()
        loaded = _sharded(1, mesh, TENSOR)
        optimizer = _stepped(loaded)
        state = get_optimizer_state_dict(loaded, optimizer)
        checkpoint.load(state, checkpoint_id=where)
        set_optimizer_state_dict(loaded, optimizer, state)
        states = _whole_states(loaded, optimizer)
        assert states.keys() == truth.keys()
        for key, value in states.items():
            assert torch.equal(value, truth[key]), (saved is whole, key)
        early = torch.optim.AdamW(loaded.parameters())  # has taken no step
        early.load_state_dict(optimizer.state_dict())
        loaded(**_seeded(labelled, 1)).loss.backward()
        early.step()
        optimizer.step()
        states, of_early = (_whole_states(loaded, o) for o in (optimizer, early))
        for key, value in states.items():
            assert torch.equal(value, of_early[key])


@pytest.mark.slowest
def test_states_of_packed_experts_are_saved_and_loaded(tmp_path):
    run_ranks(_check_states, 4, str(tmp_path))


@pytest.mark.slow
def test_checkpoints_are_those_of_one_process(tmp_path):
    run_ranks(_check_checkpoints, 4, str(tmp_path))


@pytest.mark.parametrize("make", [mixtral, qwen3_moe, qwen2_moe, deepseek])
def test_experts_without_a_plan_get_the_styles_that_transformers_gives_them(make):
    model = make()
    modules = dict(model.named_modules())
    experts = next(modules[fqn] for fqn in modules if fqn.endswith(".experts"))
    plan = model.tp_plan.items()
    where = "model.layers.*.mlp."
    wanted = {fqn.removeprefix(where): own for fqn, own in plan if "mlp.experts" in fqn}
    assert find_styles(nn.ModuleDict({"experts": experts})) == wanted


class Mixture(nn.Module):
    """Experts of Transformers with a part that a case changes."""

    def __init__(self, change=None):
        super().__init__()
        config = transformers.MixtralConfig(**_SIZES, num_local_experts=4)
        self.experts = modeling_mixtral.MixtralExperts(config)
        if change is not None:
            change(self.experts)


def _with_norm(experts):
    experts.norm = nn.RMSNorm(WIDTH)


def _normed(experts):
    experts.has_post_expert_norm = True


def _wrapped(experts):
    experts.forward = experts.forward


def _with_bias(experts):
    experts.down_proj_bias = nn.Parameter(torch.zeros(4, WIDTH))


def _with_scale(experts):
    experts.scale = nn.Parameter(torch.ones(4))


WIDE, WHOLE = ({"whole_experts": False}, {"whole_experts": True})
REFUSED = (
    (None, WHOLE, 3, "4 experts, which tp=3 does not divide"),
    (None, WIDE, 5, "48 columns each, which tp=5 does not divide"),
    (_with_norm, WHOLE, 2, "`experts.norm.weight` would see a part"),
    (_wrapped, WIDE, 2, "has a forward of its own"),
    (_wrapped, WHOLE, 2, "has a forward of its own"),
)


@pytest.mark.parametrize(("change", "kind", "degree", "why"), REFUSED)
def test_experts_that_ranks_cannot_share_are_refused(change, kind, degree, why):
    model = Mixture(change)
    styles = find_styles(model, **kind)
    with pytest.raises(autosac.ArgumentError, match=why):
        check(model, styles, degree)


GIVEN = find_styles(Mixture())
MISGIVEN = (
    (_with_bias, GIVEN, "`experts.down_proj_bias` .* has no style"),
    (_with_scale, {**GIVEN, "experts.scale": "colwise"}, "scale` is a vector"),
    (_normed, GIVEN, "`experts.post_expert_norm` would see a part"),
    (None, {**GIVEN, "experts.act_fn": "colwise"}, "`experts.act_fn` would see"),
    (None, {**GIVEN, "experts.down_proj": "grouped_gemm"}, "the style 'grouped_gemm'"),
    (
        None,
        {"experts": "ep_dispatch_experts"},
        "`experts.gate_up_proj` .* has no style",
    ),
)


@pytest.mark.parametrize(("change", "styles", "why"), MISGIVEN)
def test_given_styles_that_experts_cannot_have_are_refused(change, styles, why):
    with pytest.raises(autosac.ArgumentError, match=why):
        check(Mixture(change), styles, 2)


def test_keys_that_heads_share_are_known_by_their_size():
    attention = nn.ModuleDict({"kv_a_proj": nn.Linear(WIDTH, 12)})
    styles = {"kv_a_proj": "mla_kv_a_proj"}
    with pytest.raises(autosac.ArgumentError, match="`qk_rope_head_dim`"):
        check(attention, styles, 2)
    attention.qk_rope_head_dim = 4
    check(attention, styles, 2)


def test_parts_of_two_in_one_are_refused_where_torch_cannot_gather_them(monkeypatch):
    monkeypatch.setattr(tp_checks, "TORCH_VERSION", (2, 10))
    with pytest.raises(autosac.ArgumentError, match=r"torch 2\.10 cannot gather"):
        check(Mixture(), GIVEN, 2)
    check(Mixture(), find_styles(Mixture(), whole_experts=True), 2)


def test_experts_that_do_not_skip_rows_of_others_are_not_shared_as_wholes():
    styles = dict.fromkeys(
        ["experts.gate_up_proj", "experts.down_proj"], "grouped_gemm"
    )
    with pytest.raises(autosac.ArgumentError, match="skip rows of other ranks"):
        check(Llama4(), {"experts": "ep_dispatch_experts", **styles}, 2)
    with pytest.raises(autosac.ArgumentError, match="has none"):
        find_styles(Llama4(), whole_experts=True)


def test_experts_with_a_bias_of_their_outputs_are_only_shared_as_wholes():
    model = gpt_oss()
    assert not TensorParallel(styles=find_styles(model)).divides_experts
    assert TensorParallel(styles=find_styles(model, **EXPERT)).has_whole_experts


def cpu_plan(profile, **options):
    return autosac.plan_parallel(
        profile, cluster=SPEC, memory_budget="1GiB", **{"mesh": {"tp": 2}, **options}
    )


@pytest.fixture(scope="module")
def profile():
    return autosac.profile(mixtral(), labelled(), optimizer="adamw")


def _products(profile):
    names = ("aten._grouped_mm.default",)
    return sum(op.flops for op in profile.tape.ops if op.name in names)


@pytest.mark.slow
@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("kind", [TENSOR, EXPERT])
def test_ranks_share_the_products_of_experts_evenly(profile, kind):
    styles = find_styles(profile.step.model, **kind)
    tensor = TensorParallel(degree=2, styles=styles)
    rank = rank_profile(profile, tensor, SPEC, Setting())
    assert 2 * _products(rank) == _products(profile)


@pytest.mark.slow
def test_numbers_of_experts_that_a_degree_does_not_divide_are_listed():
    profile = autosac.profile(mixtral(num_local_experts=3), labelled())
    plan = cpu_plan(profile, tp_plan=None)
    assert plan.tensor.divides_experts
    assert not plan.tensor.has_whole_experts
    why = [other.reason for other in plan.alternatives if other.expert_parallel]
    assert len(why) == 2  # with parts of the sequence, and without
    assert all("3 experts, which tp=2 does not divide" in reason for reason in why)
    with pytest.raises(autosac.ArgumentError, match="3 experts"):
        cpu_plan(profile, tp_plan="expert")


@pytest.mark.slow
def test_a_plan_with_whole_experts_is_saved_and_says_so(profile, tmp_path):
    plan = cpu_plan(profile, tp_plan="expert")
    assert "tensor and expert parallelism" in str(plan)
    assert any(other.expert_parallel for other in plan.alternatives)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert autosac.ParallelPlan.load(path) == plan


@pytest.mark.slow
def test_experts_whose_rows_values_count_are_not_shared():
    profile = autosac.profile(mixtral(experts_implementation="eager"), labelled())
    with pytest.raises(autosac.UnsupportedError, match="grouped_mm"):
        cpu_plan(profile)


@pytest.mark.slow
def test_widths_that_products_of_groups_do_not_take_are_refused():
    # Rows of 6 numbers of four bytes; one process has 12.
    profile = autosac.profile(mixtral(intermediate_size=12), labelled())
    with pytest.raises(autosac.ArgumentError, match="multiple of 16 bytes"):
        cpu_plan(profile, tp_plan="tensor")
    assert cpu_plan(profile).tensor.has_whole_experts


@pytest.mark.slowest
@pytest.mark.skipif(allocator_shim.library() is None, reason="needs a C compiler")
@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # oneDNN is switched off
def test_real_ranks_keep_every_promise_wherever_tokens_go(short_models):
    # Under the tight cap; other kinds have tests of their own.
    cells = [next(planned(name, 2, 1, ("expert",))) for name in ("MIXTRAL", "UNEVEN")]
    assert all(cell.plan.policy for cell in cells)
    for row in mesh_ranks.run_ranks(cells, 2):
        assert row.is_kept, row
