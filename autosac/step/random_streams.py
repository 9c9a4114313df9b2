"""Random streams that are used and put back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from autosac.step.extreme_draws import ExtremeDraws, extreme_draws

HIGHEST, LOWEST = -1, -2  # in place of seeds: see `extreme_draws`

GENERATORS = (
    *(torch.Generator, random.Random),
    *(np.random.RandomState, np.random.Generator),
)


@contextlib.contextmanager
def random_streams_kept() -> Iterator[None]:
    """Restore the global streams of PyTorch, Python and NumPy.

    Of PyTorch's those of the CPU and, once CUDA is in use, of each GPU.
    """
    in_use = torch.cuda.is_initialized()
    devices = range(torch.cuda.device_count()) if in_use else ()
    others = OtherStreams()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        others.restore()


class OtherStreams:
    """Where the global streams of Python and NumPy are now."""

    __slots__ = ("_keys", "_numpy", "_python")

    def __init__(self) -> None:
        self._python = random.getstate()
        state: Any = np.random.get_state()  # its stubs allow for a dict
        name, keys, *rest = state
        self._keys, self._numpy = keys, (name, *rest)

    def have_moved(self) -> bool:
        """Whether anybody has drawn since."""
        now = OtherStreams()
        is_equal = self._python == now._python and self._numpy == now._numpy
        return not (is_equal and np.array_equal(self._keys, now._keys))

    def restore(self) -> None:
        """Put the streams there again."""
        random.setstate(self._python)
        name, *rest = self._numpy
        np.random.set_state((name, self._keys, *rest))


@contextlib.contextmanager
def generators_kept(generators: Iterable[Any]) -> Iterator[None]:
    """Restore generators of PyTorch, Python or NumPy; what is none is left alone."""
    restore = [_restorer(one) for one in generators if has_state(one)]
    try:
        yield
    finally:
        for put_back in restore:
            put_back()


def has_state(value: Any) -> bool:
    """Whether anything is a generator of PyTorch, Python or NumPy that has a state."""
    is_generator = isinstance(value, GENERATORS)
    return is_generator and not isinstance(value, random.SystemRandom)


def _restorer(generator: Any) -> Callable[[], object]:
    """What puts a generator back to where it is now."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", bits.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


def seed_streams(seed: int) -> None:
    """Seed the global streams of PyTorch, Python and NumPy.

    Those of GPUs, too, also of ones that are first used later.
    """
    torch.manual_seed(seed)
    _seed_others(seed)


def _seed_others(seed: int) -> None:
    """Seed the global streams of Python and NumPy."""
    random.seed(int(seed))  # also a number of NumPy
    np.random.seed(seed % 2**32)  # it takes no others


def stream_states() -> dict[str, torch.Tensor]:
    """Where the global streams are, by readable name; of those that are restored."""
    states = {
        "cpu": torch.get_rng_state(),
        "Python": _numbers(random.getstate()),
        "NumPy": _numbers(np.random.get_state()),
    }
    if torch.cuda.is_initialized():
        of_each = enumerate(torch.cuda.get_rng_state_all())
        states |= {f"cuda:{index}": state for index, state in of_each}
    return states


def _numbers(state: Any) -> torch.Tensor:
    """The numbers of a state, None as one that is none of them, without its words."""
    leaves = [leaf for leaf in tree_leaves(state) if not isinstance(leaf, str)]
    numbers = [2.0**60 if leaf is None else leaf for leaf in leaves]
    arrays = [np.ravel(np.asarray(number, dtype=np.float64)) for number in numbers]
    return torch.from_numpy(np.concatenate(arrays))


@contextlib.contextmanager
def seeded_streams(seed: int = 0) -> Iterator[ExtremeDraws | None]:
    """Restore the global streams; inside, they begin where those of every trace do.

    Args:
        seed: Or `HIGHEST` or `LOWEST`, for `extreme_draws`.
    """
    is_extreme = seed < 0
    highest, seed = seed == HIGHEST, max(seed, 0)
    with random_streams_kept():
        torch.default_generator.manual_seed(seed)  # the CPU's: no GPU needs to be there
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        _seed_others(seed)
        if not is_extreme:
            yield None
            return
        with extreme_draws(highest=highest) as draws:
            yield draws
