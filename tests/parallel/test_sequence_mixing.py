"""Which models context parallelism refuses: tokens must meet in attention alone."""

from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import autosac
from benchmarks import mesh_ranks
from tests.parallel.test_context_parallel import SPEC, softplus, tokens
from tests.parallel.test_meshes import bert, labelled, llama, t5, vit


class GPT(mesh_ranks.GPT):
    """With one block."""

    def __init__(self):
        super().__init__()
        self.h = self.h[:1]


class Pooled(GPT):
    def forward(self, tokens, position_ids=None):
        return super().forward(tokens, position_ids).mean(1)


class First(GPT):
    def forward(self, tokens, position_ids=None):
        return super().forward(tokens, position_ids)[:, 0]


class Counting(GPT):
    def forward(self, tokens, position_ids=None):
        return super().forward(tokens)


class Placed(GPT):
    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.zeros(64, 96))

    def forward(self, tokens, position_ids=None):
        x = self.wte(tokens) + self.places[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Convolving(GPT):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(1024, 8, 3, padding=1)

    def forward(self, tokens, position_ids=None):
        return self.mix(super().forward(tokens, position_ids).mT)


class Comparing(GPT):
    def forward(self, tokens, position_ids=None):
        x = super().forward(tokens, position_ids)
        return (x @ x.mT).softmax(-1) @ x


class Bundled(GPT):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(96, 4, batch_first=True)

    def forward(self, tokens, position_ids=None):
        x = self.wte(tokens)
        return self.lm_head(self.attention(x, x, x, need_weights=False)[0])


class OfItsOwn(nn.Linear):
    def forward(self, x, position_ids=None):
        return functional.scaled_dot_product_attention(*3 * (super().forward(x),))


def mistral():
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            sliding_window=4,
            use_cache=False,
        )
    )


def masked():
    return {**labelled(), "attention_mask": torch.ones(2, 16, dtype=torch.long)}


def eager():
    return llama(attn_implementation="eager")


REFUSED = (
    (Pooled, tokens, 2, "picks tokens or adds them up"),
    (First, tokens, 2, "picks tokens or adds them up"),
    (Counting, tokens, 2, "counts tokens"),
    (Placed, tokens, 2, "belongs to places"),
    (Convolving, tokens, 2, "`mix` mixes tokens"),
    (Comparing, tokens, 2, "compares tokens"),
    (Bundled, tokens, 2, "inside another function"),
    (partial(OfItsOwn, 8, 8), lambda: torch.ones(1, 2, 8, 8), 2, "own forward calls"),
    (eager, labelled, 2, "no fused kernel"),
    (mistral, labelled, 2, "has a mask"),
    (llama, masked, 2, "`attention_mask` cannot be cut"),
    (llama, labelled, 8, "4 heads, which cp=8 does not divide"),
    (bert, labelled, 2, "loss of kind 'ForMaskedLM'"),
    (vit, lambda: {"pixel_values": torch.randn(2, 3, 16, 16)}, 2, "no argument"),
    (t5, labelled, 2, "no argument `position_ids`"),
    (GPT, lambda: tokens()[:, :36], 8, "36 cannot be divided by cp=8"),
)


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(("make", "make_inputs", "degree", "why"), REFUSED)
def test_steps_that_cannot_be_done_in_parts_are_refused(make, make_inputs, degree, why):
    inputs = make_inputs()
    loss_fn = None
    if not isinstance(inputs, dict) or "labels" not in inputs:

        def loss_fn(output):
            return softplus(getattr(output, "logits", output))

    with pytest.raises(autosac.AutosacError, match=why):
        autosac.plan_parallel(
            make(),
            inputs,
            loss_fn=loss_fn,
            mesh={"cp": degree},
            memory_budget="1GiB",
            cluster=SPEC.resized(8),
        )
