"""What a new user tries, and what happens now: `python -m benchmarks.first_use`.

Rows of two kinds once broke a promise in silence (1) or ended in a raw traceback (2);
then what a user can live with (3), and short models that did either (4). Each row is
run, what it says or measures is written down, and held against what it must be. The
exit code tells whether all are.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import autosac
from autosac.errors import AutosacError
from autosac.step.training_step import training_step
from autosac.storages import storage_bytes
from autosac.verification.measuring import measure_peak
from benchmarks import frictions
from benchmarks.environment import environment
from benchmarks.models.short import CASES, DRAWN, Functional
from benchmarks.tried import (
    CLASSES,
    CONFIG,
    EXACT,
    GPT,
    WIDTH,
    Calls,
    Row,
    X,
    Y,
    command,
    loaded,
    loss,
    mlp,
    plan,
    planned,
    scripted,
    verified,
    with_config,
)

RESULT = Path(__file__).parent / "results" / "first_use.md"


# --- rows that take more than a line ------------------------------------------------


def larger_batch() -> None:
    model = mlp()
    plan(model, loss_fn=torch.sum).apply(model)
    model(X.repeat(16, 1)).sum().backward()


def padded_text() -> str:
    """Steps of GPT-2 on batches with and without padding, of one shape."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=3, n_head=4, n_embd=128, vocab_size=1000, n_positions=128,
        bos_token_id=0, eos_token_id=0, use_cache=False, loss_type="ForCausalLM",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    tokens, mask = torch.randint(1000, (4, 128)), torch.ones(4, 128, dtype=torch.long)
    full = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
    padded = {**full, "attention_mask": mask.clone()}
    padded["attention_mask"][0, :5] = 0

    def peak(plan: autosac.Plan | None, batch: dict[str, torch.Tensor]) -> int:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        if plan is not None:
            plan.apply(model)

        def step() -> Any:
            return training_step(model, (), batch, loss_fn=None, optimizer=None)

        def warm_up() -> None:
            step()
            model.zero_grad(set_to_none=True)

        held = storage_bytes([*model.parameters(), *batch.values()])
        return measure_peak(step, device="cpu", persistent_bytes=held, warm_up=warm_up)[
            1
        ]

    model = transformers.GPT2LMHeadModel(config)
    profile = autosac.calibrate(autosac.profile(model, padded), progress=False)
    one = autosac.plan(profile, memory_budget=autosac.floor(profile))
    both = autosac.plan(model, [padded, full], memory_budget=one.budget_bytes)
    mib = [
        f"{peak(*case) / 2**20:.1f}"
        for case in ((None, full), (one, padded), (one, full), (both, full))
    ]
    return (
        f"budget {one.budget_bytes / 2**20:.1f} MiB; plain step {mib[0]}, plan of the"
        f" padded batch {mib[1]} on it and {mib[2]} on the other, plan of both {mib[3]}"
    )


