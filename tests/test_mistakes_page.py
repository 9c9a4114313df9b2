"""Rows of the page of what once went wrong name tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_row_of_the_page_has_its_test(request):
    text = (ROOT / "docs" / "mistakes.md").read_text(encoding="utf-8")
    rows = [
        line for line in text.splitlines() if re.match(r"\| (?!what|model|---)", line)
    ]
    named = [re.search(r"`((?:\w+/)?test_\w+\.py)::([^`]+)` \|$", row) for row in rows]
    assert len(rows) > 40 and all(named), rows[named.index(None)]

    tests = {
        f"{file}::{item.name}"
        for file in {observed[1] for observed in named}
        for item in pytest.Module.from_parent(
            request.session, path=ROOT / "tests" / file
        ).collect()
    }
    functions = {test.partition("[")[0] for test in tests}
    wanted = {f"{observed[1]}::{observed[2]}" for observed in named}
    assert wanted <= tests | functions, sorted(wanted - tests - functions)
