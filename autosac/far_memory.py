"""Far memory: where tensors lie that a step does not need for a while.

Of a GPU it is pinned memory of the host. Of the CPU it is a file that is mapped into
memory and has no name: it is gone when nobody maps it any more. Buffers are kept for
the next step, by size, as making one takes long.

A copy runs beside the program: on a thread, or on a stream of its own. What it reads
stays alive until the program has waited for it, so that the moment at which device
memory becomes free is a place in the program, whatever the speed of copies.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from autosac import _compat
from autosac.devices.links import AT_ONCE_BYTES
from autosac.quantities import format_bytes, rounded_up

Way = Literal["out", "back"]
_SMALLEST_FILE_BYTES, _LARGEST_FILE_BYTES = 2**20, 2**30  # that tensors share
_ALIGNED_BYTES = 64


class Copy(Protocol):
    """A copy that runs beside the program."""

    def wait(self) -> None:
        """Wait until the program may read the target, and let go of the source.

        Raises:
            Exception: Whatever the copy raised.
        """

    def settle(self) -> None:
        """Wait until the host may read the target as well."""

    def then(self, done: Callable[[], None]) -> None:
        """Call a function once a later copy out may write to the buffer here."""


class FarMemory:
    """Buffers outside of the device, by size.

    Args:
        directory: Where the CPU's files lie; None for the system's temporary one.
        bytes_per_s: Most bytes that a copy on the CPU moves in a second; None for as
            many as it can.
        at_once_bytes: Copies of tensors on the CPU of at most so many bytes are made by
            the program itself.

    Attributes:
        in_use_bytes: Size of the buffers that hold something,
        peak_bytes: and the most that it has been.
    """

    def __init__(
        self,
        directory: str | None = None,
        bytes_per_s: float | None = None,
        at_once_bytes: int = AT_ONCE_BYTES,
    ) -> None:
        self.directory = directory
        self.bytes_per_s = bytes_per_s
        self.at_once_bytes = at_once_bytes
        self.in_use_bytes = 0
        self.peak_bytes = 0
        # The last file that `new` took parts of: these keep it.
        self._file: Callable[[], mmap.mmap | None] = lambda: None
        self._file_bytes = _SMALLEST_FILE_BYTES // 2
        self._taken_bytes = 0
        self._free: defaultdict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)
        self._lock = threading.Lock()
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    @property
    def pooled_bytes(self) -> int:
        """Size of the buffers that wait for the next step."""
        return sum(key[1] * len(buffers) for key, buffers in self._free.items())

    def send(self, source: torch.Tensor) -> Sent:
        """Begin to copy a storage.

        Args:
            source: All its bytes, shape (num_bytes,).

        Raises:
            OSError: There is no room for it.
        """
        key = (source.device.type, source.numel())
        with self._lock:
            buffer = self._free[key].pop() if self._free[key] else None
            self.in_use_bytes += key[1]
            self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        if buffer is None:
            try:
                buffer = self._new(*key)
            except BaseException:
                self.take_back(key, None)
                raise
        return Sent(self, buffer, source)

    def new(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor here of the layout of another one without holes, and not filled.

        Nobody but its holders keeps it: `in_use_bytes` does not count it.

        Args:
            tensor: The other one.
            device: Whose far memory this is.

        Raises:
            OSError: There is no room for it.
        """
        if device.type == "cuda":
            buffer = self._new("cuda", tensor.nbytes)
        else:
            with self._lock:
                buffer = self._piece(tensor.nbytes)
        return buffer.view(tensor.dtype).as_strided(tensor.size(), tensor.stride())

    def _piece(self, num_bytes: int) -> torch.Tensor:
        """A part of a mapped file: each of these takes a file descriptor."""
        file = self._file()
        if file is None or self._taken_bytes + num_bytes > len(file):
            self._file_bytes = min(2 * self._file_bytes, _LARGEST_FILE_BYTES)
            file = self._mapped(max(num_bytes, self._file_bytes))
            self._file, self._taken_bytes = weakref.ref(file), 0
        offset = self._taken_bytes
        self._taken_bytes = rounded_up(offset + num_bytes, _ALIGNED_BYTES)
        return torch.frombuffer(file, dtype=torch.uint8, count=num_bytes, offset=offset)

    def begin_copy(self, target: torch.Tensor, source: torch.Tensor, way: Way) -> Copy:
        """Begin to copy a tensor, after what the program has done to it so far.

        Copies of one way follow one another. Whoever begins one keeps both tensors
        until it has waited.

        Args:
            target: What is written,
            source: and what is read.
            way: "out" if the target lies here, "back" if the source does.
        """
        device = (source if way == "out" else target).device
        if device.type != "cuda":
            # In a list: executors hold arguments a moment longer than the work lasts.
            box = [target, source]
            if source.nbytes <= self.at_once_bytes:
                _copy(box, self)
                return _DONE
            return _Thread(self.executor(way).submit(_copy, box, self))
        stream = self.stream(device, way)
        stream.wait_stream(torch.cuda.current_stream(device))
        with _compat.no_modes(), torch.no_grad(), torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return _Stream(device, event, way)

    def take_back(self, key: tuple[str, int], buffer: torch.Tensor | None) -> None:
        """Keep a buffer for the next step.

        Args:
            key: Kind of device, and size.
            buffer: It; None if it could not be had.
        """
        with self._lock:
            self.in_use_bytes -= key[1]
            if buffer is not None:
                self._free[key].append(buffer)

    def linger(self, num_bytes: int) -> None:
        """Take as long as the limit on the rate asks for."""
        if self.bytes_per_s is not None:
            time.sleep(num_bytes / self.bytes_per_s)

    def _new(self, kind: str, num_bytes: int) -> torch.Tensor:
        if kind == "cuda":
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return torch.frombuffer(self._mapped(num_bytes), dtype=torch.uint8)

    def _mapped(self, num_bytes: int) -> mmap.mmap:
        """A new file, mapped: `torch.from_file` would tell the allocator's observers.

        Raises:
            OSError: There is no room for it.
        """
        try:
            with tempfile.TemporaryFile(dir=self.directory) as file:
                os.truncate(file.fileno(), num_bytes)
                if hasattr(os, "posix_fallocate"):  # else writing ends the process
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                return mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            place = self.directory or tempfile.gettempdir()
            what = f"has no room for another {format_bytes(num_bytes)}"
            if not os.path.isdir(place):
                what = "is no directory any more"
            raise OSError(
                error.errno,
                f"`offload_dir`={place!r} {what} ({error.strerror}): name a directory"
                " that is there and has room, or do not offload",
            ) from error

    def executor(self, way: Way) -> ThreadPoolExecutor:
        """The thread for one way of copies, out or back: they follow one another."""
        if way not in self._threads:
            self._threads[way] = ThreadPoolExecutor(1, f"autosac_far_memory_{way}")
        return self._threads[way]

    def stream(self, device: torch.device, way: Way) -> torch.cuda.Stream:
        """The stream of a device for one way of copies."""
        if (device, way) not in self._streams:
            self._streams[device, way] = torch.cuda.Stream(device)
        return self._streams[device, way]


