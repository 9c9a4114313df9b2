"""Mixtures of experts that ranks of a tensor-parallel group share."""

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama4 import modeling_llama4

from autosac.parallel.tp_finding import find_styles
from autosac.parallel.tp_styles import apply, expanded
from benchmarks.rank_server import run_ranks

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


def deepseek():
    more = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "n_group": 2}
    more |= {"v_head_dim": 8, "qk_nope_head_dim": 8, "topk_group": 1}
    more |= {"n_routed_experts": 4, "first_k_dense_replace": 1}
    return moe("DeepseekV3", **more)


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
        wanted = {fqn: p.grad for fqn, p in whole.named_parameters()}
        largest = max(g.abs().max() for g in wanted.values() if g is not None)
        for fqn, parameter in divided.named_parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            if wanted[fqn] is not None:
                off = (gradient - wanted[fqn]).abs().max()
                assert off <= 1e-5 * largest, (make, kind, fqn, off, largest)
        print(make.__name__, kind, "ok", flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_shared_experts_train_as_whole_ones(size):
    run_ranks(_hold_against_whole, size, size)
