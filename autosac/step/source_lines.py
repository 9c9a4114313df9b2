"""Which line of the user's code runs an op."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

from autosac.step import training_step

_OWN = Path(__file__).parents[1]
_LIBRARIES = (
    *(f"{path}{os.sep}" for path in (Path(torch.__file__).parent, _OWN)),
    contextlib.__file__,  # decorators of PyTorch's lie in it
)
_DEMO = str(_OWN / "cli" / "demo.py")  # a model like any other
_END = training_step.__file__  # what lies outside of the step is not the model's

_is_users: dict[CodeType, bool] = {}  # asked for every op


def running(phase: str) -> str:
    """``file:line`` of the innermost frame that is not PyTorch's or autosac's.

    Args:
        phase: Of the step; only forward and loss run user code.

    Returns:
        An empty text if there is no such frame inside the step.
    """
    return of_caller() if phase in ("forward", "loss") else ""


def of_caller() -> str:
    """``file:line`` as of `running`, in any phase: backward reruns user code, too."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_user_code = _is_users.get(code)
        if is_user_code is None:
            is_user_code = _is_users[code] = is_users(code.co_filename)
        if is_user_code:
            return f"{code.co_filename}:{frame.f_lineno}"
        if code.co_filename == _END:
            return ""
        frame = frame.f_back
    return ""


def is_users(path: str) -> bool:
    """Whether a file is neither PyTorch's nor autosac's."""
    return path == _DEMO or not path.startswith((*_LIBRARIES, "<"))


def shortened(source: str) -> str:
    """The last two parts of the path, and the line."""
    return "/".join(Path(source).parts[-2:])
