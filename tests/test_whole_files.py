"""Files that are written in one step, and what is no plain file."""

import os
import stat
import threading
from pathlib import Path

import pytest

from autosac.whole_files import write_whole


def test_what_a_link_points_to_is_written(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)

    write_whole(link, "new")

    assert link.is_symlink()
    assert real.read_text() == "new"


def test_a_file_keeps_its_mode(tmp_path):
    path = tmp_path / "private"
    path.write_text("old")
    path.chmod(0o600)

    write_whole(path, "new")

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["private"]


def test_nobody_else_reads_a_private_file_before_it_is_whole(tmp_path, monkeypatch):
    path, modes = tmp_path / "private", []
    path.touch(0o600)
    write = Path.write_text

    def note(part, *args, **kwargs):
        modes.append(stat.S_IMODE(part.stat().st_mode))
        return write(part, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", note)
    write_whole(path, "new")

    assert modes == [0o600]


def test_a_pipe_is_written_to(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()

    write_whole(pipe, "new")
    reader.join(10)

    assert read == ["new"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    path = tmp_path / "nowhere" / "plan.json"

    with pytest.raises(FileNotFoundError) as caught:
        write_whole(path, "new")

    assert caught.value.filename == str(path)
