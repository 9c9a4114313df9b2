"""What results say of themselves: one screen of text, and a table in notebooks."""

import functools
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import autosac
from autosac.summaries import Summarized, Summary, Table, equal_rows_once

WIDTH = 16
VOID = {"br"}


def layers(num):
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
            for _ in range(num)
        )
    )


def mean_square(output):
    return output.square().mean()


@functools.cache
def traced(num):
    return autosac.profile(layers(num), torch.randn(64, WIDTH), loss_fn=mean_square)


def budget_of(profile):
    return (autosac.floor(profile) + profile.baseline_peak_bytes) // 2


@functools.cache
def planned(num):
    return autosac.plan(traced(num), memory_budget=budget_of(traced(num)))


def verified(num):
    batch = torch.randn(64, WIDTH)
    return autosac.verify(
        planned(num), lambda: layers(num), lambda: batch, loss_fn=mean_square
    )


def sharded(num):
    with torch.device("meta"):
        model, inputs = layers(num), torch.empty(64, WIDTH)
    return autosac.plan_parallel(
        model, inputs, cluster="hgx-h100", num_gpus=8, memory_budget="1GiB"
    )


def pipelined(num):
    return autosac.plan_pipeline(
        layers(num),
        torch.randn(64, WIDTH),
        target=torch.randn(64, WIDTH),
        loss_fn=lambda output, target: (output - target).square().mean(),
        num_ranks=2,
        num_micro_batches=2,
        memory_budget="1GiB",
        schedules=["1F1B"],
    )


OF_MODULES = {  # which may have a line for each
    "profile": traced,
    "plan": planned,
    "module graph": lambda num: autosac.graph_info(layers(num), torch.randn(64, WIDTH)),
    "estimate": lambda num: autosac.estimate(traced(num)),
    "statistics": lambda num: traced(num).statistics,
    "parallel plan": sharded,
}
OTHERS = {
    "verification": verified,
    "sweep": lambda num: autosac.sweep(traced(num), n=64),
    "joint graph": lambda num: autosac.joint_graph(layers(num), torch.randn(64, WIDTH)),
    "advice": lambda num: autosac.advise(traced(num), memory_budget="1GiB"),
    "pipeline plan": pipelined,
}
SLOW = ("verification", "parallel plan", "advice", "pipeline plan")
FEW, SOME, MANY = 4, 16, 48  # more modules than lines of a screen; more layers, too


def cases():
    for name, make in {**OF_MODULES, **OTHERS}.items():
        for num in (SOME, MANY) if name in OF_MODULES else (FEW,):
            is_slow = num == MANY or name in SLOW
            marks = [pytest.mark.slow] if is_slow else []
            yield pytest.param((make, num), id=f"{name}-{num}", marks=marks)


@pytest.fixture(scope="module", params=cases())
def result(request):
    make, num = request.param
    return make(num)


class Checker(HTMLParser):
    """Collects the text; elements must be closed in the order they are opened."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(text):
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    return " ".join(checker.text)


def test_a_result_shows_one_screen_wherever_it_is_shown(result):
    assert isinstance(result, Summarized)
    assert repr(result) == str(result)
    assert len(repr(result).splitlines()) <= 48
    assert max(map(len, repr(result).splitlines())) <= 160


def test_notebooks_show_what_text_says(result):
    shown = " ".join(read(result._repr_html_()).split())
    for line in repr(result).splitlines():
        for word in line.split():
            assert word in shown


def test_names_in_notebooks_are_no_markup():
    rows = (("<b>", "&"),)
    table = Table(heads=("<i>", ""), rows=rows)
    shown = Summary(title="a < b", facts=(("<u>", "x"),), tables=(table,)).html()

    assert read(shown).split() == ["a", "<", "b", "<u>", "x", "<i>", "<b>", "&"]


def test_neighbours_that_differ_in_a_number_only_are_one_row():
    rows = [("b.0", "1"), ("b.1", "1"), ("b.2", "2"), ("c", "2"), ("b.3", "2")]

    assert equal_rows_once(rows) == (
        ("b.0 ... b.1 (x 2)", "1"), ("b.2", "2"), ("c", "2"), ("b.3", "2"),
    )  # fmt: skip


def test_rows_that_come_again_together_are_one_of_each():
    rows = [(f"layers.{i}.{part}", "kept") for i in range(3) for part in ("qkv", "mlp")]
    assert equal_rows_once([("embed", "kept"), *rows]) == (
        ("embed", "kept"),
        ("layers.0.qkv ... layers.2.qkv (x 3)", "kept"),
        ("layers.0.mlp ... layers.2.mlp (x 3)", "kept"),
    )
    in_turns = [(f"layers.{i}", "kept" if i % 2 else "freed") for i in range(6)]
    assert equal_rows_once(in_turns) == tuple(in_turns)


@pytest.mark.parametrize("num", [SOME, pytest.param(MANY, marks=pytest.mark.slow)])
def test_the_tree_of_an_estimate_has_equal_layers_once(num):
    lines = repr(autosac.estimate(traced(num))).splitlines()
    head = f"0-{num - 1} (Sequential) x {num}"
    (block,) = (line for line in lines if line.startswith(head))
    row = next(r for r in autosac.estimate(traced(num)).modules if r.fqn == "0")

    assert autosac.quantities.format_bytes(row.parameter_bytes) in block
    assert any(line.startswith("  0 (Linear)") for line in lines)


def test_a_long_table_loses_its_middle():
    rows = tuple((str(i), "x") for i in range(100))
    lines = list(Table(heads=("n", ""), rows=rows).lines())

    assert len(lines) == 42 and lines[21] == "... 60 more ..."
