"""Arguments of a call that lie in far memory until the call is rerun, and results.

When the call is over its arguments are sent. At a fixed place of the program, the end
of a later module call, the program waits for the copies and lets go of the tensors. A
rerun begins by allocating them again, and copies them back. If they are prefetched,
they are allocated when backward comes to that later call, and come back beside the
program.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from autosac import _compat_dispatch
from autosac.checkpointing.call_arguments import (
    Handed,
    leaves,
    map_nested,
    take_apart,
)
from autosac.checkpointing.far_places import Place, is_storage
from autosac.checkpointing.tensor_parts import (
    Layout,
    Result,
    alias_of,
    gone,
    key_of,
    layout_of,
    version_of,
)
from autosac.far_memory import FarMemory
from autosac.pytrees import tensors_in
from autosac.units.policies import OpPolicy


class _FarResult:
    """A result that a call has saved, in far memory."""

    __slots__ = ("layout", "place", "result", "version")

    def __init__(self, result: Result, place: Place) -> None:
        assert result.tensor is not None
        self.result = result
        self.place = place
        self.layout: Layout = layout_of(result.tensor)
        self.version = version_of(result.tensor)

    @property
    def is_changed(self) -> bool:
        """Whether it was changed since it was sent."""
        tensor = self.result.tensor
        return tensor is not None and version_of(tensor) != self.version

    def fetch(self) -> None:
        """Put it in new memory."""
        tensor = alias_of(self.place.fetch(), self.layout)
        _compat_dispatch.set_version(tensor, self.version)
        self.result.tensor = tensor


class _Far:
    """Stands in for a tensor among the arguments that lies in far memory."""

    __slots__ = ("is_result", "layout", "place", "version")

    def __init__(self, handed: Handed, place: Place) -> None:
        self.place = place
        self.layout: Layout = layout_of(handed.tensor)
        self.version = version_of(handed.tensor)
        self.is_result = handed.is_result

    def fetch(self) -> Handed:
        """The tensor in new memory."""
        tensor = alias_of(self.place.fetch(), self.layout)
        _compat_dispatch.set_version(tensor, self.version)
        return Handed(tensor, is_result=self.is_result)


class FarArguments:
    """Source of a call that has some of its arguments in far memory.

    Results that it has saved go there with them, and come back with them.

    Args:
        arguments: Positional and keyword arguments.
        policy: Says which.
        memory: Where they go.

    Attributes:
        is_prefetched: They come back before the call is rerun.
    """

    def __init__(self, arguments: Any, policy: OpPolicy, memory: FarMemory) -> None:
        self.template = take_apart(arguments)
        self.fqn = policy.fqn
        self.is_prefetched = policy.prefetched
        self._memory = memory
        # Distinct storages as the tape has them: in the order of meeting them.
        tensors = [t for t in tensors_in(arguments) if is_storage(t)]
        if any(tensor.is_cuda for tensor in tensors):
            tensors = [tensor for tensor in tensors if tensor.is_cuda]
        keys = list(dict.fromkeys(map(key_of, tensors)))
        self._keys = [keys[place] for place in policy.far if place < len(keys)]
        self._is_cuda = any(tensor.is_cuda for tensor in tensors)
        self._going: dict[int, tuple[Handed, _Far]] = {}  # by identity of the former
        self._places: list[Place] = []
        self._results: list[_FarResult] = []
        self._is_away = False
        self._has_rerun = False
        self._followers: list[weakref.ref[FarArguments]] = []

    def relayed(self) -> Collection[int]:
        """As `Source.relayed`."""
        return ()

    def keep_tensors_alone(self) -> None:
        """As `Source.keep_tensors_alone`."""
        self.template = tuple(leaves(self.template, (Handed, _Far)))

    def send(self, saved: Any) -> None:
        """The call is over: begin to copy its arguments.

        Args:
            saved: Results that it saved and that are copied as well, nested.
        """
        places: dict[int, Place] = {}
        for handed in leaves(self.template, Handed):
            key = key_of(handed.tensor) if is_storage(handed.tensor) else None
            if key is not None and key in self._keys:
                if key not in places:
                    places[key] = Place(handed.tensor, self._memory)
                far = _Far(handed, places[key])
                self._going.setdefault(id(handed), (handed, far))
        for result in leaves(saved, Result):
            tensor = result.tensor
            if is_storage(tensor) and tensor.is_cuda == self._is_cuda:
                key = key_of(tensor)
                if key not in places:
                    places[key] = Place(tensor, self._memory)
                self._results.append(_FarResult(result, places[key]))
        self._places = list(places.values())

    def let_go(self) -> None:
        """Wait for the copies and let go of the tensors.

        Those that were changed meanwhile stay: reading them in backward is an error.
        """
        going, self._going = self._going, {}
        for place in self._places:
            if place.sent is not None:
                place.sent.wait()
        is_changed = any(f.version != version_of(h.tensor) for h, f in going.values())
        if is_changed or any(far.is_changed for far in self._results):
            self._release()
            return
        for far in self._results:
            far.result.tensor = None

        def put_away(handed: Handed) -> Handed | _Far:
            return going[id(handed)][1] if id(handed) in going else handed

        self.template = map_nested(self.template, Handed, put_away)
        self._is_away = bool(going)

    def prefetch(self, other: FarArguments | None) -> None:
        """Backward comes to the call at whose end they went: allocate them again.

        Args:
            other: A call that is about to be rerun, whose own arguments come first if
                they are not on their way by then.
        """
        if not self._is_away:
            return
        with _compat_dispatch.untransformed():
            for place in self._places:
                place.allocate()
        if other is not None and other.is_first():
            other._followers.append(weakref.ref(self))
        else:
            self._begin()

    def is_first(self) -> bool:
        """Whether its own copies back begin with its rerun, which is yet to come."""
        return self._is_away and not (self.is_prefetched or self._has_rerun)

    def _begin(self) -> None:
        for place in self._places:
            place.begin()

    def again(self) -> Any:
        """As `Source.again`."""
        self._has_rerun = True
        try:
            return self._again()
        finally:
            followers, self._followers = self._followers, []
            for ref in followers:
                if (follower := ref()) is not None:
                    follower._begin()

    def _again(self) -> Any:
        if not self._is_away:  # backward began early, or the unit departed
            self._going = {}
            self._release()
            return self.template
        if not self._places:
            raise gone(self.fqn)
        fetched: dict[int, Handed] = {}

        def fetch(far: _Far) -> Handed:
            if id(far) not in fetched:
                fetched[id(far)] = far.fetch()
            return fetched[id(far)]

        template = map_nested(self.template, _Far, fetch)
        results, self._results = self._results, []  # these stay, if asked for again
        for far_result in results:
            far_result.fetch()
        for place in self._places:
            place.drop()
        if results:
            kept = {id(far.place) for far in leaves(self.template, _Far)}
            self._release([p for p in self._places if id(p) not in kept])
        if not _compat_dispatch.keeps_graph():
            self._release()
        return template

    def _release(self, places: Sequence[Place] | None = None) -> None:
        """Give buffers back: all, or those of some places."""
        if places is None:
            places, self._results = self._places, []
        self._places = [place for place in self._places if place not in places]
        for place in places:
            if place.sent is not None:
                place.sent.release()


class Prefetch:
    """Hook of an autograd function: backward comes to the call that it ends.

    Args:
        sources: Calls that are prefetched, whose arguments went when it ended.
        other: The unit around it, if its own arguments are in far memory.
    """

    __slots__ = ("_other", "_sources")

    def __init__(
        self, sources: Iterable[FarArguments], other: FarArguments | None
    ) -> None:
        self._sources = tuple(map(weakref.ref, sources))
        self._other = None if other is None else weakref.ref(other)

    def __call__(self, _: Any) -> None:
        other = None if self._other is None else self._other()
        for ref in self._sources:
            if (source := ref()) is not None:
                source.prefetch(other)
