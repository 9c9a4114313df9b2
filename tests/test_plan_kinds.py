"""Plan files say what they are, whichever class is asked to load them."""

import json
import re

import pytest
import torch
from torch import nn

import autosac
from autosac.profiles.fingerprints import digest

_KINDS = {
    "Plan": "a plan",
    "ParallelPlan": "a parallel plan",
    "PipelinePlan": "a pipeline plan",
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A saved plan of each kind."""
    folder = tmp_path_factory.mktemp("plans")
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    batch, how = torch.ones(4, 4), {"memory_budget": "1GiB"}
    step = {"loss_fn": lambda output: output.mean(), **how}
    plans = (
        autosac.plan(model, batch, **step),
        autosac.plan_parallel(model, batch, cluster="hgx-h100", num_gpus=2, **step),
        autosac.plan_pipeline(
            model,
            batch,
            target=batch,
            loss_fn=nn.functional.mse_loss,
            num_ranks=2,
            num_micro_batches=2,
            schedules=["1F1B"],
            **how,
        ),
    )
    for plan in plans:
        plan.save(folder / type(plan).__name__)
        assert type(plan).load(folder / type(plan).__name__) == plan
    return folder


@pytest.mark.parametrize("loader", _KINDS)
@pytest.mark.parametrize("kind", _KINDS)
def test_a_file_of_another_kind_is_named_with_what_loads_it(paths, kind, loader):
    if kind == loader:
        return
    words = f"{paths / kind} is {_KINDS[kind]}; load it by `autosac.{kind}.load`."

    with pytest.raises(autosac.ArgumentError, match=f"^{re.escape(words)}$"):
        getattr(autosac, loader).load(paths / kind)


@pytest.mark.parametrize("loader", _KINDS)
@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\x80\x02K\x01.", "no text"), (b"{", "no JSON"), (b"[]", "names no format")],
)
def test_a_file_that_is_no_plan_is_said_to_be_none(loader, content, words, tmp_path):
    (tmp_path / "file").write_bytes(content)

    with pytest.raises(
        autosac.ArgumentError, match=rf"not a plan saved by autosac: it .*{words}\.$"
    ):
        getattr(autosac, loader).load(tmp_path / "file")


@pytest.mark.parametrize("loader", _KINDS)
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("format", "3", "has plan format '3'; this autosac reads format"),
        ("budget_bytes", -1, "must be a whole number of 0 or more, got -1"),
        ("device", None, "`device` must be text, got None"),
        ("model", 3, "`model` must be a list, got 3"),
        ("calibrated", 1, "`calibrated` must be true or false, got 1"),
        ("calibrated", None, "it lacks `calibrated`"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_named_in_files_of_all_kinds(
    paths, loader, key, value, words, tmp_path
):
    record = json.loads((paths / loader).read_text())
    record[key] = value
    if words.startswith("it lacks"):
        del record[key]
    if "digest" in record:
        unread = ("format", "summary", "digest")
        body = {name: item for name, item in record.items() if name not in unread}
        record["digest"] = digest(body)
    (tmp_path / "plan.json").write_text(json.dumps(record))

    with pytest.raises(autosac.ArgumentError, match=re.escape(words)):
        getattr(autosac, loader).load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("loader", "change", "words"),
    [
        (
            "PipelinePlan",
            lambda record: record["stage_plans"].pop(),
            "it has 1 stages, and its schedule 2",
        ),
        (
            "PipelinePlan",
            lambda record: record["stage_plans"][0]["fqns"].clear(),
            "a stage of it has no block, or gets no batch",
        ),
        (
            "ParallelPlan",
            lambda record: record["context"].update(degree=0),
            "`context.degree` must be a whole number of 1 or more, got 0",
        ),
    ],
)
def test_plans_of_several_processes_that_cannot_be_are_refused(
    paths, loader, change, words, tmp_path
):
    record = json.loads((paths / loader).read_text())
    change(record)
    (tmp_path / "plan.json").write_text(json.dumps(record))

    with pytest.raises(autosac.ArgumentError, match=re.escape(words)):
        getattr(autosac, loader).load(tmp_path / "plan.json")
