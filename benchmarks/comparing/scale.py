"""How planning grows with the model: each job in a process of its own.

    python -m benchmarks.comparing.scale autosac gpt 32

prints one JSON object: seconds, CPU seconds (those of solvers that run as programs of
their own included) and the most memory of the process.
"""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import autosac
from autosac.cli import demo
from benchmarks.comparing.profiles import budget_at
from benchmarks.environment import MIB, cpu_s

LAYERS, FULL_LAYERS = (8, 32), (126,)
_SHARE, _NEXT_SHARE = 0.75, 0.7  # budgets over the baseline
_GPT2_SHARE = 0.65
_BATCH, _LENGTH, _WIDTH, _VOCABULARY = 4, 512, 1024, 2048
_TIMEOUT_S = 3600
_RUNS, _QUICK_S = 3, 60.0  # of a job that takes less
Record = dict[str, Any]


# --- the jobs -----------------------------------------------------------------


class _Clock:
    """Wall and CPU seconds since the last question."""

    def __init__(self) -> None:
        self.last = self._now()

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), cpu_s()

    def lap(self) -> dict[str, float]:
        before, self.last = self.last, self._now()
        return {"s": self.last[0] - before[0], "cpu_s": self.last[1] - before[1]}


def gpt_of(num_layers: int) -> tuple[demo.GPT, torch.Tensor]:
    """A GPT of so many layers on the meta device, and tokens for it."""
    with torch.device("meta"):
        model = demo.GPT(
            num_layers=num_layers,
            width=_WIDTH,
            num_heads=16,
            vocabulary=_VOCABULARY,
            length=_LENGTH,
            dropout=0.0,
        )
    return model, torch.zeros(_BATCH, _LENGTH, dtype=torch.int64)


def autosac_gpt(num_layers: int) -> Record:
    """Our cold plan of a GPT, and one budget more."""
    model, tokens = gpt_of(num_layers)
    loss = demo.next_token_loss(tokens)
    clock = _Clock()
    traced = autosac.profile(model, tokens, loss_fn=loss)
    return _planned(traced, clock, [_SHARE, _NEXT_SHARE])


def chain_gpt(num_layers: int) -> Record:
    """PyTorch's chain on the same step: statistics, MILP, op policies."""
    # Not at the top: the other jobs' memory is without it.
    from benchmarks.rivals.sac_milp import chain_of_step

    model, tokens = gpt_of(num_layers)
    clock = _Clock()
    chain = chain_of_step(model, tokens, demo.next_token_loss(tokens))
    record: Record = {"statistics": clock.lap()}
    for name, share in (("plan", _SHARE), ("next", _NEXT_SHARE)):
        plan = chain.ratios(int(share * chain.baseline_bytes))
        for fqn, ratio in (plan[0] if plan else {}).items():
            chain.saved_ops(fqn, ratio)
        record[name] = {**clock.lap(), "feasible": plan is not None}
    return record


def gpt2_small(_: int) -> Record:
    """GPT-2 small, batch 4 x 1024: a cold plan and 64 budgets."""
    import transformers  # the other jobs' memory is without it

    with torch.device("meta"):
        config = transformers.GPT2Config(use_cache=False)
        model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.zeros(4, 1024, dtype=torch.int64)
    clock = _Clock()
    traced = autosac.profile(
        model, {"input_ids": tokens, "labels": tokens}, optimizer=torch.optim.AdamW
    )
    planned = _planned(traced, clock, [_GPT2_SHARE])
    clock.lap()
    autosac.sweep(traced, n=64)
    return {**planned, "64 budgets": clock.lap()}


def llama_405b(kind: int) -> Record:
    """Llama 3 405B on the meta device, bf16, one sequence of 8192 tokens.

    On one device the optimizer step of AdamW peaks, whatever is recomputed; with an
    optimizer that steps in backward, or with frozen parameters, activations matter.

    Args:
        kind: Index of `_LLAMA_KINDS`.
    """
    import transformers  # as above

    make_optimizer, frozen, device = _LLAMA_KINDS[kind][1:]
    with torch.device("meta"):
        config = transformers.LlamaConfig(
            vocab_size=128256,
            hidden_size=16384,
            intermediate_size=53248,
            num_hidden_layers=126,
            num_attention_heads=128,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            use_cache=False,
        )
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    if frozen:  # an adapter at the first layer's input keeps every block in backward
        model.requires_grad_(False)
        model.model.embed_tokens.requires_grad_(True)
    tokens = torch.zeros(1, 8192, dtype=torch.int64)
    clock = _Clock()
    traced = autosac.profile(
        model,
        {"input_ids": tokens, "labels": tokens},
        optimizer=make_optimizer,
        device=device,
    )
    return _planned(traced, clock, [None, None])


