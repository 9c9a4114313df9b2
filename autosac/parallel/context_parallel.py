"""Context parallelism: ranks hold a part each of the sequence of one batch.

All that a model does token by token a rank does for its part alone. Attention sees the
whole sequence: for it, and only there, the ranks of a group exchange data, by one of

    ulysses   an all-to-all hands each rank all of the sequence for some of the heads;
              after attention another one hands the parts back (Jacobs et al.,
              "DeepSpeed Ulysses", 2023). Parts are consecutive.
    ring      keys and values go around, and what attention to each part yields is
              merged: see `ring_attention`.

Attention is `torch.nn.functional.scaled_dot_product_attention`, causal or not, without
a mask. The modules whose forward calls it run under a mode that takes its place, in
reruns as well. Gradients are those of a rank's part; FSDP2 takes their mean over all
ranks, those of one group among them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from autosac.checkpointing.stand_ins import StandIn
from autosac.errors import ArgumentError, UnsupportedError

Method = Literal["ulysses", "ring"]
METHODS: tuple[Method, ...] = ("ulysses", "ring")
ATTENTION = torch.nn.functional.scaled_dot_product_attention
HEADS, SEQUENCE = 1, 2  # dimensions of queries, keys and values


def check_method(method: str, *, is_shared: bool) -> None:
    """Refuse a method that is not known, or that nothing would follow.

    Args:
        method: How attention sees the whole sequence.
        is_shared: Ranks may have parts of one.

    Raises:
        ArgumentError: Says which there are, or what to ask for.
    """
    if method not in METHODS:
        raise ArgumentError(
            f"`cp_method` must be one of {', '.join(map(repr, METHODS))}, got"
            f" {method!r}."
        )
    if method != METHODS[0] and not is_shared:
        raise ArgumentError(
            f"`cp_method`={method!r} is given, and `mesh` asks for no parts of a"
            " sequence: pass mesh={'cp': 2}, or {'cp': None} to try all degrees."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """How ranks share the sequence of a batch.

    Attributes:
        degree: How many ranks have a part each.
        method: How attention sees the whole.
        attentions: FQNs of the modules whose forward calls it.
        positions: Argument of the model's forward that says where tokens are; '' if
            somebody else gives them to the modules that ask for them.
        shifts_labels: The model compares what it makes of a token with the label of the
            next one, which may be in the part of the next rank.
        arguments: Of the model's forward those that it takes by place as well, in
            order; none in older files.
    """

    degree: int = 1
    method: Method = "ulysses"
    attentions: tuple[str, ...] = ()
    positions: str = ""
    shifts_labels: bool = False
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        how = {
            "ulysses": "all-to-all of heads (Ulysses)",
            "ring": "ring attention, which is predicted and cannot be applied",
        }
        return (
            f"parts for {self.degree} ranks, which see one batch together: by"
            f" {how[self.method]} in {len(self.attentions)} modules"
        )

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Let attention see what all ranks of a group have, in place.

        Args:
            model: The model.
            mesh: Of the group, in the order of its parts.

        Raises:
            UnsupportedError: It is by a ring.
        """
        if self.method == "ring":
            raise UnsupportedError(
                "Ring attention is predicted, not run: PyTorch's ranks run other ops"
                " depending on their place, and a policy names ops by theirs. Plan"
                " with `cp_method='ulysses'`."
            )
        group = mesh.get_group()
        exchange = Exchange(group.group_name, self.degree)
        self.install(model, UlyssesMode(exchange))

    def install(self, model: nn.Module, mode: AttentionMode) -> None:
        """Run attentions under a mode, and look for positions in each call."""
        for fqn in self.attentions:
            module: Any = model.get_submodule(fqn)
            module.forward = _ForwardUnder(module, mode)
        if self.positions:
            looks = _Positions(self.positions)
            model.register_forward_pre_hook(looks, with_kwargs=True)

    def within(self, fqns: Sequence[str]) -> ContextParallel:
        """The same of the attentions that are some modules, or in them."""
        own = tuple(
            attention
            for attention in self.attentions
            if any(f"{attention}.".startswith(f"{fqn}.") for fqn in fqns)
        )
        return replace(self, attentions=own)


WHOLE_SEQUENCE = ContextParallel()


