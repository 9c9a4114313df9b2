import json
from dataclasses import asdict
from importlib import metadata

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import autosac
from autosac.cli import commands as cli
from autosac.cli import demo
from autosac.cli.models import asked
from autosac.devices.specs import KNOWN_DEVICES
from autosac.step.random_streams import stream_states
from autosac.verification.measuring import differences
from autosac.verification.verifying import Verification
from tests import factories

pytestmark = pytest.mark.usefixtures("one_thread")
GPT = "tests.factories:gpt"
MLP = "tests.factories:mlp"  # traced in less time
COMMANDS = [
    "demo", "plan", "sweep", "estimate", "verify", "report", "devices", "calibrate",
    "batch-size", "parallel", "min-gpus", "advise", "export", "graph-info", "compile",
]  # fmt: skip


def run(*arguments, **environment):
    return CliRunner().invoke(
        cli.app, list(arguments), prog_name="autosac", **environment
    )


def run_json(*arguments, code=0):
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def figures():
    """Floor and plain peak of the model of these tests."""
    record = run_json("estimate", MLP, "--optimizer", "adamw")
    return record["floor_bytes"], record["peak_bytes"]


@pytest.fixture(scope="module")
def plan_file(figures, tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    budget = sum(figures) // 2
    options = ("--optimizer", "adamw", "--budget", f"{budget}B", "-o", str(path))
    assert run("plan", MLP, *options).exit_code == 0
    return path


# --- demo -------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "num_threads"), [(None, 1), ("3", 3)])
def test_the_demo_has_one_thread_unless_told_and_changes_no_settings(
    said, num_threads, monkeypatch
):
    seen = []

    def profile(*args, **options):
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "profile", profile)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    before = torch.get_num_threads()
    torch.set_num_threads(3)  # as in a process that was started so
    try:
        with pytest.raises(KeyboardInterrupt):
            demo.run(Console())
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)

    assert seen == [num_threads]
    assert after == 3


# --- help -------------------------------------------------------------------------


def test_help_names_every_command_and_the_exit_codes():
    result = run("--help")

    assert result.exit_code == 0
    assert all(command in result.stdout for command in COMMANDS)
    assert "Exit codes" in result.stdout and "autosac demo" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    result = run(command, "--help")

    assert result.exit_code == 0
    assert "Exit codes" in result.stdout


def test_the_shell_completes_commands():
    asked = {"COMP_WORDS": "autosac pl", "COMP_CWORD": "1"}

    result = run(env={"_AUTOSAC_COMPLETE": "complete_bash", **asked})
    script = run(env={"_AUTOSAC_COMPLETE": "source_bash"})

    assert result.stdout.split() == ["plan"]
    assert "complete" in script.stdout and "autosac" in script.stdout


# --- models -----------------------------------------------------------------------


def _target(name, settings=(), **sizes):
    return asked(name, settings=settings, **sizes)


def test_settings_are_arguments_of_the_factory():
    parts = _target(GPT, ["layers=3", "rows=5"]).parts()

    assert len(parts["model"].blocks) == 3
    assert parts["inputs"].shape == (5, 8)
    assert _target("tests.factories:named", ["word=sgd"]).parts()["model"] is not None


def test_a_model_is_built_alike_each_time_and_random_numbers_are_left_alone():
    target = _target("tests.factories:drawn")
    before = stream_states()

    one, other = target.parts(), target.parts()

    assert torch.equal(one["inputs"], other["inputs"])
    assert not differences(before, stream_states())


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16,
    "num_hidden_layers": 2, "intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 16,
}  # fmt: skip


def test_a_config_makes_a_model_and_a_batch_without_a_download(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))

    parts = _target(f"hf:{path}", ["num_hidden_layers=3"], batch=2, length=8).parts()

    assert len(parts["model"].model.layers) == 3
    assert parts["inputs"]["input_ids"].shape == (2, 8)
    assert parts["model"](**parts["inputs"]).loss.isfinite()


