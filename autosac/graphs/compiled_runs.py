"""What compiled graphs do when they run: guards, and a measured peak."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autosac import _compat_graphs
from autosac.storages import storage_bytes
from autosac.verification.measuring import measure_peak


class Run(NamedTuple):
    """A compiled graph.

    Attributes:
        call: Takes a list of tensors, which it empties.
        example: Fake tensors with the layouts of these.
    """

    call: Callable[..., Any]
    example: tuple[Any, ...]


# Storages that a planned forward pass saved: their keys, and references to them.
_waiting: dict[int, Any] = {}


def guarded_forward(
    compiled: Callable[..., Any],
    num_outputs: int,
    check: Callable[[], None],
    outside: Outside,
) -> Callable[..., Any]:
    """A compiled forward pass that runs only when no other one waits for backward."""

    def run(args: list[Any]) -> Any:
        check()
        if _is_another_waiting():
            gc.collect()  # a backward pass that fails leaves a cycle of references
        if _is_another_waiting():
            raise RuntimeError(
                "A forward pass under a memory budget begins while another one waits"
                " for its backward pass; the budget would not hold for both. Compile"
                " the whole model as one graph, and call it once per backward pass."
            )
        caller_storages = _storages(args)
        results = compiled(args)
        outside.forward_returns(results[:num_outputs])
        caller_storages |= _storages(results[:num_outputs])
        _waiting.clear()
        for tensor in _tensors(results[num_outputs:]):
            if (key := _compat_graphs.storage_key(tensor)) not in caller_storages:
                _waiting[key] = _compat_graphs.weak_storage(tensor)
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _is_another_waiting() -> bool:
    return not all(storage.expired() for storage in _waiting.values())


class Outside:
    """Which tensors of one compiled graph nobody outside of it holds in backward.

    Autograd makes zeros for gradients of outputs that the loss does not depend on, and
    lets go of them; a caller may drop outputs before backward begins.

    Args:
        outputs: Nodes of what forward returns, in order; None for what is no tensor of
            a node that makes it.
        tangents: Those of their gradients, which are the last arguments of backward.
        saved: Those of outputs in memory that backward reads.

    Attributes:
        tell: Gets the nodes of those that were dropped in every backward pass so far,
            after the first one and whenever they have become fewer.
    """

    tell: Callable[[frozenset[fx.Node]], object] | None = None

    def __init__(
        self,
        outputs: Sequence[fx.Node | None],
        tangents: Sequence[fx.Node],
        saved: Collection[fx.Node],
    ) -> None:
        self._outputs = outputs
        self._tangents = tangents
        self._saved = frozenset(saved)
        self._references: dict[fx.Node, Any] = {}
        self._dropped: frozenset[fx.Node] | None = None

    def forward_returns(self, results: Sequence[Any]) -> None:
        """Watch what a forward pass returns."""
        self._references = _watched(self._outputs, results)

    def backward_begins(self, args: Sequence[Any]) -> set[fx.Node]:
        """Watch gradients of outputs; which outputs are gone?"""
        gone = {n for n, storage in self._references.items() if storage.expired()}
        kept = {n: s for n, s in self._references.items() if n in self._saved}
        tangents = args[len(args) - len(self._tangents) :]
        self._references = kept | _watched(self._tangents, tangents)
        return gone

    def backward_ends(self, gone: set[fx.Node]) -> None:
        """Tell what else is gone, if that is new."""
        gone |= {n for n, storage in self._references.items() if storage.expired()}
        dropped = frozenset(gone) & (gone if self._dropped is None else self._dropped)
        if dropped != self._dropped and self.tell is not None:
            self._dropped = dropped
            self.tell(dropped)


def _watched(
    nodes: Sequence[fx.Node | None], values: Sequence[Any]
) -> dict[fx.Node, Any]:
    return {
        node: _compat_graphs.weak_storage(value)
        for node, value in zip(nodes, values, strict=False)
        if node is not None and isinstance(value, torch.Tensor)
    }


def guarded_backward(
    compiled: Callable[..., Any], outside: Outside
) -> Callable[..., Any]:
    """A compiled backward pass; gradients may take the place of what was saved."""

    def run(args: list[Any]) -> Any:
        gone = outside.backward_begins(args)
        results = compiled(args)
        outside.backward_ends(gone)
        for key in _storages(results):
            _waiting.pop(key, None)
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _storages(values: Sequence[Any]) -> set[int]:
    return set(map(_compat_graphs.storage_key, _tensors(values)))


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def measured_peak(forward: Run, backward: Run, num_outputs: int) -> int:
    """Real peak of forward and backward on made-up data, with their inputs.

    Random numbers are drawn from a generator that is put back.
    """
    inputs = [_invented(example) for example in forward.example]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        num_saved = len(forward.call(list(inputs))) - num_outputs
        tangents = [_invented(example) for example in backward.example[num_saved:]]

        def step() -> Any:
            results = list(forward.call(list(inputs)))
            saved = [*results[num_outputs:], *tangents]
            del results[num_outputs:]  # what forward returns stays alive
            return results, backward.call(saved)

        held = storage_bytes(_tensors([*inputs, *tangents]))
        _, peak_bytes = measure_peak(
            step, device="cpu", persistent_bytes=held, warm_up=step
        )
    return peak_bytes


def _invented(example: Any) -> Any:
    """Made-up data with the layout of a fake tensor; 0 is a valid index."""
    if not isinstance(example, torch.Tensor):
        return example
    tensor = torch.empty_strided(
        example.shape, example.stride(), dtype=example.dtype, device="cpu"
    )
    return tensor.fill_(0.5 if example.is_floating_point() else 0)
