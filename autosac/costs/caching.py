"""Measurements of ops on disk, so that each is made once on a device.

There is one JSON file for each device in each state that changes what ops cost:
    {"format": 6, "environment": {...}, "ops": {TEXT OF SIGNATURE: [ms, bytes, bytes
    kept, spread]}}
A file that is missing, damaged or not writable costs time and one warning, no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

import torch

from autosac.costs.timing import OpMeasurement
from autosac.step.op_signatures import Layout, Signature
from autosac.whole_files import write_whole

_FORMAT_VERSION = 6  # rises when the way of measuring changes
_NAMESPACES = ("aten.", "prims.")  # PyTorch's own: others change with no new version
_PLAIN = (bool, int, float, complex, str, type(None))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)

Table = dict[str, OpMeasurement]


# --- names of ops -------------------------------------------------------------


def text_of(signature: Signature) -> str | None:
    """A signature as text that is the same in every process.

    Different signatures have different texts. None for an op that is not PyTorch's
    own or gets an argument that has no such text, a random generator for example.
    """
    name = str(signature.func)
    if not name.startswith(_NAMESPACES):
        return None
    try:
        words = [_text(value) for value in signature.args]
        words += [f"{key}={_text(value)}" for key, value in signature.kwargs]
    except ValueError:
        return None
    return f"{name}({', '.join(words)})"


def _text(value: Any) -> str:
    if isinstance(value, Layout):
        size, stride = (",".join(map(str, item)) for item in (value.size, value.stride))
        views = "*" * value.is_conj + "-" * value.is_neg
        return f"{str(value.dtype)[6:]}[{size}]{{{stride}}}{views}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, _NAMED):
        return str(value)
    raise ValueError(f"{type(value).__name__} has no stable text.")


# --- where --------------------------------------------------------------------


def environment(device: torch.device) -> dict[str, str]:
    """Settings, versions and hardware that decide what ops cost."""
    settings = {
        "torch": torch.__version__,
        "precision": _precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "dtype": str(torch.get_default_dtype()),
    }
    if device.type == "cuda":
        return settings | {
            "device": torch.cuda.get_device_name(device),
            "libraries": f"{torch.version.cuda} {torch.version.hip}"
            f" {torch.backends.cudnn.version()}",
            "cudnn": f"{torch.backends.cudnn.enabled}"
            f" {torch.backends.cudnn.benchmark} {torch.backends.cudnn.deterministic}",
        }
    return settings | {
        "device": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "mkldnn": str(torch.backends.mkldnn.enabled),
    }


def _precision() -> str:
    """How matrix products of float32 may be rounded."""
    names = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv")
    paths = [f"{name}.fp32_precision".split(".") for name in (*names, "mkldnn.rnn")]
    return " ".join(str(reduce(getattr, path, torch.backends)) for path in paths)


def _processor() -> str:
    """Name and stepping of the processor, and how many of them there are."""
    wanted = ("model name", "cpu family", "model", "stepping", "cache size")
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:  # not Linux
        fields["model name"] = platform.processor() or platform.machine()
    words = [fields[key] for key in wanted if key in fields]
    return " ".join([*words, platform.machine(), str(os.cpu_count())])


def path_of(environment: Mapping[str, str]) -> Path:
    """The file for an environment.

    It lies in ``$AUTOSAC_CACHE_DIR``, or in ``autosac`` in the user's directory for
    caches: ``$XDG_CACHE_HOME`` or ``~/.cache`` (XDG Base Directory Specification),
    ``~/Library/Caches`` on macOS, ``%LOCALAPPDATA%`` on Windows.
    """
    key = json.dumps(environment, sort_keys=True).encode()
    words = re.sub(r"[^a-z0-9]+", "-", environment["device"].lower()).strip("-")
    name = f"ops-{words[:40]}-{hashlib.sha256(key).hexdigest()[:16]}.json"
    return _directory() / name


def _directory() -> Path:
    variables = os.environ
    if own := variables.get("AUTOSAC_CACHE_DIR"):
        return Path(own)
    if shared := variables.get("XDG_CACHE_HOME"):
        return Path(shared) / "autosac"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "autosac"
    if sys.platform == "win32" and (local := variables.get("LOCALAPPDATA")):
        return Path(local) / "autosac"
    return Path.home() / ".cache" / "autosac"


# --- reading and writing ------------------------------------------------------


def read(path: Path) -> Mapping[str, OpMeasurement]:
    """The measurements in a file; none, with a warning, if it is damaged."""
    try:
        text = path.read_text()
    except OSError:  # not there, or `add` will say that it cannot be written either
        return {}
    except UnicodeDecodeError:
        text = ""
    try:
        return _table(text)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        _warn(path, "is damaged and will be replaced", error)
        return {}


@lru_cache(maxsize=2)  # large, and read for every step that is calibrated
def _table(text: str) -> Table:
    record = json.loads(text)
    if record["format"] != _FORMAT_VERSION:
        return {}
    return {name: _measurement(*entry) for name, entry in record["ops"].items()}


def _measurement(
    runtime_ms: Any, workspace_bytes: Any, kept_bytes: Any, spread: Any
) -> OpMeasurement:
    if not (math.isfinite(runtime_ms) and runtime_ms >= 0.0):
        raise ValueError(f"{runtime_ms} is no time")
    if not (math.isfinite(spread) and spread >= 0.0):
        raise ValueError(f"{spread} is no spread")
    for size in (workspace_bytes, kept_bytes):
        if type(size) is not int or size < 0:
            raise ValueError(f"{size} is no size")
    return OpMeasurement(
        runtime_ms=runtime_ms,
        workspace_bytes=workspace_bytes,
        kept_bytes=kept_bytes,
        spread=spread,
    )


def _entry(cost: OpMeasurement) -> list[float]:
    return [
        cost.runtime_ms,
        cost.workspace_bytes,
        cost.kept_bytes,
        round(cost.spread, 3),
    ]


def add(path: Path, environment: Mapping[str, str], measured: Table) -> None:
    """Add measurements to a file, in one step; what others added meanwhile stays.

    A file that cannot be written is left as it is, with a warning.
    """
    if not measured:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `read` has warned before
            table = {**read(path), **measured}
        record = {
            "format": _FORMAT_VERSION,
            "environment": dict(environment),
            "ops": {name: _entry(cost) for name, cost in sorted(table.items())},
        }
        write_whole(path, json.dumps(record))  # with line breaks it takes twice as long
    except OSError as error:
        _warn(path, "cannot be written", error)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait until no other process of the user measures on this machine.

    Where there are no such locks (Windows), or no directory for them, nothing waits.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            _directory().mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(_directory() / "measuring.lock", "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _warn(path: Path, what: str, error: Exception) -> None:
    warnings.warn(
        f"The table of measured ops {path} {what} ({error}); they are measured anew."
        " Set AUTOSAC_CACHE_DIR to a directory of your own, or pass `cache=False`.",
        stacklevel=2,
    )
