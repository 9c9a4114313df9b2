"""Random streams whose first numbers are as high, or as low, as any that are drawn.

Layer drop compares a number between 0 and 1 with a rate: where all are high nothing is
dropped, which of a few ordinary seeds none may show.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from autosac._compat import no_modes

_NUM_WORDS = 300  # of 624, before those of an ordinary seed; a number takes two
_MOST_NUMBERS = 1024  # in a tensor of decisions
_OF_TORCH = frozenset({torch.rand, torch.rand_like, torch.Tensor.uniform_})
# Words of the Mersenne Twister's state that it hands out as all ones and all zeros.
_WORDS = {True: 0x12DD9BB3, False: 0}
# Numbers of PyTorch's, which bfloat16 has as well.
_NUMBERS = {True: 511 / 512, False: 1 / 512}


class ExtremeDraws(TorchFunctionMode):
    """Draws of few uniform numbers by PyTorch are extreme inside.

    Args:
        highest: They are as high as they get, not as low.

    Attributes:
        num_made: How many such draws there were.
    """

    def __init__(self, *, highest: bool) -> None:
        super().__init__()
        self.number = _NUMBERS[highest]
        self.num_made = 0
        self._places = _places()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _OF_TORCH and out.numel() <= _MOST_NUMBERS:
            self.num_made += 1
            low, high = _range(func, *args, **(kwargs or {}))
            with no_modes():
                out.detach().fill_(low + (high - low) * self.number)
        return out

    def are_met(self) -> bool:
        """Whether there were such draws so far, or draws by Python or NumPy."""
        return bool(self.num_made) or _places() != self._places


def _range(func: Any, *args: Any, **kwargs: Any) -> tuple[float, float]:
    """Between which numbers a function draws."""
    if func is not torch.Tensor.uniform_:
        return 0.0, 1.0
    given = dict(zip(("from", "to"), args[1:], strict=False)) | kwargs
    return given.get("from", 0.0), given.get("to", 1.0)


@contextlib.contextmanager
def extreme_draws(*, highest: bool) -> Iterator[ExtremeDraws]:
    """The first numbers that Python and NumPy draw are extreme, and few of PyTorch's.

    Their global streams are changed for good.
    """
    word = _WORDS[highest]
    version, words, gauss = random.getstate()
    keys = _numpy_state()[1]
    random.setstate((version, (*_begun(word, words[:-1]), 0), gauss))
    of_numpy = np.array(_begun(word, keys), np.uint32)
    np.random.set_state(("MT19937", of_numpy, 0, 0, 0.0))
    with ExtremeDraws(highest=highest) as draws:
        yield draws


def _begun(word: int, words: Sequence[Any]) -> list[int]:
    return [word] * _NUM_WORDS + [int(word) for word in words[_NUM_WORDS:]]


def _places() -> tuple[Any, Any]:
    """How many words were drawn of those of Python and NumPy."""
    return random.getstate()[1][-1], _numpy_state()[2]


def _numpy_state() -> tuple[Any, ...]:
    state: Any = np.random.get_state()  # its stubs allow for a dict
    return tuple(state)