SMALL = {
    "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32,
    "num_hidden_layers": 1, "vocab_size": 64, "image_size": 16, "patch_size": 8,
}  # fmt: skip
SMALL_PAIR = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
}  # fmt: skip
HEADS = {
    "bert": (
        SMALL,
        ("BertForSequenceClassification", "BertForTokenClassification"),
        ("BertForQuestionAnswering", "BertForMaskedLM", "BertLMHeadModel"),
    ),
    "bart": (
        SMALL_PAIR,
        ("BartForConditionalGeneration", "BartForSequenceClassification"),
    ),
    "vit": (SMALL, ("ViTForImageClassification",)),
    "resnet": (
        {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]},
        ("ResNetForImageClassification",),
    ),
}


@pytest.mark.parametrize(
    ("kind", "head"),
    [(kind, head) for kind, (_, *heads) in HEADS.items() for head in sum(heads, ())],
)
def test_common_heads_get_the_labels_they_want(kind, head, tmp_path):
    path = tmp_path / "config.json"
    record = {"model_type": kind, "architectures": [head], **HEADS[kind][0]}
    path.write_text(json.dumps(record))

    parts = _target(f"hf:{path}", batch=2, length=8).parts()

    assert parts["model"](**parts["inputs"]).loss.isfinite()


def test_a_model_of_another_kind_of_head_wants_a_factory(tmp_path):
    path = tmp_path / "config.json"
    record = {"model_type": "bert", "architectures": ["BertForMultipleChoice"]}
    path.write_text(json.dumps({**record, **SMALL}))

    result = run("estimate", f"hf:{path}", "--on", "meta", "--device", "h100")

    assert result.exit_code == cli.EXIT_USAGE
    assert "no batch for BertForMultipleChoice; write a factory" in result.stderr


@pytest.mark.slow
def test_a_large_config_is_planned_for_a_gpu_that_is_not_here(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "hidden_size": 512, "vocab_size": 4096}))

    record = run_json(
        "estimate", f"hf:{path}", "--on", "meta", "--device", "h100", "--fits", "h200",
        "--autocast", "bfloat16", "--batch", "4", "--length", "16",
    )  # fmt: skip

    assert record["device"] == "h100" and record["fits"] is True
    assert not record["calibrated"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["estimate", "nothing"], "names no model"),
        (["estimate", "no.such.module:x"], "No module named"),
        (["estimate", "../factories:gpt"], "names no model"),
        (["estimate", "factory_of_no_python:gpt"], "SyntaxError: invalid syntax"),
        (["estimate", "factory_that_fails:gpt"], "RuntimeError: at import"),
        (["estimate", "tests.factories:missing"], "has no 'missing'"),
        (["estimate", "tests.factories:NUMBER"], "is no function, but int"),
        (["estimate", "tests.factories:alone"], "must return (model, inputs)"),
        (["estimate", GPT, "--set", "layers"], "must be key=value"),
        (["estimate", GPT, "--set", "depth=3"], "unexpected keyword argument 'depth'"),
        (["estimate", GPT, "--optimizer", "adamx"], "must be one of"),
        (["estimate", GPT, "--autocast", "real"], "is no type"),
        (["estimate", GPT, "--device", "h1000"], "not a known device"),
        (["estimate", GPT, "--on", "moon"], "must be cpu, cuda or meta"),
        (["estimate", "hf:no/config.json"], "is no file"),
        (["plan", GPT, "--budget", "much"], "--budget"),
        (["plan", GPT], "Missing option"),
        (["explode"], "No such command"),
        (["verify", "no.json", GPT], "does not exist"),
        (["plan", GPT, "-b", "1GiB", "-o", "no/plan.json"], "there is no folder no"),
        (["plan", GPT, "-b", "1GiB", "--html", "no/plan.html"], "there is no folder"),
        (["sweep", GPT, "--csv", "no/table.csv"], "there is no folder no"),
        (["plan", GPT, "-b", "1GiB", "--set", "layers=two"], "TypeError"),
        (
            ["estimate", MLP, "--exclude", "nope"],
            "--exclude has 'nope', which stands for no module",
        ),
        (["plan", MLP, "-b", "1GiB", "--ac-units", "nope"], "nope"),
        (["export", MLP, "-b", "1GiB", "--to", "foo"], "--to foo must be one of"),
        (["sweep", MLP, "-o", "x.foo"], "must end in .png, .svg, .pdf or .html"),
        (["plan", MLP, "-b", "1GiB", "--host-budget", "1GiB"], "needs --offload: add"),
        (["parallel", MLP, "-b", "1GiB", "--host-budget", "1B"], "needs --offload"),
        (["compile", MLP, "-b", "1GiB", "--host-budget", "1B"], "needs --offload"),
        (["plan", MLP, "-b", "1GiB", "--interactive"], "--interactive needs --html"),
    ],
)
def test_what_cannot_be_meant_is_a_matter_of_usage(
    arguments, match, tmp_path, monkeypatch
):
    (tmp_path / "factory_of_no_python.py").write_text("def gpt(:")
    (tmp_path / "factory_that_fails.py").write_text("raise RuntimeError('at import')")
    monkeypatch.syspath_prepend(tmp_path)

    result = run(*arguments)

    assert result.exit_code == cli.EXIT_USAGE, result.output
    assert match in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("text", "arguments", "match"),
    [
        ('{"model_type": ', [], "is no JSON"),
        ("[]", [], "holds no config, but a list"),
        ('{"model_type": "llama"}', [], "names no `model_type` or no `architectures`"),
        (None, ["--set", "num_hidden_layer=3"], "did you mean 'num_hidden_layers'?"),
        (None, ["--length", "17"], "longer than the 16 positions"),
        (None, ["--set", "hidden_size=x"], "expected int, got str"),
        (None, ["--length", "8", "--set", "hidden_act=no"], "makes no Llama"),
        (None, ["--set", "architectures=Trainer"], "has no model 'Trainer'"),
        (None, ["--set", "model_type=lama"], "did you mean 'llama'?"),
    ],
)
def test_what_a_config_cannot_mean_is_a_matter_of_usage(
    text, arguments, match, tmp_path
):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA) if text is None else text)

    result = run("plan", f"hf:{path}", "--budget", "1GiB", "--on", "meta", *arguments)

    assert result.exit_code == cli.EXIT_USAGE, result.output
    assert match in result.stderr


