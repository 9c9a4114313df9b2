"""What a value is, as text that changes when the value or the code behind it does.

Finished cells of a sweep are found again by such texts. A function is described by its
bytecode and by all of the user's own code that it names, so that editing it makes new
cells; installed packages count with their versions. What has no contents to look at (a
lock, a file) counts with its type alone.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_ROOT = Path(__file__).resolve().parents[2]
_SKIPPED = (  # entries of a class that say nothing about what it does
    "dict", "weakref", "module", "doc", "annotations", "annotate_func", "qualname",
    "annotations_cache", "firstlineno", "static_attributes",
)  # fmt: skip


def described(value: Any) -> str:
    """A text for a value, the same in every process that runs the same code."""
    return _Describer().text(value)


@functools.lru_cache(maxsize=1)
def own_version() -> str:
    """autosac's version and a digest of its source, solvers included."""
    digest = hashlib.sha256()
    for folder, _, names in sorted(os.walk(_ROOT / "autosac", followlinks=True)):
        for path in (Path(folder, name) for name in sorted(names)):
            if path.suffix == ".py":
                digest.update(path.relative_to(_ROOT).as_posix().encode())
                digest.update(path.read_bytes())
    return f"{_version('autosac')} {digest.hexdigest()[:16]}"


def versions(packages: Iterable[str]) -> str:
    """Versions of packages, and of the cuDNN whose attention may be chosen."""
    words = [f"{package} {_version(package)}" for package in packages]
    return ", ".join([*words, f"cudnn {torch.backends.cudnn.version()}"])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        module = sys.modules.get(package)
        return str(getattr(module, "__version__", ""))


class _Describer:
    """Describes values; what was met before is only counted."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}
        self._kept: list[Any] = []  # or ids would be used again

    def text(self, value: Any) -> str:
        """The text of any value."""
        if isinstance(value, _PLAIN):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, _NAMED):
            return str(value)
        if isinstance(value, types.CodeType):
            return self._code(value, {})
        if isinstance(value, (tuple, frozenset)):  # equal ones may be one object or two
            return f"{type(value).__qualname__}({self._parts(value)})"
        if id(value) in self._met:
            return f"again {self._met[id(value)]}"
        self._met[id(value)] = len(self._met)
        self._kept.append(value)
        return f"{type(value).__qualname__}({self._parts(value)})"

    def _parts(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return self._joined(value)
        if isinstance(value, (set, frozenset)):
            return ", ".join(sorted(map(described, value)))
        if isinstance(value, Mapping):
            return self._joined(x for pair in value.items() for x in pair)
        if isinstance(value, functools.partial):
            return self._joined((value.func, value.args, value.keywords))
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if isinstance(value, (staticmethod, classmethod)):
            return self.text(value.__func__)
        if isinstance(value, property):
            return self._joined((value.fget, value.fset))
        if isinstance(value, types.MethodType):
            return self._joined((value.__func__, value.__self__))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        return self._instance(value)

    def _joined(self, values: Any) -> str:
        return ", ".join(map(self.text, values))

    def _function(self, function: types.FunctionType) -> str:
        name = f"{function.__module__}.{function.__qualname__}"
        if (installed := _installed(function.__module__)) is not None:
            return f"{name} {installed}"
        cells = [_contents(cell) for cell in function.__closure__ or ()]
        rest = (function.__defaults__, function.__kwdefaults__, cells)
        code = self._code(function.__code__, function.__globals__)
        return f"{name} {code} {self._joined(rest)}"

    def _code(self, code: types.CodeType, namespace: Mapping[str, Any]) -> str:
        """Instructions, constants and what they name; lines and comments are left out.

        Attributes have names too: a global one of the same name is described for
        nothing.
        """
        inner = [
            self._code(item, namespace)
            if isinstance(item, types.CodeType)
            else self.text(item)
            for item in code.co_consts
        ]
        names = [
            f"{n}={self.text(namespace[n])}" for n in code.co_names if n in namespace
        ]
        parts = (code.co_code.hex(), *code.co_names, *code.co_varnames, *inner, *names)
        return f"code({', '.join(parts)})"

    def _class(self, kind: type) -> str:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if (installed := _installed(kind.__module__)) is not None:
            return f"{name} {installed}"
        entries = [
            f"{key}={self.text(value)}"
            for key, value in vars(kind).items()
            if key.strip("_") not in _SKIPPED
            and not isinstance(value, types.MemberDescriptorType)
        ]
        return f"{name} {self._joined(kind.__bases__)} {', '.join(entries)}"

    def _module(self, module: types.ModuleType) -> str:
        if (installed := _installed(module.__name__)) is not None:
            return f"{module.__name__} {installed}"
        path = getattr(module, "__file__", None)
        content = Path(path).read_bytes() if path and Path(path).is_file() else b""
        return f"{module.__name__} {hashlib.sha256(content).hexdigest()}"

    def _instance(self, value: Any) -> str:
        kind = self.text(type(value))
        if isinstance(value, torch.nn.Module):
            layers = [type(module) for module in value.modules()]
            shapes = [(n, tuple(p.shape), p.dtype) for n, p in value.named_parameters()]
            return f"{kind} {value!r} {self._joined((layers, shapes))}"
        if isinstance(value, torch.Tensor):
            return f"{kind} {tuple(value.shape)} {value.dtype} {_values(value)}"
        if is_dataclass(value):
            own = {field.name: getattr(value, field.name) for field in fields(value)}
            return f"{kind} {self.text(own)}"
        try:
            content = pickle.dumps(value, protocol=4)
        except Exception:  # pickling runs the code of any type: it may raise anything
            return kind
        return f"{kind} {hashlib.sha256(content).hexdigest()}"


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _values(tensor: torch.Tensor) -> str:
    if tensor.is_meta or tensor.layout != torch.strided:
        return ""
    plain = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(plain.numpy().tobytes()).hexdigest()


def _installed(module_name: str | None) -> str | None:
    """Version of what is not the user's own code; None if it is."""
    top = (module_name or "builtins").partition(".")[0]
    if top == "autosac":
        return own_version()
    if top in sys.stdlib_module_names:
        return ""
    path = getattr(sys.modules.get(top), "__file__", None) or ""
    if {"site-packages", "dist-packages"} & set(Path(path).parts):
        return _version(top)
    return None
