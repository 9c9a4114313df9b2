import copy
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autosac
from autosac.planning import plan_files
from autosac.profiles.fingerprints import (
    digest,
    fingerprint,
    first_difference,
)
from tests.models import CASES, SMALL_GPT, WIDTH

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tight(traced):
    """A plan of units, of which some are parts of a chain or a nest."""
    plan = autosac.plan(traced, memory_budget=autosac.floor(traced))
    assert {bool(one.onward) for one in plan.op_policies} == {True, False}
    return plan


@pytest.mark.filterwarnings("ignore:.* was planned with torch")
def test_a_file_that_was_written_before_still_loads_and_means_the_same(traced):
    plan = autosac.Plan.load(Path(__file__).with_name("format_3.plan.json"))

    if plan.torch_version[:4] == torch.__version__[:4]:  # others run other views
        assert autosac.check(plan, traced) == plan.peak_bytes
    assert {bool(one.chain) for one in plan.op_policies} == {True, False}
    assert any(one.around for one in plan.op_policies)


@pytest.fixture
def saved(tight, tmp_path):
    path = tmp_path / "plan.json"
    tight.save(path)
    return path


def changed(path, change, *, sign=True):
    """Change a plan file by hand; its digest too, unless it shall not fit."""
    record = json.loads(path.read_text())
    change(record)
    if sign:
        body = {k: v for k, v in record.items() if k not in plan_files._UNREAD}
        record["digest"] = digest(body)
    path.write_text(json.dumps(record))


# --- there and back ---------------------------------------------------------------


def test_a_saved_plan_loads_as_it_was(tight, saved):
    loaded = autosac.Plan.load(saved)

    assert loaded == tight
    assert loaded.optimality_gap == tight.optimality_gap
    assert autosac.Plan.load(str(saved)) == tight
    model = loaded.apply(SMALL_GPT.model())
    loaded.unapply(model)


def test_whether_a_plan_was_dry_run_is_remembered(tight, saved):
    replace(tight, dry_run=False).save(saved)

    assert not autosac.Plan.load(saved).dry_run


def test_a_file_begins_with_what_people_read_and_has_a_line_per_op(tight, saved):
    lines = saved.read_text().splitlines()
    record = json.loads(saved.read_text())

    assert record["summary"] == str(tight).splitlines()
    assert any("aten.addmm.default" in line and "rerun" in line for line in lines)
    assert all(line.count("aten.") <= 1 for line in lines)


def test_layers_that_are_treated_alike_share_their_ops(traced, saved):
    blocks = tuple(u for u in traced.units.candidates if u.fqn.count(".") == 1)
    budget = traced.baseline_peak_bytes - 1
    plan = autosac.plan(traced, memory_budget=budget)
    plan = replace(
        plan,
        policy={unit.fqn: 0.5 for unit in blocks},
        op_policies=tuple(
            replace(plan.op_policies[0], fqn=unit.fqn) for unit in blocks
        ),
    )
    plan.save(saved)

    assert len(json.loads(saved.read_text())["op_sequences"]) == 1
    assert autosac.Plan.load(saved) == plan


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))]
)
def test_a_copy_has_no_step_and_is_equal(copied, tight):
    assert tight.traced is not None

    assert copied(tight) == tight
    assert copied(tight).traced is None


def test_a_plan_keeps_neither_model_nor_inputs_alive(tight):
    assert not hasattr(tight.traced, "step")


# --- files that are no plan -------------------------------------------------------


def _set(key, value):
    return lambda record: record.__setitem__(key, value)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no JSON"),
        ("not json", "no JSON"),
        ("[1, 2]", "names no format"),
        ("3", "names no format"),
        ("{}", "names no format"),
        ('{"format": "3"}', "format '3'; this autosac reads format 3"),
        ('{"format": 1}', "format 1; this autosac reads format 3"),
        ('{"format": 3}', "changed or cut"),
    ],
)
def test_what_is_no_plan_does_not_load(text, match, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)

    with pytest.raises(ValueError, match=re.escape(str(path)) + f".*{match}"):
        autosac.Plan.load(path)