def test_an_opaque_module_is_no_unit():
    record = run_json("plan", MLP, "--budget", "1GiB")
    marked = run("plan", MLP, "--budget", "1B", "--opaque", "blocks.*")

    assert record["policy"] == {}
    assert marked.exit_code == cli.EXIT_INFEASIBLE
    assert "it is opaque" in marked.stderr
    unknown = run("plan", MLP, "--budget", "1GiB", "--opaque", "gate")
    assert unknown.exit_code == cli.EXIT_USAGE
    assert "'gate', which stands for no module" in unknown.stderr


def test_targets_of_a_loss_on_the_meta_device_are_a_mistake_with_a_fix():
    options = ("--budget", "1GiB", "--on", "meta", "--device", "h100")
    result = run("plan", "tests.factories:gpt_with_labels", *options)

    assert result.exit_code == cli.EXIT_ERROR
    assert 'with `device="cpu"`' in result.stderr


# --- commands ---------------------------------------------------------------------


def test_an_estimate_is_a_table_or_json(figures):
    text = run("estimate", MLP, "--optimizer", "adamw")

    assert text.exit_code == 0
    assert "at the peak" in text.stdout and "With recomputation" in text.stdout
    lowest, peak = figures
    assert 0 < lowest < peak


def test_an_estimate_that_does_not_fit_says_so_by_its_exit_code(figures):
    lowest, peak = figures
    options = ("--optimizer", "adamw", "--fits")

    fitting = run("estimate", MLP, *options, f"{peak}B")
    assert fitting.exit_code == 0
    assert f"fits in --fits {peak}B as it is." in fitting.stdout
    planned = run("estimate", MLP, *options, f"{lowest}B")
    assert planned.exit_code == 3
    assert "does not fit in --fits" in planned.stdout
    assert "as it is; under a plan it does." in planned.stdout
    hopeless = run("estimate", MLP, *options, "1KiB")
    assert "as it is; nor under any plan." in hopeless.stdout
    small = run_json("estimate", MLP, *options, f"{peak - 1}B", code=3)
    assert small["fits"] is False


@pytest.mark.slow
def test_advice_is_a_table_and_json(figures, tmp_path):
    options = ("advise", MLP, "--optimizer", "adamw", "--budget", f"{figures[0]}B")
    record = run_json(*options, "--csv", str(tmp_path / "advice.csv"))

    first, *others = record["rows"]
    assert first["change"] == "as it is"
    assert first["floor_bytes"] == figures[0]
    assert "optimizer in backward" in {row["change"] for row in others}
    assert (tmp_path / "advice.csv").read_text().startswith("change,results,how,")


