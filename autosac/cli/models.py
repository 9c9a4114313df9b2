"""What the command line means by a model: a factory of the user's, or an HF config."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autosac.cli import config_batches
from autosac.cli.usage import UsageError, check_needed, usage
from autosac.devices.allocator_settings import AllocatorSettings
from autosac.devices.specs import device_spec, present_gpu
from autosac.errors import AutosacError
from autosac.planning.batch_kinds import are_several
from autosac.profiles.given import calibrated_if_present
from autosac.profiles.profile import Profile, profile
from autosac.step import source_lines
from autosac.step.arguments import optimizer_class, read_dtype
from autosac.step.random_streams import random_streams_kept, seed_streams
from autosac.tracing.probing import marked_modules

_KEYS = ("model", "inputs", "loss_fn", "optimizer")
_TARGET = "target"  # of a loss of output and target, in dicts only
_HF = "hf:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A training step to build.

    Attributes:
        make: Builds model, inputs and, if they are the model's own, loss and optimizer.
        optimizer: Name of a class of ``torch.optim``, '' for none.
        options: Further options of `autosac.profile`.
    """

    make: Callable[[], dict[str, Any]]
    optimizer: str
    options: Mapping[str, Any]

    def parts(self) -> dict[str, Any]:
        """Model, inputs, loss and optimizer, built anew from the same seed."""
        parts = self._made()
        if _TARGET in parts:
            target, loss_fn = parts.pop(_TARGET), parts["loss_fn"]
            parts["loss_fn"] = lambda output: loss_fn(output, target)
        return parts

    def pipeline(self) -> dict[str, Any]:
        """The same with the target apart, as pipelines have it; and the options.

        Raises:
            UsageError: There is no target.
        """
        parts, options = self._made(), dict(self.options)
        if _TARGET not in parts:
            raise UsageError(
                "Stages of a pipeline need a factory that returns a dict with model,"
                " inputs, target and loss_fn, a function of output and target."
            )
        if options["accumulate"] == 1:
            del options["accumulate"]
        return {**parts, **options}

    def _made(self) -> dict[str, Any]:
        with random_streams_kept():
            seed_streams(0)
            parts = self.make()
        target = parts.get(_TARGET)
        if isinstance(target, torch.Tensor) and target.is_meta:
            # Losses hold targets, which are never on the meta device.
            parts = {**parts, _TARGET: torch.zeros_like(target, device="cpu")}
        self._check_names(parts["model"])
        if self.optimizer:
            parts = {**parts, "optimizer": optimizer_class(self.optimizer)}
        return parts

    def _check_names(self, model: Any) -> None:
        """Complain of typed names of modules that the model does not have."""
        if not isinstance(model, torch.nn.Module):
            return  # which `profile` says
        with usage():
            for name, inside in (("exclude", False), ("opaque", True)):
                marks = self.options.get(name, ())
                marked_modules(marks, model, name=name, inside=inside)

    def profile(self) -> Profile:
        """The step, traced."""
        return profile(**self.parts(), **self.options)

    def calibrated(self, parts: Mapping[str, Any] | None = None) -> Profile:
        """The step, traced and measured if its model lies on this machine.

        Args:
            parts: Those that were built already.
        """
        built = self.parts() if parts is None else parts
        return calibrated_if_present(profile(**built, **self.options))

    @staticmethod
    def has_several(parts: Mapping[str, Any]) -> bool:
        """Whether its inputs are several batches."""
        return are_several(parts["inputs"])


def asked(
    model: str,
    *,
    settings: Sequence[str] | None = None,
    optimizer: str = "",
    on: str = "cpu",
    batch: int | None = None,
    length: int | None = None,
    autocast: str = "",
    accumulate: int = 1,
    device: str = "",
    exclude: list[str] | None = None,
    opaque: list[str] | None = None,
    expandable_segments: bool = False,
) -> Target:
    """The step that options of the command line describe.

    Args:
        model: ``package.module:factory`` or ``hf:path/to/config.json``.
        settings: ``key=value`` arguments of the factory, or entries of the config.
        optimizer: Name of a class of ``torch.optim``, '' for none.
        on: Where to build it: ``cpu``, ``cuda`` or ``meta``.
        batch: Batch size of an HF model, None for 1,
        length: and length of its sequences, None for 512.
        autocast: Type to autocast to, '' for none.
        accumulate: As in `autosac.profile`, like what follows.
        expandable_segments: Whether the segments of a GPU's allocator are.

    Raises:
        UsageError: One of them cannot be meant.
    """
    if on not in ("cpu", "cuda", "meta"):
        raise UsageError(f"--on {on!r} must be cpu, cuda or meta.")
    if device and not present_gpu(device):
        with usage():
            device_spec(device)  # complain before anything is built
    options: dict[str, Any] = {"accumulate": accumulate}
    if exclude:
        options["exclude"] = tuple(exclude)
    if opaque:
        options["opaque"] = tuple(opaque)
    if device:
        options["device"] = device
    if expandable_segments:
        on_gpu = on == "cuda" or device not in ("", "cpu")
        check_needed("--expandable-segments", True, "--device or --on cuda", on_gpu)
        options["allocator"] = AllocatorSettings(expandable_segments=True)
    if autocast:
        with usage():
            options["autocast"] = read_dtype(autocast)
    arguments = dict(map(_setting, settings or ()))
    if optimizer:
        with usage():
            optimizer_class(optimizer)  # complain before anything is built
    path = hf_path(model)
    factory = factory_of(model) if path is None else None
    if factory is not None:
        _check_of_config(model, batch=batch, length=length)
        _check_arguments(model, factory, arguments)

    def make() -> dict[str, Any]:
        with torch.device(on):
            if factory is not None:
                return _parts_of(model, _called(model, factory, arguments))
            assert path is not None
            return _from_config(path, arguments, batch or 1, length or 512)

    return Target(make=make, optimizer=optimizer, options=options)


