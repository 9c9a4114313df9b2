"""What was typed is followed, refused or spoken of, never ignored."""

import subprocess
import sys
from pathlib import Path

import pytest

from autosac.cli import commands as cli
from autosac.cli.usage import as_typed, know_options
from tests.cli.test_commands import GPT, MLP, run, run_json

pytestmark = pytest.mark.usefixtures("one_thread")
as_printed = pytest.mark.filterwarnings("always")  # they are errors in other tests
REGRESSION = "tests.factories:regression"


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan of a step whose loss holds its target, and its optimizer as typed."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    options = ("--optimizer", "adamw")
    record = run_json("estimate", REGRESSION, *options)
    budget = (record["floor_bytes"] + record["peak_bytes"]) // 2
    run_json("plan", REGRESSION, *options, "-b", str(budget), "-o", str(path))
    return str(path), options


def test_verify_measures_targets_that_the_loss_of_a_factory_holds(planned):
    path, options = planned

    result = run("verify", path, REGRESSION, *options, "--json")
    record = run_json("verify", path, REGRESSION, *options)

    assert "warning" not in result.stderr
    assert record["measured_peak_bytes"] == record["predicted_peak_bytes"]


@as_printed
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--set", "batch=16"], "input [16, 8]"),
        (["--optimizer", "sgd"], "holds nothing here"),
        ([], "the same optimizer as --optimizer."),
    ],
)
def test_verify_of_another_step_than_the_planned_one_says_so(planned, typed, said):
    path, options = planned
    kept = () if "--optimizer" in typed or not typed else options

    result = run("verify", path, REGRESSION, *kept, *typed)

    (line,) = result.stderr.splitlines()
    assert line.startswith("autosac: warning: The ")
    assert said in line
    assert "that of another step" in line


def test_verify_refuses_a_factory_of_several_batches(tmp_path):
    path = tmp_path / "plan.json"
    run("plan", "tests.factories:rows", "-b", "1MiB", "-o", str(path))

    result = run("verify", str(path), "tests.factories:rows")

    assert result.exit_code == cli.EXIT_USAGE
    assert "name a factory that makes one of them" in result.stderr


def test_digits_alone_are_bytes_wherever_bytes_are_typed(planned):
    record = run_json("estimate", REGRESSION)
    peak = str(record["peak_bytes"])
    few = str(record["floor_bytes"] - 1)

    assert run_json("plan", REGRESSION, "-b", peak)["budget_bytes"] == int(peak)
    swept = run_json("sweep", REGRESSION, "-b", peak, "-b", few)["rows"]
    assert [row["status"] for row in swept] == ["planned", "infeasible"]
    gridded = run_json("sweep", REGRESSION, "-b", peak, "--grid", "batch=32,64")
    assert [row["status"] for row in gridded["rows"]] == ["planned"] * 2
    far = ("--offload", "--host-budget", "100000")
    assert run_json("plan", REGRESSION, "-b", peak, *far)
    assert run_json("estimate", REGRESSION, "--fits", peak)["fits"]
    assert run("advise", REGRESSION, "-b", "0").exit_code == cli.EXIT_USAGE


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["plan", MLP, "-b", "1GiB", "--batch", "1"], "--batch 1 is for hf: models"),
        (["estimate", MLP, "--length", "512"], "--length 512 is for hf: models"),
        (["sweep", MLP, "--grid", "batch=1,2"], "--set batch=1 if the factory has"),
        (["batch-size", MLP, "-b", "1GiB", "--batch", "2"], "No such option"),
    ],
)
def test_sizes_of_a_batch_that_a_factory_would_not_hear_of_are_refused(
    arguments, match
):
    result = run(*arguments)

    assert result.exit_code == cli.EXIT_USAGE, result.output
    assert match in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    "option",
    [("--optimizer", "adamw"), ("--set", "batch=2"), ("--batch", "1")],
)
def test_a_report_without_a_model_refuses_options_of_a_step(planned, option):
    result = run("report", planned[0], *option)

    assert result.exit_code == cli.EXIT_USAGE
    assert f"{option[0]} needs a model: add that" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", MLP, "-b", "1GiB", "--optimizer", "adamx"], "--optimizer adamx must"),
        (["plan", MLP, "-b", "1GiB", "--autocast", "fp17"], "--autocast fp17 is no"),
        (["plan", MLP, "-b", "1GiB", "--device", "h1000"], "--device h1000 is not"),
        (["plan", MLP, "-b", "1GiB", "--exclude", "foo"], "--exclude has 'foo'"),
        (["plan", MLP, "-b", "200%"], "--budget 200% must be at most"),
        (["plan", MLP, "-b", "1GiB", "-o", "."], ". is a folder: name a file."),
        (["sweep", MLP, "-o", "x.foo"], "--out x.foo must end in"),
        (["estimate", MLP, "--fits", "foo"], "--fits foo is not a known device"),
        (["estimate", MLP, "--fits", "0"], "has a unit, such as '80GiB'"),
        (["estimate", MLP, "--fits", "h100"], "profile the step for h100"),
        (["compile", MLP, "-b", "1GiB", "--backend", "foo"], "--backend must be"),
        (["parallel", MLP, "-b", "1GiB", "--cluster", "foo"], "--cluster foo is not"),
    ],
)
def test_errors_name_what_was_typed_and_nothing_that_cannot_be(arguments, said):
    result = run(*arguments)

    assert result.exit_code == cli.EXIT_USAGE, result.output
    assert said in result.stderr
    for word in ("`", "Spec", "torch.", "classes", "or an optimizer"):
        assert word not in result.stderr