def llama(folder):
    """A small model of Transformers, as it is named on the command line."""
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return f"hf:{folder}/config.json"


@pytest.mark.slow
def test_settings_of_another_tool_have_their_own_peak(tmp_path):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable"):
        pytest.skip("this version of transformers has no `every_n_layers`")
    options = (llama(tmp_path), "--optimizer", "adamw", "--length", "64")
    plain = run_json("estimate", *options)
    budget = (plain["floor_bytes"] + 2 * plain["peak_bytes"]) // 3

    record = run_json("export", *options, "-b", f"{budget}B", "--to", "transformers")

    assert record["fits"]
    assert record["plan_step_ms"] <= record["step_ms"]
    assert "every_n_layers=" in record["settings"]


@pytest.mark.slow
def test_a_plan_is_written_and_printed(plan_file, figures, tmp_path):
    loaded = autosac.Plan.load(plan_file)
    budget = f"{sum(figures) // 2}B"
    html = tmp_path / "plan.html"
    options = ("--optimizer", "adamw", "--budget", budget, "--html", str(html))

    record = run_json("plan", MLP, *options)

    assert loaded.peak_bytes <= loaded.budget_bytes == sum(figures) // 2
    assert record["policy"] == loaded.policy
    assert record["recompute_ms"] == loaded.recompute_ms
    assert html.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.slow
def test_written_files_are_named_beside_what_machines_read(figures, tmp_path):
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    budget = f"{sum(figures) // 2}B"
    given = ("--optimizer", "adamw", "-b", budget, "-o", str(plan), "--html", str(page))

    result = run("plan", MLP, *given, "--interactive", "--json")

    assert json.loads(result.stdout)["peak_bytes"] <= sum(figures) // 2
    assert result.stderr == f"autosac: wrote {plan}\nautosac: wrote {page}\n"
    assert "Plotly.newPlot" in page.read_text(encoding="utf-8")


def test_an_infeasible_budget_has_its_own_exit_code(figures):
    options = ("--optimizer", "adamw", "--budget", "1KiB")

    record = run_json("plan", MLP, *options, code=3)
    text = run("plan", MLP, *options)

    assert record["error"] == "infeasible"
    assert record["message"].startswith("No plan fits --budget 1024 ")
    assert record["lowest_peak_bytes"] == figures[0]
    assert text.exit_code == 3
    assert text.stdout == "" and "No plan fits" in text.stderr


def test_a_sweep_is_a_table_a_picture_and_json(figures, tmp_path):
    options = ("--optimizer", "adamw", "--budget", "1KiB", "--budget", f"{figures[1]}B")
    csv, picture = tmp_path / "sweep.csv", tmp_path / "sweep.png"

    record = run_json("sweep", MLP, *options, "--csv", str(csv), "-o", str(picture))

    assert [row["status"] for row in record["rows"]] == ["infeasible", "planned"]
    assert [row["floor_bytes"] for row in record["rows"]] == [figures[0]] * 2
    assert len(csv.read_text().splitlines()) == 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run("sweep", MLP, "--budget", "1KiB").exit_code == 3


@pytest.mark.slow
def test_the_largest_batch_is_that_of_the_python_function(figures):
    budget = figures[0] - 1  # for less than the model's own batch
    given = ("--argument", "rows", "--optimizer", "adamw")
    record = run_json("batch-size", MLP, "-b", f"{budget}B", *given)
    expected = autosac.max_batch_size(
        factories.mlp()[0],
        lambda rows: factories.mlp(rows=rows)[1],
        loss_fn=factories.mean_square,
        memory_budget=budget,
        optimizer="adamw",
        most=64,
    )
    assert record["batch_size"] == expected.batch_size
    assert record["peak_bytes"] <= budget
    assert run("batch-size", MLP, "-b", "1GiB").exit_code == cli.EXIT_USAGE


