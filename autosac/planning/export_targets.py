"""What other tools' own checkpointing can be set to, and how to switch that on.

- ``"transformers"``: `PreTrainedModel.activation_checkpointing_enable` with
  `every_n_layers` (transformers 5.24, modeling_utils.py).
- ``"axolotl"``: `gradient_checkpointing` and `gradient_checkpointing_kwargs` of its
  configuration, which it hands to the `Trainer` of Transformers
  (utils/schemas/config.py), so that these are the same. Its ``offload`` is left out: no
  trace shows when its copies end. Its lists of saved ops are in `selective_targets`.
- ``"torchtitan"``: layer-wise selective checkpointing, every k-th child of `layers` in
  PyTorch's `checkpoint_wrapper` (torchtitan/distributed/activation_checkpoint.py at
  01db32e97, `_apply_layer_sac`); "full" is every child.
- ``"megatron"``: the flags of Megatron-Core (megatron/core/transformer/
  transformer_config.py at 002526d81): ``full`` with ``block``, which reruns the first n
  layers of a pipeline stage one by one, or ``uniform``, which reruns all in chunks of
  n; ``selective``, which reruns named parts of all layers. It reruns whole calls, as
  reentrant checkpoints do. Parts that discard their outputs (``layernorm``,
  ``moe_act``, ``mla_up_proj``) are left out: that is not what a checkpoint does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as of_torch
from torch.utils.checkpoint import checkpoint

from autosac.errors import ArgumentError, UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to set a tool.

    Attributes:
        words: What to write there.
        switch: Does to a model what the tool then does.
    """

    words: str
    switch: Callable[[Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Settings that recompute more from one to the next.

    Attributes:
        settings: Least recomputation first.
        falls: Each takes no more memory than the one before.
        is_last_resort: All take the time of full recomputation: for budgets that
            nothing else keeps.
    """

    settings: tuple[Setting, ...]
    falls: bool = False
    is_last_resort: bool = False


def frequencies(num_layers: int) -> list[int]:
    """Every how many layers, fewest layers first; one for each number of layers.

    Tools count from the first layer (the number is rounded up) or from the k-th (down).
    """
    by_count = {
        (num_layers // k, -(-num_layers // k)): k for k in range(1, num_layers + 1)
    }
    return sorted(by_count.values(), reverse=True)


# --- transformers and axolotl -------------------------------------------------


def of_transformers(model: torch.nn.Module) -> list[Family]:
    """Every k-th layer."""
    return _every_n_layers(
        model, "model.activation_checkpointing_enable(every_n_layers={})"
    )


def of_axolotl(model: torch.nn.Module) -> list[Family]:
    """The same in the words of a YAML file."""
    return _every_n_layers(
        model,
        "gradient_checkpointing: true\n"
        "gradient_checkpointing_kwargs:\n"
        "  use_reentrant: false\n"
        "  every_n_layers: {}",
    )


def _every_n_layers(model: torch.nn.Module, words: str) -> list[Family]:
    settings = (
        Setting(words=words.format(every), switch=partial(_enable, every=every))
        for every in frequencies(len(transformers_layers(model)))
    )
    return [Family(settings=tuple(settings))]


def _enable(model: Any, every: int) -> None:
    model.activation_checkpointing_enable(every_n_layers=every)


def transformers_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Layers of a model of Transformers that can be checkpointed, by FQN.

    Raises:
        ArgumentError: It is no such model, or is checkpointed already.
        UnsupportedError: It has no such layers.
    """
    if not hasattr(model, "activation_checkpointing_enable"):
        raise ArgumentError(
            f"`model` is a {type(model).__name__} without"
            " `activation_checkpointing_enable`: exports for 'transformers', 'axolotl'"
            " and 'automodel' take models of Transformers, from 5.24 on."
        )
    layers = {
        fqn: module
        for fqn, module in model.named_modules()
        if hasattr(type(module), "_can_checkpoint_with_cache")
    }
    if not layers:
        raise UnsupportedError(
            f"{type(model).__name__} has no `GradientCheckpointingLayer`, so that"
            " `every_n_layers` means nothing; apply the plan itself."
        )
    if any(vars(layer).get("gradient_checkpointing") for layer in layers.values()):
        raise ArgumentError(
            "The model has gradient checkpointing already: disable it, the export says"
            " what to enable."
        )
    return layers


# --- torchtitan ---------------------------------------------------------------


def of_torchtitan(model: torch.nn.Module) -> list[Family]:
    """Every k-th block."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, torch.nn.Module) or not list(layers.children()):
        raise ArgumentError(
            f"`model` is a {type(model).__name__} without `layers`: exports for"
            " 'torchtitan' take models of its kind, whose `layers` hold the blocks."
        )
    settings = (
        Setting(words=_titan_words(every), switch=partial(_titan, every=every))
        for every in frequencies(len(list(layers.children())))
    )
    return [Family(settings=tuple(settings))]


def _titan(model: Any, every: int) -> None:
    for number, (name, layer) in enumerate(list(model.layers.named_children()), 1):
        if number % every == 0:
            model.layers.register_module(name, of_torch.checkpoint_wrapper(layer))


def _titan_words(every: int) -> str:
    if every == 1:
        return 'activation_checkpoint.mode = "full"'
    return (
        'activation_checkpoint.mode = "selective",'
        f' activation_checkpoint.selective_ac_option = "{every}"'
    )


# --- megatron -----------------------------------------------------------------


def of_megatron(model: torch.nn.Module) -> list[Family]:
    """The first n layers, named parts of all, or chunks of layers."""
    fqn, layers = _megatron_layers(model)
    num_layers = len(layers)
    *block, every = (
        Setting(
            words=_full_words("block", n), switch=partial(_first, fqn=fqn, number=n)
        )
        for n in range(1, num_layers + 1)
    )
    uniform = (
        Setting(
            words=_full_words("uniform", n), switch=partial(_chunks, fqn=fqn, size=n)
        )
        for n in _chunk_sizes(num_layers)
    )
    selective = [
        Family(settings=(_selective(fqn, names),)) for names in _subsets(layers)
    ]
    return [
        *selective,
        Family(settings=tuple(block), falls=True),
        # To rerun the last layer, whose backward comes at once, may take more.
        Family(settings=(every,)),
        Family(settings=tuple(uniform), is_last_resort=True),
    ]


def _chunk_sizes(num_layers: int) -> list[int]:
    """For each number of chunks the smallest size above 1: it reruns least at once."""
    by_count = {-(-num_layers // n): n for n in range(num_layers, 1, -1)}
    return sorted(by_count.values())


def _full_words(method: str, number: int) -> str:
    return (
        f"--recompute-granularity full --recompute-method {method}"
        f" --recompute-num-layers {number}"
    )


def _selective(fqn: str, names: tuple[str, ...]) -> Setting:
    return Setting(
        words="--recompute-granularity selective --recompute-modules "
        + " ".join(names),
        switch=partial(_parts, fqn=fqn, names=frozenset(names)),
    )


def _megatron_layers(model: torch.nn.Module) -> tuple[str, torch.nn.ModuleList]:
    """The list of layers, and its name."""
    for fqn, module in model.named_modules():
        is_named = fqn.rpartition(".")[2] == "layers"
        if is_named and isinstance(module, torch.nn.ModuleList) and len(module):
            return fqn, module
    raise ArgumentError(
        f"`model` is a {type(model).__name__} without a `ModuleList` named `layers`:"
        " exports for 'megatron' take models whose layers lie in one, as in"
        " Megatron-Core and most models of Transformers."
    )


def _megatron_parts(layer: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Name of a part of a layer for ``--recompute-modules``, and its FQN there."""
    for fqn, module in layer.named_modules():
        own = fqn.rpartition(".")[2]
        if own == "core_attention":
            yield "core_attn", fqn
        elif own == "shared_experts":
            yield own, fqn
        elif fqn == "mlp":
            yield "moe" if type(module).__name__ == "MoELayer" else "mlp", fqn


def _subsets(layers: torch.nn.ModuleList) -> Iterator[tuple[str, ...]]:
    """Names of parts that may be rerun together: none lies inside another."""
    names = sorted({name for layer in layers for name, _ in _megatron_parts(layer)})
    for size in range(1, len(names) + 1):
        for subset in combinations(names, size):
            if not {"moe", "shared_experts"} <= set(subset):
                yield subset


def _parts(model: torch.nn.Module, fqn: str, names: frozenset[str]) -> None:
    for layer in model.get_submodule(fqn).children():
        for name, part in list(_megatron_parts(layer)):
            if name in names:
                layer.set_submodule(part, _Rerun(layer.get_submodule(part)))


def _first(model: torch.nn.Module, fqn: str, number: int) -> None:
    layers: Any = model.get_submodule(fqn)
    for i in range(number):
        layers[i] = _Rerun(layers[i])


def _chunks(model: torch.nn.Module, fqn: str, size: int) -> None:
    layers: Any = model.get_submodule(fqn)
    whole = list(layers)
    for begin in range(0, len(whole), size):
        chunk = whole[begin : begin + size]
        layers[begin] = _Rerun(_Chunk(chunk))
        for i in range(begin + 1, begin + len(chunk)):
            layers[i] = _Passed(whole[i])


class _Rerun(torch.nn.Module):
    """Runs a module under a reentrant checkpoint, whatever it is called with."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # what a model asks of a layer
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = list(kwargs)  # gradients flow to positional arguments only

        def run(*flat: Any) -> Any:
            given, named = flat[: len(args)], flat[len(args) :]
            return self.module(*given, **dict(zip(names, named, strict=True)))

        return checkpoint(run, *args, *kwargs.values(), use_reentrant=True)


class _Chunk(torch.nn.Module):
    """Runs consecutive layers, each on what the one before returns first."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # what a model asks of a layer
            return getattr(self.layers[0], name)

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        output: Any = None
        for layer in self.layers:
            output = layer(hidden, *args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
        return output


class _Passed(torch.nn.Module):
    """In place of a layer that has run in its chunk."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # no child: it is one of the chunk's

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden: Any, *_: Any, **__: Any) -> Any:
        return hidden
