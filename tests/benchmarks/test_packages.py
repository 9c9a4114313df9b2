"""How models of packages are drawn and built, shown on a package of this file's own."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from benchmarks import breadth
from benchmarks.judging import verdicts
from benchmarks.models.drawn import NotBuiltError, build_small, every, packages
from benchmarks.models.drawn.packages import guessing
from benchmarks.models.workload import normal


class Mixer(nn.Module):
    def __init__(self, dim, depth=9, unknown="gelu"):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(depth)))

    def forward(self, x, mask=None):
        return {"hidden": self.layers(x), "loss": self.layers(x).sum()}


class Wants(nn.Module):
    def __init__(self, nothing_known):
        super().__init__()


@pytest.fixture
def toys(monkeypatch):
    module = ModuleType("toys")
    for shown in (Mixer, Wants):
        monkeypatch.setattr(shown, "__module__", "toys.inside")
        setattr(module, shown.__name__, shown)
    module.Alias = Mixer
    module.Sequential = nn.Sequential  # of another package
    monkeypatch.setitem(sys.modules, "toys", module)
    package = guessing.Package(
        distribution="toys",
        models=lambda: guessing.classes_in("toys"),
        settings=({"dim": 8, "depth": lambda default: default // 3},),
        batches={"x": [normal(4, 5), normal(4, 8)]},
    )
    monkeypatch.setitem(packages.PACKAGES, "toys", package)
    monkeypatch.setattr(packages, "installed", lambda: ["toys"])
    packages.names.cache_clear()
    every.cache_clear()
    yield package
    packages.names.cache_clear()
    every.cache_clear()


def test_names_are_the_classes_of_a_package_each_once(toys):
    assert every("toys") == ("toys/Alias", "toys/Wants")


def test_arguments_are_small_and_the_first_batch_that_runs_is_taken(toys):
    work = build_small("toys/Alias")
    model, ((), batch) = work.make_model(), work.make_inputs()

    output = model(**batch)

    assert len(model.layers) == 3 and batch["x"].shape == (4, 8)
    assert work.loss_fn(output) == output["loss"] + output["hidden"].square().mean()


def test_a_class_with_unknown_arguments_is_not_built(toys):
    with pytest.raises(NotBuiltError, match="nothing_known"):
        build_small("toys/Wants")


def test_no_weights_are_brought_from_a_network(toys, monkeypatch):
    def load():
        torch.hub.load_state_dict_from_url("https://localhost/weights-0.pth")

    monkeypatch.setitem(
        packages.PACKAGES,
        "toys",
        guessing.Package(distribution="toys", models=lambda: {"Loads": load}),
    )

    with pytest.raises(NotBuiltError, match="network"):
        build_small("toys/Loads")


def test_packages_have_a_page_of_their_own(toys, tmp_path):
    folders = ["--work", str(tmp_path / "work"), "--output", str(tmp_path)]

    assert breadth.main([*folders, "--packages", "toys", "--render"]) == 1

    page = (tmp_path / "packages.md").read_text()
    assert f"at least {packages.LEAST_JUDGED} models judged" in page
    assert "| toys |" in page and "| timm |" not in page
    assert not (tmp_path / "breadth.md").exists()


def test_a_name_is_of_one_source_only():
    draw = verdicts.Draw(title="", text="", sources=("x", "x-more"), least_judged=1)
    known = {"model": "x-more/Model", "status": "refused", "reason": "No."}
    whole = {"records": [known], "num_names": 1, "where": {}}
    whole |= {"command": "", "device": "CPU"}

    page = "\n".join(verdicts.page(whole, draw))

    assert "| x | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |" in page
    assert "| x-more | 0 | 0 | 0 | 0 | 0 | 1 | 0 | 0 | 1 |" in page


def test_packages_that_are_not_installed_are_not_drawn():
    assert packages.version("no-such-package-here") is None
