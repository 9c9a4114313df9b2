"""Rows of the page of what once went wrong name tests that exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_every_row_of_the_page_has_its_test():
    text = (ROOT / "docs" / "mistakes.md").read_text()
    rows = [
        line for line in text.splitlines() if re.match(r"\| (?!what|model|---)", line)
    ]
    named = [re.search(r"`((?:\w+/)?test_\w+\.py)::([^`]+)` \|$", row) for row in rows]
    assert len(rows) > 40 and all(named), rows[named.index(None)]
    files = sorted({f"tests/{observed[1]}" for observed in named})

    options = "--collect-only -q -p no:cacheprovider -o addopts="
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", *options.split(), *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout

    tests = {line.partition("/")[2] for line in listed.splitlines()}
    functions = {test.partition("[")[0] for test in tests}
    wanted = {f"{observed[1]}::{observed[2]}" for observed in named}
    assert wanted <= tests | functions, sorted(wanted - tests - functions)