@pytest.mark.slow
def test_ranks_share_sequences_by_the_method_that_is_asked_for(tmp_path):
    given = ("parallel", llama(tmp_path), "--length", "64", "--gpus", "4", "-b", "1GiB")
    record = run_json(*given, "--mesh", "cp=2")
    assert record["mesh_shape"][-1] == 2
    assert record["context"]["method"] == "ulysses"
    wrong = run(*given, "--mesh", "cp=2", "--cp-method", "rings")
    assert wrong.exit_code == cli.EXIT_USAGE and "ulysses" in wrong.stderr


@pytest.mark.slow
def test_many_gpus_are_planned_for_and_counted(tmp_path):
    given = (GPT, "--set", "layers=1", "--optimizer", "adamw", "--cluster", "hgx-h100")
    least = run("parallel", *given, "--gpus", "2", "-b", "1KiB", "--json")
    assert least.exit_code == cli.EXIT_INFEASIBLE
    fits = f"{json.loads(least.stdout)['lowest_peak_bytes']}B"
    path = tmp_path / "plan.json"
    record = run_json("parallel", *given, "--gpus", "2", "-b", fits, "-o", str(path))
    assert record["mesh_shape"] == list(autosac.ParallelPlan.load(path).mesh_shape)
    assert record["peak_bytes"] <= record["budget_bytes"]
    far = run_json("parallel", *given, "--gpus", "2", "-b", fits, "--offload")
    assert far["step_ms"] <= record["step_ms"] and not far["exposed_copies_ms"]
    assert run_json("min-gpus", *given, "-b", fits)["min_gpus"] <= 2
    with_mesh = ("parallel", *given, "--gpus", "2", "-b", "1GiB", "--mesh")
    record = run_json(*with_mesh, "tp=2", "--tp-plan", "tensor", "--loss-parallel")
    assert record["mesh_shape"] == [1, 2] and record["tensor"]["degree"] == 2
    assert record["tensor"]["styles"]["head"] == "loss_parallel"
    assert len(run_json(*with_mesh, "tp=any")["alternatives"]) > 1
    wrong = run(*with_mesh, "tp")
    assert wrong.exit_code == cli.EXIT_USAGE and "tp=8" in wrong.stderr
    alone = run("min-gpus", *given, "-b", fits, "--ac-units", "nowhere")
    assert alone.exit_code == cli.EXIT_USAGE and "nowhere" in alone.stderr
    nothing = run_json("min-gpus", *given, "-b", "1KiB", code=cli.EXIT_INFEASIBLE)
    assert nothing["min_gpus"] is None
    wrong = run("parallel", *given[:-1], "moon", "-b", "1GiB")
    assert wrong.exit_code == cli.EXIT_USAGE and "moon" in wrong.stderr


STAGES = ("tests.factories:chain", "--on", "meta", "--cluster", "hgx-h100")


@pytest.mark.slow
def test_stages_of_a_pipeline_are_planned_for_and_counted(tmp_path):
    path = tmp_path / "plan.json"
    given = (*STAGES, "-b", "1GiB", "--global-batch", "4", "--mesh", "pp=,fsdp=1")
    given += ("--set", "layers=1", "--micro-batches", "2", "--schedule", "1F1B")

    record = run_json("parallel", *given, "--gpus", "2", "-o", str(path))
    fewest = run_json("min-gpus", *given)["min_gpus"]

    loaded = autosac.PipelinePlan.load(path)
    assert record["mesh_shape"] == list(loaded.mesh_shape) == [2]
    assert record["pipeline"]["name"] == "1F1B" and record["num_gpus"] == 2
    assert record["global_batch"] == 4 and len(record["stages"]) == 2
    assert fewest == 2


@pytest.mark.parametrize(
    ("command", "typed", "message"),
    [
        ("parallel", ("--global-batch", "4"), "--global-batch is for stages"),
        ("parallel", ("--mesh", "tp=2", "--schedule", "GPipe"), "add pp to --mesh"),
        ("parallel", ("--mesh", "pp=2", "--cp-method", "ring"), "no parts of a"),
        ("parallel", ("--mesh", "tp=1", "--cp-method", "ring"), "no parts of a"),
        ("parallel", ("--mesh", "tp=2", "--stages-per-rank", "2"), "add pp to --mesh"),
        ("parallel", ("--mesh", "pp=2", "--ac-units", "0"), "leave them out"),
        ("parallel", ("--mesh", "pp=2,x"), "write tp=8"),
        ("min-gpus", ("--mesh", "tp=2"), "--mesh of min-gpus has pp"),
        ("min-gpus", ("--cp-method", "ring"), "--mesh of min-gpus has pp"),
        ("min-gpus", ("--mesh", "pp=2", "--cp-method", "ring"), "no parts of a"),
    ],
)
def test_what_is_not_for_stages_or_only_for_them_is_said(command, typed, message):
    outcome = run(command, *STAGES, "-b", "1GiB", *typed)

    assert outcome.exit_code == cli.EXIT_USAGE and message in outcome.stderr


