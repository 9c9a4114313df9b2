"""What the stand-ins of one plan know of the step that runs."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from autosac._compat_settings import all_settings
from autosac.checkpointing.chained_calls import RelayedCall
from autosac.checkpointing.far_arguments import FarArguments, Prefetch
from autosac.checkpointing.nested_calls import Nest
from autosac.far_memory import FarMemory
from autosac.pytrees import first_function


class Followed(Protocol):
    """Knows which of a model's plans is followed.

    Attributes:
        rerun: Number of the plan that a rerun follows, if one runs modules.
        is_step: The model runs forward for a step that is planned.
    """

    rerun: int | None
    is_step: bool

    @property
    def is_running(self) -> bool:
        """The model runs forward."""

    def warn_of_call(self, fqn: str) -> None:
        """A unit that forward calls once is called while the model is not."""


class Step:
    """What the stand-ins of one plan know of the step that runs.

    Args:
        variants: Know which plan is followed, if a model has several.
        number: The plan's own.
        offload_dir: Where files of far memory lie.

    Attributes:
        calls: How often each module was called.
        settings: Global settings that its units begin under, by `OpPolicy.settings`.
        latest: Chain -> its last call, as long as backward can need it.
        nests: Nest -> the call of its module that runs forward now.
        losses: How often a unit did not do what it had done before.
        onward: The nest that runs onward now, for the sake of a rerun.
        memory: Far memory.
        sources: FQN of a unit -> its last call with arguments there.
        parked: FQN of a module -> calls whose arguments go at the end of its next one.
        model: The model, as long as it lives; a copy's is not known.
    """

    def __init__(
        self,
        variants: Followed | None = None,
        number: int = 0,
        offload_dir: str | None = None,
    ) -> None:
        self.variants = variants
        self.number = number
        self.calls: Counter[str] = Counter()
        self.settings: dict[int, list[Any]] = {}
        self.latest: weakref.WeakValueDictionary[str, RelayedCall] = (
            weakref.WeakValueDictionary()
        )
        self.nests: dict[str, Nest] = {}
        self.onward: Nest | None = None
        self.losses = 0
        self.memory = FarMemory(offload_dir)
        self.sources: weakref.WeakValueDictionary[str, FarArguments] = (
            weakref.WeakValueDictionary()
        )
        self.parked: dict[str, list[weakref.ref[FarArguments]]] = {}
        self.model: Callable[[], torch.nn.Module | None] = lambda: None

    def __reduce__(self) -> tuple[type[Step], tuple[Followed | None, int, str | None]]:
        # A copy has begun no step.
        return Step, (self.variants, self.number, self.memory.directory)

    def begin(self) -> None:
        """A step begins: no module was called."""
        self.calls.clear()
        self.settings.clear()

    def settings_of(self, number: int) -> list[Any]:
        """Settings of such a number, which are read once in a step."""
        values = self.settings.get(number)
        if values is None:
            values = self.settings[number] = all_settings()
        return values

    def is_of(self, training: bool, planned: bool) -> bool:
        """Whether a module in some mode does what is planned.

        In a step of the whole model it does in any mode: it was planned in another one
        than the model's, as frozen parts are, or it may depart.

        Args:
            training: Its mode now,
            planned: and the model's in the step that was planned.
        """
        if training == planned or (self.variants is not None and self.variants.is_step):
            return True
        model = self.model()
        return model is not None and model.training == planned

    def park(self, source: FarArguments, fqn: str) -> None:
        """Let go of a call's arguments at the end of the next call of a module."""
        waiting = [ref for ref in self.parked.get(fqn, ()) if ref() is not None]
        self.parked[fqn] = [*waiting, weakref.ref(source)]

    def let_go(self, fqn: str, output: Any) -> None:
        """A call of a module ends; what is prefetched waits for its backward."""
        sources = [source for ref in self.parked.pop(fqn, ()) if (source := ref())]
        for source in sources:
            source.let_go()
        early = [source for source in sources if source.is_prefetched]
        if early and (function := first_function(output)) is not None:
            around = [fqn]
            while fqn:
                around.append(fqn := fqn.rpartition(".")[0])
            others = (self.sources.get(name) for name in around)
            first = next((o for o in others if o is not None), None)
            function.register_prehook(Prefetch(early, first))

    @contextlib.contextmanager
    def running_onward(self, nest: Nest) -> Iterator[None]:
        """Inside, modules that run belong to a nest that runs onward."""
        self.onward = nest
        if self.variants is not None:
            self.variants.rerun = self.number
        try:
            yield
        finally:
            self.onward = None
            if self.variants is not None:
                self.variants.rerun = None