class _Done:
    """A copy that the program has made."""

    def wait(self) -> None:
        """As `Copy.wait`."""

    def settle(self) -> None:
        """As `Copy.settle`."""

    def then(self, done: Callable[[], None]) -> None:
        """As `Copy.then`."""
        done()


_DONE = _Done()


@dataclass(frozen=True, slots=True)
class _Thread:
    """A copy by a thread."""

    future: Future[None]

    def wait(self) -> None:
        """As `Copy.wait`."""
        self.future.result()

    def settle(self) -> None:
        """As `Copy.settle`."""
        self.future.result()

    def then(self, done: Callable[[], None]) -> None:
        """As `Copy.then`; a copy that has not begun is left out."""
        self.future.cancel()
        self.future.add_done_callback(lambda _: done())


@dataclass(frozen=True, slots=True)
class _Stream:
    """A copy on a stream of its own: the kernels that follow a wait run after it.

    So may those that get the source's memory from the allocator.
    """

    device: torch.device
    event: torch.cuda.Event
    way: Way

    def wait(self) -> None:
        """As `Copy.wait`."""
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def settle(self) -> None:
        """As `Copy.settle`."""
        self.event.synchronize()

    def then(self, done: Callable[[], None]) -> None:
        """As `Copy.then`: copies out follow one another in any case."""
        if self.way == "back":
            self.wait()
        done()


class Sent:
    """The bytes of a storage on their way to a buffer of far memory, or there.

    Args:
        memory: Whose buffer it is.
        buffer: Of as many bytes as the storage.
        source: All bytes of the storage, shape (num_bytes,).
    """

    _out: Copy = _DONE  # until it has begun

    def __init__(
        self, memory: FarMemory, buffer: torch.Tensor, source: torch.Tensor
    ) -> None:
        self._memory = memory
        self._buffer: torch.Tensor | None = buffer
        self._key = (source.device.type, source.numel())
        self._back: tuple[Copy, torch.Tensor] | None = None
        self._out = memory.begin_copy(buffer, source, "out")

    def wait(self) -> None:
        """Wait until the program may let go of the storage.

        Raises:
            Exception: Whatever the copy raised.
        """
        self._out.wait()

    def begin(self, target: torch.Tensor) -> None:
        """Begin to copy the bytes back, beside the program.

        Args:
            target: All bytes of a new storage, shape (num_bytes,). It stays until the
                program has waited.
        """
        assert self._buffer is not None
        if self._back is None:
            self.wait()
            back = self._memory.begin_copy(target, self._buffer, "back")
            self._back = back, target

    def fetch(self, target: torch.Tensor) -> None:
        """Copy the bytes back, or wait until that is done if it has begun.

        Args:
            target: As in `begin`. On a GPU the kernels that follow may read it.
        """
        back, self._back = self._back, None
        if back is not None:
            back[0].wait()
            return
        self.wait()
        assert self._buffer is not None
        _copy([target, self._buffer], self._memory)

    def release(self) -> None:
        """Give the buffer back once no copy needs it; it may be called again."""
        buffer, self._buffer = self._buffer, None
        back, self._back = self._back, None
        if buffer is not None:
            memory, key = self._memory, self._key
            last = self._out if back is None else back[0]
            last.then(lambda: memory.take_back(key, buffer))

    def __del__(self) -> None:
        self.release()


def _copy(box: list[torch.Tensor], memory: FarMemory) -> None:
    source, target = box.pop(), box.pop()
    with _compat.no_modes(), torch.no_grad():
        target.copy_(source, non_blocking=True)  # so that the host waits for no GPU
    memory.linger(source.nbytes)