class Batches:
    """A model and its batches of any size, for the search of a batch size.

    Args:
        name: Of the model.
        options: As typed.
        argument: Of the factory, which is the batch size; an HF model has its own.

    Attributes:
        model: The model.
        options: Of `autosac.profile`.
        make_loss_fn: Inputs -> loss, if the factory returns one; None if not.

    Raises:
        UsageError: The factory has no such argument.
    """

    def __init__(self, name: str, options: Mapping[str, Any], argument: str) -> None:
        self._name, self._typed, self._argument = name, options, argument
        self._is_hf = hf_path(name) is not None
        first = self._target(1)
        parts = first.parts()
        self.model = parts["model"]
        self.options = dict(first.options)
        if "optimizer" in parts:
            self.options["optimizer"] = parts["optimizer"]
        self._loss_fn: Any = None
        self.make_loss_fn = self._loss_of if "loss_fn" in parts else None

    def _target(self, size: int) -> Target:
        typed = dict(self._typed)
        if self._is_hf:
            typed["batch"] = size
        else:
            settings = typed["settings"] or []
            typed["settings"] = [*settings, f"{self._argument}={size}"]
        return asked(self._name, **typed)

    def inputs(self, size: int) -> Any:
        """A batch; the model that is built with it is dropped."""
        parts = self._target(size).parts()
        self._loss_fn = parts.get("loss_fn")
        return parts["inputs"]

    def _loss_of(self, inputs: Any) -> Any:
        """The loss that was returned with these inputs, as it may hold targets."""
        return self._loss_fn


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise UsageError(f"--set {text!r} must be key=value, such as layers=12.")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value  # a word is a text


def optimizer_of(model: torch.nn.Module, given: Any) -> Any:
    """An optimizer out of what a factory returns: one, its name, or what makes one."""
    if isinstance(given, torch.optim.Optimizer):
        return given
    maker: Any = optimizer_class(given) if isinstance(given, str) else given
    return maker(model.parameters())


def hf_path(name: str) -> Path | None:
    """The config that a name of a model means; None if it means a factory.

    Raises:
        UsageError: There is no such file.
    """
    if not name.startswith(_HF):
        return None
    path = Path(name[len(_HF) :])
    if not path.is_file():
        raise UsageError(f"{path} is no file; give the path of a config.json.")
    return path


def factory_of(name: str) -> Callable[..., Any]:
    """The function that a name of a model means.

    Raises:
        UsageError: There is none.
    """
    module_name, colon, attribute = name.partition(":")
    is_module = all(part.isidentifier() for part in module_name.split("."))
    if not colon or not is_module or not attribute:
        raise UsageError(
            f"{name!r} names no model; write package.module:factory or"
            " hf:path/to/config.json."
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules beside the user, as for `python -m`
    with _of_others(f"{name!r} cannot be imported"):
        resolved: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        if not hasattr(resolved, part):
            raise UsageError(f"{name!r}: {module_name} has no {attribute!r}.")
        resolved = getattr(resolved, part)
    if not callable(resolved):
        raise UsageError(f"{name!r} is no function, but {type(resolved).__name__}.")
    factory: Callable[..., Any] = resolved
    return factory


def _check_of_config(name: str, **sizes: Any) -> None:
    """Refuse sizes of batches that a factory would not hear of."""
    for option, size in sizes.items():
        if size is not None:
            raise UsageError(
                f"--{option} {size} is for hf: models, and {name!r} makes its own"
                f" batch: leave it out, or write --set {option}={size} if the factory"
                " has such an argument."
            )


def _check_arguments(
    name: str, factory: Callable[..., Any], arguments: Mapping[str, Any]
) -> None:
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise UsageError(f"{name!r}: {error}; see --set key=value.") from error


def _called(
    name: str, factory: Callable[..., Any], arguments: Mapping[str, Any]
) -> Any:
    """What a factory returns."""
    with _of_others(f"{name!r} fails with {dict(arguments)}"):
        return factory(**arguments)


@contextlib.contextmanager
def _of_others(what: str) -> Iterator[None]:
    """Code of the user's or of Transformers': its errors are one sentence."""
    try:
        yield
    except (AutosacError, UsageError):
        raise
    except Exception as error:  # whatever such code raises
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if source_lines.is_users(frame.filename)]
        where = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
        said = " ".join(str(error).split())
        raise UsageError(f"{what}{where}: {type(error).__name__}: {said}") from error