def test_stages_take_a_target_apart_which_other_commands_bind():
    outcome = run("parallel", MLP, "-b", "1GiB", "--mesh", "pp=2")
    assert outcome.exit_code == cli.EXIT_USAGE and "target" in outcome.stderr
    assert run_json("estimate", *STAGES[:3])["peak_bytes"]


def test_stages_share_sequences_if_their_blocks_take_positions():
    given = ("parallel", *STAGES, "-b", "1GiB", "--global-batch", "4", "--gpus", "4")
    outcome = run(*given, "--mesh", "pp=2,cp=2")
    assert outcome.exit_code and "No block's forward" in outcome.stderr


def test_stages_may_offload():
    given = ("parallel", *STAGES, "-b", "1GiB", "--global-batch", "4", "--offload")
    refused = run(*given, "--gpus", "4", "--mesh", "pp=2,tp=2")
    assert "--offload is not planned in pipelines with tensor" in refused.stderr
    typed = ("--set", "layers=1", "--micro-batches", "2", "--schedule", "1F1B")
    record = run_json(*given, *typed, "--gpus", "2", "--mesh", "pp=2")
    assert record["far_bytes"] == max(s["far_bytes"] for s in record["stages"])


def test_the_version_is_that_of_the_package():
    assert run("--version").stdout == f"autosac {metadata.version('autosac')}\n"


