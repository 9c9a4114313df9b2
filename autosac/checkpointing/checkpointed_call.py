"""One call of a function that keeps nothing for backward and is recomputed for it.

The first run has gradients enabled, as a plain call has: kernels and models may do
otherwise without. But autograd is kept from saving anything, and the graph goes as soon
as it has told which results require gradients and which tensors it reads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autosac import _compat_autograd
from autosac.checkpointing.ambient_state import Surroundings
from autosac.checkpointing.cuda_streams import Moment
from autosac.checkpointing.tensor_parts import version_of
from autosac.pytrees import opaque_type
from autosac.step.reaching import reached
from autosac.tracing.probing import random_numbers

RECOMPUTATION = "autosac::recompute"  # of its range in a profile
_Versions = list[int]
_Layout = tuple[torch.Size, torch.dtype, torch.device, bool]


@dataclass(frozen=True, slots=True)
class _Structure:
    """How nested values are put together from tensors, each of which counts once.

    Equal for values of the same containers, plain values and order of tensors.

    Attributes:
        spec: The containers.
        leaves: Plain values; None in the place of a tensor.
        places: Of every leaf: which tensor it is, -1 for a plain value.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]
    places: tuple[int, ...]

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Put the nested values together from these tensors."""
        pairs = zip(self.leaves, self.places, strict=True)
        leaves = [leaf if place < 0 else tensors[place] for leaf, place in pairs]
        return tree_unflatten(leaves, self.spec)


def _take_apart(value: Any, what: str) -> tuple[_Structure, list[torch.Tensor]]:
    leaves, spec = tree_flatten(value)
    tensors: dict[int, torch.Tensor] = {}
    order: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            order.setdefault(id(leaf), len(order))
            tensors[id(leaf)] = leaf
        elif (name := opaque_type((leaf,))) is not None:
            raise TypeError(
                f"`pipeline_checkpoint`: {what} holds a {name}, which may hide tensors"
                " or change before it is recomputed; use tensors and plain values in"
                " tuples, lists and dicts."
            )
    structure = _Structure(
        spec,
        tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
        tuple(order.get(id(leaf), -1) for leaf in leaves),
    )
    return structure, list(tensors.values())


@dataclass(frozen=True, slots=True)
class _Graph:
    """The graph of a call that was recomputed.

    Attributes:
        inputs: Leaves that stand for the tensor arguments.
        outputs: Results, in the order of the first run.
        moment: When it was done, on which streams.
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    moment: Moment


