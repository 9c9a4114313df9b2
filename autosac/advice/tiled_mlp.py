"""MLPs in tiles of the sequence, each checkpointed: their insides never exist at once.

    tiled = autosac.tile_mlp(model)  # until tiled.remove()

A tiled module runs on some tokens after the other, under non-reentrant checkpointing,
and joins what they give. Backward runs the last tile again and goes
backward through it, then the one before. Its output and gradients are those of the
module but for rounding: kernels may round matrices of other sizes otherwise, and
gradients of parameters are summed over the tiles, last to first.

Source: TiledMLP of Arctic Long Sequence Training (arXiv:2506.13996), its number of
tiles included; here with PyTorch's own checkpoint, so that each gradient of a parameter
is added to its sum at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from autosac.advice.token_wise import why_not_token_wise
from autosac.errors import ArgumentError, UnsupportedError
from autosac.profiles.mistakes import check_unplanned
from autosac.quantities import whole_number
from autosac.step.arguments import check_kind
from autosac.step.marks import Marks
from autosac.tracing.probing import marked_modules

_LEAST_TILES = 4  # a heuristic: a quarter of the insides is alive


class TiledMlps:
    """Handle of tiled modules; as a context it removes the tiles at its end.

    Attributes:
        fqns: The modules.
    """

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        self._modules = modules
        self.fqns = tuple(modules)

    def remove(self) -> None:
        """Run the modules as they are from now on.

        Raises:
            UnsupportedError: A plan is applied on top.
        """
        for fqn, module in self._modules.items():
            forward = module.__dict__.get("forward")
            if not isinstance(forward, (_Tiled, type(None))):
                raise UnsupportedError(
                    f"The tiles of `{fqn}` cannot be removed: its `forward` is another"
                    " by now, such as a plan's. Take that off first."
                )
            module.__dict__.pop("forward", None)

    def __enter__(self) -> TiledMlps:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def tile_mlp(
    model: torch.nn.Module,
    modules: Marks | None = None,
    *,
    num_tiles: int | None = None,
) -> TiledMlps:
    """Run MLPs of a model in tiles of the sequence from now on, each checkpointed.

    Do so before planning; a plan then takes the tiles as they are.

    Args:
        model: The model.
        modules: Which: names, patterns such as ``"blocks.*.mlp"``, or classes; None for
            the outermost modules inside the model of which the ops prove that each
            token depends on itself alone.
        num_tiles: Tiles of each; None for tokens over width, but 4 at least.

    Returns:
        A handle that removes the tiles.

    Raises:
        ArgumentError: There is no such module, or the model has a plan.
        UnsupportedError: It cannot be proven of one of them, or its `forward` is
            replaced already.
    """
    check_kind(model)
    check_unplanned(model)
    if num_tiles is not None:
        whole_number(num_tiles, name="num_tiles")
    chosen = _found(model) if modules is None else _checked(model, modules)
    if not chosen:
        raise ArgumentError(
            "The model has no module that can be tiled: of none could it be proven that"
            " each token depends on itself alone (dropout must be 0)."
        )
    for fqn, module in chosen.items():
        if "forward" in module.__dict__:
            raise UnsupportedError(
                f"`{fqn}` cannot be tiled: its `forward` is replaced already. Tile it"
                " before it is planned or wrapped."
            )
    for module in chosen.values():
        module.__dict__["forward"] = _Tiled(module, num_tiles)
    return TiledMlps(chosen)


def _found(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The outermost modules inside a model that can be tiled, by FQN."""
    found: dict[str, torch.nn.Module] = {}
    known: dict[object, bool] = {}  # of modules that look alike
    last = ""
    for fqn, module in model.named_modules():  # what is inside one follows it
        if not fqn or (last and fqn.startswith(f"{last}.")):
            continue
        shapes = tuple(parameter.shape for parameter in module.parameters())
        if sum(len(shape) > 1 for shape in shapes) < 2:
            continue
        kind = (type(module), repr(module), shapes, module.training)
        if kind not in known:
            known[kind] = not why_not_token_wise(module)
        if known[kind]:
            last, found[fqn] = fqn, module
    return found


def _checked(model: torch.nn.Module, marks: Marks) -> dict[str, torch.nn.Module]:
    """The modules that a user names, by FQN."""
    chosen = {}
    for fqn in sorted(marked_modules(marks, model, name="modules")):
        chosen[fqn] = model.get_submodule(fqn)
        if why := why_not_token_wise(chosen[fqn]):
            raise UnsupportedError(
                f"`{fqn}` cannot be tiled: {why}. Tile modules of which each token"
                " depends on itself alone, without dropout."
            )
    return chosen


class _Tiled:
    """Stands in for the ``forward`` of a module."""

    def __init__(self, module: torch.nn.Module, num_tiles: int | None) -> None:
        self.num_tiles = num_tiles
        self.__wrapped__ = type(module).forward.__get__(module)

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs or hidden.ndim not in (2, 3):
            raise UnsupportedError(
                "A tiled MLP takes one tensor (batch, sequence, width) and nothing"
                " else; call `remove()` of what `autosac.tile_mlp` returned."
            )
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        num_rows, width = rows.shape[1:]
        count = self.num_tiles or max(_LEAST_TILES, -(-num_rows // width))
        tiles = rows.chunk(count, 1)
        run = partial(checkpoint, self.__wrapped__, use_reentrant=False)
        return torch.cat([run(tile) for tile in tiles], 1).view(hidden.shape)
