"""Models of packages that nobody tuned for, drawn from those that are installed."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import random

from benchmarks.models.drawn.errors import NotBuiltError
from benchmarks.models.drawn.packages import graphs, guessing, images, other, sequences
from benchmarks.models.workload import Workload

__all__ = ["PACKAGES", "build", "installed", "names", "version"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no weights from a network
PACKAGES = {
    package.distribution: package
    for package in (
        *(images.DIFFUSERS, images.SEGMENTATION, images.VIT, images.MONAI),
        *(images.KORNIA, images.DENOISING, other.OPEN_CLIP, other.ULTRALYTICS),
        *(sequences.X_TRANSFORMERS, sequences.VECTOR_QUANTIZE, sequences.PERFORMER),
        *(sequences.REFORMER, sequences.LOCAL_ATTENTION, sequences.COLT5),
        *(sequences.MAMBAPY, sequences.XLSTM, sequences.TORCHAUDIO),
        *(sequences.ASTEROID, sequences.SPEECHBRAIN, sequences.BRAINDECODE),
        *(sequences.FORECASTING, graphs.GEOMETRIC, graphs.E3NN),
        *(graphs.NEURALOPERATOR, other.TAB_TRANSFORMER, other.TABNET),
        *(other.DEEPCTR, other.ZUKO, other.NFLOWS, other.GPYTORCH, other.TORCHRL),
    )
}
LEAST, SHARE = 12, 5  # models of a package: so many, or one in so many of its list
LEAST_JUDGED = 60
SEED = 17


def version(distribution: str) -> str | None:
    """Of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed() -> list[str]:
    """Those of `PACKAGES` that are there."""
    return [name for name in PACKAGES if version(name) is not None]


@functools.cache
def names(distribution: str) -> tuple[str, ...]:
    """Some of a package's own list of models, drawn by number.

    Args:
        distribution: One of `PACKAGES`, installed.
    """
    listed = sorted(PACKAGES[distribution].models())
    order = random.Random(SEED).sample(listed, len(listed))
    return tuple(sorted(order[: max(LEAST, len(listed) // SHARE)]))


def build(distribution: str, name: str) -> Workload:
    """A step of a model of a package.

    Raises:
        NotBuiltError: It cannot be built here; says why.
    """
    try:
        return guessing.build(PACKAGES[distribution], name)
    except NotBuiltError:
        raise
    except Exception as error:  # whatever a package raises, it is not built
        raise NotBuiltError(f"{type(error).__name__}: {error}") from error
