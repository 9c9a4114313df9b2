"""Every architecture of Transformers as a training step, from a shrunken config."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

from autosac.step.training_step import default_loss
from benchmarks.models.drawn.batches import Batch, batches
from benchmarks.models.drawn.configs import DEGREES, shrunken
from benchmarks.models.drawn.errors import NotBuiltError
from benchmarks.models.workload import Workload, adamw

transformers.logging.set_verbosity_error()

# The first of these that a model has is taken; the last one is for no head.
_TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "MASKED_LM",
    "CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "CTC",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "OBJECT_DETECTION",
    "IMAGE_TEXT_TO_TEXT",
    "",
)
_MOST_BYTES = 2**30  # of parameters of a model that is tried
_LONGEST_REASON = 160


def names() -> list[str]:
    """All architectures with a model that the library's own tables name."""
    return sorted(n for n in configuration_auto.CONFIG_MAPPING_NAMES if _heads(n))


def _heads(name: str) -> list[tuple[str, str]]:
    """Task -> class name of a model, preferred ones first."""
    heads = []
    for task in _TASKS:
        table = f"MODEL_{f'FOR_{task}_' if task else ''}MAPPING_NAMES"
        of_task = getattr(modeling_auto, table).get(name)
        if of_task is not None:
            first = of_task if isinstance(of_task, str) else of_task[0]
            heads.append((task, first))
    return heads


def build(name: str) -> Workload:
    """A step of an architecture that really runs on the CPU.

    Args:
        name: One of `names`.

    Raises:
        NotBuiltError: Nothing that was tried runs.
    """
    heads = _heads(name)
    if not heads:
        raise NotBuiltError(f"no model class is known for {name}")
    task, class_name = heads[0]
    failures = []
    for degree in DEGREES:
        try:
            config = shrunken(name, degree)
            model_class = getattr(transformers, class_name)
            batch = _batch_that_runs(model_class, config, task)
        except Exception as error:  # whatever a library raises, it is not built
            why = " ".join(str(error).split())[:_LONGEST_REASON]
            failures.append(f"{degree}: {type(error).__name__}: {why}")
        else:
            return _workload(f"{name}@{task or 'BASE'}", model_class, config, batch)
    raise NotBuiltError("; ".join(failures))


def _workload(
    name: str, model_class: Any, config: PretrainedConfig, batch: Batch
) -> Workload:
    return Workload(
        name=name,
        make_model=lambda: model_class(config).train(),
        make_inputs=lambda: batch,
        make_optimizer=adamw,
        blocks=(),
    )


def _batch_that_runs(model_class: Any, config: PretrainedConfig, task: str) -> Batch:
    """The first batch with which a forward and a backward pass run on the CPU."""
    with torch.device("meta"), contextlib.suppress(NotImplementedError, RuntimeError):
        size = sum(p.nbytes for p in model_class(config).parameters())
        if size > _MOST_BYTES:
            raise NotBuiltError(f"{size / 2**30:.1f} GiB of parameters")
    torch.manual_seed(0)
    model = model_class(config).train()
    failures: list[Exception] = []
    for batch in filter(None, batches(model, config, task)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                default_loss(model(**batch)).backward()
        except Exception as error:  # as above
            failures.append(error)
        else:
            return batch
    raise failures[0] if failures else NotBuiltError("no batch is known for it")