def test_the_version_of_a_tree_that_is_not_installed_is_a_sentence(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    result = run("--version")

    assert result.exit_code == 0
    assert result.stdout.startswith("autosac is not installed: run from ")


def test_graph_info_has_the_figures_of_the_python_function():
    rows = run_json("graph-info", GPT, "--set", "layers=1")
    model, tokens, loss_fn = factories.gpt(layers=1)
    expected = autosac.graph_info(model, tokens, loss_fn=loss_fn)

    assert rows == [asdict(info) for info in expected.modules]
    assert run("graph-info", GPT, "--set", "layers=1").stdout == f"{expected}\n"


@pytest.mark.slow
def test_a_compiled_budget_is_kept_or_infeasible():
    plain = run_json("compile", MLP, "-b", "1GiB")
    least = run_json("compile", MLP, "-b", "1KiB", code=cli.EXIT_INFEASIBLE)
    budget = (plain["peak_bytes"] + least["lowest_peak_bytes"]) // 2
    record = run_json("compile", MLP, "-b", f"{budget}B")
    wrong = run("compile", MLP, "-b", "1GiB", "--backend", "nothing")

    far_least = run_json(
        "compile", MLP, "-b", "1KiB", "--offload", code=cli.EXIT_INFEASIBLE
    )["lowest_peak_bytes"]
    far = run_json("compile", MLP, "-b", f"{far_least}B", "--offload")

    assert plain["num_rerun"] == 0 < record["num_rerun"]
    assert record["peak_bytes"] <= budget
    assert far["peak_bytes"] <= far_least <= least["lowest_peak_bytes"]
    assert far["offloaded_bytes"] > 0 == record["offloaded_bytes"]
    assert wrong.exit_code == cli.EXIT_USAGE and "'nothing'" in wrong.stderr


def test_a_plan_is_verified_by_real_steps(plan_file):
    record = run_json("verify", str(plan_file), MLP, "--optimizer", "adamw")

    assert record["identical"] and record["within_budget"]
    assert record["measured_peak_bytes"] <= record["budget_bytes"]


@pytest.mark.parametrize("what", ["optimizer", "name"])
def test_verify_takes_an_optimizer_that_the_factory_makes(plan_file, what):
    record = run_json("verify", str(plan_file), f"{MLP}_and_{what}")

    assert record["identical"]
    assert record["within_budget"]


def test_a_plan_that_does_not_hold_is_an_error(plan_file, monkeypatch):
    broken = Verification(
        baseline_peak_bytes=3,
        measured_peak_bytes=2,
        predicted_peak_bytes=1,
        budget_bytes=1,
        baseline_step_ms=1.0,
        step_ms=1.0,
        differences=("loss",),
    )
    monkeypatch.setattr(autosac, "verify", lambda *_, **__: broken)

    record = run_json("verify", str(plan_file), MLP, "--optimizer", "adamw", code=1)

    assert not record["identical"] and not record["within_budget"]


def test_another_model_does_not_take_the_plan(plan_file):
    result = run("verify", str(plan_file), "tests.factories:named")

    assert result.exit_code == cli.EXIT_ERROR
    assert "made for another model" in result.stderr


@pytest.mark.slow
def test_a_report_needs_only_the_file_and_takes_the_model(plan_file, tmp_path):
    bare = run("report", str(plan_file))
    full = run("report", str(plan_file), MLP, "--optimizer", "adamw")
    page = tmp_path / "report.html"
    run("report", str(plan_file), MLP, "--optimizer", "adamw", "--html", str(page))

    assert bare.exit_code == full.exit_code == 0
    assert "comes from a file" in bare.stdout
    assert "Why is this module recomputed?" in full.stdout
    assert page.read_text().count("<svg") == 4


def test_a_broken_plan_file_is_an_error(tmp_path):
    (tmp_path / "plan.json").write_text("{}")

    result = run("report", str(tmp_path / "plan.json"))

    assert result.exit_code == cli.EXIT_ERROR
    assert "is not a plan saved by autosac" in result.stderr


def test_all_devices_are_listed():
    printed = run_json("devices")

    assert [record["name"] for record in printed] == list(KNOWN_DEVICES)
    assert printed[1]["memory_bytes"] == KNOWN_DEVICES["h100"].memory_bytes
    assert "h100" in run("devices").stdout


def test_calibration_says_what_was_measured():
    record = run_json("calibrate", "tests.factories:named")

    assert record["measured"]["num_ops"] + record["cached"]["num_ops"] > 0
    assert "distinct ops" in run("calibrate", "tests.factories:named").stdout


# --- grids ------------------------------------------------------------------------

GRID = ("sweep", MLP, "--grid", "layers=2,3", "--grid", "device=cpu,h100", "--n", "2")


@pytest.mark.slow
def test_a_grid_is_a_table_files_and_json(tmp_path):
    csv, parquet, picture = (tmp_path / f"x.{end}" for end in ("csv", "parquet", "png"))
    files = ("--csv", str(csv), "--parquet", str(parquet), "-o", str(picture))

    record = run_json(*GRID, *files, "--directory", str(tmp_path / "cells"))
    text = run(*GRID, "--directory", str(tmp_path / "cells"))

    assert record["axes"] == ["layers", "device"]
    cells = [
        (row["layers"], row["device"], row["planned_for"]) for row in record["rows"]
    ]
    assert cells == [
        (n, device, device) for n in (2, 3) for device in ("cpu", "h100") for _ in "ab"
    ]
    assert all(row["status"] == "planned" for row in record["rows"])
    assert len(csv.read_text().splitlines()) == 9
    assert parquet.read_bytes().startswith(b"PAR1")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "cells").iterdir())) == 4
    assert text.exit_code == 0 and "modelled figures" in text.stdout


def test_finished_cells_of_a_grid_are_read_until_the_factory_changes(
    tmp_path, monkeypatch
):
    from tests import factories

    options = ("sweep", MLP, "--grid", "layers=2", "--n", "2", "--directory")
    first = run_json(*options, str(tmp_path))
    built = []

    def other(layers=4, rows=64):
        built.append(layers)
        return original(layers, 2 * rows)

    original = factories.mlp
    again = run_json(*options, str(tmp_path))
    monkeypatch.setattr(factories, "mlp", other)
    changed = run_json(*options, str(tmp_path))

    assert first == again != changed
    assert built == [2]


