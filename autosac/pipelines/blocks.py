"""A model as a chain of blocks, and stages that are stretches of it.

Blocks are the model's children; of a container without a forward of its own, such as a
``torch.nn.ModuleList``, its children in turn. They are a chain if each is called once,
with nothing but the tensor that the one before has returned.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from autosac import _compat_fakes
from autosac._compat_distributed import hide_propagation, unwrapped
from autosac.errors import ArgumentError, AutosacError, TraceError, UnsupportedError
from autosac.parallel.sequence_parts import positions_argument
from autosac.parallel.tp_styles import TensorParallel
from autosac.step.random_streams import seeded_streams
from autosac.tracing.copying import copied
from autosac.tracing.failures import explanation
from autosac.tracing.recorder import Recorder
from autosac.tracing.step import Step

_Model = TypeVar("_Model", bound=nn.Module)
_ADVICE = "a pipeline cuts a model whose blocks follow one another"


@dataclass(frozen=True, slots=True)
class Tokens:
    """A part of a sequence.

    Attributes:
        first: Position of its first token.
        number: How many it has.
    """

    first: int
    number: int

    def positions(self, device: torch.device) -> torch.Tensor:
        """Of its tokens; shape (1, number)."""
        end = self.first + self.number
        return torch.arange(self.first, end, device=device)[None]


class Stage(nn.Module):
    """Some blocks of a model, one after the other, under the names they have in it.

    Args:
        model: The model.
        fqns: Names of the blocks in the order of their calls.
        tokens: The part of the sequence that it is given: blocks whose forward takes
            positions (`sequence_parts.positions_argument`) get these. None for all of
            it, whose positions blocks know.
    """

    def __init__(
        self, model: nn.Module, fqns: Sequence[str], tokens: Tokens | None = None
    ) -> None:
        super().__init__()
        # Names of attributes are not those of blocks.
        self.block_fqns = tuple(fqns)
        self._tokens_given = tokens
        names = {fqn: positions_argument(model.get_submodule(fqn)) for fqn in fqns}
        self._positions_of = {f: n for f, n in names.items() if n and tokens}
        self.training = model.training
        for fqn in fqns:
            parent: nn.Module = self
            *path, name = fqn.split(".")
            for part in path:
                if part not in dict(parent.named_children()):
                    parent.add_module(part, nn.Module().train(model.training))
                parent = parent.get_submodule(part)
            parent.add_module(name, model.get_submodule(fqn))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        (last,) = deque(self._outputs(x), maxlen=1)
        return last

    def _outputs(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Run the blocks, and hand on what each of them returns."""
        where = None
        if self._tokens_given is not None and self._positions_of:
            where = self._tokens_given.positions(x.device)
        for fqn in self.block_fqns:
            name = self._positions_of.get(fqn)
            x = self.get_submodule(fqn)(x, **({name: where} if name else {}))
            yield x


def block_fqns(model: nn.Module) -> list[str]:
    """Names of a model's blocks, in the order of registration."""
    return _blocks_in(model, "")


def _blocks_in(module: nn.Module, prefix: str) -> list[str]:
    fqns = []
    for name, child in module.named_children():
        fqn = f"{prefix}{name}"
        if type(child) in (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.Module):
            fqns += _blocks_in(child, f"{fqn}.")
        else:
            fqns.append(fqn)
    return fqns


@dataclass(frozen=True, slots=True)
class Passed:
    """A tensor that one block hands on to the next.

    Attributes:
        shape: Its shape,
        dtype: and its type, such as ``float32``.
        is_contiguous: Whether a process group sends it: none sends another one.
    """

    shape: tuple[int, ...]
    dtype: str
    is_contiguous: bool = True

    @property
    def is_floating(self) -> bool:
        """Whether it can have a gradient."""
        return bool(getattr(torch, self.dtype).is_floating_point)

    def example(self, device: str | torch.device) -> torch.Tensor:
        """A tensor of zeros that is like it, a leaf that requires a gradient."""
        zeros = torch.zeros(self.shape, dtype=getattr(torch, self.dtype), device=device)
        return zeros.requires_grad_(self.is_floating)


def _passed(tensor: torch.Tensor) -> Passed:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Passed(tuple(tensor.shape), dtype, tensor.is_contiguous())