def _parts_of(name: str, parts: Any) -> dict[str, Any]:
    """What a factory returned, by name."""
    if isinstance(parts, tuple) and 2 <= len(parts) <= len(_KEYS):
        parts = dict(zip(_KEYS, parts, strict=False))
    is_right = isinstance(parts, Mapping) and {"model", "inputs"} <= parts.keys()
    if is_right and _TARGET in parts:
        is_right = "loss_fn" in parts
    if not is_right or not parts.keys() <= {*_KEYS, _TARGET}:
        raise UsageError(
            f"{name!r} must return (model, inputs), (model, inputs, loss_fn) or"
            " (model, inputs, loss_fn, optimizer), or a dict with these keys, and with"
            " target if loss_fn is a function of output and target; it returned"
            f" {_described(parts)}."
        )
    return dict(parts)


def _described(returned: Any) -> str:
    if isinstance(returned, Mapping):
        return f"a dict with {sorted(map(str, returned))}"
    return type(returned).__name__


def _from_config(
    path: Path, changes: Mapping[str, Any], batch: int, length: int
) -> dict[str, Any]:
    """A model of Transformers with random weights, and a batch; nothing is loaded."""
    try:
        import transformers  # only here, and slow to import
    except ImportError as error:
        raise UsageError("hf: needs transformers: pip install transformers.") from error
    record = {**_read_config(path), **changes}
    architecture = _architecture(path, record, transformers)
    kind, told = record["model_type"], f" with {dict(changes)}" if changes else ""
    _check_entries(kind, transformers.AutoConfig.for_model(kind), changes)
    with _of_others(f"{path} makes no {architecture.__name__}{told}"):
        config = transformers.AutoConfig.for_model(**record)
    longest = getattr(config, "max_position_embeddings", None) or 0
    if 0 < longest < length:  # XLNet says -1
        raise UsageError(
            f"--length {length} is longer than the {longest} positions of {path}; use"
            f" --set max_position_embeddings={length} for a model that has as many."
        )
    config.use_cache = False  # a cache of keys is for generation
    with _of_others(f"{path} makes no {architecture.__name__}{told}"):
        model = architecture(config).train()
        inputs = config_batches.batch_for(model, batch, length)
    return {"model": model, "inputs": inputs}


def _architecture(path: Path, record: Mapping[str, Any], transformers: Any) -> Any:
    """The class of Transformers that a config names.

    Raises:
        UsageError: It names none.
    """
    kind, names = record.get("model_type"), record.get("architectures")
    if kind is None or not names:
        raise UsageError(f"{path} names no `model_type` or no `architectures`.")
    kinds = [key for key in transformers.CONFIG_MAPPING if isinstance(key, str)]
    if kind not in kinds:
        close = difflib.get_close_matches(str(kind), kinds, 1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise UsageError(f"{path}: this transformers has no model_type {kind!r}{hint}")
    name = names[0] if isinstance(names, list) else names
    architecture: Any = getattr(transformers, str(name), None)
    is_class = isinstance(architecture, type)
    if not is_class or not issubclass(architecture, transformers.PreTrainedModel):
        raise UsageError(f"{path}: this transformers has no model {name!r}.")
    return architecture


def _read_config(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}.") from error
    if not isinstance(record, dict):
        raise UsageError(f"{path} holds no config, but a {type(record).__name__}.")
    return record


def _check_entries(kind: str, plain: Any, changes: Mapping[str, Any]) -> None:
    """Refuse entries that configs of a kind do not have: they would change nothing."""
    entries = {*plain.to_dict(), *plain.attribute_map, "architectures"}
    for key in changes:
        if key not in entries:
            close = difflib.get_close_matches(key, sorted(entries), 1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise UsageError(f"--set {key}: a config of {kind} has no {key!r}{hint}")
