"""Random draws that are as high, or as low, as any.

Layer drop compares a number with a rate: where all are high nothing is dropped, which
of a few ordinary seeds none may show. Each distribution has another extreme, but the
highest of many numbers is near it, whatever draws them.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from autosac._compat import no_modes
from autosac._compat_dispatch import is_plain, set_version

_NUM_WORDS = 300  # of 624, before those of an ordinary seed; a number takes two
_MOST_NUMBERS = 1024  # in a tensor of decisions
_MOST_DRAWS = 300  # by a function: loops until a number is liked must end
_NUM_DRAWN = 1024  # of each number, of which the highest counts
_MULTINOMIAL = frozenset({torch.multinomial, torch.Tensor.multinomial})
_OF_TORCH = _MULTINOMIAL | {
    *(torch.rand, torch.rand_like, torch.Tensor.uniform_),
    *(torch.randn, torch.randn_like, torch.normal, torch.Tensor.normal_),
    *(torch.randint, torch.randint_like, torch.Tensor.random_),
    *(torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_),
    *(torch.binomial, torch.poisson, torch.Tensor.exponential_),
    *(torch.Tensor.geometric_, torch.Tensor.log_normal_, torch.Tensor.cauchy_),
}
# Those that reject words, and all that are extreme; others become extreme by them.
_OF_PYTHON = ("betavariate", "gammavariate", "gauss", "lognormvariate", "normalvariate")
_OF_NUMPY = (
    *("beta", "binomial", "choice", "gamma", "normal", "poisson", "randint", "randn"),
    *("random_integers", "standard_normal", "triangular"),
)
# Words of the Mersenne Twister's state that it hands out as all ones and all zeros.
_WORDS = {True: 0x12DD9BB3, False: 0}


class ExtremeDraws(TorchFunctionMode):
    """Draws of few numbers by PyTorch are extreme inside.

    Args:
        highest: They are as high as they get, not as low.

    Attributes:
        num_made: Name of a function -> how many such draws there were.
    """

    def __init__(self, *, highest: bool) -> None:
        super().__init__()
        self.highest = highest
        self.num_made: Counter[str] = Counter()
        self._places = _places()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func not in _OF_TORCH or out.numel() > _MOST_NUMBERS or out.is_complex():
            return out
        is_distinct = func in _MULTINOMIAL and out.shape[-1] > 1
        if is_distinct or not self.makes(func.__name__):
            return out
        if is_plain(type(out)):  # nobody can read others, such as fakes
            further = torch.maximum if self.highest else torch.minimum
            with no_modes(), torch.no_grad():
                version = None if out.is_inference() else out._version
                best = out.clone()
                for _ in range(_NUM_DRAWN - 1):
                    best = further(best, func(*args, **kwargs))
                out.detach().copy_(best)
                if version is not None:  # one draw, also where each is in place
                    set_version(out, version)
        return out

    def makes(self, name: str) -> bool:
        """Whether a function's next draw is to be extreme; it counts."""
        self.num_made[name] += 1
        return self.num_made[name] <= _MOST_DRAWS

    def are_met(self) -> bool:
        """Whether there were such draws so far, or draws by Python or NumPy."""
        return any(self.num_made.values()) or _places() != self._places


@contextlib.contextmanager
def extreme_draws(*, highest: bool) -> Iterator[ExtremeDraws]:
    """The first numbers that Python and NumPy draw are extreme, and few of PyTorch's.

    Their global streams are changed for good. NumPy's new generators, and a model's own
    of Python and NumPy, draw as ever.
    """
    word = _WORDS[highest]
    version, words, gauss = random.getstate()
    keys = _numpy_state()[1]
    random.setstate((version, (*_begun(word, words[:-1]), 0), gauss))
    of_numpy = np.array(_begun(word, keys), np.uint32)
    np.random.set_state(("MT19937", of_numpy, 0, 0, 0.0))
    with ExtremeDraws(highest=highest) as draws, contextlib.ExitStack() as stack:
        own = random.random.__self__  # type: ignore[attr-defined]
        # All integers come from it, also in functions that were imported by name.
        stack.enter_context(patch.object(own, "_randbelow", _below(draws)))
        for name in _OF_PYTHON:
            new = _extreme(draws, getattr(random.Random(0), name))
            stack.enter_context(patch.object(random, name, new))
        for name in _OF_NUMPY:
            new = _extreme(draws, getattr(np.random.RandomState(0), name))
            stack.enter_context(patch.object(np.random, name, new))
        yield draws


def _below(draws: ExtremeDraws) -> Callable[[int], int]:
    """Draws integers below a number."""
    stream = random.Random(0)

    def below(n: int) -> int:
        _move_streams()
        is_extreme = draws.makes("_randbelow")
        return (n - 1) * draws.highest if is_extreme else stream.randrange(n)

    return below


def _extreme(draws: ExtremeDraws, draw: Callable[..., Any]) -> Callable[..., Any]:
    """What draws the highest, or lowest, of many numbers, each time.

    Args:
        draws: Says which, and how often.
        draw: A distribution, with a stream of its own.
    """

    @wraps(draw)
    def extreme(*args: Any, **kwargs: Any) -> Any:
        _move_streams()
        drawn = draw(*args, **kwargs)
        is_many = np.size(drawn) > (1 if draw.__name__ == "choice" else _MOST_NUMBERS)
        if is_many or not draws.makes(draw.__name__):
            return drawn
        all_drawn = [drawn, *(draw(*args, **kwargs) for _ in range(_NUM_DRAWN - 1))]
        if isinstance(drawn, np.ndarray):
            return np.max(all_drawn, 0) if draws.highest else np.min(all_drawn, 0)
        try:
            return max(all_drawn) if draws.highest else min(all_drawn)
        except TypeError:  # a choice of what has no order
            return drawn

    return extreme


def _move_streams() -> None:
    """Let those see that somebody draws who compare the streams."""
    random.getrandbits(1)
    np.random.bytes(1)


def _begun(word: int, words: Sequence[Any]) -> list[int]:
    return [word] * _NUM_WORDS + [int(word) for word in words[_NUM_WORDS:]]


def _places() -> tuple[Any, Any]:
    """How many words were drawn of those of Python and NumPy."""
    return random.getstate()[1][-1], _numpy_state()[2]


def _numpy_state() -> tuple[Any, ...]:
    state: Any = np.random.get_state()  # its stubs allow for a dict
    return tuple(state)
