"""Models and batches of the sizes that people train: for planning without memory."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.models import language, vision
from benchmarks.models.workload import Workload


def full_size() -> dict[str, Callable[[], Workload]]:
    """What builds each workload, by command-line name."""
    base = {"layers": 12, "width": 768, "heads": 12}
    words = {"gpt2": 50257, "bert": 30522}
    return {
        "full/gpt2-small": lambda: language.gpt2(
            **base, vocabulary=words["gpt2"], batch=8, length=1024
        ),
        "full/bert-base": lambda: language.bert(
            **base, vocabulary=words["bert"], batch=32, length=512
        ),
        "full/resnet50": lambda: vision.resnet50(batch=64, pixels=224),
        "full/vit-b-16": lambda: vision.vit(**base, batch=64, pixels=224, patch=16),
    }
