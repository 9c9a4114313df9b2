"""Traces of stages that are kept from plan to plan: they depend on no budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from autosac.pipelines import micro_batches


@contextmanager
def kept_traces() -> Iterator[None]:
    """While this is open, equal stages are traced, and their ops measured, once."""
    measure = micro_batches.calibrated_if_present
    kept: dict[str, Any] = {
        **{name: _kept(getattr(micro_batches, name)) for name in _TRACING},
        **{name: _told(getattr(micro_batches, name)) for name in _DIVIDING},
        "calibrated_if_present": _measured_once(measure),
    }
    with ExitStack() as stack:
        for name, function in kept.items():
            stack.enter_context(mock.patch.object(micro_batches, name, function))
        yield


_TRACING = ("stage_step", "profile_in")
_DIVIDING = ("divided_copy", "rank_copy")


def _told(divide: Callable[..., Any]) -> Callable[..., Any]:
    def told(stage: torch.nn.Module, *how: Any) -> Any:
        divided = divide(stage, *how)
        divided._divided_so = repr(how)
        return divided

    return told


def _kept(trace: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[str, Any] = {}

    def kept(*args: Any, **options: Any) -> Any:
        (module, received), dtypes = args[-2:], args[:-2]
        how = [str(options.get(n)) for n in ("parallel", "device", "optimizer")]
        loss_fn = options.get("loss_fn")  # kept, so that its address stays its own
        how += [repr(loss_fn), dtypes]
        key = str((_described(module), received.shape, received.dtype, how))
        if key not in known:
            known[key] = trace(*args, **options), loss_fn
        own, _ = known[key]
        # Nor do copies know of plans that were made of it.
        return own.each(replace) if trace.__name__ == "stage_step" else replace(own)

    return kept


def _described(stage: torch.nn.Module) -> tuple[Any, ...]:
    """What a trace depends on: blocks, and what a rank has of them."""
    blocks = [(fqn, str(child)) for fqn, child in stage.named_children()]
    parts = [
        (fqn, getattr(p, "_local_tensor", p).shape, p.requires_grad)
        for fqn, p in stage.named_parameters()
    ]
    divided_so = getattr(stage, "_divided_so", "")
    return blocks, parts, divided_so, stage._tokens_given


def _measured_once(measure: Callable[[Any], Any]) -> Callable[[Any], Any]:
    # By tape; with the profile, so that no id comes again.
    known: dict[int, tuple[Any, Any]] = {}

    def measured(profile: Any) -> Any:
        key = id(profile.tape)
        if key not in known:
            known[key] = profile, measure(profile)
        return replace(known[key][1])  # knows of no plan that was made of it

    return measured
