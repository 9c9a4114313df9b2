"""Keep, recompute or offload: real steps with far memory in a file, and GPUs predicted.

    python -m benchmarks.offload [--parts real,times,rules,gpus,layers,pipelines]
        [--models llama,unet]

*real*: models of the zoo under six budgets, three of them below the floor without
offload: real peaks by the allocator's events, bits, and at the lowest budget the same
peak with copies held to 0.1 GB/s. *times*: what such steps take beside those of rules
and of plans without offload. *rules*: plans under the peaks of rules that people
set by hand, which must not be faster. *gpus*: two language models of 8B parameters,
planned for GPUs that need not be present. *layers*: what planning a GPT of 126 layers
takes. *pipelines*: Llama 3 in stages on H100, predicted.
Exits with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autosac
from autosac.checkpointing import batch_variants
from autosac.cli import demo
from autosac.costs.sources import modelled_costs
from autosac.devices.specs import device_spec
from autosac.errors import InfeasibleBudgetError
from autosac.far_memory import FarMemory
from autosac.planning.checking import chosen
from autosac.profiles.restricting import restricted
from autosac.solving.incumbents import recompute_ms
from autosac.units.curves import kept
from autosac.units.far_units import FarUnit
from benchmarks import offload_pipelines, offload_times
from benchmarks.comparing.scale import FULL_LAYERS, gpt_of
from benchmarks.environment import MIB, cpu_s, environment
from benchmarks.models import zoo
from benchmarks.offload_rules import LEAST_BYTES, every_input, every_saved
from benchmarks.planning_time import profiled

PARTS = ("real", "times", "rules", "gpus", "layers", "pipelines", "interleaved")
RESULTS = Path(__file__).parent / "results"
MODELS = (
    *("llama", "llama-tied", "qwen3", "mistral", "mixtral", "albert", "t5", "swin"),
    *("convnext", "densenet", "unet", "two-towers"),
)
LARGEST_ERROR = 0.002  # of the predicted peak
SLOW_BYTES_PER_S = 1e8
SMALL_BYTES = LEAST_BYTES // 64
_LAYERS_ROUNDS = 5
LENGTHS = (8192, 32768, 131072)
GPUS = ("h100", "gh200")
_NS = 1e-12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    broken: list[str] = []
    for part in options.parts.split(","):
        lines = ["# Keep, recompute or offload", ""]
        if part in OF_MODELS:
            lines += list(OF_MODELS[part](options.models.split(","), broken))
        else:
            lines += list(PREDICTED[part]())
        lines += ["", *(f"- {name}: {value}" for name, value in environment().items())]
        lines += [f"- command: `python -m benchmarks.offload --parts {part}`", ""]
        path = options.output / f"offload_{part}.md"
        path.write_text("\n".join(lines))
    for line in broken:
        print("BROKEN", line)
    sys.exit(bool(broken))


# --- real steps -------------------------------------------------------------------


class Slow:
    """A plan whose far memory is slow."""

    def __init__(self, plan: autosac.Plan) -> None:
        self.plan = plan
        self.peak_bytes, self.budget_bytes = plan.peak_bytes, plan.budget_bytes

    def apply(self, model: nn.Module) -> None:
        self.plan.apply(model)
        forward = model.__dict__["forward"]
        assert isinstance(forward, batch_variants.BatchForward)
        for step in forward.steps:
            step.memory = FarMemory(bytes_per_s=SLOW_BYTES_PER_S, at_once_bytes=0)


def real(names: list[str], broken: list[str]) -> Iterator[str]:
    """Rows of real steps under budgets below and above the floor without offload."""
    yield "Real steps on the CPU, far memory in a file. *off*: predicted over measured"
    yield "peak. Bytes are MiB."
    yield ""
    yield "| model | floor without | with | budget | off | time without | with |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name in names:
        work = zoo()[name]
        profile = autosac.calibrate(profiled(work), progress=False)
        low, floor = autosac.floor(profile, offload=True), autosac.floor(profile)
        room = profile.baseline_peak_bytes - floor
        below = [low + (floor - low) * i // 3 for i in range(3)]
        budgets = [*below, floor, floor + room // 20, floor + room // 5]
        for budget in budgets:
            plan = autosac.plan(profile, memory_budget=budget, offload=True)
            plans: list[Any] = [plan, Slow(plan)] if budget == low else [plan]
            measured = [_verified(one, work) for one in plans]
            where = f"{name} under {budget} bytes"
            for done in measured:
                if done.differences:
                    broken.append(f"{where}: {done.differences[0]} differs")
                if not done.within_budget:
                    broken.append(f"{where}: {done.measured_peak_bytes} bytes")
                if abs(done.prediction_error) > LARGEST_ERROR:
                    broken.append(f"{where}: off by {done.prediction_error:+.3%}")
            if len({done.measured_peak_bytes for done in measured}) > 1:
                broken.append(f"{where}: another peak with slow copies")
            without = "none fits"
            if budget >= floor:
                plain_ms = autosac.plan(profile, memory_budget=budget).recompute_ms
                without = f"{plain_ms:.2f} ms"
                if plan.recompute_ms > plain_ms * (1 + _NS):
                    broken.append(f"{where}: dearer than without")
            cells = [name, *(f"{n / MIB:.2f}" for n in (floor, low, budget))]
            off = f"{measured[0].prediction_error:+.3%}"
            mine = f"{plan.recompute_ms:.2f} ms, {plan.offloaded_bytes / MIB:.2f} moved"
            yield f"| {' | '.join([*cells, off, without, mine])} |"
            print(*cells, off, without, mine, flush=True)


def _verified(plan: Any, work: Any) -> autosac.Verification:
    return autosac.verify(
        plan,
        work.make_model,
        work.make_inputs,
        make_optimizer=work.make_optimizer,
        loss_fn=work.loss_fn,
        timing_rounds=0,
        extra_bytes=work.loss_bytes,
    )


# --- rules ------------------------------------------------------------------------


def rules(names: list[str], broken: list[str]) -> Iterator[str]:
    """Rules that people set by hand, and plans under their peaks."""
    yield "Rules, simulated, and plans with offload under their peaks: every block"
    yield "recomputed whole; the same with every argument moved that can be; nothing"
    yield "recomputed, and every saved tensor moved that is larger than 1 MiB (of the"
    yield f"small models on the CPU, {SMALL_BYTES // 1024} KiB), one by one, as"
    yield "`benchmarks.offload_rules` says. If no plan fits the peak: what plans take"
    yield "at the floor, and with 1 % more. Times are recomputation and waiting."
    yield ""
    yield "| model | device | rule | peak | its time | plan under that peak |"
    yield "| --- | --- | --- | ---: | ---: | --- |"
    for name in names:
        profile = profiled(zoo()[name])
        yield from _rules_of(name, profile, SMALL_BYTES, broken)
    for name, make in GPU_MODELS:
        for length in LENGTHS:
            traced = _traced(make, length)
            for gpu in map(device_spec, GPUS):
                costs = modelled_costs(traced.tape, gpu)
                profile = replace(traced, device=gpu, costs=costs)
                label = f"{name}, {length} tokens"
                yield from _rules_of(label, profile, LEAST_BYTES, broken)


def _rules_of(
    label: str, profile: Any, least_bytes: int, broken: list[str]
) -> Iterator[str]:
    offloading = restricted(profile, offload=True)
    saved = every_saved(profile, least_bytes)
    every = profile.rules.every_kth_block(1)
    moved = every_input(offloading)
    figures = [
        ("every block rerun", profile.peak_bytes(every), recompute_ms(every)),
        ("and every input moved", profile.peak_bytes(moved), recompute_ms(moved)),
        ("every saved tensor moved", saved.peak_bytes, saved.waits_ms),
    ]
    floor = autosac.floor(profile, offload=True)
    for rule, peak, rule_ms in figures:
        budgets = [peak] if peak >= floor else [floor, floor + floor // 100]
        plans = [
            autosac.plan(profile, memory_budget=budget, offload=True, dry_run=False)
            for budget in budgets
        ]
        if peak >= floor and plans[0].recompute_ms > rule_ms * (1 + _NS):
            broken.append(f"{label} on {profile.device.name}: dearer than {rule}")
        told = "; ".join(
            f"{plan.recompute_ms:.2f} ms at {plan.budget_bytes / MIB:.2f} MiB"
            for plan in plans
        )
        if peak < floor:
            told = f"none; {told}"
        cells = label, profile.device.name, rule, f"{peak / MIB:.2f} MiB"
        row = [*cells, f"{rule_ms:.2f} ms", told]
        print(*row, flush=True)
        yield f"| {' | '.join(row)} |"


# --- many layers ------------------------------------------------------------------


def layers() -> Iterator[str]:
    """CPU time of plans of a step of many layers, with and without offload."""
    (number,) = FULL_LAYERS
    model, tokens = gpt_of(number)
    loss = demo.next_token_loss(tokens)
    yield f"A GPT of {number} layers (`benchmarks.comparing.scale`), CPU seconds: the"
    yield "first plan, one for a smaller budget, and the floor of a step that nothing"
    yield "was asked of before."
    yield f"Medians of {_LAYERS_ROUNDS} rounds in which all take turns."
    yield ""
    yield "| device | offload | first plan | next | floor |"
    yield "| --- | --- | ---: | ---: | ---: |"
    kinds = list(itertools.product(("cpu", "h100"), (False, True)))
    taken: dict[tuple[str, bool], list[list[float]]] = {kind: [] for kind in kinds}
    for _ in range(_LAYERS_ROUNDS):
        for device, offload in kinds:
            profile = partial(
                autosac.profile, model, tokens, loss_fn=loss, device=device
            )
            taken[device, offload].append(_planning_s(profile, offload))
    for (device, offload), rounds in taken.items():
        medians = map(statistics.median, zip(*rounds, strict=True))
        row = [device, "yes" if offload else "no", *(f"{s:.1f}" for s in medians)]
        print(*row, flush=True)
        yield f"| {' | '.join(row)} |"
    yield ""
    yield "And `plan_parallel` of the same model with AdamW on 8 H100 (`hgx-h100`),"
    yield "from the trace on; with offload the plan without is made as well."
    yield ""
    yield "| budget, of the plain peak | offload | step | bound | CPU s |"
    yield "| ---: | --- | ---: | ---: | ---: |"
    yield from _parallel_rows(model, tokens, loss)


def _planning_s(profile: Callable[[], autosac.Profile], offload: bool) -> list[float]:
    """CPU seconds of a first plan, of another one, and of the floor alone."""
    step, other = profile(), profile()
    budget = step.baseline_peak_bytes * 3 // 4
    jobs: list[Callable[[], object]] = [
        partial(autosac.plan, step, memory_budget=budget, offload=offload),
        partial(autosac.plan, step, memory_budget=budget * 14 // 15, offload=offload),
        partial(autosac.floor, other, offload=offload),
    ]
    taken = []
    for job in jobs:
        started = cpu_s()
        job()
        taken.append(cpu_s() - started)
    return taken


def _parallel_rows(model: Any, tokens: Any, loss_fn: Any) -> Iterator[str]:
    planned = partial(
        autosac.plan_parallel,
        model,
        tokens,
        loss_fn=loss_fn,
        optimizer=torch.optim.AdamW,
        cluster="hgx-h100",
        num_gpus=8,
    )
    peak = planned(memory_budget="100%").peak_bytes
    for share in (0.3, 0.5, 0.75):
        for offload in (False, True):
            started = cpu_s()
            plan = planned(memory_budget=int(share * peak), offload=offload)
            taken = cpu_s() - started
            cells = [f"{share:.0%}", "yes" if offload else "no"]
            cells += [f"{plan.step_ms:.1f} ms", f"{plan.bound_ms:.1f} ms"]
            row = [*cells, f"{taken:.1f}"]
            print(*row, flush=True)
            yield f"| {' | '.join(row)} |"


# --- GPUs -------------------------------------------------------------------------


def gpus() -> Iterator[str]:
    """Predicted shares, times and peaks of 8B models on GPUs."""
    yield "Predicted, nothing of this was run: hidden states of one sample, weights"
    yield "frozen but for norms, in bfloat16, without the head. Budgets are the floor"
    yield "with offload, and the peak with every block recomputed whole; shares are of"
    yield "what blocks keep in the plain step, and of their arguments that are moved,"
    yield "or of all that can be if a model is streamed."
    yield ""
    heads = "tokens | GPU | every block | and its input moved | budget | plan"
    yield f"| model | {heads} | shares |"
    yield "| --- | ---: | --- | ---: | ---: | ---: | ---: | --- |"
    notes = []
    for name, make in GPU_MODELS:
        for length in LENGTHS:
            traced = _traced(make, length)
            for gpu in map(device_spec, GPUS):
                costs = modelled_costs(traced.tape, gpu)
                profile = replace(traced, device=gpu, costs=costs)
                lines, note = _on_gpu(name, profile, length)
                yield from lines
                notes.append(note)
                print(*lines, note, sep="\n", flush=True)
    yield ""
    yield from notes


def _traced(make: Any, length: int) -> autosac.Profile:
    """The step on either GPU: their kernels are the same."""
    with torch.device("meta"):
        model = make().to(torch.bfloat16)
    for fqn, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in fqn)
    tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
    return autosac.profile(
        model,
        {"input_ids": tokens, "use_cache": False},
        device=GPUS[0],
        loss_fn=lambda output: output.last_hidden_state.float().square().mean(),
    )


def _on_gpu(name: str, profile: Any, length: int) -> tuple[list[str], str]:
    gpu = profile.device.name
    offloading = restricted(profile, offload=True)
    every, moved = profile.rules.every_kth_block(1), every_input(offloading)
    rules = [
        f"{profile.peak_bytes(rule) / 1e9:.2f} GB {recompute_ms(rule):.0f} ms"
        for rule in (every, moved)
    ]
    low, floor = autosac.floor(profile, offload=True), autosac.floor(profile)
    full = profile.peak_bytes(every)
    lines = []
    for budget in sorted({low, full}):
        lines.append(_plan_row(profile, budget, [name, str(length), gpu, *rules]))
    link = profile.device.link
    assert link is not None
    nbytes = sum(unit.activation_bytes for unit in profile.rules.blocks)
    link_ms = link.out_ms(nbytes, 1) + link.back_ms(nbytes, 1)
    note = (
        f"- {name}, {length} tokens, {gpu}: floor {floor / 1e9:.2f} GB, with offload"
        f" {low / 1e9:.2f} GB; the plain step"
        f" {profile.baseline_peak_bytes / 1e9:.2f} GB,"
        f" {profile.baseline_ms:.0f} ms; all that blocks keep, {nbytes / 1e9:.1f} GB,"
        f" takes the link {link_ms:.0f} ms out and back"
    )
    return lines, note


def _plan_row(profile: Any, budget: int, cells: list[str]) -> str:
    plan = autosac.plan(profile, memory_budget=budget, offload=True, dry_run=False)
    try:
        plain = autosac.plan(profile, memory_budget=budget, dry_run=False)
        without = f"{plain.recompute_ms:.0f} ms without"
    except InfeasibleBudgetError:
        without = "none fits without"
    told = f"{plan.recompute_ms:.0f} ms ({plan.exposed_ms:.0f} waiting), {without}"
    shares = _shares(profile, plan)
    return f"| {' | '.join([*cells, f'{budget / 1e9:.2f} GB', told, shares])} |"


def _shares(profile: Any, plan: autosac.Plan) -> str:
    """What is kept and moved."""
    offloading = restricted(profile, offload=True)
    gigabytes = plan.offloaded_bytes / 1e9
    if plan.is_streamed:
        all_bytes = sum(stream.nbytes for stream in offloading.streamed.streams)
        share = plan.offloaded_bytes / all_bytes
        return f"streamed, moved {share:.0%} ({gigabytes:.1f} GB)"
    total = sum(unit.activation_bytes for unit in profile.rules.blocks)
    choice = chosen(plan, offloading)
    results = {
        unit: unit.results_bytes(policy)
        for unit, policy in choice.items()
        if isinstance(unit, FarUnit)
    }
    held = sum(
        min(kept(call, part) - results.get(call, 0), call.activation_bytes)
        for unit, policy in choice.items()
        for call, part in unit.by_call(policy)
    )
    arguments_bytes = plan.offloaded_bytes - sum(results.values())
    share = plan.offloaded_bytes / (total + arguments_bytes)
    return f"kept {held / total:.0%}, moved {share:.0%} ({gigabytes:.1f} GB)"


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    )
    return LlamaModel(config)


def _qwen() -> nn.Module:
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        num_hidden_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=131072,
    )
    return Qwen3Model(config)


GPU_MODELS = (("Llama-3-8B", llama), ("Qwen3-8B", _qwen))
OF_MODELS = {"real": real, "times": offload_times.times, "rules": rules}
PREDICTED = {
    "gpus": gpus,
    "layers": layers,
    "pipelines": offload_pipelines.pipelines,
    "interleaved": offload_pipelines.interleaved,
}


if __name__ == "__main__":
    main()
