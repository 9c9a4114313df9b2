"""The part of a batch that a rank of context parallelism has.

Every tensor of two dimensions or more is cut along its second one, the sequence; others
are the same for all ranks. Where the tokens are goes with them (`position_ids`), and so
does, for causal language models of Transformers, what each token is to be followed by:
the last label of a part is of the next one. These divide the sum of their losses by the
number of labels that count in all parts over the degree, so that the mean over ranks is
that of the whole.

Parts are copies, and loops hold the whole batch beside them, which counts
(`held_beside`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils._pytree import tree_map

from autosac.errors import ArgumentError, UnsupportedError
from autosac.parallel.context_parallel import ContextParallel
from autosac.storages import addresses_of, storages_of

_POSITIONS = ("position_ids", "positions")
_IGNORED = -100  # label that no loss counts: `ignore_index` of cross entropy
_SEQUENCE = 1  # dimension

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def positions_of(model: nn.Module) -> str:
    """Argument of a model's forward that says where tokens are.

    Raises:
        UnsupportedError: There is none.
    """
    name = positions_argument(model)
    if name:
        return name
    raise UnsupportedError(
        f"The forward of {type(model).__name__} has no argument `position_ids`, and a"
        " rank of context parallelism has a part of the sequence: let it take the"
        " positions of its tokens, of shape (1, tokens), and count none itself; or plan"
        " without 'cp'."
    )


def positions_argument(module: nn.Module) -> str:
    """Argument of a module's forward that says where tokens are, '' without one."""
    parameters = inspect.signature(type(module).forward).parameters
    return next((name for name in _POSITIONS if name in parameters), "")


def names_by_place(model: nn.Module) -> tuple[str, ...]:
    """Arguments that a model's forward takes by place as well, in order."""
    parameters = list(inspect.signature(type(model).forward).parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(own.name for own in parameters[1:] if own.kind in kinds)


def shifts_labels(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether a model of Transformers compares its output with the next labels.

    Args:
        model: Of Transformers, or another one.
        given: Arguments of its forward by name.

    Raises:
        UnsupportedError: It has a loss of another kind.
    """
    if given.get("labels") is None or not hasattr(model, "loss_function"):
        return False
    kind = getattr(model, "loss_type", None)
    if kind not in ("ForCausalLM", None):  # None stands for that as well
        raise UnsupportedError(
            f"{type(model).__name__} has a loss of kind {kind!r}, whose mean over parts"
            " is not that of the whole: pass no `labels`, and a `loss_fn` of its"
            " outputs; or plan without 'cp'."
        )
    return True


def part_of(inputs: Inputs, context: ContextParallel, index: int) -> Inputs:
    """What a rank is given.

    Args:
        inputs: Arguments of the model for the whole sequence.
        context: How many parts there are, and what goes with them.
        index: Of the rank in its group.

    Raises:
        ArgumentError: The sequence cannot be cut evenly, or not everything has one.
        UnsupportedError: There is a mask.
    """
    args, kwargs = inputs[0], dict(inputs[1])
    by_place = by_name(args, context.arguments)
    given = {**kwargs, **by_place}
    if given.get("attention_mask") is not None:
        raise UnsupportedError(
            "`attention_mask` cannot be cut into parts: leave it out (labels of -100"
            " are not counted, and causal attention does not look at what follows), or"
            " plan without 'cp'."
        )
    length, device = _length(args, kwargs)
    degree, positions = context.degree, context.positions
    if given.get(positions) is None:
        # Values count: models look for packed sequences in them.
        where = "cpu" if device.type == "meta" else device
        own = by_place if positions in by_place else kwargs
        own[positions] = torch.arange(length, device=where)[None]
    if context.shifts_labels:
        labels = given["labels"]
        following = nn.functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
        kwargs["shift_labels"] = following
        kwargs["num_items_in_batch"] = (following != _IGNORED).sum() / degree
    args = (*by_place.values(), *args[len(by_place) :])

    def cut(value: Any) -> Any:
        return tensor_part(value, degree, index)

    return tree_map(cut, args), tree_map(cut, kwargs)


def by_name(args: tuple[Any, ...], names: tuple[str, ...]) -> dict[str, Any]:
    """Those of a call's arguments by place whose names are known."""
    return dict(zip(names, args, strict=False))


def is_cut(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether one of a model's arguments has a sequence."""
    return isinstance(value, torch.Tensor) and value.dim() > _SEQUENCE


def held_beside(inputs: Inputs) -> list[torch.UntypedStorage]:
    """Memory of a whole batch that a rank has a part of, each once.

    What all ranks are given as it is belongs to the part.
    """
    leaves = torch.utils._pytree.tree_leaves(inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    given = addresses_of(tensor for tensor in tensors if not is_cut(tensor))
    whole = storages_of(filter(is_cut, tensors), None)
    return [storage for storage in whole if storage._cdata not in given]


def tensor_part(value: Any, degree: int, index: int) -> Any:
    """What a rank is given of one argument: the same if it has no sequence.

    Raises:
        ArgumentError: The sequence cannot be cut evenly.
    """
    if not is_cut(value):
        return value
    length = value.shape[_SEQUENCE]
    if length % degree:
        raise ArgumentError(
            f"A sequence of {length} cannot be divided by cp={degree}: pad it to a"
            " multiple."
        )
    size = length // degree
    part = value.narrow(_SEQUENCE, index * size, size)
    # A copy, as views hold the whole.
    return part.clone(memory_format=torch.contiguous_format)


def _length(args: Any, kwargs: Any) -> tuple[int, torch.device]:
    """Of the sequence, and where it lies."""
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    tensors = list(filter(is_cut, leaves))
    lengths = {tensor.shape[_SEQUENCE] for tensor in tensors}
    if len(lengths) != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ArgumentError(
            "Context parallelism cuts inputs along their second dimension, the"
            f" sequence, which must be equally long in all: got shapes {shapes or '()'}"
        )
    return lengths.pop(), tensors[0].device
