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

"A part" is of the last dimension; "some heads" of the third. `whole_input` is for
modules that hand one argument to several modules of style ``colwise``, such as an
attention: backward then sums the parts of its gradient before it reduces them, once.
`local_heads` is for an attention whose forward reads how many heads it has: what counts
them says how many the rank has. `loss_parallel` is for the head: logits stay divided
over the vocabulary for the loss, which runs in PyTorch's context of that name.

A part of the sequence (dimension 1) between modules instead of the whole:

    sequence_parallel                whole             of sequence       of sequence
    sequence_parallel_gather_output  whole             of sequence       whole
    rowwise_to_sequence              columns           a part            of sequence
    sequence_to_whole                (of its children) of sequence       its own
    whole_to_sequence                (of its children) whole             its own
"""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
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

Styles = Mapping[str, str]

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
        for name in _HEAD_COUNTS:
            number = getattr(module, name, None)
            if isinstance(number, int):
                setattr(module, name, number // device_mesh.size())
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
    "sequence_to_whole": lambda: _FirstArgument(
        Shard(_SEQUENCE), Replicate(), is_plain=False
    ),
    "whole_to_sequence": lambda: _FirstArgument(
        Replicate(), Shard(_SEQUENCE), is_plain=True
    ),
}
STYLES = tuple(_MAKE)
OF_HEADS = ("colwise_gather_output", "loss_parallel")
_OF_ROWS = ("colwise", *OF_HEADS)
_OF_COLUMNS = ("rowwise", "rowwise_split_input", "rowwise_to_sequence")
_OF_SEQUENCE = frozenset(name for name in STYLES if "sequence" in name)


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

    @property
    def cuts_sequences(self) -> bool:
        """Whether a rank has a part of the sequence between some modules."""
        return not _OF_SEQUENCE.isdisjoint(self.styles.values())

    @property
    def divides_loss(self) -> bool:
        """Whether logits stay divided, and the loss is computed on parts of them."""
        return "loss_parallel" in self.styles.values()

    def __str__(self) -> str:
        kind = " and sequence" * self.cuts_sequences
        loss = "; logits stay divided: train under `loss_parallel()`"
        return (
            f"{len(self.styles)} modules with styles of tensor{kind} parallelism over"
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

    Args:
        styles: Styles by FQN or pattern such as ``"blocks.*.mlp.up"``; of several that
            match the last one counts.
        model: The model.

    Raises:
        ArgumentError: A style is unknown, or a pattern matches nothing.
    """
    names = [fqn for fqn, _ in model.named_modules()]
    known = set(names)
    found: dict[str, str] = {}
    for pattern, style in styles.items():
        if style not in _MAKE:
            raise ArgumentError(
                f"`tp_plan` gives {pattern!r} the style {style!r}, which is not known;"
                f" use one of {', '.join(STYLES)}."
            )
        matching = [pattern]
        if pattern not in known:
            matching = [fqn for fqn in names if fnmatch.fnmatchcase(fqn, pattern)]
        if not matching:
            raise ArgumentError(
                f"`tp_plan` has {pattern!r}, which matches no module: use names from"
                " `model.named_modules()`, or patterns of them."
            )
        found.update(dict.fromkeys(matching, style))
    return {fqn: found[fqn] for fqn in names if fqn in found}


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
    plan = {fqn: _MAKE[style]() for fqn, style in styles.items()}
    parallelize_module(model, mesh, dict(plan), src_data_rank=src_data_rank)
    _tie_again(model, shared)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])  # styles of norms forget it


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


# --- what can be divided ------------------------------------------------------

