"""The HTML report as a browser shows it; skipped where no Chromium is installed."""

import functools
import html
import json
import re
import shutil
import subprocess

import pytest
import torch

import autosac
from tests.models import SMALL_GPT

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed"),
]
WIDE, NARROW = 1300, 480
DARK = "--blink-settings=preferredColorScheme=0"
LOOK = """
<script>window.addEventListener("load", () => setTimeout(() => {
  const rects = (root, what) => [...root.querySelectorAll(what)]
    .map(e => [e.textContent.trim(), e.getBoundingClientRect()])
    .filter(([text, r]) => text && r.width);
  const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
  const colliding = [], cut = [];
  for (const figure of document.querySelectorAll("figure")) {
    const texts = rects(figure, "svg text"), box = figure.getBoundingClientRect();
    texts.forEach(([a, r], i) => {
      for (const [b, s] of texts.slice(i + 1)) if (over(r, s)) colliding.push([a, b]);
      if (r.left < box.left - 1 || r.right > box.left + figure.scrollWidth + 1)
        cut.push(a);
    });
  }
  const seen = document.createElement("pre");
  seen.id = "seen";
  seen.textContent = JSON.stringify({
    title: document.title, colliding, cut,
    beside: document.documentElement.scrollWidth - window.innerWidth,
    paper: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
    drawn: document.querySelectorAll("figure svg").length,
    figures: document.querySelectorAll("figure").length,
  });
  document.body.append(seen);
}, 500));</script></body>
"""


@pytest.fixture(scope="module")
def plan():
    profile = SMALL_GPT.profile(torch.optim.AdamW)
    budget = (autosac.floor(profile) + profile.baseline_peak_bytes) // 2
    return autosac.plan(profile, memory_budget=budget)


@pytest.fixture(scope="module", params=[False, True], ids=["static", "interactive"])
def page(request, plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "plan.html"
    plan.to_html(path, interactive=request.param)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("</body>", LOOK), encoding="utf-8")
    return path


@functools.cache
def look(page, width, *options):
    """What a browser of some width makes of a page."""
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={page.parent / 'browser'}", "--enable-logging=stderr",
        f"--window-size={width},1000", "--virtual-time-budget=10000", *options,
        "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    shown = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120
    )
    assert "CONSOLE" not in shown.stderr, shown.stderr
    seen = re.search(r'<pre id="seen">(.*?)</pre>', shown.stdout)
    return json.loads(html.unescape(seen[1]))


@pytest.mark.slow
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_no_labels_collide_and_nothing_is_cut_off(page, width, plan):
    seen = look(page, width)

    assert seen["title"].startswith(plan.model[0][1])
    assert seen["drawn"] >= seen["figures"] == 4
    assert seen["colliding"] == [] == seen["cut"]
    assert seen["beside"] <= 0


@pytest.mark.slow
def test_a_dark_desktop_gets_a_dark_page(page):
    light, dark = look(page, WIDE), look(page, WIDE, DARK)

    assert brightness(light["paper"]) > brightness(light["ink"])
    assert brightness(dark["paper"]) < brightness(dark["ink"])


def brightness(color):
    return sum(map(int, re.findall(r"\d+", color)[:3]))
