import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import autosac
from autosac.cli import demo
from autosac.devices.allocator_settings import AllocatorSettings
from autosac.planning import reporting
from autosac.planning.checking import chosen
from autosac.quantities import format_bytes
from autosac.solvers import sac
from autosac.units import curves
from tests.models import CASES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def details(plan):
    return plan.report().details


@pytest.fixture(scope="module")
def page(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "plan.html"
    plan.to_html(path)
    return path


@pytest.fixture
def loaded(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    return autosac.Plan.load(tmp_path / "plan.json")


# --- why is this module recomputed? -----------------------------------------------


def test_units_add_up_to_the_plan(plan, details):
    assert sum(row.recompute_ms for row in details.units) == pytest.approx(
        plan.recompute_ms
    )
    assert len(details.units) >= 2
    for row in details.units:
        assert 0 <= row.freed_bytes <= row.activation_bytes


def test_the_reason_is_the_peak_that_a_step_without_the_unit_has(plan, traced, details):
    picked = chosen(plan, traced)

    for row, unit in zip(details.units, picked, strict=True):
        others = {u: p for u, p in picked.items() if u is not unit}
        peak = traced.peak_bytes(others)
        assert row.without_peak_bytes == peak
        if peak > plan.budget_bytes:
            assert format_bytes(peak - plan.budget_bytes) in row.why
        else:
            assert "budget holds without it" in row.why


def test_refused_modules_say_why():
    step_profile = autosac.profile(
        CASES["mlp"].model(), CASES["mlp"].inputs(), exclude=("1",)
    )
    plan = autosac.plan(step_profile, memory_budget=step_profile.baseline_peak_bytes)

    (row,) = (row for row in plan.report().details.refused if row[0] == "1")

    assert row[2] == "it was excluded"
    assert "it was excluded" in str(plan.report())


# --- what would more memory buy? --------------------------------------------------


def test_offers_are_what_planning_anew_gives(plan, traced, details):
    assert any(offer.more_bytes == 2**30 for offer in details.offers)
    saved = [offer.saved_ms for offer in details.offers]
    assert saved == sorted(saved)
    for offer in details.offers:
        again = autosac.plan(
            traced, memory_budget=plan.budget_bytes + offer.more_bytes, dry_run=False
        )
        assert offer.recompute_ms <= again.recompute_ms * 1.006  # two gaps of 0.5 %
        assert offer.recompute_ms >= again.bound_ms * (1 - 1e-9)
    enough = traced.baseline_peak_bytes - plan.budget_bytes
    assert details.offers[-1].saved_ms == plan.recompute_ms
    assert any(offer.more_bytes == enough for offer in details.offers)


def test_the_price_is_the_slope_of_the_bound(plan, traced, details):
    solver_bound = sac.Solver(traced.formulation.problem(0))
    step = 64

    def relaxed(budget_bytes):
        return solver_bound.solve(
            budget_bytes,
            relative_gap=10.0,
            mixed_units=range(len(traced.formulation.units)),
        ).bound_ms

    slope = relaxed(plan.budget_bytes - step) - relaxed(plan.budget_bytes + step)

    assert details.price > 0.0
    assert details.price == pytest.approx(slope / (2 * step), rel=1e-3)


def test_a_budget_with_room_to_spare_buys_nothing_more(traced):
    plan = autosac.plan(traced, memory_budget=2 * traced.baseline_peak_bytes)

    details = plan.report().details

    assert details.price == 0.0
    assert details.offers == details.units == ()
    assert "would save nothing" in str(plan.report())


# --- what happens to every op? ----------------------------------------------------


def test_every_op_of_forward_is_in_the_tables_once(plan, traced, details):
    forward = [
        op
        for op in traced.tape.ops
        if op.phase in ("forward", "loss") and not op.is_view
    ]
    listed = 0
    for table in details.tables:
        alike = re.search(r"and (\d+) alike", table.title)
        times = 1 + int(alike[1]) if alike else 1
        listed += times * sum(row.count for row in table.rows)

    assert listed == len(forward)


def test_recomputed_ops_and_what_follows_them_take_the_plans_time(plan, details):
    observed = 0.0
    for table in details.tables:
        alike = re.search(r"and (\d+) alike", table.title)
        times = 1 + int(alike[1]) if alike else 1
        observed += times * sum(r.ms for r in table.rows if r.action == "recomputed")
        if followed := re.search(r"each ([\d.]+) (us|ms) of the program", table.title):
            observed += times * float(followed[1]) / {"us": 1e3, "ms": 1}[followed[2]]

    assert not any(one.chain for one in plan.op_policies)  # their ops may run twice
    assert observed == pytest.approx(plan.recompute_ms, rel=1e-3)  # rounded titles


def test_ops_name_the_line_that_runs_them(details):
    rows = [row for table in details.tables for row in table.rows]

    (attention,) = {row.source for row in rows if "scaled_dot_product" in row.name}
    assert re.fullmatch(r"cli/demo\.py:\d+", attention)
    line = int(attention.split(":")[1])
    text = Path(demo.__file__).read_text().splitlines()
    assert "scaled_dot_product_attention" in "".join(text[line - 1 : line + 2])
    assert all(row.shape for row in rows)


def test_ops_of_modules_that_are_pytorchs_alone_have_no_line():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    step_profile = autosac.profile(model, torch.randn(3, 2), loss_fn=torch.sum)

    assert {op.source for op in step_profile.tape.ops} == {""}


# --- text and HTML ----------------------------------------------------------------


def test_the_text_answers_the_questions(plan):
    text = str(plan.report())

    assert "Why is this module recomputed?" in text
    assert "Price of memory at the margin" in text and "LP relaxation" in text
    assert "more would save" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "aten.gelu.default" in text


@pytest.mark.slow
def test_a_plan_from_a_file_says_what_needs_the_profile(loaded, plan, traced):
    report = loaded.report()

    assert report.details is None
    assert reporting.MISSING[:40] in str(report)
    assert all(fqn in str(report) for fqn in plan.policy)
    assert str(loaded.report(traced)) == str(plan.report())


def test_another_step_is_refused(plan):
    with pytest.raises(autosac.PlanMismatchError):
        plan.report(CASES["gpt"].profile())


class _Checker(HTMLParser):
    """Finds elements that are not closed, and what would be loaded."""

    VOID = frozenset({"meta", "br", "img", "link"})

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href") or k == "xlink:href"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href") or k == "xlink:href"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def _checked(path):
    checker = _Checker()
    checker.feed(path.read_text(encoding="utf-8"))
    assert checker.open == []
    return checker


@pytest.mark.slow
def test_the_page_is_one_file_with_pictures_and_tables(plan, page):
    checked = _checked(page)
    assert checked.seen.count("svg") == 4
    assert "script" not in checked.seen
    assert all(link.startswith(("#", "data:")) for link in checked.links)
    text = page.read_text(encoding="utf-8")
    for question in ("Why is this module recomputed?", "What would more memory buy?"):
        assert question in text
    assert all(fqn in text for fqn in plan.policy)
    assert text.count('<tr class="recomputed">') == sum(
        row.action == "recomputed"
        for table in plan.report().details.tables
        for row in table.rows
    )
    assert len(text) < 10**6


@pytest.mark.slow
def test_ids_of_pictures_do_not_clash(page):
    text = page.read_text(encoding="utf-8")

    for figure in re.findall(r"<figure>.*?</figure>", text, flags=re.S):
        used = set(re.findall(r"url\(#(\w+)\)", figure))
        assert used <= set(re.findall(r'id="(\w+)"', figure))


@pytest.mark.slow
def test_the_page_of_a_plan_from_a_file_has_what_is_known(loaded, traced, tmp_path):
    loaded.to_html(tmp_path / "bare.html")
    loaded.to_html(tmp_path / "full.html", traced)

    assert _checked(tmp_path / "bare.html").seen.count("svg") == 1
    assert _checked(tmp_path / "full.html").seen.count("svg") == 4


def test_names_are_escaped(plan, tmp_path):
    strange = replace(plan, device="<b>&", traced=None)

    strange.to_html(tmp_path / "plan.html")

    assert "&lt;b&gt;&amp;" in (tmp_path / "plan.html").read_text()


@pytest.mark.slow
def test_a_report_of_a_plan_of_chains_adds_up(traced):
    plan = autosac.plan(traced, memory_budget=autosac.floor(traced))
    assert any(one.chain for one in plan.op_policies)

    rows = plan.report().details.units

    assert sum(row.recompute_ms for row in rows) == pytest.approx(plan.recompute_ms)
    assert all(
        row.recompute_ms == pytest.approx(curves.recompute_ms(unit, policy))
        for row, (unit, policy) in zip(rows, chosen(plan, traced).items(), strict=True)
    )


@pytest.mark.parametrize(
    ("device", "expandable", "told"),
    [
        ("cpu", False, "`time_limit_s`=60"),
        ("h100", False, "PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ("h100", True, "`time_limit_s`=60"),
    ],
)
def test_a_wide_gap_is_said_with_what_it_is_of(plan, device, expandable, told):
    settings = AllocatorSettings(expandable_segments=expandable)
    traced = replace(plan.traced, allocator=settings)
    wide = replace(plan, bound_ms=plan.recompute_ms / 2, device=device, traced=traced)

    assert told not in " ".join(str(plan).split())
    assert told in " ".join(str(wide).split())
