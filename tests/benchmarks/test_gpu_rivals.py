"""Plans beside checkpointing by hand: the parts that need no GPU."""

import pytest

from benchmarks import gpu_rivals
from benchmarks.models import language


@pytest.mark.slow
def test_every_rival_and_the_floor_have_a_row():
    work = language.gpt(layers=2, width=32, heads=2, vocabulary=64, batch=2, length=16)
    case = gpu_rivals.Case(name="GPT", work=work, autocast=None)
    rows = list(gpu_rivals.measure(case, "cpu", num_rounds=1))
    assert [row["rival"] for row in rows] == [*gpu_rivals.rivals(()), "floor"]
    assert all(row["plan_ms"] > 0 and row["plain_ms"] > 0 for row in rows)
    assert rows[-1]["rival_ms"] is None
    head, line, *table = gpu_rivals.table(rows)
    assert len({text.count("|") for text in (head, line, *table)}) == 1
    assert len(table) == len(rows)


@pytest.mark.parametrize(
    ("plan_bytes", "plan_ms", "is_kept"),
    [(100, 101.0, True), (101, 99.0, False), (100, 103.0, False)],
)
def test_a_plan_is_kept_below_its_rivals_peak_and_not_slower(
    plan_bytes, plan_ms, is_kept
):
    row = {
        "budget_bytes": 100,
        "plan_bytes": plan_bytes,
        "plan_ms": plan_ms,
        "rival_ms": 100.0,
    }
    assert gpu_rivals.kept(row) is is_kept
