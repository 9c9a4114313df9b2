import dataclasses
import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import autosac
from autosac import caching, inventing, timing
from autosac.signatures import Layout, Signature, signature
from autosac.timing import OpMeasurement, measure_ops
from tests.models import CASES

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A directory with no measurements in it yet."""
    monkeypatch.setenv("AUTOSAC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def gpt():
    return CASES["gpt"].profile(torch.optim.AdamW)


def figures(made):
    return made.op_ms, [op.workspace_bytes for op in made.tape.ops]


def num_distinct(made):
    return len({op.signature for op in made.tape.ops if not op.is_view})


# --- what is measured -----------------------------------------------------------------


def test_a_profile_knows_what_is_modelled(gpt):
    found = gpt.calibration

    assert not gpt.calibrated
    assert found.modelled.num_ops == num_distinct(gpt)
    assert found.modelled.ms == pytest.approx(gpt.baseline_ms)
    assert found.measured.num_ops == found.cached.num_ops == 0
    assert found.measured_fraction == 0.0
    assert {reason for _, reason in found.modelled_ops} == {"not calibrated"}


def test_a_calibrated_profile_knows_what_was_measured(gpt):
    made = autosac.calibrate(gpt, cache=False)
    found = made.calibration

    assert made.calibrated
    assert found.measured.num_ops == num_distinct(gpt)
    assert found.measured.ms == pytest.approx(made.baseline_ms)
    assert found.measured.workspace_bytes > 0
    assert found.modelled.num_ops == found.cached.num_ops == 0
    assert found.modelled_ops == ()
    assert found.measured_fraction == 1.0
    assert "measured" in str(found)


class Doubled(nn.Module):
    """Runs an op that only works on what the trace shows it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return picky(self.linear(x).double()).sum()