def test_half_a_file_does_not_load(saved):
    saved.write_text(saved.read_text()[: len(saved.read_text()) // 2])

    with pytest.raises(ValueError, match="no JSON"):
        autosac.Plan.load(saved)


@pytest.mark.parametrize(
    "change",
    [
        _set("budget_bytes", 10**9),
        _set("torch_version", "2.10"),
        lambda record: record["policy"].clear(),
        lambda record: record.pop("peak_bytes"),
        lambda record: record["op_sequences"][0].append("save aten.mm.default"),
        lambda record: record["model"].pop(),
        _set("bound_ms", float("nan")),
    ],
    ids=["budget", "torch", "policy", "peak", "ops", "model", "nan"],
)
def test_a_changed_file_does_not_load(change, saved):
    changed(saved, change, sign=False)

    with pytest.raises(ValueError, match="was changed or cut since it was saved"):
        autosac.Plan.load(saved)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_set("budget_bytes", 1), "above its budget of 1"),
        (lambda record: record["policy"].popitem(), "different units"),
        (lambda record: record["model"].__delitem__(slice(1, None)), "no module"),
        (lambda record: record.pop("peak_bytes"), "it lacks `peak_bytes`"),
        (lambda record: record.pop("units"), "it lacks `units`"),
        (lambda record: record["units"][0].pop("ops"), r"`units\[0\].ops` must be"),
        (lambda record: record["headroom_bytes"].pop("handed"), "what its peak leaves"),
        (_set("surplus", 1), "it has an unknown `surplus`"),
        (_set("replan", None), "it has an unknown `replan`"),
        (_set("units", [1]), r"`units\[0\]` must be an object, got 1"),
        (_set("units", [{"fqn": "0", "ops": 0}]), "training"),
        (_set("model", [["0"]]), r"`model\[0\]` must be a list of 3, got \['0'\]"),
        (_set("op_sequences", [["do aten.mm.default"]]), "becomes of an op"),
    ],
)  # fmt: skip
def test_a_file_that_was_made_wrongly_does_not_load(change, match, saved):
    changed(saved, change)

    with pytest.raises(ValueError, match=re.escape(str(saved))) as caught:
        autosac.Plan.load(saved)

    assert re.search(match, str(caught.value))


_OTHERS = (None, [], {}, "x", -1, 1.5, True, 7, ["x"], {"x": "x"}, [[]], [{}])


