import errno
import gc
import os
import threading

import pytest
import torch

from autosac import far_memory
from autosac.devices.allocator_events import cpu_events, recorded_events
from autosac.far_memory import FarMemory
from autosac.kinds import read_directory


def some_bytes(number=5000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (number,), dtype=torch.uint8, generator=generator)


class Held(FarMemory):
    """Copies beside the program that end only when they are told to."""

    def __init__(self):
        super().__init__(at_once_bytes=0)
        self.may_end = threading.Event()

    def linger(self, num_bytes):
        assert self.may_end.wait(60)


@pytest.mark.parametrize("at_once_bytes", [0, 5000])
def test_bytes_come_back_and_their_buffer_serves_the_next_ones(at_once_bytes):
    memory = FarMemory(at_once_bytes=at_once_bytes)
    first, second = some_bytes(seed=1), some_bytes(seed=2)

    for source in (first, second):
        sent = memory.send(source)
        assert memory.in_use_bytes == source.numel()
        target = torch.zeros_like(source)
        sent.fetch(target)
        sent.release()
        assert torch.equal(target, source)
    assert (memory.in_use_bytes, memory.peak_bytes) == (0, first.numel())
    assert memory.pooled_bytes == first.numel()


def test_the_program_copies_small_tensors_itself_and_what_it_sent_may_change_then():
    others = set(threading.enumerate())  # of other tests' memories
    memory, kept = Held(), some_bytes()
    memory.at_once_bytes = kept.numel()
    memory.may_end.set()
    source = kept.clone()
    sent = memory.send(source)
    source.zero_()
    target = torch.zeros_like(source)
    sent.begin(target)
    sent.fetch(target)

    assert torch.equal(target, kept)
    started = set(threading.enumerate()) - others
    assert not any("far_memory" in thread.name for thread in started)


def test_buffers_of_other_sizes_are_others():
    memory = FarMemory()
    sent = [memory.send(some_bytes(number)) for number in (10, 20)]

    assert memory.in_use_bytes == memory.peak_bytes == 30
    for one in sent:
        one.wait()
        one.release()
    assert memory.pooled_bytes == 30


def test_what_is_dropped_leaves_no_buffer_in_use():
    memory = FarMemory()
    sent = memory.send(some_bytes())
    sent.wait()
    del sent
    gc.collect()

    assert memory.in_use_bytes == 0


def test_a_buffer_is_free_again_only_when_its_copy_is_over():
    memory = Held()
    started = threading.Event()
    copy = far_memory._copy

    def noted(box, kept):
        started.set()
        copy(box, kept)

    far_memory._copy = noted
    try:
        sent = memory.send(some_bytes())
        assert started.wait(60)
        sent.release()
        assert memory.in_use_bytes == 5000
        memory.may_end.set()
        memory.executor("out").shutdown()
    finally:
        far_memory._copy = copy
    assert memory.in_use_bytes == 0


def test_bytes_come_back_beside_the_program_and_their_buffer_stays_meanwhile():
    memory, source = Held(), some_bytes()
    memory.may_end.set()
    sent = memory.send(source)
    sent.wait()
    memory.may_end.clear()
    target = torch.zeros_like(source)
    sent.begin(target)
    sent.release()
    assert memory.in_use_bytes == source.numel()

    memory.may_end.set()
    memory.executor("back").shutdown()
    assert torch.equal(target, source)
    assert memory.in_use_bytes == 0


@pytest.mark.parametrize("at_once_bytes", [0, 5000])
def test_what_was_begun_is_waited_for_and_may_come_back_again(at_once_bytes):
    memory, source = FarMemory(at_once_bytes=at_once_bytes), some_bytes()
    sent = memory.send(source)
    for _ in range(2):
        target = torch.zeros_like(source)
        sent.begin(target)
        sent.begin(target)
        sent.fetch(target)
        assert torch.equal(target, source)


def test_waiting_ends_when_the_copy_has():
    memory, source = Held(), some_bytes()
    sent = memory.send(source)
    has_waited = []
    waiting = threading.Thread(target=lambda: has_waited.append(sent.wait()))
    waiting.start()

    waiting.join(0.05)
    assert not has_waited
    memory.may_end.set()
    waiting.join(60)
    assert has_waited


def test_after_waiting_nobody_else_holds_what_was_sent():
    memory, source = FarMemory(), some_bytes()
    storage = source.untyped_storage()
    before = torch._C._storage_Use_Count(storage._cdata)
    sent = memory.send(source)
    sent.wait()

    assert torch._C._storage_Use_Count(storage._cdata) == before


def test_the_allocators_events_know_nothing_of_far_memory():
    memory, source = FarMemory(), some_bytes()
    target = torch.zeros_like(source)
    with cpu_events() as recording:
        sent = memory.send(source)
        sent.fetch(target)
        sent.release()
    kinds = (event.typed[0].name for event in recorded_events(recording))

    assert torch.equal(source, target)
    assert "Allocation" not in kinds


def test_a_directory_without_room_is_named(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    memory = FarMemory(str(tmp_path))

    with pytest.raises(OSError, match=f"{tmp_path}.* has no room for another") as error:
        memory.send(some_bytes())
    assert error.value.errno == errno.ENOSPC
    assert memory.in_use_bytes == 0


def test_a_directory_that_is_gone_is_named(tmp_path):
    memory = FarMemory(str(tmp_path / "gone"))

    with pytest.raises(OSError, match=r"gone.* is no directory any more"):
        memory.send(some_bytes())


def test_a_relative_directory_is_the_one_that_was_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path.parent)

    assert read_directory(tmp_path.name) == str(tmp_path)


def test_files_have_no_name(tmp_path):
    memory = FarMemory(str(tmp_path))
    sent = memory.send(some_bytes())
    sent.wait()

    assert not list(tmp_path.iterdir())
