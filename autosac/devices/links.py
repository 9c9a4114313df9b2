"""Links between a device and its far memory: how fast tensors move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autosac.errors import ArgumentError

_GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How fast bytes move between a device and its far memory.

    Attributes:
        out_bytes_per_s: Rate to far memory,
        back_bytes_per_s: and from there.
        latency_ms: Time that every copy takes besides.
        issue_ms: Time for which the program is busy with a copy, and computes nothing.
            On a GPU kernels run meanwhile.
        at_once_ms: Likewise with a copy that it makes itself, of a tensor
        at_once_bytes: of at most so many bytes.
    """

    out_bytes_per_s: float
    back_bytes_per_s: float
    latency_ms: float = 0.0
    issue_ms: float = 0.0
    at_once_ms: float = 0.0
    at_once_bytes: int = 0

    def __post_init__(self) -> None:
        if min(self.out_bytes_per_s, self.back_bytes_per_s) <= 0:
            raise ArgumentError("Rates of a `Link` must be above 0 bytes per second.")

    def shared_by(self, num_devices: int) -> Link:
        """What each of several devices has of it when all of them copy at once."""
        return replace(
            self,
            out_bytes_per_s=self.out_bytes_per_s / num_devices,
            back_bytes_per_s=self.back_bytes_per_s / num_devices,
        )

    @property
    def without_issue(self) -> Link:
        """The link, if copies kept the program busy for no time."""
        return replace(self, issue_ms=0.0, at_once_ms=0.0)

    def issued_ms(self, sizes: Iterable[int]) -> float:
        """Time for which the program is busy with tensors, each moved one way.

        Args:
            sizes: Their bytes.
        """
        return sum(
            self.at_once_ms if nbytes <= self.at_once_bytes else self.issue_ms
            for nbytes in sizes
        )

    def out_ms(self, num_bytes: int, num_copies: int, hidden_ms: float = 0.0) -> float:
        """Time to wait for copies to far memory.

        Args:
            num_bytes: Of all of them.
            num_copies: How many there are.
            hidden_ms: Time for which the device has other work meanwhile.
        """
        own_ms = 1e3 * num_bytes / self.out_bytes_per_s
        return max(0.0, num_copies * self.latency_ms + own_ms - hidden_ms)

    def back_ms(self, num_bytes: int, num_copies: int, hidden_ms: float = 0.0) -> float:
        """Time to wait for copies back; arguments as those of `out_ms`."""
        own_ms = 1e3 * num_bytes / self.back_bytes_per_s
        return max(0.0, num_copies * self.latency_ms + own_ms - hidden_ms)


# Of what a data sheet says of a link copies reach 50 of 64 GB/s: PyTorch's
# `activation_offload_cpu_gpu_bw` (torch 2.14, torch/_functorch/config.py).
_REACHED = 50 / 64
# Heuristic, on no data sheet: one asynchronous copy and its event.
_COPY_MS = 0.02


def symmetric(gb_per_s: float) -> Link:
    """A link of so many gigabytes per second each way by the data sheet."""
    rate = _REACHED * gb_per_s * _GB
    return Link(out_bytes_per_s=rate, back_bytes_per_s=rate, latency_ms=_COPY_MS)


# Of tensors on the CPU: up to that size the program has copied one to a file in memory
# before a thread has taken it over.
AT_ONCE_BYTES = 2**19
# Rates are nominal, on no data sheet: a file on a solid-state disk over NVMe. For how
# long the program is busy was measured (`python -m benchmarks.offload --parts times`).
DISK = Link(
    out_bytes_per_s=1.0 * _GB,
    back_bytes_per_s=2.0 * _GB,
    latency_ms=0.05,
    issue_ms=0.11,
    at_once_ms=0.08,
    at_once_bytes=AT_ONCE_BYTES,
)