def gradients_of_another() -> str:
    """Right gradients, or not, through functional_call."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Functional()

    x = torch.randn(256, WIDTH)
    return verified(made, lambda: x, part=10**9)


def compiled_after() -> None:
    torch.compile(planned(), backend="eager")(X)


def compiled_in_part(model: nn.Module) -> nn.Module:
    model.get_submodule("0").compile(backend="eager")
    return model


def broken_plans() -> str:
    """What loading says of a nested, a cut and an edited file."""
    said = []
    for text in ("[" * 100_000, '{"format": 3', '{"format": 3}'):
        try:
            loaded(text)
            said.append("LOADED")
        except ValueError as error:
            said.append(type(error).__name__ if str(error) else "NO WORDS")
    return ", ".join(said)


def saved_sweep() -> str:
    sweep = autosac.sweep(
        autosac.profile(mlp(), X, loss_fn=loss), memory_budgets=[2**30]
    )
    with tempfile.TemporaryDirectory() as folder:
        sweep.picture().save(Path(folder) / "sweep.png")
        return f"works: {[path.name for path in Path(folder).iterdir()]}"


def inference() -> None:
    with torch.inference_mode():
        plan(mlp())


def quantized() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(mlp(), {nn.Linear})
    plan(model)


def rows() -> Iterator[Row]:
    """All rows."""
    yield from _silent()
    yield from _raw()
    yield from frictions.rows()
    for name, (make, inputs) in CASES.items():
        wanted = "kept, equal bits" if name in DRAWN else EXACT

        def run(make: Any = make, inputs: Any = inputs) -> str:
            torch.manual_seed(1)
            batch = inputs()
            return verified(make, lambda: batch)

        yield "short model", name, run, wanted


def _silent() -> Iterator[Row]:
    kind = "silent"
    yield kind, "`functional_call` on a unit", gradients_of_another, EXACT
    yield (
        kind, "an optimizer of another model",
        lambda: plan(mlp(), optimizer=torch.optim.AdamW(mlp().parameters())),
        "trains other parameters",
    )  # fmt: skip
    yield kind, "`loss_fn` forgotten", lambda: plan(mlp(), loss_fn=None), "is missing"
    yield kind, "a batch larger than planned", larger_batch, "is larger than all"
    yield (
        kind, "padded text, then a batch without padding", padded_text,
        r"budget (\S+) MiB;.* plan of both \1",
    )  # fmt: skip
    yield (
        kind,
        "a planned model is planned",
        lambda: plan(planned()),
        "has a plan already",
    )
    yield (
        kind, "`model.compile()`, then `plan`",
        lambda: plan(compiled()), "is compiled by torch.compile",
    )  # fmt: skip
    yield (
        kind, "integers for a model of floats",
        lambda: plan(mlp(), torch.ones(4, WIDTH, dtype=torch.long)),
        "same dtype",
    )  # fmt: skip
    text = json.dumps(CONFIG)
    yield (
        kind, "`hf:` with `--set num_hidden_layer=3`",
        lambda: with_config(text, "--set", "num_hidden_layer=3"),
        "exit code 2.*did you mean",
    )  # fmt: skip
    yield (
        kind, "`hf:` with `--length` beyond the positions",
        lambda: with_config(text, "--length", "17"),
        "exit code 2.*longer than the 16 positions",
    )  # fmt: skip


def compiled() -> nn.Module:
    model = mlp()
    model.compile(backend="eager")
    return model


def _raw() -> Iterator[Row]:
    eager = {"backend": "eager"}
    yield _said("`torch.compile` of a planned model", compiled_after, "plan.unapply")
    yield _said(
        "a part of a planned model is compiled",
        lambda: compiled_in_part(planned())(X),
        "`0` of a planned model is compiled",
    )
    yield _said(
        "`torch.export` of a planned model",
        lambda: torch.export.export(planned(), (X,)),
        "plan.unapply",
    )
    yield _said(
        "compiled code inside a model",
        lambda: plan(Calls(torch.compile(functional.silu, **eager))),
        "runs code that is compiled",
    )
    yield _said(
        "`plan.apply` to a compiled model",
        lambda: plan(mlp()).apply(torch.compile(mlp(), **eager)),
        "is compiled by torch.compile",
    )
    yield _said(
        "`plan` of a compiled model",
        lambda: plan(torch.compile(mlp(), **eager)),
        "is compiled by torch.compile",
    )
    yield _said(
        "a loss over its targets, `--on meta`",
        lambda: command("plan", GPT, "-b", "1GiB", "--on", "meta", "--device", "h100"),
        'exit code 1.*device="cpu"',
    )
    yield _said(
        "`torch.jit.script`",
        lambda: plan(scripted(lambda: torch.jit.script(mlp()))),
        "TorchScript",
    )
    yield _said(
        "`torch.jit.trace` of a part",
        lambda: plan(nn.Sequential(scripted(lambda: torch.jit.trace(mlp(), X)))),
        "TorchScript",
    )
    yield _said(
        "nothing requires a gradient",
        lambda: plan(mlp().requires_grad_(False)),
        "no parameter requires a gradient",
    )
    yield _said(
        "a detached loss",
        lambda: plan(mlp(), loss_fn=lambda out: loss(out.detach())),
        "Leave out `detach",
    )
    yield _said("`torch.inference_mode()`", inference, "plan outside of it")
    yield _said("dynamically quantised weights", quantized, "no parameter")
    yield _said(
        "a loss of many numbers",
        lambda: plan(mlp(), loss_fn=lambda out: out - Y),
        "must be one number",
    )
    yield _said(
        "a float as loss", lambda: plan(mlp(), loss_fn=lambda _: 0.5), "is 0.5:"
    )
    yield _said("no loss", lambda: plan(mlp(), loss_fn=lambda _: None), "is None:")
    yield _said(
        "`loss_fn=nn.MSELoss()`",
        lambda: plan(mlp(), loss_fn=nn.MSELoss()),
        "Let it hold its targets",
    )
    yield _said('`optimizer="adamw"`', lambda: plan(mlp(), optimizer="adamw"), "works")
    yield _said(
        '`autocast="bfloat16"`', lambda: plan(mlp(), autocast="bfloat16"), "works"
    )
    yield _said(
        "`make_optimizer=torch.optim.AdamW`",
        lambda: autosac.verify(
            plan(mlp(), optimizer="adamw"),
            mlp,
            lambda: X,
            loss_fn=loss,
            make_optimizer=torch.optim.AdamW,
            timing_rounds=0,
        ),
        "works",
    )
    yield _said(
        "inputs of another width",
        lambda: plan(nn.Sequential(mlp(), nn.Linear(9, CLASSES))),
        "module `1`",
    )
    yield _said(
        "`torch.vmap` inside",
        lambda: plan(Calls(torch.vmap(lambda row: row.sin() * row.sum()))),
        "works",
    )
    yield _said(
        "`.numpy()` inside",
        lambda: plan(Calls(lambda y: y + torch.from_numpy(y.detach().numpy()))),
        "works",
    )
    yield _said(
        "`.numpy()` inside, on the meta device",
        lambda: plan(
            Calls(lambda y: y + torch.from_numpy(y.detach().numpy())).to("meta"),
            X.to("meta"),
        ),
        "pass a real model",
    )
    yield _said(
        "`torch.func.jvp` inside",
        lambda: plan(Calls(lambda y: torch.func.jvp(torch.sin, (y,), (y,))[1])),
        "cannot be traced: .*torch.autograd.grad|works",
    )
    yield _said("lazy modules", lambda: plan(nn.LazyLinear(CLASSES)), "is lazy")
    yield _said("broken plan files", broken_plans, "ValueError, ValueError, ValueError")
    yield _said(
        "`hf:` with broken JSON",
        lambda: with_config('{"model_type": '),
        "exit code 2.*config.json.* is no JSON",
    )
    yield _said(
        "`-o` into no folder",
        lambda: command("plan", GPT, "-b", "1GiB", "-o", "nowhere/plan.json"),
        "exit code 2.*there is no folder",
    )
    yield _said(
        "a factory that raises",
        lambda: command("plan", GPT, "-b", "1GiB", "--set", "layers=two"),
        "exit code 2.*TypeError",
    )
    yield _said(
        '`.fits("4090")`',
        lambda: autosac.estimate(mlp(), X, loss_fn=loss).fits("4090"),
        "did you mean 'rtx4090'",
    )
    yield _said("a picture of a sweep is saved", saved_sweep, "works")


def _said(what: str, run: Callable[[], Any], wanted: str) -> Row:
    return "raw error", what, run, wanted


def outcome(run: Callable[[], Any]) -> str:
    """What a row returns, warns of or raises, in words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = run()
        except (AutosacError, ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
        except Exception as error:
            return f"RAW {type(error).__name__}: {error}"
    said = [
        str(one.message)
        for one in caught
        if one.category is UserWarning and not issubclass(one.category, FutureWarning)
    ]
    words = result if isinstance(result, str) else "works"
    return " ".join([words, *(f"UserWarning: {text}" for text in dict.fromkeys(said))])


def main(arguments: list[str] | None = None) -> int:
    """Run all rows, or those of whose name a part is given, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_use")
    parser.add_argument("--only", default="", help="part of what was tried")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    where = ", ".join(f"{key} {value}" for key, value in environment().items())
    lines = ["| | what was tried | as asked | what happens now |", "| --- " * 4 + "|"]
    failures = 0
    for kind, what, run, wanted in rows():
        if options.only not in what:
            continue
        torch.manual_seed(0)
        words = " ".join(outcome(run).split()).replace(f"{Path.cwd()}/", "")
        is_right = re.search(wanted, words) is not None and "RAW" not in words
        failures += not is_right
        print(
            "ok " if is_right else "BAD", kind, what, words[:300], sep=" | ", flush=True
        )
        shown = words.replace("|", "/")[:420]
        lines.append(
            f"| {kind} | {what} | {'yes' if is_right else '**no**'} | {shown} |"
        )
    head = [
        "# What a new user tries",
        "",
        f"`python -m benchmarks.first_use`: {where}.",
    ]
    summary = f"{len(lines) - 2} rows, {failures} not as asked."
    options.output.write_text("\n".join([*head, "", summary, "", *lines]) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