def _in_backward(parameters: Any) -> autosac.OptimizerInBackward:
    return autosac.OptimizerInBackward(parameters, torch.optim.AdamW)


_LLAMA_KINDS: tuple[tuple[str, Any, bool, str], ...] = (
    ("AdamW", torch.optim.AdamW, False, "h100"),
    ("SGD", torch.optim.SGD, False, "h100"),
    ("AdamW in backward", _in_backward, False, "h100"),
    ("embedding only", torch.optim.AdamW, True, "h100"),
)


def _planned(
    profile: autosac.Profile, clock: _Clock, shares: list[float | None]
) -> Record:
    """Plans at shares of the baseline; None for half way up from the floor."""
    record: Record = {"statistics": clock.lap()}
    baseline = profile.baseline_peak_bytes
    for name, share in zip(("plan", "next"), shares, strict=False):
        if share is None:
            budget_bytes = budget_at(profile, 0.5 if name == "plan" else 0.25)
        else:
            budget_bytes = int(share * baseline)
        try:
            plan = autosac.plan(profile, memory_budget=budget_bytes)
        except autosac.InfeasibleBudgetError:
            record[name] = {**clock.lap(), "feasible": False}
            continue
        record[name] = {
            **clock.lap(),
            "feasible": True,
            "gap": plan.optimality_gap,
            "recompute_share": plan.recompute_ms / plan.step_ms,
            "budget_bytes": budget_bytes,
        }
    return {
        **record,
        "floor_bytes": autosac.floor(profile),
        "baseline_bytes": baseline,
        "num_ops": len(profile.tape.ops),
    }


_JOBS: dict[tuple[str, str], Callable[[int], Record]] = {
    ("autosac", "gpt"): autosac_gpt,
    ("sac_milp", "gpt"): chain_gpt,
    ("autosac", "gpt2-small"): gpt2_small,
    ("autosac", "llama-405b"): llama_405b,
}


def _job(system: str, case: str, size: int) -> Record:
    torch.set_num_threads(1)
    record = _JOBS[system, case](size)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**record, "rss_bytes": most}


# --- all of them --------------------------------------------------------------


def jobs(full: bool) -> list[tuple[str, str, int, str]]:
    """System, case, size and title of every job."""
    layers = (*LAYERS, *FULL_LAYERS) if full else LAYERS
    every = [
        (system, "gpt", size, f"GPT of width {_WIDTH}, {size} layers")
        for size in layers
        for system in ("autosac", "sac_milp")
    ]
    every.append(("autosac", "gpt2-small", 0, "GPT-2 small, AdamW"))
    return every + [
        ("autosac", "llama-405b", kind, f"Llama 3 405B, {title}, {device}")
        for kind, (title, _, _, device) in enumerate(_LLAMA_KINDS)
    ]


def key(job: Record) -> tuple[str, str, int]:
    """What tells a job from others."""
    return job["system"], job["case"], job["size"]


def place(job: Record) -> int:
    """Its place in the table."""
    return [other[:3] for other in jobs(full=True)].index(key(job))


