import json

import pytest
import torch
from torch import nn

from autosac.errors import SolverError, TraceError, UnsupportedError
from autosac.pytrees import tensors_in
from autosac.step.training_step import normalize_inputs
from benchmarks import breadth
from benchmarks.judging import job, verdicts
from benchmarks.models.drawn import NotBuiltError, build_small, every
from benchmarks.models.workload import Workload, adamw, normal, on_device


def cell(measured=10, *, budget=10, predicted=10, differences=()):
    return {
        "budget_bytes": budget,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "differences": list(differences),
    }


def record(*cells, plain=(), **more):
    return {
        "model": "timm/toy",
        "status": "done",
        "phase": "real steps",
        "cpu_s": {"trace": 1.0, "real steps": 2.0},
        "plain": cell(differences=plain),
        "cells": list(cells),
        "gaps": [0.0] * len(cells),
        **more,
    }


def growing(*cells):
    said = ["Modules keep 1 B more with every step."]
    return record(*cells, warnings=said) | {"plain": cell(11)}


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (record(cell(), cell(9)), verdicts.EXACT),
        (record(cell(), cell(11)), verdicts.OVER),
        (record(cell(11), cell(differences=["loss"])), verdicts.BITS),
        (record(cell(), cell(), recompute_ms=[1.0, 2.0]), verdicts.DEARER),
        (record(cell(), cell(), recompute_ms=[1.0, 1.0]), verdicts.EXACT),
        (record(cell(differences=["loss"]), plain=["loss"]), verdicts.NOT_JUDGED),
        (record(cell(11, differences=["loss"]), plain=["loss"]), verdicts.OVER),
        (record(status="refused", reason="No."), verdicts.REFUSED),
        (record(status="raw error", reason="KeyError: 1"), verdicts.RAW),
        (growing(cell(11)), verdicts.NOT_JUDGED),
        (growing(cell(12)), verdicts.OVER),  # by more than without a plan
        (record(status="ended", phase="floor"), verdicts.SLOW),
        (record(status="ended", phase="real steps"), verdicts.NOT_JUDGED),
        (record(status="not built", reason="No."), verdicts.NOT_JUDGED),
    ],
)
def test_every_way_to_fail_has_a_verdict(observed, expected):
    assert verdicts.verdict(observed) == expected


@pytest.mark.parametrize(
    ("observed", "asked"),
    [
        (record(cell(11), cell(), cell()), "over budget: 0"),
        (record(cell(differences=["loss"])), "other bits: 0"),
        (record(status="raw error", reason="KeyError: 1"), "raw exception: 0"),
        (record(*[cell()] * 2, recompute_ms=[1.0, 2.0]), "dearer with more: 0"),
        (record(status="ended", phase="floor", reason="late"), "too slow: 0"),
        (record(status="refused", reason="No."), "refused: at most 3%"),
    ],
)
def test_one_failure_among_few_models_fails_what_is_asked_for(observed, asked):
    records = [*[record(cell())] * verdicts.LEAST_JUDGED, observed]
    most = verdicts.LEAST_JUDGED * verdicts.MOST_REFUSED
    records += [observed] * int(most) if asked.startswith("refused") else []

    failed = [text for text, _, kept in verdicts.summary(records) if not kept]
    whole = {"records": records, "num_names": 900, "where": {}}
    whole |= {"command": "", "device": "CPU"}
    page = "\n".join(verdicts.page(whole))

    assert failed == [asked]
    assert page.count("**FAIL**") == 1


def toy():
    return Workload(
        name="toy",
        make_model=lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)),) * 3
        ),
        make_inputs=lambda: normal(64, 16),
        loss_fn=torch.sum,
        make_optimizer=adamw,
        blocks=(),
    )


def judged(tmp_path):
    job.run("timm/toy", tmp_path / "toy.json")
    return json.loads((tmp_path / "toy.json").read_text())