@torch.library.custom_op("autosac_tests::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("this data was made up\nby someone")


picky.register_fake(lambda x: torch.empty_like(x))
picky.register_autograd(lambda ctx, grad: grad)


def test_an_op_that_does_not_run_keeps_its_model_and_is_named():
    traced = autosac.profile(Doubled(), torch.randn(3, 4))
    made = autosac.calibrate(traced)
    found = made.calibration

    ((name, reason),) = found.modelled_ops
    assert name == "autosac_tests.picky.default"
    assert reason == "it fails on made-up data: ValueError: this data was made up"
    assert name in str(found) and reason in str(found)
    assert found.modelled.num_ops == 1
    assert 0.0 < found.measured_fraction < 1.0
    index = [op.name for op in made.tape.ops].index(name)
    assert made.op_ms[index] == traced.op_ms[index]


def test_the_report_of_a_plan_says_how_much_was_measured(gpt):
    budget = gpt.baseline_peak_bytes
    modelled = autosac.plan(gpt, memory_budget=budget)
    measured = autosac.plan(autosac.calibrate(gpt), memory_budget=2 * budget)

    assert modelled.measured_fraction == 0.0
    assert measured.measured_fraction == 1.0
    assert "measured  0.0% of the step's time" in str(modelled)
    assert "measured  100.0% of the step's time" in str(measured)
    assert measured.reserved_bytes is None
    assert "reserved" not in str(measured)
    on_gpu = dataclasses.replace(measured, reserved_bytes=3 * 2**20)
    assert "reserved  3.0 MiB predicted" in str(on_gpu)


def test_an_op_larger_than_memory_is_not_run(monkeypatch):
    monkeypatch.setattr(timing, "available_bytes", lambda device: 1000)
    small, large = (signature(aten.neg.default, [torch.ones(n)], {}) for n in (9, 999))

    found = measure_ops({small: 72, large: 7992}, device=CPU)

    assert list(found.costs) == [small]
    assert found.failures == {large: "it needs 7.8 KiB, 1000 B are free"}


def test_memory_that_is_free_is_known_here():
    free = timing.available_bytes(CPU)

    assert free is None or 2**20 < free < 2**50


@torch.library.custom_op("autosac_tests::roomy", mutates_args=())
def roomy(x: torch.Tensor) -> torch.Tensor:
    torch.ones(1000)
    return x.clone()


def test_a_workspace_is_what_a_kernel_allocates_and_frees():
    x = torch.ones(100)
    neg = signature(aten.neg.default, [x], {})
    wide = signature(torch.ops.autosac_tests.roomy.default, [x], {})

    found = measure_ops({neg: 800, wide: 800}, device=CPU).costs

    # 4000 bytes are gone before 400 are returned.
    assert found[neg].workspace_bytes == 0
    assert found[wide].workspace_bytes == 4000 - 400
    assert found[neg].runtime_ms > 0.0


# --- made-up data ---------------------------------------------------------------------


class Embeddings(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 8, mode=mode)

    def forward(self, indices, offsets):
        return self.bag(indices, offsets).sum()


class Recurrent(nn.Module):
    def __init__(self, cls, **options):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.layers = cls(8, 8, num_layers=2, batch_first=True, **options)
        self.head = nn.LazyLinear(50)

    def forward(self, tokens):
        out, _ = self.layers(self.embed(tokens))
        return functional.cross_entropy(self.head(out).flatten(0, 1), tokens.flatten())


class Indexing(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(50, 16))
        self.linear = nn.Linear(16, 16)

    def forward(self, x, index, mask):
        h, num = self.linear(x), index.numel()
        wide, head = index[:, None].expand(-1, 16), h[:num]
        z = x.new_zeros(50, 16)
        parts = [
            z.index_add(0, index, head),
            z.scatter(0, wide, head),
            z.scatter_add(0, wide, head),
            z.scatter_reduce(0, wide, head, "amax"),
            z.index_copy(0, index[:5], head[:5]).index_fill(0, index[:3], 0.0),
            self.table[index],
            self.table.gather(0, wide),
            self.table.index_select(0, index),
            h.masked_fill(mask[:, None], 0.0),
            h.masked_scatter(mask[:, None].expand_as(h), h[:10].reshape(-1)),
            torch.linalg.solve(h.T @ h + torch.eye(16), h.T),
        ]
        h = h.clone()
        h[index % 40] = self.table[:num]
        return sum(part.sum() for part in parts) + h.sum()


def _tokens():
    return torch.randint(50, (4, 6))


HARD = {
    "bags sum": (
        lambda: Embeddings("sum"),
        lambda: (_tokens()[0], torch.arange(0, 6, 2)),
    ),
    "bags mean": (
        lambda: Embeddings("mean"),
        lambda: (_tokens()[0], torch.arange(0, 6, 2)),
    ),
    "bags max": (
        lambda: Embeddings("max"),
        lambda: (_tokens()[0], torch.arange(0, 6, 2)),
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), _tokens),
    "lstm both ways": (lambda: Recurrent(nn.LSTM, bidirectional=True), _tokens),
    "gru": (lambda: Recurrent(nn.GRU), _tokens),
    "rnn": (lambda: Recurrent(nn.RNN), _tokens),
    "indexing": (
        Indexing,
        lambda: (
            torch.randn(40, 16),
            torch.randint(40, (20,)),
            torch.arange(40) % 4 == 0,
        ),
    ),
}


@pytest.mark.parametrize("name", HARD)
def test_ops_with_arguments_that_must_fit_each_other_run(name):
    make_model, make_inputs = HARD[name]
    inputs = make_inputs()
    model = make_model()
    model(*(inputs if isinstance(inputs, tuple) else (inputs,)))  # lazy modules

    found = autosac.calibrate(autosac.profile(model, inputs), cache=False).calibration

    assert found.modelled_ops == ()


def test_indices_are_spread_and_valid():
    weight, indices = (
        Layout((7, 2), (2, 1), torch.float32),
        Layout((90,), (1,), torch.int64),
    )
    call = Signature(aten.embedding.default, (weight, indices), ())

    args, _ = inventing.arguments(call, CPU)

    assert sorted(set(args[1].tolist())) == list(range(7))


def test_bytes_of_a_forward_kernel_are_not_made_up():
    nothing = Layout((0,), (1,), torch.uint8)
    call = Signature(aten.neg.default, (nothing,), ())

    found = measure_ops({call: 0}, device=CPU)

    assert "forward kernel" in found.failures[call]


