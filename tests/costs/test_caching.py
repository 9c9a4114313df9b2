import json
import math
import os
import sys
import threading

import pytest
import torch
import torchvision  # noqa: F401 (its ops)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autosac
from autosac.costs import caching, timing
from autosac.costs.timing import OpMeasurement
from autosac.step.op_signatures import Layout, Signature, signature
from tests.models import CASES

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A directory with no measurements in it yet; a busy machine changes nothing."""
    monkeypatch.setattr(timing, "STEADY", math.inf)
    monkeypatch.setenv("AUTOSAC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def gpt():
    return CASES["gpt"].profile(torch.optim.AdamW)


def figures(traced):
    return traced.op_ms, [op.workspace_bytes for op in traced.tape.ops]


def num_distinct(traced):
    return len({op.signature for op in traced.tape.ops if not op.is_view})


# --- the table on disk ----------------------------------------------------------------


def test_the_second_time_everything_is_in_the_table(gpt, cache):
    first = autosac.calibrate(gpt)
    second = autosac.calibrate(gpt)

    assert first.calibration.measured.num_ops == num_distinct(gpt)
    assert second.calibration.cached.num_ops == num_distinct(gpt)
    assert second.calibration.measured.num_ops == 0
    assert figures(first) == figures(second)
    assert len(list(cache.iterdir())) == 1


def test_a_model_that_is_present_is_planned_with_the_table(gpt, cache):
    case = CASES["gpt"]
    model = case.model()
    autosac.plan(model, case.inputs(), memory_budget="1GiB")
    (file,) = cache.iterdir()
    stamp = file.stat().st_mtime_ns

    plan = autosac.plan(model, case.inputs(), memory_budget="1GiB")

    assert plan.measured_fraction == 1.0
    assert file.stat().st_mtime_ns == stamp  # nothing was new


def test_the_table_is_neither_read_nor_written_without_cache(gpt, cache):
    autosac.calibrate(gpt, cache=False)
    assert not cache.exists()

    autosac.calibrate(gpt)
    assert autosac.calibrate(gpt, cache=False).calibration.cached.num_ops == 0


def test_refresh_measures_again_and_replaces(gpt, cache):
    autosac.calibrate(gpt)
    (file,) = cache.iterdir()
    record = json.loads(file.read_text())
    record["ops"] = {name: [1e9, 7, 0, 0.0] for name in record["ops"]}
    file.write_text(json.dumps(record))
    assert min(ms for ms in autosac.calibrate(gpt).op_ms if ms) == 1e9

    traced = autosac.calibrate(gpt, refresh=True)

    assert traced.calibration.measured.num_ops == num_distinct(gpt)
    assert max(traced.op_ms) < 1e9
    assert figures(autosac.calibrate(gpt)) == figures(traced)


def test_what_runs_disagreed_on_is_measured_again(gpt, cache, monkeypatch):
    monkeypatch.setattr(timing, "STEADY", 1e6)
    autosac.calibrate(gpt)
    (file,) = cache.iterdir()
    record = json.loads(file.read_text())
    name, *others = record["ops"]
    record["ops"][name] = [1e9, 7, 0, 1e9]  # a slow run, and one yet slower
    file.write_text(json.dumps(record))

    traced = autosac.calibrate(gpt)

    assert traced.calibration.measured.num_ops == 1
    assert traced.calibration.cached.num_ops == len(others)
    assert max(traced.op_ms) < 1e9
    assert autosac.calibrate(gpt).calibration.measured.num_ops == 0


def test_two_measurements_that_agree_are_believed():
    one = OpMeasurement(runtime_ms=10.0, workspace_bytes=1, spread=4.0)
    other = OpMeasurement(runtime_ms=8.0, workspace_bytes=2, spread=3.0)

    both = one.or_earlier(other)

    assert both == OpMeasurement(runtime_ms=8.0, workspace_bytes=2, spread=0.25)
    assert both.is_steady
    assert not one.is_steady


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "{",
        '{"format": 6}',
        '{"format": 6, "ops": []}',
        '{"format": 6, "ops": {"aten.neg.default()": 3}}',
        '{"format": 6, "ops": {"aten.neg.default()": [-1.0, 0, 0, 0.0]}}',
        '{"format": 6, "ops": {"aten.neg.default()": [NaN, 0, 0, 0.0]}}',
        '{"format": 6, "ops": {"aten.neg.default()": [1.0, 0.5, 0, 0.0]}}',
        '{"format": 6, "ops": {"aten.neg.default()": [1.0, 0, 0, -1.0]}}',
        '{"format": 6, "ops": {"aten.neg.default()": ["a", 0, 0, 0.0]}}',
        '{"format": 6, "ops": {"aten.neg.default()": [1.0]}}',
    ],
)
def test_a_damaged_table_is_replaced_with_one_warning(text, cache):
    traced = autosac.profile(nn.Linear(4, 4), torch.randn(2, 4))
    cache.mkdir()
    file = caching.path_of(caching.environment(CPU))
    file.write_text(text)

    with pytest.warns(UserWarning, match="damaged") as caught:
        measured = autosac.calibrate(traced)

    assert len(caught) == 1
    assert measured.calibration.measured.num_ops == num_distinct(traced)
    assert autosac.calibrate(traced).calibration.cached.num_ops == num_distinct(traced)


def test_a_table_of_another_format_is_replaced(cache):
    traced = autosac.profile(nn.Linear(4, 4), torch.randn(2, 4))
    cache.mkdir()
    caching.path_of(caching.environment(CPU)).write_text('{"format": 0, "ops": {}}')

    autosac.calibrate(traced)

    assert autosac.calibrate(traced).calibration.cached.num_ops == num_distinct(traced)


def test_a_table_that_cannot_be_written_costs_one_warning(cache):
    traced = autosac.profile(nn.Linear(4, 4), torch.randn(2, 4))
    cache.write_text("a file where the directory should be")

    with pytest.warns(UserWarning, match="cannot be written") as caught:
        measured = autosac.calibrate(traced)

    assert len(caught) == 1
    assert measured.calibration.measured_fraction == 1.0


def _cost(number):
    return OpMeasurement(runtime_ms=float(number), workspace_bytes=number)


def test_writers_do_not_undo_each_other(cache):
    environment = {"device": "a device"}
    path = caching.path_of(environment)
    caching.add(path, environment, {"a": _cost(1), "b": _cost(1)})

    caching.add(path, environment, {"b": _cost(2), "c": _cost(2)})

    assert caching.read(path) == {"a": _cost(1), "b": _cost(2), "c": _cost(2)}
    assert os.listdir(cache) == [path.name]  # no temporary file is left


def test_readers_see_whole_tables_while_writers_write(cache):
    environment = {"device": "a device"}
    path = caching.path_of(environment)
    table = {str(number): _cost(number) for number in range(2000)}
    caching.add(path, environment, table)

    def write():
        for number in range(10):
            caching.add(path, environment, {f"new {number}": _cost(number)})

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        assert caching.read(path).items() >= table.items()  # a warning would fail
    writer.join()
    assert len(caching.read(path)) == 2010


# --- where the table lies -------------------------------------------------------------


def test_another_number_of_threads_has_a_table_of_its_own():
    one = caching.environment(CPU)
    torch.set_num_threads(2)

    assert caching.environment(CPU)["threads"] == "2" != one["threads"]
    assert caching.path_of(caching.environment(CPU)) != caching.path_of(one)


def test_the_directory_follows_the_environment(monkeypatch, tmp_path):
    environment = {"device": "A (tm) device"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert caching.path_of(environment).parent != tmp_path / "xdg" / "autosac"

    monkeypatch.delenv("AUTOSAC_CACHE_DIR")
    assert caching.path_of(environment).parent == tmp_path / "xdg" / "autosac"
    assert caching.path_of(environment).name.startswith("ops-a-tm-device-")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    if sys.platform == "linux":
        parent = caching.path_of(environment).parent
        assert parent == tmp_path / ".cache" / "autosac"


# --- names of ops ---------------------------------------------------------------------

numbers = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()
)
layouts = st.builds(
    Layout,
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
leaves = numbers | layouts | st.sampled_from([torch.float32, torch.strided])
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple))
signatures = st.builds(
    Signature,
    st.sampled_from([aten.add.Tensor, aten.add.Scalar, aten.mul.Tensor]),
    st.lists(values, max_size=3).map(tuple),
    st.lists(st.tuples(st.sampled_from("ab"), values), max_size=2).map(tuple),
)


def _typed(value):
    """A value that differs where types do: True == 1 == 1.0."""
    if isinstance(value, tuple):
        return tuple(map(_typed, value))
    return (type(value).__name__, repr(value))


@pytest.mark.slow
@given(signatures, signatures)
def test_texts_differ_where_ops_do(one, other):
    def exact(s):
        return s.func, _typed(s.args), _typed(s.kwargs)

    same = exact(one) == exact(other)
    assert (caching.text_of(one) == caching.text_of(other)) == same


def test_a_text_says_all():
    call = signature(
        aten.add.Tensor, [torch.ones(2, 3).T, (1, 2.5, None)], {"alpha": True}
    )

    assert caching.text_of(call) == (
        "aten.add.Tensor(float32[3,2]{1,3}, (1, 2.5, None), alpha=True)"
    )


def test_what_has_no_lasting_text_has_none():
    generator = signature(
        aten.bernoulli.default, [torch.ones(2)], {"generator": torch.Generator()}
    )
    foreign = signature(torch.ops.torchvision.nms.default, [torch.ones(2)], {})

    assert caching.text_of(generator) is None
    assert caching.text_of(foreign) is None
