"""Steps of classes that nothing is known of but their signatures.

What an argument means is guessed from its name, by a table of the package: the names
that one package uses are few.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks.models.drawn.errors import NotBuiltError
from benchmarks.models.drawn.running import copied, first_that_runs, optimizer_by_size
from benchmarks.models.workload import Workload

_MOST_BYTES = 2**28  # of parameters of a model that is tried
_MOST_TRIES = 30
_SKIPPED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
Table = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Package:
    """One package: which models it has, and what their arguments are called.

    Attributes:
        distribution: What it is called where it is installed from.
        models: Its own list, name -> class or factory.
        settings: Tables of arguments of constructors: name -> value, or a function of
            the default that makes the value anew. Each table is tried.
        batches: Name of an argument of `forward` -> its value, a function that makes
            it, or a list of layouts to try.
        around: Puts a model into one that trains; None to train it as it is.
        whole: Whether optional arguments of `forward` that are known are given, too.
        is_large: Whether models may have too many parameters to be built.
    """

    distribution: str
    models: Callable[[], dict[str, Callable[..., Any]]]
    settings: tuple[Table, ...] = field(default_factory=lambda: ({},))
    batches: Table = field(default_factory=dict)
    around: Callable[[Any], nn.Module] | None = None
    whole: bool = False
    is_large: bool = False


def classes_in(
    *namespaces: str, base: type[nn.Module] = nn.Module
) -> dict[str, Callable[..., Any]]:
    """Module classes that modules of a package show, each once, by name."""
    listed: dict[Any, str] = {}
    for namespace in namespaces:
        module = importlib.import_module(namespace)
        root = namespace.partition(".")[0]
        for name in sorted(dir(module)):
            shown = getattr(module, name, None)
            if not name.startswith("_") and _is_model(shown, root, base):
                listed.setdefault(shown, name)
    return {name: shown for shown, name in listed.items()}


def last_of_files(namespace: str) -> dict[str, Callable[..., Any]]:
    """The last module class of each file of a package: what the file is for."""
    root = importlib.import_module(namespace)
    listed: dict[str, Callable[..., Any]] = {}
    for info in pkgutil.walk_packages(root.__path__, f"{namespace}."):
        try:
            module = importlib.import_module(info.name)
        except Exception:  # a file for what is not installed
            continue
        own = [
            shown
            for shown in vars(module).values()
            if _is_model(shown, info.name, nn.Module) and shown.__module__ == info.name
        ]
        if own:
            listed[info.name.removeprefix(f"{namespace}.")] = own[-1]
    return listed


def _is_model(shown: Any, root: str, base: type[nn.Module]) -> bool:
    return (
        inspect.isclass(shown)
        and issubclass(shown, base)
        and shown.__module__.startswith(root)
        and not inspect.isabstract(shown)
    )


def build(package: Package, name: str) -> Workload:
    """A step of a model of a package that really runs on the CPU.

    Args:
        package: Where it is from.
        name: Of the package's own list.

    Raises:
        NotBuiltError: Nothing that was tried runs.
    """
    model_class = package.models()[name]
    title = f"{package.distribution}: {name}"
    tries = itertools.islice(_tries(package, title, model_class), _MOST_TRIES)
    with (
        mock.patch("torch.hub.download_url_to_file", _refuse_weights),
        mock.patch("urllib.request.urlopen", _refuse_weights),
    ):
        try:
            return first_that_runs(tries)
        except _WeightsWantedError as error:
            raise NotBuiltError("it wants weights from a network") from error


class _WeightsWantedError(BaseException):
    """No mere exception: packages catch these, wait and try again."""


def _refuse_weights(*_: Any, **__: Any) -> None:
    raise _WeightsWantedError


def _tries(
    package: Package, title: str, model_class: Callable[..., Any]
) -> Iterator[Callable[[], Workload]]:
    for settings in package.settings:
        for only_needed in (False,) if package.is_large else (False, True):
            make = partial(
                _made, model_class, settings, only_needed, around=package.around
            )
            for layout in range(_num_layouts(package.batches)):
                yield partial(_workload, package, title, make, layout)


def _num_layouts(batches: Table) -> int:
    return max((len(v) for v in batches.values() if isinstance(v, list)), default=1)


def _made(
    model_class: Callable[..., Any],
    settings: Table,
    only_needed: bool,
    *,
    around: Callable[[Any], nn.Module] | None,
) -> nn.Module:
    """A model with small settings, in training mode."""
    arguments = {}
    for name, parameter in _parameters(model_class):
        is_needed = parameter.default is inspect.Parameter.empty
        if name in settings and (is_needed or not only_needed):
            value = settings[name]
            is_rule = isinstance(value, FunctionType)
            arguments[name] = value(parameter.default) if is_rule else value
    model = model_class(**arguments)
    whole = model if around is None else around(model)
    if isinstance(model, nn.Module):
        model.train()
    return whole.train()


def _parameters(called: Callable[..., Any]) -> list[tuple[str, inspect.Parameter]]:
    own = inspect.signature(called).parameters
    return [(name, p) for name, p in own.items() if p.kind not in _SKIPPED]


def _workload(
    package: Package, title: str, make: Callable[[], nn.Module], layout: int
) -> Workload:
    model = _small(make, is_large=package.is_large)
    inputs = _batch(package, model, layout)
    return Workload(
        name=title,
        make_model=make,
        make_inputs=lambda: copied(inputs),
        loss_fn=losses,
        make_optimizer=optimizer_by_size,
        blocks=(),
    )


def _small(make: Callable[[], nn.Module], *, is_large: bool) -> nn.Module:
    """A model, if it has few parameters."""
    torch.manual_seed(0)
    if is_large:  # others keep constants, which would be of the meta device
        unknown = (NotImplementedError, RuntimeError)
        with contextlib.suppress(*unknown), torch.device("meta"):
            _check_size(make())
    model = make()
    _check_size(model)
    return model


def _check_size(model: nn.Module) -> None:
    size = sum(parameter.nbytes for parameter in model.parameters())
    if size > _MOST_BYTES:
        raise NotBuiltError(f"{size / 2**20:.0f} MiB of parameters")


def _batch(
    package: Package, model: nn.Module, layout: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `forward` in one of the layouts that they have."""
    batch = {}
    for name, parameter in _parameters(model.forward):
        is_needed = parameter.default is inspect.Parameter.empty
        if is_needed or (package.whole and name in package.batches):
            if name not in package.batches:
                raise NotBuiltError(f"no batch is known for `{name}`")
            batch[name] = _layout(package.batches[name], layout)
    own = inspect.signature(model.forward).parameters.values()
    takes_any = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in own)
    if not batch and takes_any and "x" in package.batches:
        return (_layout(package.batches["x"], layout),), {}
    return (), batch


def _layout(layouts: Any, number: int) -> Any:
    if isinstance(layouts, FunctionType):
        return layouts()
    if not isinstance(layouts, list):
        return layouts
    return layouts[min(number, len(layouts) - 1)]


def losses(output: Any) -> torch.Tensor:
    """Numbers of an output that train, and mean squares of what else does, summed."""
    trained = [x for x in tensors_of(output) if x.requires_grad]
    if not trained:
        raise NotBuiltError("no output requires a gradient")
    parts = [_part(x) for x in trained]
    return torch.stack(parts).sum()


def _part(output: torch.Tensor) -> torch.Tensor:
    if output.ndim == 0 and not output.is_complex():
        return output
    return output.abs().square().mean() if output.is_complex() else _square(output)


def _square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def tensors_of(output: Any) -> Iterable[torch.Tensor]:
    """Tensors of nested containers, records and objects with attributes."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif not isinstance(leaf, (type, str, FunctionType, nn.Module)):
            inside = vars(leaf) if hasattr(leaf, "__dict__") else {}
            yield from (x for x in inside.values() if isinstance(x, torch.Tensor))
