"""Work that is begun on one CUDA stream and used on another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


class Moment:
    """How far the current streams had come on each CUDA device.

    Args:
        devices: Of any type; those without streams count for nothing.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        streams = [torch.cuda.current_stream(d) for d in devices if d.type == "cuda"]
        self._reached = [(stream, stream.record_event()) for stream in streams]

    def _crossings(self) -> Iterator[tuple[torch.Stream, torch.Stream, torch.Event]]:
        """The streams that are not current any more, with those that are."""
        for stream, event in self._reached:
            present = torch.cuda.current_stream(stream.device)
            if present != stream:
                yield stream, present, event

    def wait(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the current streams go on from here, and use tensors made until here."""
        tensors = list(tensors)
        for _, present, event in self._crossings():
            present.wait_event(event)
            _used_on(present, tensors)

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the streams of this moment use tensors of the current ones."""
        tensors = list(tensors)
        for stream, present, _ in self._crossings():
            stream.wait_stream(present)
            _used_on(stream, tensors)

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the current streams use what those of this moment have made since."""
        tensors = list(tensors)
        for stream, present, _ in self._crossings():
            present.wait_stream(stream)
            _used_on(present, tensors)


def _used_on(stream: torch.Stream, tensors: list[torch.Tensor]) -> None:
    """Keep the allocator from reusing tensors' memory before the stream is done."""
    for tensor in tensors:
        if tensor.device == stream.device:
            tensor.record_stream(stream)
