"""Tools that checkpoint every layer and save the outputs of some of its ops.

- ``"automodel"``: `activation_checkpointing` under `distributed` of NeMo Automodel
  (components/distributed/activation_checkpointing.py at 03d37fcc): ``selective`` saves
  every other matmul and what takes long, ``full`` nothing, in Transformers' own way.
  `activation_checkpointing_scope` selects layers of multimodal models by tables of
  Automodel's own, so that such models are refused; others have one scope.
- ``"axolotl"``: `selective_checkpointing` (monkeypatch/selective_checkpointing.py at
  19302b63): `save` has parts of names of ops, or ``attention``. Its
  `activation_offloading` is left out: when a copy to the host frees what it copied is
  up to streams, of which no trace tells.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as of_torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autosac._compat_compiler import compute_intensive_ops
from autosac.errors import UnsupportedError
from autosac.planning.export_targets import Family, Setting, transformers_layers

_Saves = Callable[[Any, int], bool]  # op, how many matmuls ran so far -> saved
# Of aten, as far as a version of PyTorch has them.
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
_ALTERNATING = ("mm", "linear", "_grouped_mm", "_scaled_grouped_mm")
_ALWAYS = (
    *_ATTENTION,
    *("addmm", "bmm", "_scaled_mm", "topk", "max"),
    "_scaled_dot_product_fused_attention_overrideable",
)
_AXOLOTL_LISTS = (
    ("attention", "aten::mm", "aten::addmm"),
    ("aten::mm", "aten::addmm"),
    ("attention",),
)


# --- automodel ----------------------------------------------------------------


def of_automodel(model: torch.nn.Module) -> list[Family]:
    """Its own selection of ops, or whole layers.

    Raises:
        ArgumentError: It is no model of Transformers.
        UnsupportedError: Automodel would do something that is not told by a word.
    """
    layers = transformers_layers(model)
    for sentence, applies in _refused(model, layers).items():
        if applies:
            raise UnsupportedError(f"{type(model).__name__} {sentence}.")
    words = "distributed:\n  activation_checkpointing: {}"
    return [
        Family(settings=(Setting(words=words.format(word), switch=switch),))
        for word, switch in (("selective", _select), ("full", _check_all))
    ]


def _refused(
    model: torch.nn.Module, layers: dict[str, torch.nn.Module]
) -> dict[str, bool]:
    """What to say of a model -> whether it is so."""
    config = getattr(model, "config", None)
    text = getattr(config, "text_config", None) or config
    lists = {fqn.rpartition(".")[0] for fqn in layers}
    parameters = [layer.parameters() for layer in layers.values()]
    return {
        f"has layers in {', '.join(f'`{fqn}`' for fqn in sorted(lists))}, which"
        " `activation_checkpointing_scope` of Automodel groups by tables of its own;"
        " apply the plan itself": len(lists) > 1,
        "shares keys and values among layers, for which Automodel checkpoints parts of"
        " layers; apply the plan itself": bool(
            getattr(text, "num_kv_shared_layers", 0)
        ),
        "has layers without trained parameters, which Automodel leaves out by a rule"
        " of each of its versions; apply the plan itself": not all(
            any(p.requires_grad for p in own) for own in parameters
        ),
    }


def _check_all(model: Any) -> None:
    model.activation_checkpointing_enable()


def _select(model: Any) -> None:
    model.config.use_cache = False
    alternating, always = _ops(_ALTERNATING), _ops(_ALWAYS) | compute_intensive_ops()

    def saves(op: Any, num_matmuls: int) -> bool:
        return num_matmuls % 2 == 1 if op in alternating else op in always

    for fqn, layer in transformers_layers(model).items():
        wrapped = of_torch.checkpoint_wrapper(
            layer, **_saving(partial(_contexts, saves, alternating))
        )
        model.set_submodule(fqn, wrapped)


# --- axolotl ------------------------------------------------------------------


def axolotl_lists(model: torch.nn.Module) -> list[Family]:
    """Every layer, with one of a few lists of saved ops."""
    return [
        Family(settings=(Setting(words=_words(names), switch=partial(_save, names)),))
        for names in _AXOLOTL_LISTS
    ]


def _words(names: tuple[str, ...]) -> str:
    quoted = ", ".join(f'"{name}"' for name in names)
    return (
        "gradient_checkpointing: true\n"
        "gradient_checkpointing_kwargs:\n"
        "  use_reentrant: false\n"
        "selective_checkpointing:\n"
        f"  save: [{quoted}]\n"
        "  save_sliding_window: true"
    )


def _save(names: tuple[str, ...], model: Any) -> None:
    attention = _ops(_ATTENTION) if "attention" in names else frozenset()
    parts = [name for name in names if name != "attention"]

    def saves(op: Any, num_matmuls: int) -> bool:
        return op in attention or any(part in op.name() for part in parts)

    model.activation_checkpointing_enable(
        activation_checkpointing_kwargs={
            "use_reentrant": False,
            **_saving(partial(_contexts, saves, frozenset())),
        }
    )


# --- both ---------------------------------------------------------------------


def _ops(names: tuple[str, ...]) -> frozenset[Any]:
    """Default overloads of those that this version of PyTorch has."""
    found = (getattr(torch.ops.aten, name, None) for name in names)
    packets = (packet for packet in found if packet is not None)
    return frozenset(
        packet.default for packet in packets if "default" in packet.overloads()
    )


def _saving(contexts: Callable[[], Any]) -> dict[str, Any]:
    """Options of a checkpoint that saves by contexts, past the hooks of a trace.

    PyTorch 2.14 asks for that to be said.
    """
    option = "respect_saved_tensors_hooks"
    is_known = option in inspect.signature(checkpoint).parameters
    return {"context_fn": contexts, **({option: False} if is_known else {})}


def _contexts(saves: _Saves, counted: frozenset[Any]) -> Any:
    """Contexts of forward and of the rerun of one layer call."""
    num_matmuls = {False: 0, True: 0}  # in forward and in the rerun

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        num_matmuls[context.is_recompute] += op in counted
        if saves(op, num_matmuls[context.is_recompute]):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