class _Option:
    param_type_name = "option"

    def __init__(self, name):
        self.name, self.opts = name, [f"--{name.replace('_', '-')}", "-x"]


def test_advice_that_names_no_option_of_the_command_is_left_out():
    message = (
        "No plan fits `memory_budget`=5 (5 B), in `blocks.0.out`. Raise it. With"
        " `offload`=True 3 bytes are enough. Or pass `loss_fn` as text."
    )

    know_options([_Option("budget"), _Option("offload")])
    with_it = as_typed(message)
    know_options([_Option("budget")])
    without = as_typed(message)

    start = "No plan fits --budget 5 (5 B), in `blocks.0.out`. Raise it."
    end = " Or pass `loss_fn` as text."
    assert with_it == f"{start} With --offload 3 bytes are enough.{end}"
    assert without == start + end


@pytest.mark.parametrize("command", ["export", "batch-size", "plan"])
def test_offload_is_advised_only_where_it_can_be_typed(command):
    typed = ["--to", "torchtitan"] if command == "export" else []
    typed += ["--argument", "rows"] if command == "batch-size" else []

    result = run(command, GPT, "-b", "1KiB", *typed)

    assert result.exit_code == cli.EXIT_INFEASIBLE
    assert ("--offload" in result.stderr) == (command == "plan")


@as_printed
def test_a_warning_is_one_line_without_advice_for_python(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOSAC_CACHE_DIR", str(tmp_path / "file"))

    result = run("calibrate", MLP)

    assert result.exit_code == 0
    for line in result.stderr.splitlines():
        assert line.startswith("autosac: warning: The table of measured ops")
        assert line.endswith("Set AUTOSAC_CACHE_DIR to a directory of your own.")
    assert result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("option", ["-o", "--html"])
def test_what_a_full_disk_does_not_take_is_named(option):
    result = run("plan", MLP, "-b", "1GiB", option, "/dev/full")

    assert result.exit_code == cli.EXIT_ERROR
    assert "/dev/full" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.slowest_but_first
@pytest.mark.parametrize("option", [(), ("--json",)])
def test_a_full_standard_output_is_named(option):
    command = [sys.executable, "-m", "autosac", "devices", *option]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)

    assert done.returncode == cli.EXIT_ERROR
    assert done.stderr.splitlines()[0].endswith("No space left on device: 'stdout'")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["parallel", "min-gpus"])
@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("pp=2,tp=3", "--mesh has tp=3, which must divide the 8 GPUs of a node; any"),
        ("pp=2,tp=0", "--mesh has tp=0, which must divide the 8 GPUs of a node; any"),
        ("pp=2,fsdp=2,tp=7", "--mesh has tp=7, which must divide the 8"),
        ("xx=2", "its dimensions are pp, replicate, fsdp, cp, tp, and 'xx' is none"),
        (
            "tp=any,fsdp=2",
            "--mesh has fsdp, for ranks of a pipeline's stage: add",
        ),
    ],
)
def test_a_mesh_is_refused_in_words_that_can_be_typed(command, mesh, said):
    # A factory without a target, which is not what is wrong first.
    result = run(command, MLP, "-b", "1GiB", "--cluster", "hgx-h100", "--mesh", mesh)

    assert result.exit_code == cli.EXIT_USAGE
    assert said in result.stderr
    assert "None" not in result.stderr
    assert "`" not in result.stderr


def test_degrees_that_a_message_asks_for_are_those_that_are_typed():
    know_options([])
    message = "Pass mesh={'tp': 2}, or {'tp': None}; mesh={'fsdp': ..., 'pp': 2} else."
    assert as_typed(message) == (
        "Pass --mesh tp=2, or tp=any; --mesh fsdp=N,pp=2 else."
    )