def _places(value, path=()):
    """Places of a JSON value, of lists those in the first and the last entry."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, (*path, key))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1} & {*range(len(value))}):
            yield from _places(value[index], (*path, index))


def _put(record, path, value):
    *outer, last = path
    for key in outer:
        record = record[key]
    record[last] = value


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* was planned with torch")
def test_no_value_of_another_kind_is_an_error_later(saved):
    # Whatever loads can be shown.
    whole = json.loads(saved.read_text())
    whole["policy"] = dict(list(whole["policy"].items())[:1])  # one says all
    kept = saved.read_text()
    paths = [p for p in _places(whole) if p and p[0] not in plan_files._UNREAD]
    refused = set()
    for path in paths:
        for value in _OTHERS:
            saved.write_text(kept)
            changed(saved, lambda record, p=path, v=value: _put(record, p, v))
            try:
                plan = autosac.Plan.load(saved)
            except autosac.ArgumentError as error:
                refused.add(path)
                assert "Error(" not in str(error), (path, value)
                continue
            str(plan), repr(plan), plan.report()
            assert hash(plan.signatures) and plan == plan
    assert set(paths) == refused


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("torch_version",), None, "`torch_version` must be text, got None"),
        (("step_ms",), "x", "`step_ms` must be a number of 0 or more, got 'x'"),
        (("recompute_ms",), -1.0, "`recompute_ms` must be a number of 0 or more, got"),
        (("peak_bytes",), -1, "`peak_bytes` must be a whole number of 0 or more, got"),
        (("baseline_peak_bytes",), 1.5, "must be a whole number of 0 or more, got 1.5"),
        (("measured_fraction",), 2.0, "must be a share of 0 to 1, got 2.0"),
        (("calibrated",), "x", "`calibrated` must be true or false, got 'x'"),
        (("cap",), "x", "`cap` must be one of 'allocated', 'reserved', got 'x'"),
        (("reserved_bytes",), [], "a whole number of 0 or more or null, got []"),
        (("device",), {}, "`device` must be text, got {}"),
        (("composition", "parameter"), None, "`composition['parameter']` must be"),
        (("signatures", 0, 0, 2), ["x"], "`signatures[0].leaves[0][2][0]` must be a"),
        (("units", 0, "call_index"), None, "`op_policies[0].call_index` must be a who"),
        (
            ("units", 0, "call_index"),
            7,
            "for call 7 of `blocks.0.norm1`, of 1 that",
        ),
        (("units", 0, "chain"), "", "names a place in a chain, and no chain"),
        (("units", 0, "position"), 7, "does not have all blocks of its chain"),
        (("units", 0, "around"), "x", "its unit `x` is no module of its model"),
    ],
)
def test_a_value_of_another_kind_or_range_is_named(path, value, words, saved):
    changed(saved, lambda record: _put(record, path, value))

    with pytest.raises(autosac.ArgumentError, match=re.escape(words)):
        autosac.Plan.load(saved)


def test_the_mark_of_an_encoding_is_read_over(tight, saved):
    saved.write_text(saved.read_text(), encoding="utf-8-sig")

    assert autosac.Plan.load(saved) == tight


def test_another_pytorch_is_named_in_a_warning(saved):
    changed(saved, _set("torch_version", "2.9.1+cpu"))
    match = r"torch 2\.9\.1\+cpu, this is torch.*`autosac verify` on the command line"

    with pytest.warns(UserWarning, match=match):
        assert autosac.Plan.load(saved).torch_version == "2.9.1+cpu"


def test_another_build_of_the_same_pytorch_is_fine(saved):
    changed(saved, _set("torch_version", torch.__version__.split("+")[0] + "+rocm9"))

    autosac.Plan.load(saved)  # warnings fail the run


# --- does it hold? ----------------------------------------------------------------


def test_a_plan_holds_for_its_own_step(tight, traced, saved):
    assert autosac.check(tight, traced) == tight.peak_bytes
    assert autosac.check(autosac.Plan.load(saved), traced) == tight.peak_bytes


def test_a_larger_batch_breaks_the_budget_and_a_smaller_one_does_not(tight):
    def profiled(rows):
        return autosac.profile(
            SMALL_GPT.model(),
            torch.randint(32, (rows, 8)),
            loss_fn=SMALL_GPT.loss_fn,
            optimizer=torch.optim.AdamW,
        )

    assert autosac.check(tight, profiled(8)) < tight.peak_bytes
    with pytest.raises(autosac.PlanMismatchError, match="does not fit its budget"):
        autosac.check(tight, profiled(32))


class Activated(nn.Module):
    """Runs another op, with no other module, where `kind` says so."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        hidden = torch.tanh(self.up(x)).mul(2)
        kinds = {"sin": torch.sin, "cos": torch.cos, "none": lambda x: x}
        return self.down(kinds[self.kind](hidden))


def _activated(kind):
    model = nn.Sequential(Activated(kind), Activated("sin"))
    return autosac.profile(model, torch.randn(64, WIDTH))


def test_the_first_op_that_differs_is_named():
    activated = _activated("sin")
    plan = autosac.plan(activated, memory_budget=autosac.floor(activated))
    assert "0" in plan.policy

    with pytest.raises(autosac.PlanMismatchError, match=(
        r"op \d+ of `0` is aten.cos.default here, and aten.sin.default there"
    )):  # fmt: skip
        autosac.check(plan, _activated("cos"))
    with pytest.raises(autosac.PlanMismatchError, match=r"op .* of `0` is aten"):
        autosac.check(plan, _activated("none"))


def test_another_mode_model_or_device_does_not_pass(tight, traced):
    with pytest.raises(autosac.PlanMismatchError, match="for another model"):
        autosac.check(tight, CASES["gpt"].profile())
    with pytest.raises(autosac.PlanMismatchError, match="for training mode"):
        autosac.check(
            tight, autosac.profile(SMALL_GPT.model().eval(), SMALL_GPT.inputs())
        )
    with pytest.raises(autosac.PlanMismatchError, match="`device`='h100'"):
        autosac.check(replace(tight, device="h100"), traced)


def test_the_first_module_that_differs_is_named():
    expected = fingerprint(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))

    assert first_difference(expected, expected) is None
    other = fingerprint(nn.Sequential(nn.Linear(2, 4), nn.GELU()))
    assert "`0` to be a Linear" in first_difference(expected, other)
    longer = fingerprint(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.ReLU()))
    assert "expects 3 modules, this model has 4" in first_difference(expected, longer)
    assert "`2`" in first_difference(longer, expected)
