"""Optimizer state in far memory: real steps on the CPU, and GPUs predicted.

    python -m benchmarks.offloaded_states [--models llama,unet]

Models of the zoo train three steps with `OffloadedOptimizer`, under a plan for its
floor: peaks by the allocator's events, bits against the plain optimizer without any
plan, the same with copies held to 0.1 GB/s, and the time of real steps without a plan.
A language model of 8B parameters is predicted for GPUs. Exits with 1 if a promise is
broken.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autosac
from autosac.costs.sources import modelled_costs
from autosac.devices.specs import device_spec
from autosac.far_memory import FarMemory
from autosac.step.training_step import normalize_inputs, training_step
from autosac.verification.measuring import State, capture_state, differences
from benchmarks.environment import MIB, environment
from benchmarks.models import Workload, zoo
from benchmarks.offload import GPUS, LARGEST_ERROR, RESULTS, SLOW_BYTES_PER_S, llama

MODELS = ("llama", "qwen3", "mixtral", "t5", "swin", "unet")
STEPS, ROUNDS = 3, 5
TOKENS = 8192
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD, momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW, single": partial(torch.optim.AdamW, foreach=False),
    "RMSprop": torch.optim.RMSprop,
}
Make = Callable[[nn.Module], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--output", type=Path, default=RESULTS / "offloaded_states.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    broken: list[str] = []
    lines = ["# Optimizer state in far memory", ""]
    lines += [*real(options.models.split(","), broken), "", *gpus(), ""]
    lines += [f"- {name}: {value}" for name, value in environment().items()]
    lines += ["- command: `python -m benchmarks.offloaded_states`", ""]
    options.output.write_text("\n".join(lines))
    for line in broken:
        print("BROKEN", line)
    sys.exit(bool(broken))


# --- real steps -------------------------------------------------------------------


def real(names: list[str], broken: list[str]) -> Iterator[str]:
    """Rows of real steps under plans for the floor."""
    yield "Real steps on the CPU, far memory in a file of the system's temporary"
    yield "directory. *off*: predicted over measured peak, of a plan for the floor with"
    yield "the state there. *step*: real ones without a plan. Bytes are MiB."
    yield ""
    heads = "floor without | with | off | step without | with"
    yield f"| model | optimizer | state | {heads} |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name in names:
        for kind, make in OPTIMIZERS.items():
            row = _row(zoo()[name], kind, make, broken)
            print(row, flush=True)
            yield row


def _row(work: Workload, kind: str, make: Any, broken: list[str]) -> str:
    def plain(model: nn.Module) -> Any:
        return make(model.parameters())

    def far(model: nn.Module) -> Any:
        return autosac.OffloadedOptimizer(plain(model))

    def slow(model: nn.Module) -> Any:
        optimizer = far(model)
        optimizer.memory = FarMemory(bytes_per_s=SLOW_BYTES_PER_S, at_once_bytes=0)
        return optimizer

    steps = {name: _profiled(work, one) for name, one in (("", plain), ("far", far))}
    low, floor = autosac.floor(steps["far"]), autosac.floor(steps[""])
    plan = autosac.plan(steps["far"], memory_budget=low)
    done = [_verified(plan, work, one) for one in (far, slow)]
    where = f"{work.name} with {kind}"
    state_bytes = plan.far_state_bytes
    if low >= floor:
        broken.append(f"{where}: the floor is no lower")
    if any(not one.within_budget or one.differences for one in done):
        broken.append(f"{where}: {done[0]}")
    if abs(done[0].prediction_error) > LARGEST_ERROR:
        broken.append(f"{where}: off by {done[0].prediction_error:+.3%}")
    if done[0].measured_peak_bytes != done[1].measured_peak_bytes:
        broken.append(f"{where}: another peak with slow copies")
    (own, plain_ms), (planned, _) = _run(work, plain), _run(work, far, plan)
    if different := differences(own, planned):
        broken.append(f"{where}: {different[0]} than with the plain optimizer")
    far_ms = _run(work, far)[1]
    cells = [f"{n / MIB:.2f}" for n in (state_bytes, floor, low)]
    cells += [f"{done[0].prediction_error:+.3%}"]
    cells += [f"{plain_ms:.0f} ms", f"{far_ms:.0f} ms"]
    return f"| {' | '.join([work.name, kind, *cells])} |"


def _profiled(work: Workload, make_optimizer: Make) -> autosac.Profile:
    model = work.make_model()
    profile = autosac.profile(
        model,
        work.make_inputs(),
        optimizer=make_optimizer(model),
        loss_fn=work.loss_fn,
    )
    return autosac.calibrate(profile, progress=False)


def _verified(
    plan: autosac.Plan, work: Workload, make_optimizer: Make
) -> autosac.Verification:
    return autosac.verify(
        plan,
        work.make_model,
        work.make_inputs,
        make_optimizer=make_optimizer,
        loss_fn=work.loss_fn,
        steps=STEPS,
        timing_rounds=0,
        extra_bytes=work.loss_bytes,
    )


def _run(
    work: Workload, make_optimizer: Make, plan: autosac.Plan | None = None
) -> tuple[State, float]:
    """State after some steps, and the median time of further ones."""
    torch.manual_seed(0)
    model = work.make_model()
    if plan is not None:
        plan.apply(model)
    optimizer = make_optimizer(model)
    args, kwargs = normalize_inputs(work.make_inputs())
    torch.manual_seed(0)

    def step() -> torch.Tensor:
        model.zero_grad()
        return training_step(
            model, args, kwargs, loss_fn=work.loss_fn, optimizer=optimizer
        )

    for _ in range(STEPS):
        loss = step()
    state = capture_state(model, optimizer, loss)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return state, statistics.median(times)


# --- GPUs -------------------------------------------------------------------------


def gpus() -> Iterator[str]:
    """Predicted floors and times of a model of 8B parameters."""
    yield f"Predicted, nothing of this was run: Llama-3-8B without its head, {TOKENS}"
    yield "tokens of one sample, parameters and AdamW's states in bfloat16, all"
    yield "trained. Steps are without recomputation, at the peak without a plan."
    yield ""
    yield "| optimizer | GPU | state on the host | floor | peak | step | of it copies |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"

    def far(parameters: Any) -> Any:
        return autosac.OffloadedOptimizer(torch.optim.AdamW(parameters))

    kinds: dict[str, Any] = {
        "AdamW": torch.optim.AdamW,
        "AdamW, offloaded": far,
        "AdamW in backward": partial(
            autosac.OptimizerInBackward, make_optimizer=torch.optim.AdamW
        ),
        "AdamW in backward, offloaded": partial(
            autosac.OptimizerInBackward, make_optimizer=far
        ),
    }
    for kind, optimizer in kinds.items():
        traced = _traced(optimizer)
        for gpu in map(device_spec, GPUS):
            costs = modelled_costs(traced.tape, gpu)
            step = replace(traced, device=gpu, costs=costs)
            gigabytes = [step.far_state_bytes, autosac.floor(step)]
            gigabytes += [step.baseline_peak_bytes]
            cells = [kind, gpu.name, *(f"{n / 1e9:.2f} GB" for n in gigabytes)]
            cells += [f"{step.baseline_ms:.0f} ms", f"{step.far_state_ms:.0f} ms"]
            row = f"| {' | '.join(cells)} |"
            print(row, flush=True)
            yield row


def _traced(optimizer: Any) -> autosac.Profile:
    with torch.device("meta"):
        model = llama().to(torch.bfloat16)
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    return autosac.profile(
        model,
        {"input_ids": tokens, "use_cache": False},
        device=GPUS[0],
        optimizer=optimizer,
        loss_fn=lambda output: output.last_hidden_state.float().square().mean(),
    )


if __name__ == "__main__":
    main()
