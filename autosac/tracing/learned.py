"""What runs of a step under fakes teach the ones that come after them.

A run may find that it should have begun in another way. It then ends with `Retrace`,
and the next one knows better.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from autosac import _compat
from autosac.fake_tensors.repeated_calls import KnownCalls
from autosac.step.tape import Tape
from autosac.tracing.later_steps import Allocations


class Retrace(BaseException):
    """A run must begin anew. No `Exception`: models catch these."""


@dataclass(slots=True)
class Learned:
    """What is known of a step from its runs.

    Attributes:
        calls: Calls of ops that they made.
        plain: Autograd must take the fakes for plain tensors (`_compat_plain`).
        overwritten: Ops, by name and line, whose results look as if their values were
            known, until a value that is not is written to them.
        real: It must run on real tensors, as its values decide what it does; or why
            fakes cannot do it.
        earlier: Steps that come before it and make what modules keep for later ones.
        covered: Other steps whose memory its tape has as well, as how many come before.
        reached: Its code writes to the user's modules, which it reaches by another way
            than `self`: while it runs, what holds these holds their copies.
        kept_bytes: What modules keep after each of these, and after the step.
        allocations: What each of these allocated.
        trained: Parameters, by their places, of which these made gradients.
        counts: An attribute of a module that each step changes, such as a count of
            steps, by which what it does may depend on how many there were; or None.
        beside: Which tensors that it trains are none of the model's parameters.
        seed: Where its random streams begin.
        draws_extremes: The last run drew what a seed that is none makes extreme.
        num_updates: Training steps that come before it.
        num_later_updates: Steps of the optimizer between its first and the one that is
            traced; None if that is not known.
        condition: What its optimizer reads where that asks for a condition on values
            which nobody has, as the step cannot run; None until it does.
        largest_write: Bytes of the largest tensor of the user's that it writes to and
            that is not copied for it; None if no run has shown all that it writes to.
        redrawn: Its tapes with other seeds and updates, if these decide sizes.
        is_largest: None of them does what it does not do.
    """

    calls: KnownCalls = field(default_factory=dict)
    plain: bool = False
    overwritten: set[tuple[str, str]] = field(default_factory=set)
    real: bool = False
    earlier: int = 0
    covered: tuple[int, ...] = (0,)
    reached: bool = False
    kept_bytes: list[int] = field(default_factory=list)
    allocations: list[Allocations] = field(default_factory=list)
    trained: set[int] = field(default_factory=set)
    counts: str | None = None
    beside: tuple[int, ...] = ()
    seed: int = 0
    draws_extremes: bool = False
    num_updates: int = 0
    num_later_updates: int | None = None
    condition: bool | None = None
    largest_write: int | None = None
    redrawn: list[Tape] = field(default_factory=list)
    is_largest: bool = False


class LiveViews:
    """Views that a run has made so far, by the storage that they look at.

    Autograd makes their functions anew after a write that it follows, which only plain
    fakes show.
    """

    def __init__(self) -> None:
        self._views: dict[int, list[weakref.ref[torch.Tensor]]] = defaultdict(list)

    def are_written(
        self,
        func: Any,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        storages: tuple[int, ...],
    ) -> bool:
        """Whether an op writes to memory of live views, and autograd follows that.

        Args:
            func: The operator.
            inputs: The tensors in its arguments.
            outputs: Those that it returned.
            storages: Indices of their storages.
        """
        if not torch.is_grad_enabled() or func is torch.ops.aten.detach.default:
            return False
        if not _compat.returned_arguments(func):
            for output in outputs:
                self._views[storages[0]].append(weakref.ref(output))
            return False
        return any(tensor.requires_grad for tensor in inputs) and any(
            view() is not None for i in storages for view in self._views.get(i, ())
        )