class Call:
    """One checkpointed call: what its rerun needs, and the graph once it has rerun.

    Args:
        fn: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        preserve_rng: Whether it draws the same random numbers again.

    Attributes:
        tensors: Tensors among the arguments, each once; gone after `run`.
        parameters: Tensors that require gradients and that ``fn`` reaches by itself.
        lock: Held while it is recomputed or goes backward.
        node: The autograd function that saved the tensors, while that lives.
        graph: What was recomputed, until backward takes it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        preserve_rng: bool,
    ) -> None:
        self.fn = fn
        self.preserve_rng = preserve_rng
        self.structure, self.tensors = _take_apart((args, kwargs), "an argument")
        self.reached = reached(fn)
        self.parameters = self.reached.parameters()
        self.lock = threading.RLock()
        self.node: weakref.ref[Any] | None = None
        self.graph: _Graph | None = None

    def run(self) -> tuple[torch.Tensor, ...]:
        """Run the function the first time and return its tensors, each once."""
        _refuse_hooks(self.parameters)
        constants = self.reached.constants()
        self.fixed = [*self.parameters, *constants]  # must not change until it reruns
        devices = {t.device for t in (*self.tensors, *self.fixed)}
        self.surroundings = Surroundings(
            self.reached.modules,
            devices,
            preserve_rng=self.preserve_rng,
            generators=self.reached.all_generators(),
        )
        self.begin = Moment(devices)
        self.devices = devices
        versions, drawn = _versions(self.tensors), random_numbers()
        with torch.autograd.graph.saved_tensors_hooks(_drop, _refuse_backward):
            _, outputs, self.results = self._run(self.tensors)
        self.surroundings.finish()
        if random_numbers() != drawn:
            raise RuntimeError(
                "`pipeline_checkpoint`: the function draws from Python's or NumPy's"
                " random numbers, which a recomputation would draw anew; use torch's."
            )
        self._refuse_changed(versions)
        self.fixed_versions = _versions(self.fixed)
        self.layouts = [_layout(tensor) for tensor in outputs]
        # Detached: an argument or a buffer that is handed on becomes another tensor.
        return tuple(tensor.detach() for tensor in outputs)

    def _run(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], _Structure]:
        """Leaves in place of the arguments' tensors, results, and their structure.

        Raises:
            RuntimeError: It changes a container, or reads tensors that nobody knows.
        """
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        first = _compat_autograd.next_sequence_nr()
        with torch.enable_grad():
            arguments = self.structure.fill(inputs)
            before, _ = _take_apart(arguments, "an argument")
            output = self.fn(*arguments[0], **arguments[1])
        if _take_apart(arguments, "an argument")[0] != before:
            raise RuntimeError(
                "`pipeline_checkpoint`: the function changes a list or dict that it is"
                " given, and would do that again; let it change a copy."
            )
        structure, outputs = _take_apart(output, "the result")
        self._refuse_unknown(outputs, inputs, first)
        return inputs, outputs, structure

    def _refuse_changed(self, versions: _Versions) -> None:
        for place, (before, now) in enumerate(
            zip(versions, _versions(self.tensors), strict=True)
        ):
            if before != now:
                shape = tuple(self.tensors[place].shape)
                raise RuntimeError(
                    "`pipeline_checkpoint`: the function changes an argument in place,"
                    f" a tensor of shape {shape}, and could not be recomputed from it;"
                    " let it change a clone."
                )

    def leave_to(self, node: Any) -> None:
        """Let go of the arguments' tensors, which an autograd function keeps now."""
        self.node = weakref.ref(node)
        self.tensors = []

    def has_no_gradient(self) -> list[bool]:
        """Which results require no gradient."""
        return [not requires_grad for *_, requires_grad in self.layouts]

    def output(self, results: Sequence[torch.Tensor]) -> Any:
        """The function's result, put together from tensors."""
        return self.results.fill(results)

    # --- recomputation ----------------------------------------------------------

    def recompute(self, saved: Sequence[torch.Tensor]) -> None:
        """Run the function again, with a graph.

        Args:
            saved: The tensors among its arguments.
        """
        if self.fixed_versions != _versions(self.fixed):
            raise RuntimeError(
                "`pipeline_checkpoint`: a parameter or tensor that the function reads"
                " has changed since its forward pass, so that it cannot be recomputed;"
                " step the optimizer after the last backward pass."
            )
        self.begin.wait([*saved, *self.fixed, *self.surroundings.tensors()])
        with record_function(RECOMPUTATION), self.surroundings.again():
            inputs, outputs, results = self._run(saved)
        if results != self.results or list(map(_layout, outputs)) != self.layouts:
            raise RuntimeError(
                "`pipeline_checkpoint`: the function returned other shapes, types or"
                " values when it was recomputed than in forward: it depends on"
                " something that changed in between. Pass that as an argument."
            )
        self.graph = _Graph(inputs, outputs, Moment(self.devices))

    def _refuse_unknown(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], first: int
    ) -> None:
        """Refuse a graph that reads a tensor whose gradient nobody would get."""
        differentiable = [t for t in (*inputs, *self.parameters) if t.requires_grad]
        leaves = {id(t) for t in differentiable if t.is_leaf}
        seen = {t.grad_fn for t in differentiable if not t.is_leaf}
        pending = [t.grad_fn for t in outputs if t.grad_fn not in seen]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if _compat_autograd.name_of(node).endswith("AccumulateGrad"):
                leaf = getattr(node, "variable", None)  # an empty one gets no gradient
                is_known = id(leaf) in leaves or not (leaf is None or leaf.numel())
            else:
                is_known = _compat_autograd.sequence_nr(node) >= first
            if not is_known:
                raise RuntimeError(
                    "`pipeline_checkpoint`: the function reads a tensor that requires a"
                    " gradient and was not found among its arguments and modules, so"
                    " that its gradient would be lost. Pass it as an argument."
                )
            pending += [function for function, _ in node.next_functions]

    # --- backward ---------------------------------------------------------------

    def gradients(
        self, gradients: Sequence[torch.Tensor | None], needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Go backward through the recomputed graph, and drop it.

        Args:
            gradients: Of the results; None where there is none.
            needed: Which of the arguments' tensors and parameters need theirs.

        Returns:
            Gradients of all of these, None where there is none.
        """
        _refuse_hooks(self.parameters)
        with self.lock:
            graph, self.graph = self.graph, None
        assert graph is not None
        pairs = zip(graph.outputs, gradients, strict=True)
        given = [(t, g) for t, g in pairs if g is not None and t.requires_grad]
        sources = [*graph.inputs, *self.parameters]
        wanted = [t for t, need in zip(sources, needed, strict=True) if need]
        if not given or not wanted:
            return [None] * len(sources)
        roots, seeds = [t for t, _ in given], [g for _, g in given]
        graph.moment.wait(roots)
        graph.moment.lend(seeds)
        del pairs, gradients
        wanted_gradients = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
        graph.moment.take(g for g in wanted_gradients if g is not None)
        rest = iter(wanted_gradients)
        return [next(rest) if need else None for need in needed]


def _versions(tensors: Iterable[torch.Tensor]) -> _Versions:
    return [version_of(tensor) for tensor in tensors]


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _drop(tensor: torch.Tensor) -> None:
    """Pack hook that saves nothing."""


def _refuse_backward(_: None) -> torch.Tensor:
    raise RuntimeError(
        "`pipeline_checkpoint`: the function goes backward inside its own forward pass,"
        " which keeps nothing for that; leave that part out of it."
    )


def _refuse_hooks(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if getattr(tensor, "_backward_hooks", None) or tensor.retains_grad:
            raise RuntimeError(
                "`pipeline_checkpoint`: a tensor that the function reaches by itself,"
                f" of shape {tuple(tensor.shape)}, has a gradient hook, which would run"
                " twice; pass it as an argument, or use"
                " `register_post_accumulate_grad_hook`."
            )
