"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step: whoever reads it sees the old text or the new one.

    A link stays one, and a file that is there keeps its mode; until it is whole nobody
    else reads it. Devices and pipes are written to.

    Raises:
        OSError: It cannot be written; nothing is left beside it.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(path))
    part = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_ident()}.part")
    is_there = target.exists()
    try:
        part.touch(mode=0o600 if is_there else 0o666)
        part.write_text(text, encoding="utf-8")
        if is_there:
            shutil.copymode(target, part)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise type(error)(error.errno, error.strerror, str(path)) from None
