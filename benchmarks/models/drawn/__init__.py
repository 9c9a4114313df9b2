"""Models that nobody chose: drawn by number from the lists of libraries.

A model has a name such as ``transformers/opt``, ``timm/regnetx_002`` or
``torchvision/vgg11``, and everything about its step follows from the name. Those of
packages that are optional are called ``monai/UNet``.
"""

from __future__ import annotations

import functools
import random

from benchmarks.models.drawn.errors import NotBuiltError
from benchmarks.models.workload import Workload

__all__ = [
    "LIBRARIES",
    "SOURCES",
    "NotBuiltError",
    "build",
    "build_small",
    "drawn",
    "every",
]

LIBRARIES = ("transformers", "timm", "torchvision")
SOURCES = (*LIBRARIES, "modules")
SEED = 16
# Architectures of `benchmarks.models.zoo`, as the libraries call them.
_OF_ZOO = {
    *("gpt2", "llama", "qwen3", "mistral", "mixtral", "bert", "albert", "t5", "mamba"),
    *("vit", "swin", "convnext", "resnet", "densenet"),
    *("vision_transformer", "swin_transformer"),
}


def drawn(library: str, seed: int = SEED) -> list[str]:
    """All names of a library but the zoo's architectures, in an order drawn by number.

    Of timm's 1,400 models one of each family, drawn as well.

    Args:
        library: One of `LIBRARIES`.
        seed: Of the order.
    """
    from benchmarks.models.drawn import of_vision  # libraries when they are needed

    generator = random.Random(seed)
    if library == "transformers":
        from benchmarks.models.drawn import of_transformers  # as above

        names = [name for name in of_transformers.names() if name not in _OF_ZOO]
        sampled = generator.sample(names, len(names))
    elif library == "timm":
        families = [f for f in of_vision.families_of_timm() if f not in _OF_ZOO]
        order = generator.sample(families, len(families))
        sampled = [generator.choice(of_vision.variants_of_timm(f)) for f in order]
    else:
        names = [
            name
            for name in of_vision.names_of_torchvision()
            if of_vision.family_of_torchvision(name) not in _OF_ZOO
        ]
        sampled = generator.sample(names, len(names))
    return [f"{library}/{name}" for name in sampled]


def build(name: str, *, num_images: int = 8) -> Workload:
    """The training step of a drawn model.

    Args:
        name: Of `drawn`, or another one of the same libraries.
        num_images: Batch of models of timm and torchvision, which have their own size;
            those of Transformers are shrunken, with a small batch.

    Raises:
        NotBuiltError: It cannot be built here; says why.
    """
    library, _, own = name.partition("/")
    if library == "transformers":
        from benchmarks.models.drawn import of_transformers  # as in `drawn`

        return of_transformers.build(own)
    from benchmarks.models.drawn import of_vision  # as in `drawn`

    builders = {
        "timm": of_vision.build_of_timm,
        "torchvision": of_vision.build_of_torchvision,
    }
    try:
        return builders[library](own, num_images)
    except Exception as error:  # whatever a library raises, it is not built
        raise NotBuiltError(f"{type(error).__name__}: {error}") from error


@functools.cache
def every(source: str) -> tuple[str, ...]:
    """All names of a source: a family of timm is one, named after its file.

    Args:
        source: One of `SOURCES`, or an optional package that is installed.
    """
    if source == "transformers":
        from benchmarks.models.drawn import of_transformers  # as in `drawn`

        names = of_transformers.names()
    elif source == "modules":
        from benchmarks.models.drawn import of_modules  # as in `drawn`

        names = of_modules.names()
    elif source not in SOURCES:
        from benchmarks.models.drawn import packages  # as in `drawn`

        names = packages.names(source)
    else:
        from benchmarks.models.drawn import of_vision  # as in `drawn`

        is_timm = source == "timm"
        names = (
            of_vision.families_of_timm()
            if is_timm
            else of_vision.names_of_torchvision()
        )
    return tuple(f"{source}/{name}" for name in names)


def build_small(name: str) -> Workload:
    """A training step that a CPU really runs in seconds.

    Args:
        name: Of `every`.

    Raises:
        NotBuiltError: It cannot be built here; says why.
    """
    source, _, own = name.partition("/")
    if source == "transformers":
        from benchmarks.models.drawn import of_transformers  # as in `drawn`

        return of_transformers.build(own)
    if source == "modules":
        from benchmarks.models.drawn import of_modules  # as in `drawn`

        return of_modules.build(own)
    if source not in SOURCES:
        from benchmarks.models.drawn import packages  # as in `drawn`

        return packages.build(source, own)
    from benchmarks.models.drawn import small_vision  # as in `drawn`

    if source == "timm":
        return small_vision.build_of_timm(own)
    return small_vision.build_of_torchvision(own)
