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
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from autosac import _compat
from autosac.quantities import format_bytes


class Sent(Protocol):
    """The bytes of a storage on their way to far memory, or there."""

    def wait(self) -> None:
        """Wait until the program may let go of the storage.

        Raises:
            Exception: Whatever the copy raised.
        """

    def fetch(self, target: torch.Tensor) -> None:
        """Copy the bytes back.

        Args:
            target: All bytes of a new storage, shape (num_bytes,).
        """

    def release(self) -> None:
        """Give the buffer back to the pool; it may be called more than once."""


class FarMemory:
    """Buffers outside of the device, by size.

    Args:
        directory: Where the CPU's files lie; None for the system's temporary one.
        bytes_per_s: Most bytes that a copy on the CPU moves in a second; None for as
            many as it can.

    Attributes:
        in_use_bytes: Size of the buffers that hold something,
        peak_bytes: and the most that it has been.
    """

    def __init__(
        self, directory: str | None = None, bytes_per_s: float | None = None
    ) -> None:
        self.directory = directory
        self.bytes_per_s = bytes_per_s
        self.in_use_bytes = 0
        self.peak_bytes = 0
        self._free: defaultdict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

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
        if key[0] == "cuda":
            return _Streamed(self, buffer, source, self._stream(source.device))
        return _Threaded(self, buffer, source, self._executor())

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
        # `torch.from_file` would tell the allocator's observers of it.
        try:
            with tempfile.TemporaryFile(dir=self.directory) as file:
                os.truncate(file.fileno(), num_bytes)
                if hasattr(os, "posix_fallocate"):  # else writing ends the process
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                mapping = mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            place = self.directory or tempfile.gettempdir()
            raise OSError(
                error.errno,
                f"`offload_dir`={place!r} has no room for another"
                f" {format_bytes(num_bytes)} ({error.strerror}): name a directory that"
                " has, or plan without `offload`",
            ) from error
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "autosac_far_memory")
        return self._thread

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _Buffered:
    """What both kinds of copies have in common: the buffer."""

    def __init__(
        self, memory: FarMemory, buffer: torch.Tensor, source: torch.Tensor
    ) -> None:
        self._memory = memory
        self._buffer: torch.Tensor | None = buffer
        self._key = (source.device.type, source.numel())

    def _hand_back(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._memory.take_back(self._key, buffer)

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """As `Sent.release`."""
        self._hand_back()


class _Threaded(_Buffered):
    """A copy by a thread."""

    def __init__(
        self,
        memory: FarMemory,
        buffer: torch.Tensor,
        source: torch.Tensor,
        executor: ThreadPoolExecutor,
    ) -> None:
        super().__init__(memory, buffer, source)
        # In a list: executors hold arguments a moment longer than the work lasts.
        box = [source]
        self._future: Future[None] = executor.submit(_copy, buffer, box, memory)

    def wait(self) -> None:
        """As `Sent.wait`."""
        self._future.result()

    def fetch(self, target: torch.Tensor) -> None:
        """As `Sent.fetch`."""
        self.wait()
        assert self._buffer is not None
        with _compat.no_modes(), torch.no_grad():
            target.copy_(self._buffer)
        self._memory.linger(target.numel())

    def release(self) -> None:
        """As `Sent.release`; a copy that still runs ends first."""
        if self._buffer is not None:
            future = self.__dict__.get("_future")
            if future is None or future.cancel() or future.done():
                self._hand_back()
            else:
                key, buffer = self._key, self._buffer
                memory, self._buffer = self._memory, None
                future.add_done_callback(lambda _: memory.take_back(key, buffer))


def _copy(buffer: torch.Tensor, box: list[torch.Tensor], memory: FarMemory) -> None:
    source = box.pop()
    with torch.no_grad():
        buffer.copy_(source)
    memory.linger(source.numel())


class _Streamed(_Buffered):
    """A copy on a stream of its own, into pinned memory."""

    def __init__(
        self,
        memory: FarMemory,
        buffer: torch.Tensor,
        source: torch.Tensor,
        stream: torch.cuda.Stream,
    ) -> None:
        super().__init__(memory, buffer, source)
        self._device = source.device
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with _compat.no_modes(), torch.no_grad(), torch.cuda.stream(stream):
            buffer.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def wait(self) -> None:
        """As `Sent.wait`: the kernels that follow run after the copy.

        So may those that get the same memory from the allocator.
        """
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def fetch(self, target: torch.Tensor) -> None:
        """As `Sent.fetch`, on the stream of the kernels that read it.

        The next copy into the buffer waits for that stream.
        """
        self.wait()
        assert self._buffer is not None
        with _compat.no_modes(), torch.no_grad():
            target.copy_(self._buffer, non_blocking=True)
