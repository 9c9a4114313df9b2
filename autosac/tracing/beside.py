"""Gradients of what a model trains though it is none of its parameters.

Modules in a plain list or dict and tensors in attributes get gradients like parameters,
but neither the model's nor its optimizer's ``zero_grad`` drops them: they stay for
good, and later steps add to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from autosac import _compat_plain
from autosac.pytrees import module_tensors
from autosac.quantities import format_bytes
from autosac.step.arguments import warn
from autosac.tracing.learned import Learned, Retrace
from autosac.tracing.recorder import Recorder

_Leaf = weakref.ref[torch.Tensor]


def keep_gradients(
    recorder: Recorder, model: torch.nn.Module, learned: Learned
) -> list[_Leaf]:
    """Give those that get gradients the ones that earlier steps have left.

    Returns:
        All that the model holds and may train, but for its parameters. What it lets go
        of in the step, such as the weight that an earlier forward pass has made, is
        not held.
    """
    with _compat_plain.fakes_of(recorder.repeated.mode):
        leaves = give_gradients(model, learned)
    gradients = (leaf.grad for leaf in leaves if leaf.grad is not None)
    recorder.register(gradients, "gradient")
    return [weakref.ref(leaf) for leaf in leaves]


def give_gradients(model: torch.nn.Module, learned: Learned) -> list[torch.Tensor]:
    """The same for a step that nothing records."""
    own = set(map(id, model.parameters()))
    leaves = [
        tensor
        for tensor in module_tensors(model)
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in own
    ]
    with torch.no_grad():
        for leaf in [leaves[n] for n in learned.beside if n < len(leaves)]:
            leaf.grad = torch.zeros_like(leaf)
    return leaves


def learn_gradients(references: Sequence[_Leaf], learned: Learned) -> None:
    """Note which of them have a gradient after backward.

    Raises:
        Retrace: Some that nothing was known of.
    """
    found = {
        n: leaf.nbytes
        for n, reference in enumerate(references)
        if (leaf := reference()) is not None and leaf.grad is not None
    }
    if found.keys() <= set(learned.beside):
        return
    learned.beside = tuple(sorted(found.keys() | set(learned.beside)))
    in_all = format_bytes(sum(found.values()))
    warn(
        f"{len(found)} tensors of the model get gradients, {in_all} in all, though"
        " they are none of its parameters: `zero_grad()` never drops these,"
        " and `model.parameters()` gives them to no optimizer. They count in every"
        " step. Keep modules in an `nn.ModuleList` or `nn.ModuleDict`, tensors as"
        " `nn.Parameter`; or call `requires_grad_(False)` on what shall not be trained."
    )
    raise Retrace