def chain_of(
    model: nn.Module, inputs: torch.Tensor, dtype: torch.dtype | None = None
) -> dict[str, Passed]:
    """A model's blocks in the order in which they follow one another.

    Args:
        model: The model; it runs once on fake tensors.
        inputs: Of one micro-batch.
        dtype: In which it computes, None for its own.

    Returns:
        The name of each block -> what it hands on.

    Raises:
        UnsupportedError: They are no chain; says which block is called otherwise.
        TraceError: One of them fails.
    """
    mode = _compat_fakes.fake_mode(plain=False)
    fake_model, passed = _on_fakes(model, inputs, mode, dtype)
    order: dict[str, Passed] = {}
    latest: list[Any] = [passed]

    def note(fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if fqn in order:
            raise UnsupportedError(f"`{fqn}` is called several times, and {_ADVICE}.")
        if kwargs or len(args) != 1 or args[0] is not latest[0]:
            before = f"`{next(reversed(order))}`" if order else "the batch"
            raise UnsupportedError(
                f"`{fqn}` gets something else than just what comes out of {before}, and"
                f" {_ADVICE}; compute it inside the block."
            )
        if not isinstance(out, torch.Tensor):
            raise UnsupportedError(
                f"`{fqn}` returns {type(out).__name__}, and stages hand on one tensor."
            )
        order[fqn] = _passed(out)
        latest[0] = out

    for fqn in block_fqns(fake_model):
        fake_model.get_submodule(fqn).register_forward_hook(
            lambda _, args, kwargs, out, fqn=fqn: note(fqn, args, kwargs, out),
            with_kwargs=True,
        )
    try:
        with _running(fake_model, mode):
            output = fake_model(passed)
    except (AutosacError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the user's code raises
        left = [fqn for fqn in block_fqns(fake_model) if fqn not in order]
        where = f"block `{left[0]}`" if left else "the model"
        place = f"{where}, on a micro-batch of {len(inputs)} rows,"
        raise TraceError(explanation(error, place)) from error
    if not order or output is not latest[0]:
        raise UnsupportedError(
            "The model returns something else than what its last block does, and"
            f" {_ADVICE}; put what it does besides into a block."
        )
    _check_all_called(model, order)
    return order


def _on_fakes(
    model: _Model,
    inputs: torch.Tensor,
    mode: _compat_fakes.FakeTensorMode,
    dtype: torch.dtype | None,
) -> tuple[_Model, torch.Tensor]:
    """A model and its inputs as fake tensors of a mode, which compute in a type."""
    step = Step(
        model=model,
        args=(inputs,),
        kwargs={},
        loss_fn=None,
        optimizer=None,
        device_type="cpu",
        granularity_bytes=1,
        compute_dtype=dtype,
    )
    with copied(step, mode) as (fake_model, _, (passed,), *_):
        pass  # nothing of it runs yet
    if dtype is not None and passed.is_floating_point():
        with mode:
            passed = passed.to(dtype)
    return fake_model, passed


@contextlib.contextmanager
def _running(model: nn.Module, mode: _compat_fakes.FakeTensorMode) -> Iterator[None]:
    """Run a model on fakes of a mode; what equal blocks do is worked out once."""
    recorder = Recorder(
        model, mode=mode, device_type="cpu", granularity_bytes=1, only_storages=True
    )
    recorder.muted = True  # nothing is recorded, but calls are remembered
    hide_propagation()
    with seeded_streams(), mode, torch.no_grad(), recorder:
        yield


def handed_on(
    divided: Stage,
    inputs: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    divides_loss: bool,
) -> dict[str, Passed]:
    """What blocks of a divided model hand on, on the first rank of those that share it.

    Args:
        divided: Some in a group of these ranks; they run once on fake tensors.
        inputs: Of one micro-batch.
        dtype: In which it computes, None for its own.
        divides_loss: The loss takes a distributed tensor of the last block.

    Raises:
        UnsupportedError: A block hands on a distributed tensor otherwise.
        TraceError: A block does not run under its styles.
    """
    mode = _compat_fakes.fake_mode(plain=False)
    fake_model, passed = _on_fakes(divided, inputs, mode, dtype)
    order: dict[str, Passed] = {}
    fqns = divided.block_fqns
    with _running(fake_model, mode):
        outputs = fake_model._outputs(passed)
        for fqn in fqns:
            try:
                passed = next(outputs)
            except (AutosacError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever the user's code raises
                raise TraceError(explanation(error, f"divided `{fqn}`")) from error
            is_divided = unwrapped(passed)[1] is not None
            if is_divided and not (divides_loss and fqn == fqns[-1]):
                raise UnsupportedError(
                    f"`{fqn}` hands on a distributed tensor under `tp_plan`, and stages"
                    " hand on what a rank has: give the modules in it styles whose"
                    " outputs are plain tensors."
                )
            order[fqn] = _passed(passed)
    return order


def check_styles(fqns: Sequence[str], tensor: TensorParallel) -> None:
    """Refuse styles of modules that lie in no block, whose forward no stage runs.

    Raises:
        ArgumentError: Names the module.
    """
    inside = tensor.within(fqns).styles
    for fqn, style in tensor.styles.items():
        if fqn not in inside:
            raise ArgumentError(
                f"`tp_plan` gives `{fqn}` the style {style!r}, and it is in no block:"
                f" stages run `{fqns[0]}` and what follows one by one. Give styles to"
                " these, or to modules in them."
            )


def _check_all_called(model: nn.Module, order: Mapping[str, Passed]) -> None:
    """Refuse parameters that lie in no block, and blocks that are not called."""
    uncalled = {fqn for fqn in block_fqns(model)} - set(order)
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    outside = [
        owner
        for owner in sorted(owners)
        if not any(owner == fqn or owner.startswith(f"{fqn}.") for fqn in order)
    ]
    if uncalled or outside:
        raise UnsupportedError(
            f"`{min(uncalled) if uncalled else outside[0]}` is in no block that the"
            f" model calls, and {_ADVICE}."
        )


def possible_cuts(model: nn.Module, chain: Mapping[str, Passed]) -> list[int]:
    """Blocks before which a model may be cut.

    What is handed on there has a gradient, as something before is trained, and can be
    sent; and no parameter is on both sides. Each stage has parameters: blocks without
    any are not cut off those before them.
    """
    fqns, handed_on = list(chain), list(chain.values())
    last_use: dict[nn.Parameter, int] = {}
    first_use: dict[nn.Parameter, int] = {}
    with_parameters: list[int] = []
    trained: list[int] = []
    for i, fqn in enumerate(fqns):
        for parameter in model.get_submodule(fqn).parameters():
            first_use.setdefault(parameter, i)
            last_use[parameter] = i
            with_parameters.append(i)
            trained += [i] * parameter.requires_grad
    shared = [(first_use[p], last) for p, last in last_use.items()]
    shared = [(first, last) for first, last in shared if first < last]
    return [
        cut
        for cut in sorted(set(with_parameters))[1:]
        if handed_on[cut - 1].is_floating
        and handed_on[cut - 1].is_contiguous
        and cut > min(trained, default=cut)
        and not any(first < cut <= last for first, last in shared)
    ]


def check_cuts(
    model: nn.Module, chain: Mapping[str, Passed], cuts: Sequence[int], num_stages: int
) -> None:
    """Refuse a model that cannot be cut into so many stages.

    Raises:
        ArgumentError: It has too few blocks.
        UnsupportedError: Blocks share parameters, or hand on what cannot be sent.
    """
    fqns = list(chain)
    if len(fqns) < num_stages:
        raise ArgumentError(
            f"The model has {len(fqns)} blocks, too few for {num_stages} stages; use"
            " fewer ranks."
        )
    if len(cuts) >= num_stages - 1:
        return
    possible = only_possible(len(cuts) + 1)
    first, last = _sharing(model, fqns)
    if first != last:
        raise UnsupportedError(
            f"`{first}` and `{last}` share a parameter, which cannot be on two ranks:"
            f" {possible}. Untie them or use fewer ranks."
        )
    for fqn in fqns[:-1]:
        if not chain[fqn].is_contiguous:
            raise UnsupportedError(
                f"`{fqn}` hands on a tensor that is not contiguous, which no process"
                f" group sends: {possible}. Let it return `x.contiguous()`, or use"
                " fewer ranks."
            )
    raise UnsupportedError(
        "Each stage needs parameters, and the first one some that are trained:"
        f" {possible} with blocks like these. Use fewer ranks."
    )


def only_possible(num_stages: int) -> str:
    """How many stages there can be at most, as a clause."""
    if num_stages == 1:
        return "only 1 stage is possible"
    return f"only {num_stages} stages are possible"


def _sharing(model: nn.Module, fqns: Sequence[str]) -> tuple[str, str]:
    """Two blocks that share a parameter, the furthest apart; one twice if none do."""
    users: dict[nn.Parameter, list[int]] = {}
    for i, fqn in enumerate(fqns):
        for parameter in model.get_submodule(fqn).parameters():
            users.setdefault(parameter, []).append(i)
    places = users.values()
    widest = max(places, key=lambda own: own[-1] - own[0], default=[0])
    return fqns[widest[0]], fqns[widest[-1]]