def run(system: str, case: str, size: int, title: str) -> Record:
    """A job: of several runs of a quick one, that of the median time."""
    records = [_run_once(system, case, size, title)]
    while len(records) < _RUNS and _is_quick(records[-1]):
        records.append(_run_once(system, case, size, title))
    if "error" in records[-1]:
        return records[-1]
    return sorted(records, key=lambda job: _total(job, "s"))[len(records) // 2]


def _is_quick(job: Record) -> bool:
    return "error" not in job and _total(job, "s") < _QUICK_S


def _run_once(system: str, case: str, size: int, title: str) -> Record:
    """One job in a fresh process."""
    head = {"system": system, "case": case, "size": size, "title": title}
    command = [sys.executable, "-m", "benchmarks.comparing.scale"]
    try:
        done = subprocess.run(
            [*command, system, case, str(size)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {**head, "error": f"not done after {_TIMEOUT_S} s"}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        return {**head, "error": last[0] if last else f"exit {done.returncode}"}
    return {**head, **json.loads(done.stdout.splitlines()[-1])}


def page(record: Record) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Planning time and memory\n"
    yield (
        "Every row is a process of its own on one thread, of three the one of median"
        f" time where one takes less than {_QUICK_S:.0f} s; uncalibrated, model on the"
        " meta device. `cold` is tracing or statistics and the first plan, op policies"
        " included; `next` is one budget more on the same profile. Seconds of wall time"
        " (CPU time); memory is the most that the process ever held, Python and PyTorch"
        f" included. GPT: batch {_BATCH} x {_LENGTH}, forward, loss and backward, at"
        f" {_SHARE:.0%} and {_NEXT_SHARE:.0%} of the system's own baseline; GPT-2 at"
        f" {_GPT2_SHARE:.0%}; Llama half and a quarter of the way from the floor, which"
        " is then worked out as well, to the baseline.\n"
    )
    yield (
        "| step | system | statistics | cold | next | memory MiB | gap | peak GiB |"
        " taken (UTC) |"
    )
    yield "| --- | --- |" + " ---: |" * 7
    for job in record["jobs"]:
        yield row(job)
    yield from _ratios(record["jobs"])
    for job in record["jobs"]:
        if "64 budgets" in job:
            cold = _total(job, "cpu_s")
            many = job["64 budgets"]
            yield (
                f"\n64 budgets of {job['title']}: {_seconds(many)} s,"
                f" {many['cpu_s'] / cold:.1f} times the CPU time of its cold plan."
            )


def _total(job: Record, clock: str) -> float:
    return float(job["statistics"][clock] + job["plan"][clock])


def row(job: Record) -> str:
    """One job as a line of the table."""
    head = f"| {job['title']} | {job['system']} |"
    if "error" in job:
        return f"{head} {job['error']} | | | | | | |"
    gap, cpu_s = job["plan"].get("gap"), _total(job, "cpu_s")
    peak = ""
    if "floor_bytes" in job:
        low, high = job["floor_bytes"] / 2**30, job["baseline_bytes"] / 2**30
        peak = f"{low:.1f} to {high:.1f}"
    return (
        f"{head} {_seconds(job['statistics'])} |"
        f" {_seconds({**job['plan'], 's': _total(job, 's'), 'cpu_s': cpu_s})} |"
        f" {_seconds(job.get('next'))} | {job['rss_bytes'] / MIB:.0f} |"
        f" {'' if gap is None else f'{gap:.2%}'} | {peak} |"
        f" {job['date'][:16].replace('T', ' ')} |"
    )


def _seconds(lap: Record | None) -> str:
    if lap is None:
        return ""
    return f"{lap['s']:.1f} ({lap['cpu_s']:.1f}){_feasible(lap)}"


def _feasible(lap: Record) -> str:
    return "" if lap.get("feasible", True) else ", infeasible"


def _ratios(records: list[Record]) -> Iterator[str]:
    """PyTorch's chain over ours, size by size."""
    pairs = {(j["size"], j["system"]): j for j in records if j["case"] == "gpt"}
    for size in sorted({size for size, _ in pairs}):
        ours, chain = pairs.get((size, "autosac")), pairs.get((size, "sac_milp"))
        if ours and chain and "error" not in ours and "error" not in chain:
            cpu, wall = (_total(chain, c) / _total(ours, c) for c in ("cpu_s", "s"))
            memory = chain["rss_bytes"] / ours["rss_bytes"]
            further = chain["next"]["cpu_s"] / ours["next"]["cpu_s"]
            yield (
                f"\nAt {size} layers PyTorch's chain takes {cpu:.1f} times our CPU"
                f" time, {wall:.1f} times our wall time and {memory:.2f} times our"
                f" memory for a cold plan; {further:.1f} times our CPU time for one"
                " budget more."
            )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # sac_milp logs what the result says anyway
    print(json.dumps(_job(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
