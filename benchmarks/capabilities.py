"""Lines of each capability, now and at the review that drew up the first such table.

Files are told by patterns, of which the first that matches counts; a file that serves
several capabilities counts for the one it serves most. Modules of the old tree and of
today's stand side by side.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

REVIEW = "5766259"  # commit of that review
ROOT = Path(__file__).parents[1]

# What there was not at the review, in files of its own.
NEWER = {
    "plans of several batches and branches, batches that come later": """
        autosac/planning/batch_kinds.py autosac/planning/plan_batches.py
        autosac/planning/unseen_batches.py autosac/checkpointing/batch_variants.py
        autosac/step/batch_signatures.py""",
    "real traces: steps whose values decide what they do": """
        autosac/tracing/real_steps.py autosac/tracing/real_tensors.py
        autosac/tracing/draws.py autosac/tracing/learned.py
        autosac/tracing/one_hot.py autosac/tracing/memoized.py
        autosac/tracing/conversions.py autosac/tracing/failures.py
        autosac/simulation/varied_simulator.py autosac/_compat_plain.py""",
    "reruns op by op, units that depart from their plan, second backward": """
        autosac/checkpointing/op_*.py autosac/checkpointing/departed_units.py
        autosac/checkpointing/recording_mode.py autosac/checkpointing/tensor_parts.py
        autosac/checkpointing/unneeded_ops.py autosac/_compat_dispatch.py
        autosac/checkpointing/module_attributes.py autosac/_compat_autograd.py""",
    "mistakes in what is passed, said in a sentence": """
        autosac/step/arguments.py autosac/profiles/mistakes.py
        autosac/_compat_profiler.py""",
    "bounds and search near the optimum": """
        solvers/sac/surrogate.py solvers/sac/segments.py solvers/sac/mixed_points.py
        solvers/sac/start.py solvers/sac/least_peak.py solvers/milp/linear_program.py
        solvers/curves/hull.py autosac/solving/curve_points.py
        autosac/solving/path_relinking.py autosac/solving/repair.py
        autosac/solving/rules_of_thumb.py autosac/solving/incumbents.py""",
}

OLDER = {
    "many GPUs: FSDP2 memory, time, MILP": """
        autosac/parallel/* solvers/*fsdp* solvers/*collectives.py
        solvers/*step_time.py""",
    "module statistics, PyTorch's trackers, graph info": """
        autosac/statistics/* autosac/graphs/analyzing.py
        autosac/profiles/module_graph.py""",
    "joint graphs, `compile`, Capuchin": """
        autosac/graphs/* solvers/*graph* solvers/capuchin.py solvers/recomputation.py
        autosac/_compat_graphs.py""",
    "trade-off curves: exact points, fits": """
        solvers/curves/* solvers/curve.py solvers/knapsack.py solvers/_save_front.py
        autosac/*/curves.py""",
    "the MILP of one device, from formulation to choice": """
        solvers/* autosac/solving/* autosac/planning/formulating.py
        autosac/candidates/holding.py autosac/planning/spending.py""",
    "units: modules, chains, nests, slices": """
        autosac/units/* autosac/candidates/*""",
    "simulation, allocator, memory over time": """
        autosac/simulation/* autosac/step/ledger.py
        autosac/profiles/memory_history.py""",
    "checkpointing at run time, pipelines": """
        autosac/checkpointing/* autosac/applying/*""",
    "a GPU that is not present: lens, CUDA workspaces": """
        autosac/lens/* autosac/*/cuda_workspaces.py autosac/_compat_gpu.py""",
    "costs: devices, calibration, CPU workspaces": """
        autosac/costs/* autosac/devices/*""",
    "the trace's speed-ups": """
        autosac/fake_tensors/* autosac/tracing/repeating.py
        autosac/tracing/op_facts.py autosac/tracing/foreach.py
        autosac/tracing/equal_states.py autosac/tracing/values.py
        autosac/tracing/real_layouts.py""",
    "tracing, and what a user passes": """
        autosac/tracing/* autosac/step/*""",
    "grids of steps, batch sizes, sweeps": """
        autosac/sweeps/* autosac/results/* autosac/planning/sweeping.py
        autosac/planning/budget_sweep.py autosac/planning/batching.py
        autosac/planning/batch_sizes.py""",
    "pictures, reports, estimates": """
        autosac/showing/* autosac/pictures/* autosac/plotting.py
        autosac/planning/plotting.py autosac/planning/*report*.py
        autosac/planning/explaining.py autosac/*/estimat*.py""",
    "profiles and plans": """
        autosac/planning/* autosac/profiles/*""",
    "measuring and verifying": """
        autosac/verification/* autosac/measuring/*""",
    "trainers": "autosac/integrations/*",
    "command line": "autosac/cli/*",
    "what all share: errors, quantities, private PyTorch APIs": "autosac/*.py",
}  # fmt: skip


def capability(path: str) -> str:
    """The capability that a file of the product serves."""
    for name, patterns in {**NEWER, **OLDER}.items():
        if any(fnmatch(path, pattern) for pattern in patterns.split()):
            return name
    raise ValueError(f"{path} serves no capability; name one in {__file__}.")


def lines_now(paths: Iterable[Path]) -> Counter[str]:
    """Lines of each capability in the working tree."""
    counts: Counter[str] = Counter()
    for path in paths:
        name = capability(path.relative_to(ROOT).as_posix())
        counts[name] += len(path.read_text().splitlines())
    return counts


def lines_at_review() -> Counter[str]:
    """Lines of each capability at the review; needs the repository's history."""
    counts: Counter[str] = Counter()
    names = _git("ls-tree", "-r", "--name-only", REVIEW, "autosac", "solvers")
    for path in filter(lambda name: name.endswith(".py"), names.splitlines()):
        text = _git("show", f"{REVIEW}:{path}")
        counts[capability(path)] += len(text.splitlines())
    return counts


def _git(*words: str) -> str:
    return subprocess.run(
        ("git", *words), check=True, cwd=ROOT, capture_output=True, text=True
    ).stdout


def table(paths: Iterable[Path]) -> list[str]:
    """The table as lines of Markdown."""
    before, now = lines_at_review(), lines_now(paths)
    lines = [
        f"Lines of each capability at the review (commit {REVIEW}) and now.",
        "",
        "| capability | at the review | now |",
        "| --- | ---: | ---: |",
    ]
    lines += [f"| {name} | {before[name]:,} | {now[name]:,} |" for name in OLDER]
    lines.append(_total("all of these", OLDER, before, now))
    lines += ["| *what there was not then* | | |"]
    lines += [f"| {name} | {before[name] or ''} | {now[name]:,} |" for name in NEWER]
    lines.append(_total("in all", {**OLDER, **NEWER}, before, now))
    return lines


def _total(
    title: str, names: Iterable[str], before: Counter[str], now: Counter[str]
) -> str:
    sums = [sum(counts[name] for name in names) for counts in (before, now)]
    return f"| **{title}** | {sums[0]:,} | {sums[1]:,} |"
