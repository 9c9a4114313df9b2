import json

import pytest

from benchmarks.published import predict, tables
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


@pytest.mark.slow
@pytest.mark.parametrize("model", PICKED)
def test_memory_grows_with_the_batch_as_was_published(model, tmp_path):
    first, last = predicted(model, tmp_path)["points"]

    published = last["mib"] - first["mib"]
    reserved = last["predicted_reserved_bytes"] - first["predicted_reserved_bytes"]
    assert reserved / MIB == pytest.approx(published, rel=0.002)


def test_the_page_says_how_far_predictions_are_off(tmp_path):
    point = {"batch": 1, "samples": 1, "samples_per_s": 10.0, "predicted_ms": 50.0}
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
        return {**own, "points": points}

    bert = series("bert-fp32", "device", [(6000, 5000), (10000, 9000)])
    other = series("resnet50", "device", [(6000, 5000), (10000, 9500)])
    llama = series("llama-3.2-1b", "allocated", [(10000, 8000)])

    tables.write([bert, other, llama], [], tmp_path)

    page = (tmp_path / "published.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if "a file" in line]
    assert "h100 1,000 MiB" in page
    assert rows[0][6:10] == ["0.00%", "+0.00%", "+0.00%", "2.00"]
    assert rows[1][6:9] == ["2.50%", "+5.00%", "+12.50%"]
    assert rows[2][6:9] == ["20.00%", "-20.00%", ""]
    assert "ops" not in (tmp_path / "published.json").read_text()
    assert (tmp_path / "published.png").stat().st_size > 0
