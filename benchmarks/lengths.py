"""Text of three lengths under one budget: `python -m benchmarks.lengths`.

A loader gives padded batches of 64, 128 and 256 tokens. A GPT-2 and a BERT train on
them: plainly, with every block checkpointed, under the plan for a longest batch alone,
and under the plan for the loader. Every step's peak is measured by the allocator's own
events, every step's state compared bit by bit with the plain one. Times are those of
steps in turns, as the machine may be busy: only their ratios count.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import autosac
from autosac.step.optimizer_state import optimizer_tensors
from autosac.step.training_step import training_step
from autosac.storages import storage_bytes
from autosac.verification.measuring import capture_state, differences, measure_peak
from benchmarks.environment import MIB, environment

RESULT = Path(__file__).parent / "results" / "lengths.md"
LENGTHS = {64: 6, 128: 4, 256: 2}  # batches of each
ROWS, NUM_TOKENS, WIDTH, LAYERS = 8, 1000, 128, 4
SHARES = (0.0, 0.15)  # of the way from the longest batch's floor to its peak


class Texts(Dataset[list[int]]):
    """Random texts, each a bit shorter than one of the lengths."""

    def __init__(self) -> None:
        draw = random.Random(0)
        self.rows = [
            [draw.randrange(4, NUM_TOKENS) for _ in range(length - draw.randrange(24))]
            for length, num_batches in LENGTHS.items()
            for _ in range(num_batches * ROWS)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[int]:
        return self.rows[index]


class ByLength:
    """Batches of texts of about the same length, shuffled."""

    def __iter__(self) -> Iterator[list[int]]:
        num_batches = sum(LENGTHS.values())
        batches = [list(range(ROWS * i, ROWS * (i + 1))) for i in range(num_batches)]
        return iter(random.Random(1).sample(batches, num_batches))


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """A batch with zeros and a mask behind the texts."""
    length = next(n for n in LENGTHS if n >= max(map(len, rows)))
    tokens, mask = torch.zeros(2, len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def make_model(name: str) -> torch.nn.Module:
    """The same model each time."""
    import transformers  # an extra: says so when it is missing

    torch.manual_seed(0)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if name == "GPT-2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=LAYERS, n_embd=WIDTH, n_head=4, vocab_size=NUM_TOKENS,
                n_positions=max(LENGTHS), use_cache=False, **tokens,
            )
        )  # fmt: skip
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=4,
            intermediate_size=4 * WIDTH, vocab_size=NUM_TOKENS,
            max_position_embeddings=max(LENGTHS), **tokens,
        )
    )  # fmt: skip


class Training:
    """One model in training.

    Args:
        name: Of the model.
        plan: Is applied to it, unless None.
    """

    def __init__(self, name: str, plan: autosac.Plan | None) -> None:
        self.model = make_model(name)
        if plan is not None:
            plan.apply(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, batch: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
        """Train on a batch; gradients of the step stay."""
        torch.manual_seed(seed)  # contenders take turns
        return training_step(
            self.model, (), batch, loss_fn=None, optimizer=self.optimizer
        )

    def clear(self) -> None:
        """Drop gradients, as a step begins."""
        self.model.zero_grad(set_to_none=True)

    def held_bytes(self, batch: dict[str, torch.Tensor]) -> int:
        """What is alive when a step begins."""
        model = self.model
        lasting = [*model.parameters(), *model.buffers(), *batch.values()]
        return storage_bytes([*lasting, *optimizer_tensors(self.optimizer)])


def measured(
    training: Training, batches: list[dict[str, torch.Tensor]]
) -> tuple[list[int], list[dict[str, torch.Tensor]]]:
    """Peak and state of every step of an epoch, after one that makes the state."""
    training.step(batches[0], seed=0)
    peaks, states = [], []
    for seed, batch in enumerate(batches, start=1):
        training.clear()
        loss, peak_bytes = measure_peak(
            lambda batch=batch, seed=seed: training.step(batch, seed),
            device="cpu",
            persistent_bytes=training.held_bytes(batch),
        )
        peaks.append(peak_bytes)
        states.append(capture_state(training.model, training.optimizer, loss))
    return peaks, states


def timed(
    trainings: dict[str, Training],
    batches: list[dict[str, torch.Tensor]],
    rounds: int,
) -> dict[str, float]:
    """Milliseconds of an epoch: the sum over batches of the medians of their steps."""
    total = dict.fromkeys(trainings, 0.0)
    for batch in batches:
        times: dict[str, list[float]] = {name: [] for name in trainings}
        for seed in range(rounds):
            for name, training in trainings.items():
                training.clear()
                start = time.perf_counter()
                training.step(batch, seed)
                times[name].append((time.perf_counter() - start) * 1000)
        for name, of_batch in times.items():
            total[name] += statistics.median(of_batch)
    return total


def checkpointed(name: str) -> Training:
    """Every block under `torch.utils.checkpoint`, as the model's own switch does it."""
    training = Training(name, None)
    with warnings.catch_warnings():  # it has another name in later versions
        warnings.simplefilter("ignore", FutureWarning)
        training.model.gradient_checkpointing_enable({"use_reentrant": False})
    return training