@pytest.mark.parametrize("size", [0, 1, 65_521, 200_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_random_data_fills_everything(size, dtype):
    layout = Layout((size,), (1,), dtype)
    call = Signature(aten.neg.default, (layout,), ())

    (x,), _ = inventing.arguments(call, CPU)

    assert x.shape == (size,) and x.dtype == dtype
    assert bool((x.abs() <= 2).all())
    assert not size or x.abs().float().mean() > 0.01


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
    record["ops"] = {name: [1e9, 7] for name in record["ops"]}
    file.write_text(json.dumps(record))
    assert min(ms for ms in autosac.calibrate(gpt).op_ms if ms) == 1e9

    made = autosac.calibrate(gpt, refresh=True)

    assert made.calibration.measured.num_ops == num_distinct(gpt)
    assert max(made.op_ms) < 1e9
    assert figures(autosac.calibrate(gpt)) == figures(made)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "{",
        '{"format": 1}',
        '{"format": 1, "ops": []}',
        '{"format": 1, "ops": {"aten.neg.default()": 3}}',
        '{"format": 1, "ops": {"aten.neg.default()": [-1.0, 0]}}',
        '{"format": 1, "ops": {"aten.neg.default()": [NaN, 0]}}',
        '{"format": 1, "ops": {"aten.neg.default()": [1.0, 0.5]}}',
        '{"format": 1, "ops": {"aten.neg.default()": ["a", 0]}}',
        '{"format": 1, "ops": {"aten.neg.default()": [1.0]}}',
    ],
)
def test_a_damaged_table_is_replaced_with_one_warning(text, cache):
    made = autosac.profile(nn.Linear(4, 4), torch.randn(2, 4))
    cache.mkdir()
    file = caching.path_of(caching.environment(CPU))
    file.write_text(text)

    with pytest.warns(UserWarning, match="damaged") as caught:
        measured = autosac.calibrate(made)

    assert len(caught) == 1
    assert measured.calibration.measured.num_ops == num_distinct(made)
    assert autosac.calibrate(made).calibration.cached.num_ops == num_distinct(made)


def test_a_table_of_another_format_is_replaced(cache):
    made = autosac.profile(nn.Linear(4, 4), torch.randn(2, 4))
    cache.mkdir()
    caching.path_of(caching.environment(CPU)).write_text('{"format": 0, "ops": {}}')

    autosac.calibrate(made)

    assert autosac.calibrate(made).calibration.cached.num_ops == num_distinct(made)


def test_a_table_that_cannot_be_written_costs_one_warning(cache):
    made = autosac.profile(nn.Linear(4, 4), torch.randn(2, 4))
    cache.write_text("a file where the directory should be")

    with pytest.warns(UserWarning, match="cannot be written") as caught:
        measured = autosac.calibrate(made)

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
    foreign = signature(torch.ops.autosac_tests.picky.default, [torch.ones(2)], {})

    assert caching.text_of(generator) is None
    assert caching.text_of(foreign) is None


_TEXTS = """
from tests.models import CASES
from autosac import caching
import torch
made = CASES["gpt"].profile(torch.optim.AdamW)
ops = dict.fromkeys(op.signature for op in made.tape.ops if not op.is_view)
print(*sorted(caching.text_of(s) for s in ops), sep="\\n")
"""


def test_texts_are_the_same_in_every_process(gpt):
    ops = {op.signature for op in gpt.tape.ops if not op.is_view}
    texts = sorted(caching.text_of(s) for s in ops)
    assert len(set(texts)) == len(ops)

    for seed in "12":
        found = subprocess.run(
            [sys.executable, "-c", _TEXTS],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert found.stdout.splitlines() == texts, found.stderr


# --- progress -------------------------------------------------------------------------


def _watch(progress, capsys):
    assert list(timing._watched([1, 2, 3], "times", progress)) == [1, 2, 3]
    return capsys.readouterr()


def test_progress_is_shown_only_when_asked_for_or_on_a_terminal(capsys, monkeypatch):
    assert _watch(None, capsys) == ("", "")
    assert _watch(False, capsys) == ("", "")
    shown = _watch(True, capsys)
    assert shown.out == "" and "times of 3 ops" in shown.err

    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    assert _watch(None, capsys) == ("", "")  # too short
    monkeypatch.setattr(timing, "_SHOW_AFTER_S", -1.0)
    assert "times of 3 ops" in _watch(None, capsys).err
    assert _watch(False, capsys) == ("", "")
