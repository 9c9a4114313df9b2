"""Tensor-parallel styles of modules: names, and what PyTorch makes of them.

The names are plain data, so that a plan can be saved; where Transformers has one for
the same thing it is its name (transformers/distributed/tensor_parallel.py). Ranks of
one tensor-parallel group hold slices of parameters and see the same batch. Between
modules there are plain tensors, whole or a rank's part of them:

    style                            parameters        first argument    output
    colwise                          rows of weight    whole             a part
    colwise_gather_output            rows of weight    whole             whole
    loss_parallel                    rows of weight    whole             distributed
    rowwise                          columns           a part            whole
    rowwise_split_input              columns           whole             whole
    embedding_rowwise                vocabulary        whole             whole
    replicated_with_grad_allreduce   whole             some heads        some heads
    whole_input                      (of its children) whole             its own
    local_bias                       heads of a table  whole             some heads
    local_heads                      (counts heads)    as it is          as it is
    mla_kv_a_proj                    whole             whole             whole

"A part" is of the last dimension; "some heads" of the third. `whole_input` is for
modules that hand one argument to several modules of style ``colwise``, such as an
attention: backward then sums the parts of its gradient before it reduces them, once.
`local_heads` is for an attention whose forward reads how many heads it has: what counts
them says how many the rank has. `mla_kv_a_proj` is for what puts out latents, and then
keys that all heads share (DeepSeek-V2, arXiv 2405.04434, section 2.1): backward sums
what the rank's heads make of these. `loss_parallel` is for the head: logits stay
divided over the vocabulary for the loss, which runs in PyTorch's context of that name.

A part of the sequence (dimension 1) between modules instead of the whole:

    sequence_parallel                whole             of sequence       of sequence
    sequence_parallel_gather_output  whole             of sequence       whole
    rowwise_to_sequence              columns           a part            of sequence
    rowwise_split_to_sequence        columns           whole             of sequence
    sequence_to_whole                (of its children) of sequence       its own
    whole_to_sequence                (of its children) whole             its own
    sequence_around                  (of its children) of sequence       of sequence

`sequence_around` is for modules that route tokens: all of a sequence inside.

Mixtures of experts (`tp_experts`), whose parameters have styles as well:

    moe_tp_experts                   (of its own)      whole             whole
    ep_dispatch_experts              (of its own)      whole             whole
    parameters of the first: colwise, rowwise: the last dimension but one, the last one;
      packed_colwise, packed_rowwise: likewise, of each of two in one
    parameters of the second: grouped_gemm: whole experts
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from autosac._compat_distributed import is_loss_parallel
from autosac.errors import ArgumentError
from autosac.parallel.tp_checks import (
    HEAD_COUNTS,
    OF_EXPERTS,
    PARAMETER_DIMENSIONS,
    ROTARY_SIZE,
    SHARED_KEYS,
    WHOLE_EXPERTS,
    Styles,
    check,
    check_known,
    is_of_parameter,
    parameter_styles,
)
from autosac.parallel.tp_experts import Experts, with_summed_gradient

_SEQUENCE = 1  # dimension
_HEADS = 2


class _FirstArgument(ParallelStyle):
    """Hands the first floating-point tensor argument of a module on in another layout.

    As `PrepareModuleInput`, whatever else the module gets, and by position or by name.
    """

    def __init__(self, comes: Placement, wanted: Placement, *, is_plain: bool) -> None:
        super().__init__()
        self.comes, self.wanted, self.is_plain = comes, wanted, is_plain

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            for i, value in enumerate(args):
                if _is_activation(value):
                    moved = self._moved(value, device_mesh)
                    return (*args[:i], moved, *args[i + 1 :]), kwargs
            for name, value in kwargs.items():
                if _is_activation(value):
                    return args, {**kwargs, name: self._moved(value, device_mesh)}
            return args, kwargs

        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module

    def _moved(self, tensor: Any, mesh: DeviceMesh) -> torch.Tensor:
        dimension = getattr(self.wanted, "dim", None)
        if dimension is not None and tensor.shape[dimension] % mesh.size():
            raise ArgumentError(
                f"A sequence of {tensor.shape[dimension]} cannot be divided by"
                f" tp={mesh.size()}: pad it to a multiple, or give `tp_plan` without"
                " sequence parallelism."
            )
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, mesh, [self.comes], run_check=False)
        moved: Any = tensor
        if moved.placements != (self.wanted,):
            moved = moved.redistribute(placements=[self.wanted])
        laid_out: torch.Tensor = moved.to_local() if self.is_plain else moved
        return laid_out


def _is_activation(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class _LocalHeads(ParallelStyle):
    """Lets the attributes of a module that count heads count those of the rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in HEAD_COUNTS:
            number = getattr(module, name, None)
            if isinstance(number, int):
                setattr(module, name, number // device_mesh.size())
        return module


class _SharedKeys(ParallelStyle):
    """Sums the gradients of the last outputs, which each rank's heads get as they are.

    Args:
        size: How many these are.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        size = self.size

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            latents, keys = output[..., :-size], output[..., -size:]
            return torch.cat([latents, with_summed_gradient(keys, device_mesh)], -1)

        module.register_forward_hook(hook)
        return module


class _GatheredSequence(SequenceParallel):
    """`SequenceParallel` with whole outputs."""

    def __init__(self) -> None:
        super().__init__(sequence_dim=_SEQUENCE)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        whole = PrepareModuleOutput(
            output_layouts=Shard(_SEQUENCE), desired_output_layouts=Replicate()
        )
        return whole._apply(module, device_mesh)


class _AroundSequence(_FirstArgument):
    """Gives a module the whole sequence, and what follows its part of the output."""

    def __init__(self) -> None:
        super().__init__(Shard(_SEQUENCE), Replicate(), is_plain=True)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        after = _FirstArgument(Replicate(), Shard(_SEQUENCE), is_plain=True)

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (after._moved(output[0], device_mesh), *output[1:])
            return after._moved(output, device_mesh)

        module.register_forward_hook(hook)
        return module


class _LossParallel(ColwiseParallel):
    """`ColwiseParallel` of a head whose outputs stay distributed for the loss."""

    def __init__(self) -> None:
        super().__init__(output_layouts=Shard(-1), use_local_output=False)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        module.register_forward_hook(_check_loss_parallel)
        return module


def _check_loss_parallel(module: nn.Module, args: Any, output: Any) -> None:
    if torch.is_grad_enabled() and not is_loss_parallel():
        raise ArgumentError(
            "Logits stay divided over the vocabulary (`loss_parallel`), and a loss"
            " outside of PyTorch's context would gather them on every rank: run"
            " forward, loss and backward in"
            " `with torch.distributed.tensor.parallel.loss_parallel():`."
        )


_MAKE: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "loss_parallel": _LossParallel,
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(
        sequence_dim=_HEADS, use_local_output=True
    ),
    "whole_input": lambda: _FirstArgument(Replicate(), Replicate(), is_plain=False),
    "local_bias": ColwiseParallel,
    "local_heads": _LocalHeads,
    "sequence_parallel": lambda: SequenceParallel(
        sequence_dim=_SEQUENCE, use_local_output=True
    ),
    "sequence_parallel_gather_output": _GatheredSequence,
    "rowwise_to_sequence": lambda: RowwiseParallel(output_layouts=Shard(_SEQUENCE)),
    "rowwise_split_to_sequence": lambda: RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(_SEQUENCE)
    ),
    "sequence_to_whole": lambda: _FirstArgument(
        Shard(_SEQUENCE), Replicate(), is_plain=False
    ),
    "whole_to_sequence": lambda: _FirstArgument(
        Replicate(), Shard(_SEQUENCE), is_plain=True
    ),
    "sequence_around": _AroundSequence,
}
STYLES = (*_MAKE, SHARED_KEYS, *OF_EXPERTS)
_OF_SEQUENCE = frozenset(name for name in STYLES if "sequence" in name)
_OF_EXPERTS = frozenset(OF_EXPERTS)
_AROUND = (  # whose own parameters stay as they are
    *("whole_input", "local_heads", "whole_to_sequence", "sequence_to_whole"),
    "sequence_around",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """How a model is divided among ranks that see the same batch.

    Attributes:
        degree: How many ranks share the slices.
        styles: FQN of each module that takes part -> its style.
        draws: The step draws random numbers, which must be the same on these ranks.
        asynchronous: Collectives are timed as if products beside them hid them: see
            `async_tp`. That is for comparing times; no plan is made so.
    """

    degree: int = 1
    styles: Styles = field(default_factory=dict)
    draws: bool = False
    asynchronous: bool = False

    def divides(self, parameter: str) -> bool:
        """Whether a style says what ranks have of a parameter, or how they sum it."""
        style = self.styles.get(parameter.rpartition(".")[0])
        return parameter in self.styles or style not in (None, *_AROUND)

    @property
    def cuts_sequences(self) -> bool:
        """Whether a rank has a part of the sequence between some modules."""
        return not _OF_SEQUENCE.isdisjoint(self.styles.values())

    @property
    def divides_experts(self) -> bool:
        """Whether ranks share experts of a mixture, or parts of each."""
        return not _OF_EXPERTS.isdisjoint(self.styles.values())

    @property
    def has_whole_experts(self) -> bool:
        """Whether a rank has whole experts of a mixture."""
        return WHOLE_EXPERTS in self.styles.values()

    @property
    def divides_loss(self) -> bool:
        """Whether logits stay divided, and the loss is computed on parts of them."""
        return "loss_parallel" in self.styles.values()

    def __str__(self) -> str:
        num_modules = sum(not is_of_parameter(fqn, self.styles) for fqn in self.styles)
        kind = " and sequence" * self.cuts_sequences
        kind += " and expert" * self.has_whole_experts
        loss = "; logits stay divided: train under `loss_parallel()`"
        return (
            f"{num_modules} modules with styles of tensor{kind} parallelism over"
            f" {self.degree} ranks of a node, which see one batch together"
            + loss
            * self.divides_loss
        )

    def within(self, fqns: Sequence[str]) -> TensorParallel:
        """The same of some modules and what is in them."""
        among = set(fqns)
        styles = {
            fqn: style
            for fqn, style in self.styles.items()
            if not among.isdisjoint(accumulate(fqn.split("."), "{}.{}".format))
        }
        return replace(self, styles=styles)

    def apply(
        self, model: nn.Module, mesh: DeviceMesh, *, src_data_rank: int | None = 0
    ) -> None:
        """Divide a model, in place: see `apply`.

        Raises:
            ArgumentError: As `apply`; or the step draws random numbers, and ranks that
                must draw the same ones have other seeds.
        """
        if self.draws:
            _check_seeds(mesh)
        if self.degree > 1:
            apply(model, mesh, self.styles, src_data_rank=src_data_rank)


WHOLE = TensorParallel()


def _check_seeds(mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    if dist.get_backend(group) == "fake":
        return
    seeds: list[Any] = [None] * mesh.size()
    dist.all_gather_object(seeds, torch.initial_seed(), group=group)
    if len(set(seeds)) > 1:
        raise ArgumentError(
            f"Ranks that share slices have seeds {seeds}, and the step draws random"
            " numbers, such as those of dropout, which must be the same on them: call"
            " torch.manual_seed with one number on all of them before `apply`."
        )


def expanded(styles: Styles, model: nn.Module) -> dict[str, str]:
    """FQN of each module that has a style -> the style, in the model's order.

    Those of parameters of experts follow the module's.

    Args:
        styles: Styles by FQN or pattern such as ``"blocks.*.mlp.up"``; of several that
            match the last one counts.
        model: The model.

    Raises:
        ArgumentError: A style is unknown, or a pattern matches nothing.
    """
    check_known(styles, (*STYLES, *PARAMETER_DIMENSIONS))
    modules = dict(model.named_modules())
    found = _matched(styles, modules, STYLES)
    own = {
        fqn: [f"{fqn}.{name}" for name, _ in modules[fqn].named_parameters()]
        for fqn, style in found.items()
        if style in OF_EXPERTS
    }
    parameters = dict.fromkeys(name for names in own.values() for name in names)
    found |= _matched(styles, parameters, PARAMETER_DIMENSIONS)
    names = dict.fromkeys(name for fqn in modules for name in (fqn, *own.get(fqn, ())))
    for pattern in styles:
        if not _matching(pattern, names):
            raise ArgumentError(
                f"`tp_plan` has {pattern!r}, which matches no module: use names from"
                " `model.named_modules()`, or patterns of them."
            )
    return {fqn: found[fqn] for fqn in names if fqn in found}


def _matched(
    styles: Styles, names: Collection[str], known: Container[str]
) -> dict[str, str]:
    """The style of each name that has one of those that are known."""
    return {
        name: style
        for pattern, style in styles.items()
        if style in known
        for name in _matching(pattern, names)
    }


def _matching(pattern: str, names: Collection[str]) -> list[str]:
    if pattern in names:
        return [pattern]
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    styles: Styles,
    *,
    src_data_rank: int | None = 0,
) -> None:
    """Make a model tensor-parallel, in place, by PyTorch's `parallelize_module`.

    Args:
        model: Whole on every rank.
        mesh: One dimension: the ranks that share the slices.
        styles: FQN -> style, as `expanded` gives them.
        src_data_rank: Whose values all ranks take; None for each its own.

    Raises:
        ArgumentError: As `check`; or parameters are shared by modules whose styles
            place them otherwise.
    """
    check(model, styles, mesh.size())
    shared = _shared_parameters(model)
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    kinds: dict[type, type] = {}
    plan = {
        fqn: _made(fqn, model, styles, kinds)
        for fqn in styles
        if not is_of_parameter(fqn, styles)
    }
    parallelize_module(model, mesh, dict(plan), src_data_rank=src_data_rank)
    _tie_again(model, shared)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])  # styles of norms forget it


def _made(
    fqn: str, model: nn.Module, styles: Styles, kinds: dict[type, type]
) -> ParallelStyle:
    """What divides a module."""
    style = styles[fqn]
    if style in OF_EXPERTS:
        return Experts(style, parameter_styles(fqn, styles), kinds)
    if style == SHARED_KEYS:
        around = model.get_submodule(fqn.rpartition(".")[0])
        return _SharedKeys(getattr(around, ROTARY_SIZE))
    return _MAKE[style]()


def _shared_parameters(model: nn.Module) -> list[list[str]]:
    """Names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie_again(model: nn.Module, shared: list[list[str]]) -> None:
    for first, *others in shared:
        parameter: Any = model.get_parameter(first)
        for name in others:
            other: Any = model.get_parameter(name)
            if getattr(parameter, "placements", None) != getattr(
                other, "placements", None
            ):
                raise ArgumentError(
                    f"`{first}` and `{name}` are one parameter, and `tp_plan` divides"
                    " them differently: give both modules styles that divide the same"
                    " dimension ('embedding_rowwise' and 'colwise_gather_output' or"
                    " 'loss_parallel'), or none."
                )
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner).register_parameter(attribute, parameter)
