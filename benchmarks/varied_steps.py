"""Steps whose sizes draws or training decide: do plans hold for steps nobody traced?

    python -m benchmarks.varied_steps [--models transformers/switch_transformers,...]

Each model is planned at budgets between its floor and the plain step's peak, with the
few variants of its step that a profile has. Then further ones are traced, under other
seeds and after other numbers of updates: the plan's peak is simulated in each, and
that of a plan that leaves no room. Exits with 1 if one of ours is above its budget.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

import autosac
from autosac.costs.sources import modelled_costs
from autosac.planning.choices import choose
from autosac.profiles.traced_step import TracedStep
from autosac.simulation.varied_simulator import peaks_of_variants
from autosac.solving.incumbents import recompute_ms
from autosac.solving.rules_of_thumb import Choice
from autosac.solving.solve_options import SolveOptions
from autosac.tracing import draws
from autosac.tracing import trace as tracing
from benchmarks.environment import MIB, environment
from benchmarks.models.drawn import build_small
from benchmarks.models.workload import profile_of

RESULTS = Path(__file__).parent / "results"
MODELS = (
    "transformers/switch_transformers",
    "transformers/openai_privacy_filter",
    "transformers/nllb-moe",
    "transformers/wav2vec2-bert",
    "torchvision/fasterrcnn_mobilenet_v3_large_320_fpn",
)
NUM_BUDGETS, NUM_VARIANTS = 10, 8
_FIRST_SEED = 100  # the profile's own are below


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--output", type=Path, default=RESULTS / "varied_steps.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    broken: list[str] = []
    lines = [
        "# Plans of steps whose sizes vary, held against steps that nobody traced",
        "",
        f"{NUM_BUDGETS} budgets a model, {NUM_VARIANTS} further variants of its step.",
        "*over*: of all pairs of a plan and a variant with the same ops, those whose",
        "peak is above the budget: of plans that leave no room, and of ours.",
        "*recomputed*: what plans recompute, as a multiple of the proven bound of the",
        "planned step, which knows of no variants; mean and worst. *room*: the",
        "most that a variant needed of what one of our plans left.",
        "",
        "| model | ops | span MiB | over: no room | ours | recomputed: no room | ours"
        " | worst | room needed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in options.models.split(","):
        line = _row(name, broken)
        print(line, flush=True)
        lines.append(line)
    lines += ["", *(f"- {name}: {value}" for name, value in environment().items())]
    lines += ["- command: `python -m benchmarks.varied_steps`", ""]
    options.output.write_text("\n".join(lines))
    for line in broken:
        print("BROKEN", line)
    sys.exit(bool(broken))


def _row(name: str, broken: list[str]) -> str:
    profile = _profiled(name)
    low, high = autosac.floor(profile), profile.baseline_peak_bytes
    variants = list(_variants(profile))
    over, pairs = {"none": 0, "ours": 0}, 0
    shares: dict[str, list[float]] = {"none": [], "ours": []}
    room = 0.0
    for i in range(NUM_BUDGETS):
        budget_bytes = low + (high - low) * (2 * i + 1) // (2 * NUM_BUDGETS)
        without, bound_ms = profile.chooser.choose(budget_bytes, SolveOptions())
        assert without is not None
        choices: dict[str, Choice] = {
            "none": without,
            "ours": choose(profile, budget_bytes)[0],
        }
        for kind, choice in choices.items():
            shares[kind].append(recompute_ms(choice) / bound_ms if bound_ms else 1.0)
            left_bytes = budget_bytes - profile.peak_bytes(choice)
            own_bytes = profile.simulator.peak_bytes(choice, workspaces=False)
            peaks = peaks_of_variants(variants, choice)
            above = [peak_bytes - own_bytes for peak_bytes in peaks]
            over[kind] += sum(more > left_bytes for more in above)
            if kind == "ours":
                pairs += len(above)
                room = max(room, *(m / max(1, left_bytes) for m in above), 0.0)
    if over["ours"]:
        broken.append(f"{name}: {over['ours']} of {pairs} above the budget")
    mean = {kind: sum(own) / len(own) for kind, own in shares.items()}
    cells = [
        f"{len(profile.tape.ops)}",
        f"{(high - low) / MIB:.1f}",
        f"{over['none']}/{pairs}",
        f"{over['ours']}/{pairs}",
        f"{mean['none']:.2f}",
        f"{mean['ours']:.2f}",
        f"{max(shares['ours']):.2f}",
        f"{room:.0%}",
    ]
    return f"| {' | '.join([name, *cells])} |"


def _profiled(name: str) -> autosac.Profile:
    return autosac.calibrate(profile_of(build_small(name)), progress=False)


def _variants(profile: autosac.Profile) -> Iterator[TracedStep]:
    """The step under other seeds, and after other numbers of updates."""
    learned = profile.step.learned
    is_drawn = draws.may_decide(profile.tape)
    is_trained = learned.real and draws.training_may_decide(profile.tape)
    template = replace(profile, redrawn=()).traced()
    for i in range(NUM_VARIANTS):
        learned.seed = _FIRST_SEED + i if is_drawn else 0
        learned.num_updates = i % 5 if is_trained else 0
        tape = tracing.trace_once(profile.step)
        yield replace(template, tape=tape, costs=modelled_costs(tape, profile.device))


if __name__ == "__main__":
    main()