def test_a_grid_without_any_plan_has_an_exit_code():
    low = run_json("sweep", MLP, "--grid", "layers=2,3", "-b", "1KiB", code=3)
    failed = run_json(
        "sweep", "tests.factories:alone", "--grid", "accumulate=1,2", code=1
    )

    assert [row["status"] for row in low["rows"]] == ["infeasible"] * 2
    assert [row["status"] for row in failed["rows"]] == ["failed"] * 2


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--grid", "layers"], "must be name=value"),
        (["--grid", "layers=2", "--grid", "layers=3"], "names an axis twice"),
        (["--grid", "depth=2"], "unexpected keyword argument 'depth'"),
        (["--grid", "device=cpu,h1000"], "not a known device"),
        (["--grid", "optimizer=sgd,adamx"], "must be one of"),
        (["--grid", "accumulate=few"], "whole numbers"),
        (["--grid", "layers=2,2"], "equal labels"),
        (["--grid", "layers=2", "-b", "much"], "much"),
        (["--jobs", "2"], "need --grid"),
    ],
)
def test_what_no_grid_can_mean_is_a_matter_of_usage(arguments, match):
    result = run("sweep", MLP, *arguments)

    assert result.exit_code == cli.EXIT_USAGE, result.output
    assert match in " ".join(result.stderr.split())


def test_values_of_a_grid_are_read_as_settings_are():
    from autosac.cli import grids

    read = {text: grids._axis(text)[1] for text in ("a=1,2", "a=x,1", "a=(1,2),(3,4)")}

    assert list(read.values()) == [[1, 2], ["x", 1], [(1, 2), (3, 4)]]


def test_a_factory_of_several_batches_is_planned_for_all(tmp_path):
    path = tmp_path / "plan.json"
    result = run("plan", "tests.factories:rows", "-b", "1GiB", "-o", str(path))

    assert result.exit_code == 0
    assert result.stdout.count("\nbatches ") == 2
    loaded = autosac.Plan.load(path)
    assert [one.num_batches for one in loaded.variants] == [2, 1]


# --- given units ------------------------------------------------------------------


def test_plans_and_sweeps_take_given_units(figures):
    budget = f"{figures[1] - 1}B"
    given = ("--ac-units", "blocks.0*", "--fsdp-units", "blocks.1")

    plan = run_json("plan", MLP, "--optimizer", "adamw", "-b", budget, *given)
    sweep = run_json("sweep", MLP, "--optimizer", "adamw", "--n", "2", *given)
    grid = run_json("sweep", MLP, "--grid", "optimizer=adamw", "--n", "2", *given)

    assert plan["policy"]
    assert all(name.startswith("blocks.0") for name in plan["policy"])
    assert sweep["rows"][0]["floor_bytes"] > figures[0]
    assert grid["rows"][0]["floor_bytes"] == sweep["rows"][0]["floor_bytes"]


@pytest.mark.slow
def test_batch_sizes_and_many_gpus_take_given_units():
    given = ("--ac-units", "blocks.0*")

    size = run_json("batch-size", GPT, "--argument", "rows", "-b", "8MiB", *given)
    cluster = run_json(
        "parallel", GPT, "--gpus", "2", "-b", "1GiB", *given, "--fsdp-units", "blocks.1"
    )

    assert all(name.startswith("blocks.0") for name in size["policy"])
    assert {unit["fqn"] for unit in cluster["fsdp_units"]} <= {"", "blocks.1"}


def test_given_units_that_are_none_are_a_matter_of_usage():
    outcome = run("plan", MLP, "--budget", "1GiB", "--ac-units", "nothing.*")

    assert outcome.exit_code == cli.EXIT_USAGE
    assert "--ac-units" in outcome.stderr


# --- offload ----------------------------------------------------------------------


def test_a_plan_may_offload():
    arguments = ("plan", "tests.factories:named", "-b", "1GiB", "--offload")

    assert run_json(*arguments, "--host-budget", "1MiB")["offloaded_bytes"] == 0


def test_segments_may_be_expandable_where_a_gpu_is_planned_for():
    step = ("estimate", MLP, "--optimizer", "adamw", "--device", "h100")
    more = "--expandable-segments"
    peaks = [run_json(*step)["peak_bytes"], run_json(*step, more)["peak_bytes"]]
    refused = run("estimate", MLP, "--expandable-segments")

    assert 0 < peaks[1] <= peaks[0]
    assert refused.exit_code == 2
    assert "--expandable-segments needs --device or --on cuda" in refused.stderr
