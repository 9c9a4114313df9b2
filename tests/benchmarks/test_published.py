import json
import re
from pathlib import Path

import pytest

from autosac.devices.specs import device_spec
from benchmarks.published import checkpointed, predict, tables, times
from benchmarks.published.models import SUBJECTS

MIB = 2**20
PICKED = {"bert-fp32": (40, 128), "bert-fp16": (40, 136), "resnet50": (272, 1680)}


def series_of(model, gpu="h100"):
    name = f"{model}-{gpu}"
    return next(s for s in predict.figures()["series"] if predict.key(s) == name)


def predicted(model, tmp_path):
    """A published series, cut to two batches, with its predictions."""
    series, path = series_of(model), tmp_path / "series.json"
    points = [p for p in series["points"] if p["batch"] in PICKED[model]]
    predict.predict({**series, "points": points}, path)
    return json.loads(path.read_text())


def test_every_series_has_a_model_a_gpu_and_a_source():
    record = predict.figures()

    names = [predict.key(series) for series in record["series"]]
    assert len(set(names)) == len(names)
    for series in record["series"]:
        assert series["model"] in SUBJECTS
        assert series["memory"] in ("device", "allocated")
        assert series["source"]
        batches = [point["batch"] for point in series["points"]]
        assert batches == sorted(set(batches))


@pytest.mark.slowest_but_first
@pytest.mark.parametrize("model", PICKED)
def test_memory_grows_with_the_batch_as_was_published(model, tmp_path):
    first, last = predicted(model, tmp_path)["points"]

    published = last["mib"] - first["mib"]
    reserved = last["predicted_reserved_bytes"] - first["predicted_reserved_bytes"]
    assert reserved / MIB == pytest.approx(published, rel=0.002)


def test_the_page_says_how_far_predictions_are_off(tmp_path):
    point = {"batch": 1, "samples": 1, "samples_per_s": 10.0}
    point |= {"predicted_allocated_bytes": 0, "ops": []}

    def series(model, memory, pairs):
        points = [
            {
                **point,
                "batch": batch,
                "mib": published,
                "predicted_reserved_bytes": reserved * MIB,
                "predicted_allocated_bytes": reserved * MIB,
            }
            for batch, (published, reserved) in enumerate(pairs)
        ]
        own = {"model": model, "gpu": "h100", "memory": memory, "source": "a file"}
        return {**own, "transformers": "4.49.0", "points": points}

    bert = series("bert-fp32", "device", [(6000, 5000), (10000, 9000)])
    other = series("resnet50", "device", [(6000, 5000), (10000, 9500)])
    llama = series("llama-3.2-1b", "allocated", [(10000, 8000)])

    tables.write([bert, other, llama], [], tmp_path)

    page = (tmp_path / "published.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if "a file" in line]
    assert "h100 1,000 MiB" in page
    assert rows[0][6:9] == ["0.00%", "+0.00%", "+0.00%"]
    assert rows[1][6:9] == ["2.50%", "+5.00%", "+12.50%"]
    assert rows[2][6:9] == ["20.00%", "-20.00%", ""]
    assert "ops" not in (tmp_path / "published.json").read_text()
    assert (tmp_path / "published.png").stat().st_size > 0


KNOWN = {
    "hopper half": 0.4,
    "hopper float32": 0.6,
    "hopper tfloat32": 0.25,
    "hopper memory": 0.7,
    "host": 0.02,
}


def steps_of_known_speed():
    """Steps whose times are those of known parameters: a matmul and a copy each."""
    records = []
    for model, rate, flops in (
        ("bert-fp16", "float16", 10**12),
        ("bert-fp32", "float32", 10**11),
        ("bert-tf32", "tfloat32", 10**11),
    ):
        matmul, add = ["matmul", rate, flops, 0], ["pointwise", rate, 0]
        ops = {
            1: [[*add, 0, 500]],  # bound by the host
            16: [[*matmul, 20], [*add, 10**10, 1]],  # by matmuls
            32: [[*matmul, 40], [*add, 10**10, 2]],
            64: [[*matmul, 1], [*add, 10**10, 50]],  # by memory
            128: [[*matmul, 2], [*add, 10**10, 99]],
        }
        points = [
            {"batch": batch, "samples": batch, "samples_per_s": 1.0, "ops": ops[batch]}
            for batch in ops
        ]
        records.append({"model": model, "gpu": "h100", "points": points})
    for record in records:
        for point, step in zip(record["points"], times.steps([record]), strict=True):
            point["samples_per_s"] = 1e3 * point["samples"] / times.step_ms(step, KNOWN)
    return records


def test_the_fit_finds_what_steps_of_known_speed_reach():
    fitted = times.fit(times.steps(steps_of_known_speed()))

    assert fitted == pytest.approx(KNOWN, rel=0.02)


def test_a_step_left_out_is_predicted_by_the_others():
    steps = times.steps(steps_of_known_speed())

    assert times.without_each(steps) == pytest.approx([0.0] * len(steps), abs=0.03)


def test_what_only_one_series_shows_cannot_be_predicted_without_it(tmp_path):
    records = steps_of_known_speed()
    steps = times.steps(records)
    errors = times.without_its_series(steps)

    # Each series has its own precision; steps of one sample have no matmul.
    assert [error == error for error in errors] == [s.batch == 1 for s in steps]
    times.write(records, tmp_path)
    page = (tmp_path / "published_times.md").read_text()
    assert "| bert-fp16 | h100 | 16 |" in page
    assert "nothing else of its kind" in page


def test_devices_reach_what_the_committed_page_says_was_fitted():
    page = Path(predict.FIGURES).parents[1] / "results" / "published_times.md"
    fitted = dict(re.findall(r"^\| (\w+ \w+) \| (\d\.\d\d) \|", page.read_text(), re.M))

    other = device_spec("b200")
    assert f"{other.bandwidth_efficiency:.2f}" == fitted["mean memory"]
    assert f"{other.matmul_efficiency['bfloat16']:.2f}" == fitted["mean half"]
    for name, chip in times.CHIPS.items():
        spec = device_spec(name)
        memory = f"{times.MEMORY.get(name, chip)} memory"
        assert f"{spec.bandwidth_efficiency:.2f}" == fitted[memory]
        for kind, dtype in (("half", "float16"), ("float32", "float32")):
            share = fitted.get(f"{chip} {kind}")
            assert share in (None, f"{spec.matmul_efficiency[dtype]:.2f}")


@pytest.mark.slowest
def test_checkpointing_saves_what_was_published():
    published = predict.figures()["checkpointed"]["gib"]
    predicted = checkpointed.predicted_gib()

    for k in (1, 2):
        saved = published["0"] - published[str(k)]
        assert predicted[0] - predicted[k] == pytest.approx(saved, rel=0.01)