def rows_of(name: str, shares: tuple[float, ...], rounds: int) -> list[tuple[Any, ...]]:
    """Rows of the table for a model."""
    loader = DataLoader(Texts(), batch_sampler=ByLength(), collate_fn=padded)
    batches = list(loader)
    longest = max(batches, key=lambda batch: batch["input_ids"].shape[1])
    model = make_model(name)
    options = {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}
    profile = autosac.calibrate(autosac.profile(model, longest, **options))
    floor, highest = autosac.floor(profile), profile.baseline_peak_bytes
    plain = measured(Training(name, None), batches)
    known = {"plain": plain, "every block": measured(checkpointed(name), batches)}
    rows: list[tuple[Any, ...]] = []
    for share in shares:
        budget_bytes = int(floor + share * (highest - floor))
        plans = {
            "longest batch": autosac.plan(profile, memory_budget=budget_bytes),
            "loader": autosac.plan(
                model, loader, memory_budget=budget_bytes, **options
            ),
        }
        trainings = {
            "plain": Training(name, None),
            "every block": checkpointed(name),
            **{which: Training(name, plan) for which, plan in plans.items()},
        }
        total = timed(trainings, batches, rounds)
        for which in trainings:
            plan = plans.get(which)
            seen = known.get(which) or measured(Training(name, plan), batches)
            pairs = zip(plain[1], seen[1], strict=True)
            rows.append(
                (
                    name,
                    f"{share:.0%}",
                    which,
                    f"{budget_bytes / MIB:.2f}",
                    f"{max(seen[0]) / MIB:.2f}",
                    "" if plan is None else f"{plan.peak_bytes / MIB:.2f}",
                    sum(peak > budget_bytes for peak in seen[0]),
                    sum(bool(differences(*pair)) for pair in pairs),
                    f"{total[which] / total['plain']:.3f}",
                    "" if plan is None else str(len(plan.each)),
                )
            )
            print(*rows[-1], sep=" | ", flush=True)
        gc.collect()
    return rows


def table(rows: list[tuple[Any, ...]], num_steps: int) -> str:
    """The table as Markdown."""
    where = ", ".join(f"{key} {value}" for key, value in environment().items())
    names = (
        "model", "budget", "contender", "budget MiB", "highest peak MiB",
        "predicted MiB", "steps above budget", "steps of other bits",
        "time / plain", "kinds",
    )  # fmt: skip
    lines = [
        "# Text of three lengths under one budget",
        "",
        f"`python -m benchmarks.lengths`: {where}.",
        "",
        f"{num_steps} steps a row on batches of {ROWS} texts, padded to"
        f" {', '.join(f'{n} ({c} batches)' for n, c in LENGTHS.items())}. A budget is a"
        " share of the way from the floor of the longest batch to its plain peak. Peaks"
        " are those of the allocator's events; times are ratios of steps in turns.",
        "",
        "| " + " | ".join(names) + " |",
        "| " + " | ".join(["---"] * len(names)) + " |",
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="steps a batch is timed")
    parser.add_argument("--quick", action="store_true", help="one model and budget")
    options = parser.parse_args()
    names = ("GPT-2",) if options.quick else ("GPT-2", "BERT")
    shares = SHARES[1:2] if options.quick else SHARES
    torch.set_num_threads(1)
    rows = [row for n in names for row in rows_of(n, shares, options.rounds)]
    text = table(rows, sum(LENGTHS.values()))
    if not options.quick:
        RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
