"""What a trace knows of each parameter: its memory, its gradient's, its state's."""

from __future__ import annotations

import torch

from autosac._compat_distributed import local
from autosac.errors import TraceError
from autosac.pytrees import tensors_in
from autosac.step.tape import Parameter
from autosac.step.training_step import AnyOptimizer
from autosac.tracing.probing import dtype_name
from autosac.tracing.recorder import Recorder


def find_parameters(
    recorder: Recorder,
    own: torch.nn.Module,
    model: torch.nn.Module,
    optimizer: AnyOptimizer | None,
) -> tuple[Parameter, ...]:
    """Describe the parameters of a model that was just traced, gradients in place.

    Args:
        recorder: Recorded the step.
        own: The user's model.
        model: Its fake copy.
        optimizer: The optimizer of the copy.

    Raises:
        TraceError: The step has made parameters, or has removed some.
    """
    _check_same(own, model)
    names: dict[int, list[str]] = {}
    for fqn, parameter in own.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    states = {} if optimizer is None else optimizer.state
    parameters = []
    for original, parameter in zip(own.parameters(), model.parameters(), strict=True):
        tensors = list(tensors_in(states.get(parameter, {})))
        tensors = [t for t in tensors if recorder.storages_of([t])]
        alike = [t for t in tensors if t.shape == parameter.shape and t.dim()]
        others = [t for t in tensors if t.shape != parameter.shape and t.numel() > 1]
        gradient = recorder.storages_of([parameter.grad])
        parameters.append(
            Parameter(
                fqns=tuple(names[id(original)]),
                shape=tuple(local(original).shape),
                dtype=dtype_name(original.dtype),
                itemsize=original.itemsize,
                traced_itemsize=parameter.itemsize,
                trained=original.requires_grad,
                storage=recorder.storages_of([parameter])[0],
                gradient=gradient[0] if gradient else None,
                states=recorder.storages_of(alike),
                state_itemsizes=tuple(t.itemsize for t in alike),
                other_states=tuple(tuple(t.shape) for t in others),
            )
        )
    return tuple(parameters)


def _check_same(own: torch.nn.Module, model: torch.nn.Module) -> None:
    before, after = (dict(m.named_parameters()) for m in (own, model))
    changed = sorted(before.keys() ^ after.keys())
    if changed:
        what = "removes" if changed[0] in before else "makes"
        raise TraceError(
            f"The step {what} the parameter `{changed[0]}` of the model, so that it is"
            " another model from then on: call the model once on a batch, then build"
            " the optimizer, before it is planned."
        )
