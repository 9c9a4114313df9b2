"""The docs as a site: every page is built, and no link in them leads nowhere."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autosac

ROOT = Path(__file__).parents[1]
_OURS = re.compile(r"python -m ((?:autosac|benchmarks|examples)[\w.]*\w)")


@pytest.mark.slowest
def test_the_site_has_all_pages_and_no_broken_link(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", tmp_path]

    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert not built.returncode, built.stderr
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert pages <= {page.parent.name for page in tmp_path.glob("*/index.html")}
    reference = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    for name in autosac.__all__:
        assert name == "plotting" or f'id="autosac.{name}"' in reference


def test_every_module_that_a_page_runs_is_there():
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/results/*.md")]
    named = {
        (page.name, module)
        for page in pages
        for module in _OURS.findall(page.read_text(encoding="utf-8"))
    }

    assert len(named) > 20
    missing = [(p, name) for p, name in named if importlib.util.find_spec(name) is None]
    assert missing == []
