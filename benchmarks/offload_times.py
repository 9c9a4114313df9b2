"""Real steps that offload to a fast file, timed beside others: a part of `offload`.

At the peaks of rules and at the floor without offload, forward and backward passes of
the rule, of the plan without offload and of the one with it take turns, and their CPU
time counts, as the machine may be busy: that of the threads which copy as well, for
which the step waits at most. Only ratios of medians count. The plain step takes part
twice; how far its two medians are apart is the noise. A plan that is made as if copies
kept the program busy for no time shows for how long they do: `Link.issue_ms` is from
there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf

import torch

import autosac
from autosac.devices.links import DISK, Link
from autosac.far_memory import FarMemory
from autosac.profiles.restricting import restricted
from autosac.solving.rules_of_thumb import Choice
from benchmarks.environment import MIB
from benchmarks.models import Workload, zoo
from benchmarks.offload_rules import every_input
from benchmarks.timed_steps import (
    FAST_FILES,
    Run,
    install,
    medians,
    planned,
    profiled,
    steps,
)

_COPIED_BYTES = 16 * 2**20
_COPIES = 8
_ROUNDS = 31

_KINDS = ("rule", "without", "with", "unpriced")


def measured_link() -> Link:
    """The link to a fast file, by a thread's copies of a large and of a tiny tensor."""
    memory = FarMemory(FAST_FILES, at_once_bytes=0)
    large_ms = [_copied_ms(memory, _COPIED_BYTES) for _ in range(_COPIES)]
    tiny_ms = [_copied_ms(memory, 64) for _ in range(_COPIES)]
    out_ms, back_ms = (statistics.median(ms) for ms in zip(*large_ms, strict=True))
    latency_ms = statistics.median(max(pair) for pair in tiny_ms)
    return replace(
        DISK,
        out_bytes_per_s=1e3 * _COPIED_BYTES / out_ms,
        back_bytes_per_s=1e3 * _COPIED_BYTES / back_ms,
        latency_ms=latency_ms,
    )


def _copied_ms(memory: FarMemory, num_bytes: int) -> tuple[float, float]:
    source = torch.ones(num_bytes, dtype=torch.uint8)
    begin = time.perf_counter()
    sent = memory.send(source)
    sent.wait()
    there = time.perf_counter()
    sent.fetch(source)
    back = time.perf_counter()
    sent.release()
    return 1e3 * (there - begin), 1e3 * (back - there)


def times(names: Sequence[str], _: list[str]) -> Iterator[str]:
    """Rows of measured times, of each model in turn; times break no promise."""
    link = measured_link()
    yield "Real forward and backward passes on the CPU, far memory in a file in memory,"
    yield f"whose link was measured: {link.out_bytes_per_s / 1e9:.1f} GB/s there,"
    yield f"{link.back_bytes_per_s / 1e9:.1f} back, {link.latency_ms:.3f} ms a copy."
    own = "in CPU time with that of"
    yield f"Medians of {_ROUNDS} rounds in which all take turns, {own}"
    yield "the threads that copy, over that of the plain step, which takes part twice:"
    yield "*noise* is what its second median is off by."
    yield "*more*: what the plan with offload takes over the faster of rule and plan"
    yield "without. *unpriced*: a plan with offload made as if copies kept the program"
    yield "busy for no time; *busy*, where it streams the model: what its steps take"
    yield "beyond the plain one and its predicted waits, for each tensor that goes and"
    yield "comes back."
    yield ""
    timed = "rule | without | with | more | unpriced | busy ms"
    yield f"| model | plain ms | noise | peak of | MiB | {timed} |"
    yield f"| --- | ---: | ---: | --- |{' ---: |' * 7}"
    for name in names:
        yield from _times_of(name, zoo()[name], link)


def _times_of(name: str, work: Workload, link: Link) -> Iterator[str]:
    profile = profiled(work, link)
    every = profile.rules.every_kth_block(1)
    moved = every_input(restricted(profile, offload=True))
    rules: dict[str, tuple[Choice | None, int]] = {
        "every block rerun": (every, profile.peak_bytes(every)),
        "and every input moved": (moved, profile.peak_bytes(moved)),
        "the floor without offload": (None, autosac.floor(profile)),
    }
    unpriced = replace(profile.device, link=link.without_issue)
    as_free = replace(profile, device=unpriced)
    runs: dict[tuple[str, str], Run] = {
        ("", one): steps(work, lambda model: None) for one in ("plain", "again")
    }
    plans: dict[str, dict[str, autosac.Plan | None]] = {}
    for rule, (choice, peak_bytes) in rules.items():
        if choice is not None:
            runs[rule, "rule"] = steps(work, partial(install, profile, choice))
        plans[rule] = {
            "without": planned(profile, peak_bytes, offload=False),
            "with": planned(profile, peak_bytes, offload=True),
            "unpriced": planned(as_free, peak_bytes, offload=True),
        }
        for kind, plan in plans[rule].items():
            if plan is not None:
                runs[rule, kind] = steps(work, plan.apply)
    taken_ms = medians(runs, _ROUNDS)
    plain_ms = taken_ms["", "plain"]
    noise = taken_ms["", "again"] / plain_ms - 1
    for rule, (_, peak_bytes) in rules.items():
        own = {
            kind: taken_ms[rule, kind] / plain_ms
            for kind in _KINDS
            if (rule, kind) in taken_ms
        }
        peak = f"{peak_bytes / MIB:.2f}"
        *figures, free = [f"{own[kind]:.2f}" if kind in own else "" for kind in _KINDS]
        busy = _busy(plans[rule]["unpriced"], (own["unpriced"] - 1) * plain_ms)
        best = min(own.get("rule", inf), own.get("without", inf))
        more = f"{own['with'] / best - 1:+.0%}"
        row = [name, f"{plain_ms:.1f}", f"{noise:+.1%}", rule, peak, *figures]
        row += [more, free, busy]
        print(*row, flush=True)
        yield f"| {' | '.join(row)} |"


def _busy(plan: autosac.Plan | None, more_ms: float) -> str:
    """Time for each tensor that goes and comes back, if a plan streams the model."""
    assert plan is not None
    streamed = sum(len(policy.streamed) for policy in plan.op_policies)
    return f"{(more_ms - plan.recompute_ms) / streamed:.2f}" if streamed else ""