def test_a_model_is_planned_and_trained_at_three_budgets(
    tmp_path, monkeypatch, one_thread
):
    monkeypatch.setattr(job, "build_small", lambda name: toy())

    judgement = judged(tmp_path)

    assert verdicts.verdict(judgement) == verdicts.EXACT
    assert [c["measured_bytes"] for c in judgement["cells"]] == [
        c["predicted_bytes"] for c in judgement["cells"]
    ]
    assert judgement["floor_bytes"] < judgement["cells"][0]["budget_bytes"]
    assert set(judgement["cpu_s"]) == {job.BUILD, *job.PLANNING, job.STEPS}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (TraceError("No."), verdicts.REFUSED),
        (UnsupportedError("No."), verdicts.REFUSED),
        (NotImplementedError("No."), verdicts.RAW),
        (SolverError("A mistake."), verdicts.RAW),
        (RuntimeError("No."), verdicts.RAW),
        (RuntimeError("can't allocate memory"), verdicts.NOT_JUDGED),
        (NotBuiltError("No."), verdicts.NOT_JUDGED),
    ],
)
def test_what_is_raised_while_planning_is_a_verdict(
    tmp_path, monkeypatch, one_thread, error, verdict
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(job, "build_small", lambda name: toy())
    monkeypatch.setattr(job.autosac, "floor", fail)

    judgement = judged(tmp_path)

    assert verdicts.verdict(judgement) == verdict
    assert judgement["reason"].endswith(str(error)) and judgement["phase"] == job.FLOOR


@pytest.mark.slow
def test_a_batch_of_equal_layers_is_cut_to_two():
    from benchmarks.models.drawn import small_vision  # imports all models of timm

    blocks = [nn.Linear(8, 8) for _ in range(5)]
    model = nn.Sequential(nn.Linear(4, 8), *blocks, nn.ReLU(), nn.Linear(8, 2))

    left = small_vision.cut(model)

    assert [name for name, _ in left.named_children()] == ["0", "1", "2", "6", "7"]
    assert left(torch.ones(1, 4)).shape == (1, 2)


@pytest.mark.slowest
def test_a_process_for_each_model_and_none_for_what_is_done(tmp_path, capsys):
    pytest.importorskip("expecttest")  # of PyTorch's list of modules
    folders = ["--work", str(tmp_path / "work"), "--output", str(tmp_path)]
    given = [*folders, "--models", "modules/nn.Linear"]
    large = ["--models", "torchvision/convnext_large", "--cpu-s", "1"]

    assert breadth.main([*folders, *large]) == 1
    late = (tmp_path / "breadth.md").read_text()
    assert breadth.main(given) == 1  # one is not enough
    page = (tmp_path / "breadth.md").read_text()
    capsys.readouterr()
    assert breadth.main(given) == 1

    assert "not done in 1 s of work" in late
    assert "| modules | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 1 |" in page
    assert "expected" not in page and str(tmp_path) not in page
    assert capsys.readouterr().out == ""  # nothing was left to do


@pytest.mark.slow
def test_a_run_goes_on_with_the_records_beside_the_page(tmp_path, capsys):
    known = record(*[cell()] * 3, model="modules/nn.ReLU")
    (tmp_path / "breadth.json").write_text(json.dumps([known]))
    folders = ["--work", str(tmp_path / "work"), "--output", str(tmp_path)]

    assert breadth.main([*folders, "--render"]) == 1

    assert "| modules | 1 |" in (tmp_path / "breadth.md").read_text()
    assert json.loads((tmp_path / "breadth.json").read_text()) == [known]
    assert capsys.readouterr().out == ""


def test_every_source_has_names_each_once():
    names = [
        name for source in ("transformers", "torchvision") for name in every(source)
    ]

    assert len(set(names)) == len(names) > 600
    assert {"transformers/gpt2", "torchvision/fcos_resnet50_fpn"} <= set(names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_gpu_that_is_not_here_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        breadth.main(["--device", "cuda", "--models", "timm/dla"])
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_moves_to_a_device_with_its_inputs():
    work = build_small("modules/nn.Linear")

    moved = on_device(work, "meta")

    args, kwargs = normalize_inputs(moved.make_inputs())
    tensors = [*moved.make_model().parameters(), *tensors_in((args, kwargs))]
    assert tensors and all(tensor.is_meta for tensor in tensors)
    assert on_device(work, "cpu") is work
