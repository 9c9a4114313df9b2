"""Fine-tunes a small Llama with TRL's `SFTTrainer` in a budget: LoRA, 4-bit if asked.

    python -m examples.finetune_sft --budget 80MiB
    python -m examples.finetune_sft --budget 80MiB --quantized  # needs bitsandbytes

The model is made here, so that nothing is downloaded; with a real one only
`make_model` and `make_data` differ. The budget is a callback, as for any other trainer
of Transformers; the plan decides what is recomputed, so `gradient_checkpointing`, which
`SFTConfig` switches on by itself, is off, in `prepare_model_for_kbit_training` too.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import peft
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTConfig, SFTTrainer

from autosac.integrations.huggingface import MemoryBudget

VOCABULARY, LENGTH, BATCH = 256, 128, 4


def make_model(*, quantized: bool) -> Any:
    """A Llama of 4 layers, its linear layers in 4 bits if asked."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=128,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    if not quantized:
        return model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model = transformers.LlamaForCausalLM.from_pretrained(
            folder,
            quantization_config=transformers.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=torch.float32,
            ),
            device_map="cpu",
        )
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words "w0", "w1" and so on."""
    special = ["<pad>", "<eos>", "<unk>"]
    words = [f"w{i}" for i in range(VOCABULARY - len(special))]
    own = Tokenizer(
        models.WordLevel(
            {word: i for i, word in enumerate([*words, *special])}, unk_token="<unk>"
        )
    )
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_data() -> Dataset:
    """Rows of tokens, as `SFTTrainer` makes of texts."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY - 3, (6 * BATCH, LENGTH), generator=generator)
    return Dataset.from_list([{"input_ids": row.tolist()} for row in rows])


def make_trainer(
    folder: str,
    budget: MemoryBudget | None,
    *,
    quantized: bool,
    kind: type[SFTTrainer] = SFTTrainer,
) -> SFTTrainer:
    """The trainer, with a budget or without."""
    return kind(
        make_model(quantized=quantized),
        SFTConfig(
            folder,
            max_steps=3,
            max_length=LENGTH,
            per_device_train_batch_size=BATCH,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=make_data(),
        processing_class=make_tokenizer(),
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        callbacks=[] if budget is None else [budget],
    )


def main() -> None:
    """Train and print the plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="80MiB")
    parser.add_argument("--quantized", action="store_true")
    options = parser.parse_args()
    budget = MemoryBudget(options.budget)
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(folder, budget, quantized=options.quantized).train()
    print(budget.plan)


if __name__ == "__main__":
    main()