class _ForwardUnder(StandIn):
    """Stands in for a module's ``forward`` and runs it under a mode."""

    def __init__(self, module: nn.Module, mode: AttentionMode) -> None:
        super().__init__(module)
        self.mode = mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.mode:
            return self.__wrapped__(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Positions:
    """Refuses calls of a model that do not say where their tokens are."""

    name: str

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if given_positions(module, args, kwargs, self.name) is None:
            raise ArgumentError(
                f"The model was called without `{self.name}`, and a rank has a part of"
                " the sequence: pass what `plan.part_of(inputs, mesh)` returns."
            )


def given_positions(module: nn.Module, args: Any, kwargs: Any, name: str) -> Any:
    """An argument of a call by its name, None if it is not given."""
    forward = type(module).forward
    return (
        inspect.signature(forward)
        .bind_partial(module, *args, **kwargs)
        .arguments.get(name)
    )


# --- Ulysses ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exchange:
    """All-to-all among the ranks of a group.

    Attributes:
        group_name: PyTorch's name of the group.
        degree: Its size.
    """

    group_name: str
    degree: int

    def __call__(self, tensor: torch.Tensor, cut: int, joined: int) -> torch.Tensor:
        """Give up all but one part of a dimension for the others' parts of another.

        Args:
            tensor: Of a rank.
            cut: Dimension of which each rank gets a part,
            joined: and that of which it gets all, part by part.
        """
        return _AllToAll.apply(tensor, self, cut, joined)  # type: ignore[no-any-return]

    def moved(self, tensor: torch.Tensor, cut: int, joined: int) -> torch.Tensor:
        """The same without a gradient."""
        ops = torch.ops._c10d_functional
        parts = torch.stack(tensor.chunk(self.degree, cut))
        sizes = [1] * self.degree
        others = ops.all_to_all_single(parts, sizes, sizes, self.group_name)
        others = ops.wait_tensor(others)
        return torch.cat(others.unbind(), joined)


class _AllToAll(torch.autograd.Function):
    """`Exchange.moved`, whose gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, exchange: Exchange, cut: int, joined: int
    ) -> torch.Tensor:
        ctx.back = exchange, joined, cut
        return exchange.moved(tensor, cut, joined)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        exchange, *dimensions = ctx.back
        return exchange.moved(*gradients, *dimensions), None, None, None


class AttentionMode(TorchFunctionMode):
    """Takes the place of attention; copies of a model share it.

    Modules whose forward calls attention may lie in each other: it acts once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._acts = False

    def __deepcopy__(self, memo: Any) -> AttentionMode:
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not ATTENTION or self._acts:
            return func(*args, **(kwargs or {}))
        call = Attention.of(*args, **(kwargs or {}))
        call.check()
        self._acts = True
        try:
            return self.attend(call)
        finally:
            self._acts = False

    def attend(self, call: Attention) -> torch.Tensor:
        """Run a call that has been checked."""
        raise NotImplementedError


def check_divides(num_heads: int, degree: int) -> None:
    """Refuse heads that so many ranks cannot share evenly.

    Raises:
        ArgumentError: Says so.
    """
    if num_heads % degree:
        raise ArgumentError(
            f"Attention has {num_heads} heads, which cp={degree} does not divide:"
            " take a degree that does."
        )


class UlyssesMode(AttentionMode):
    """Attention of some heads to the whole sequence in place of all heads to a part."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange

    def attend(self, call: Attention) -> torch.Tensor:
        """Exchange, attend, and exchange again."""
        degree, num_heads = self.exchange.degree, call.query.shape[HEADS]
        check_divides(num_heads, degree)
        query, key, value = (
            self.exchange(tensor, HEADS, SEQUENCE)
            for tensor in (call.query, *call.shared(degree))
        )
        out = ATTENTION(
            query, key, value, None, call.dropout_p, call.is_causal, **call.rest
        )
        return self.exchange(out, SEQUENCE, HEADS)


@dataclass(frozen=True, slots=True)
class Attention:
    """Arguments of `scaled_dot_product_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    rest: dict[str, Any]

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **rest: Any,
    ) -> Attention:
        """Read a call."""
        return cls(query, key, value, attn_mask, dropout_p, is_causal, rest)

    def check(self) -> None:
        """Refuse what parts of a sequence cannot do.

        Raises:
            UnsupportedError: There is a mask, or keys are no part like the queries.
        """
        if self.attn_mask is not None:
            raise UnsupportedError(
                "Context parallelism takes attention that is causal or sees all, and"
                " this one has a mask: leave out `attention_mask`, windows and packed"
                " sequences, or plan without 'cp'."
            )
        lengths = {t.shape[-2] for t in (self.query, self.key, self.value)}
        if self.query.dim() != 4 or len(lengths) > 1:
            raise UnsupportedError(
                "Context parallelism takes queries, keys and values of shape (batch,"
                " heads, sequence, width) of one sequence, got"
                f" {tuple(self.query.shape)} and {tuple(self.key.shape)}: plan without"
                " 'cp'."
            )

    def shared(self, degree: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, repeated until each rank has as many heads of them."""
        num_heads, own = self.query.shape[HEADS], self.key.shape[HEADS]
        times = degree // gcd(own, degree)
        if times == 1:
            return self.key, self.value
        if num_heads % (own * times):
            raise ArgumentError(
                f"Attention has {own} heads of keys for {num_heads} of queries, which"
                f" cannot be repeated for cp={degree}: take a degree that divides"
                f" {own}."
            )
        return (
            self.key.repeat_interleave(times, HEADS),
            self.value.repeat_interleave(times, HEADS),
        )