_PACKED = re.compile(
    r"(qkv|c_attn|in_proj|query_key_value|gate_up|kv_proj|wkv|to_kv)", re.IGNORECASE
)
_HEAD_COUNTS = frozenset(
    {
        *("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead"),
        *("num_key_value_heads", "n_kv_heads", "num_kv_heads"),
        *("n_local_heads", "n_local_kv_heads", "all_head_size", "inner_dim"),
    }
)
_WIDTHS = frozenset({"embed_dim", "hidden_size", "d_model", "n_embd", "dim"})
_HEAD_SIZES = frozenset(
    {"head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "d_kv"}
)


def head_counts_read(module: nn.Module) -> list[str]:
    """Attributes that count all heads or their widths, read by a module's forward."""
    read = _read(module) & (_HEAD_COUNTS | _WIDTHS)
    return sorted(n for n in read if isinstance(getattr(module, n, None), int))


def counts_can_be_local(module: nn.Module) -> bool:
    """Whether a forward that reads how many heads there are also reads their size.

    Then it is right with fewer of them; else it may take the size from their number.
    """
    read = _read(module)
    return not read & _WIDTHS and bool(read & _HEAD_SIZES)


def _read(module: nn.Module) -> frozenset[str]:
    """Names of attributes that a module's forward reads."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return frozenset(code.co_names) if code else frozenset()


def check(model: nn.Module, styles: Styles, degree: int) -> None:
    """Refuse styles that a model cannot have.

    Raises:
        ArgumentError: Names the module, and what to change.
    """
    for fqn, style in styles.items():
        module = model.get_submodule(fqn)
        around = model.get_submodule(fqn.rpartition(".")[0])
        if style in _OF_ROWS:
            linear = _of_kind(fqn, module, style, nn.Linear)
            _check_packed(fqn)
            _check_divides(fqn, "outputs", linear.out_features, degree)
            if style == "colwise":
                name = fqn.rpartition(".")[0]
                _check_heads(fqn, linear, around, degree)
                _check_counts(name, around, styles.get(name))
                _check_norms(name, around, styles)
        elif style in _OF_COLUMNS:
            linear = _of_kind(fqn, module, style, nn.Linear)
            _check_divides(fqn, "inputs", linear.in_features, degree)
        elif style == "embedding_rowwise":
            table = _of_kind(fqn, module, style, nn.Embedding)
            _check_divides(fqn, "entries", table.num_embeddings, degree)
        elif style == "local_bias":
            table = _of_kind(fqn, module, style, nn.Embedding)
            _check_divides(fqn, "heads", table.embedding_dim, degree)
        elif style == "local_heads":
            for name in _HEAD_COUNTS:
                if isinstance(number := getattr(module, name, None), int):
                    _check_divides(fqn, f"as `{name}`", number, degree)


def _of_kind(fqn: str, module: Any, style: str, kind: type) -> Any:
    if isinstance(module, kind):
        return module
    raise ArgumentError(
        f"`tp_plan` gives `{fqn}` the style {style!r}, which is for"
        f" torch.nn.{kind.__name__}, and it is a {type(module).__name__}: leave it"
        " out, or write it as that."
    )


def _check_packed(fqn: str) -> None:
    if _PACKED.search(fqn.rpartition(".")[2]):
        raise ArgumentError(
            f"`{fqn}` packs several projections into one, whose outputs cannot be cut"
            " into equal parts: make them modules of their own, or leave it out of"
            " `tp_plan`."
        )


def _check_divides(fqn: str, what: str, number: int, degree: int) -> None:
    if number % degree:
        padded = -(-number // degree) * degree
        raise ArgumentError(
            f"`{fqn}` has {number} {what}, which tp={degree} does not divide: make"
            f" that {padded}, take another degree, or leave it out of `tp_plan`."
        )


def _check_heads(fqn: str, linear: nn.Linear, around: nn.Module, degree: int) -> None:
    """Refuse to cut through heads."""
    head_dim = getattr(around, "head_dim", None)
    if isinstance(head_dim, int) and head_dim > 0:
        num_heads = linear.out_features // head_dim
        if linear.out_features % head_dim == 0 and num_heads % degree:
            raise ArgumentError(
                f"`{fqn}` has {num_heads} heads of {head_dim}, which tp={degree} does"
                f" not divide: take a degree that divides {num_heads}, or leave the"
                " attention out of `tp_plan`."
            )


def _check_counts(name: str, around: nn.Module, style: str | None) -> None:
    """Refuse a forward that counts all heads, unless what counts them is changed."""
    counts = head_counts_read(around)
    if counts and style != "local_heads":
        raise ArgumentError(
            f"The forward of `{name}` ({type(around).__name__}) reads"
            f" `{counts[0]}`, which counts all heads, and a rank has some of them:"
            " write `-1` for their number in its views, as in"
            " x.view(batch, length, -1, head_dim); or give it the style 'local_heads',"
            " if that attribute is used for nothing else; or leave its projections out"
            " of `tp_plan`."
        )


def _check_norms(name: str, around: nn.Module, styles: Styles) -> None:
    """Refuse norms of heads that would get a part of their gradients on each rank."""
    head_dim = getattr(around, "head_dim", None)
    for child_name, child in around.named_children():
        fqn = f"{name}.{child_name}" if name else child_name
        shapes = {tuple(p.shape) for p in child.parameters(recurse=False)}
        if shapes == {(head_dim,)} and fqn not in styles:
            raise ArgumentError(
                f"`{fqn}` sees some of the heads on each rank, so that its gradients"
                " must be summed over the ranks: give it the style"
                " 'replicated_with_grad_allreduce' in `tp_plan`."
            )
