"""The pictures of the docs: of a step, of trade-offs, of a report, of a notebook.

python -m examples.pictures_of_docs  # takes Chromium and, with JupyterLab, nbconvert
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image

import autosac
from autosac.cli.demo import BATCH, GPT, LENGTH, VOCABULARY, next_token_loss

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NOTEBOOK = ROOT / "notebooks" / "1_first_plan.ipynb"
_COLORS = 128  # of a picture: lines, text and a few areas
_DARK = "--blink-settings=preferredColorScheme=0"


def make_plan() -> autosac.Plan:
    """A plan of the demo's model two fifths of the way from its floor."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    model = GPT()
    profile = autosac.profile(
        model,
        tokens,
        loss_fn=next_token_loss(tokens),
        optimizer=torch.optim.AdamW(model.parameters()),
    )
    profile = autosac.calibrate(profile)
    floor, baseline = autosac.floor(profile), profile.baseline_peak_bytes
    return autosac.plan(profile, memory_budget=round(floor + 0.4 * (baseline - floor)))


def photograph(page: Path, path: Path, height: int, *options: str) -> None:
    """What a browser shows of a page, from its top."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("Chromium is not installed.")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--window-size=1150,{height}", "--virtual-time-budget=10000", *options,
        f"--screenshot={path}", page.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    shrink(path)


def shrink(path: Path) -> None:
    """Write a PNG anew with few colors."""
    with Image.open(path) as image:
        few = image.convert("RGB").quantize(_COLORS)
    few.save(path, optimize=True)


def main() -> None:
    """Draw all of them."""
    plan = make_plan()
    for name, picture in (
        ("step_memory", autosac.plotting.memory(plan)),
        ("trade_offs", autosac.plotting.trade_offs(plan)),
    ):
        picture.save(DOCS / f"{name}.png")
        shrink(DOCS / f"{name}.png")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        plan.to_html(page)
        photograph(page, DOCS / "report.png", 1900)
        photograph(page, DOCS / "report_dark.png", 1100, _DARK)
        command = [sys.executable, "-m", "nbconvert", "--to", "html", str(NOTEBOOK)]
        subprocess.run([*command, "--output-dir", folder], check=True)
        page = Path(folder) / f"{NOTEBOOK.stem}.html"
        photograph(page, DOCS / "notebook.png", 2300)


if __name__ == "__main__":
    main()
