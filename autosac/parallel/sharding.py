"""How a model is sharded by FSDP2: units, degrees, types; and the sizes that follow.

A parameter is cut along its first dimension into chunks of ``ceil(rows / degree)``
rows. The last ranks may get fewer rows or none, but every rank allocates a whole chunk
for the parameter and its gradient, so that collectives are even; only optimizer state
has the rows that are really there. Rank 0 always has the most.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_init_sharded_param`, and
_fsdp_init.py, `_get_managed_modules`, of torch 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from autosac.errors import ArgumentError, UnsupportedError
from autosac.step.modules import ModuleTree
from autosac.step.tape import Parameter, Tape
from autosac.units.unit import Unit

_RANK_BYTES = 4  # of `DeviceMesh.mesh`, which lies on the CPU
# Bytes of one element of the types that a mixed-precision policy may name.
_ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpUnit:
    """One module that is given to ``fully_shard``.

    Attributes:
        fqn: Its name; empty for the model itself, which is always a unit.
        reshard_after_forward: Free its parameters between forward and backward; a
            number n keeps them sharded over n ranks in between.
    """

    fqn: str
    reshard_after_forward: bool | int = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How the model is sharded.

    Attributes:
        units: The FSDP units, the model itself among them. Each holds the parameters
            below it that no unit further down holds.
        shard_degree: Ranks over which parameters are sharded.
        replicate_degree: How many such groups there are (HSDP); ranks are
            ``shard_degree * replicate_degree``.
        param_dtype: Type of gathered parameters, None for their own.
        reduce_dtype: Type in which gradients are reduced; given if and only if
            `param_dtype` is.

    Raises:
        ValueError: With what is wrong.
    """

    units: tuple[FsdpUnit, ...]
    shard_degree: int
    replicate_degree: int = 1
    param_dtype: str | None = None
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("shard_degree", "replicate_degree"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be at least 1, got {getattr(self, name)}."
                )
        fqns = [unit.fqn for unit in self.units]
        if "" not in fqns:
            raise ValueError(
                "`units` lacks the model itself, which holds what no other unit does;"
                ' add FsdpUnit(fqn="", reshard_after_forward=False).'
            )
        twice = [fqn for fqn in set(fqns) if fqns.count(fqn) > 1]
        if twice:
            raise ValueError(f"`units` names `{twice[0]}` twice; name it once.")
        for unit in self.units:
            self._check_reshard(unit)
        self._check_dtypes()

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Ranks by dimension of the mesh: replicas, if there are, then shards."""
        if self.replicate_degree > 1:
            return (self.replicate_degree, self.shard_degree)
        return (self.shard_degree,)

    @property
    def num_ranks(self) -> int:
        """How many there are of all."""
        return prod(self.mesh_shape)

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Names of these dimensions."""
        return ("replicate", "shard")[-len(self.mesh_shape) :]

    def _check_reshard(self, unit: FsdpUnit) -> None:
        ranks = unit.reshard_after_forward
        if isinstance(ranks, bool):
            return
        if ranks < 1 or self.shard_degree % ranks:
            raise ValueError(
                f"`reshard_after_forward`={ranks} of unit `{unit.fqn}` must divide the"
                f" shard degree {self.shard_degree}."
            )

    def _check_dtypes(self) -> None:
        given = (self.param_dtype, self.reduce_dtype)
        if (given[0] is None) != (given[1] is None):
            raise ArgumentError(
                f"`param_dtype`={given[0]!r} and `reduce_dtype`={given[1]!r}: give both"
                " or none, as versions of PyTorch differ in what one alone means."
            )
        for name, dtype in zip(("param_dtype", "reduce_dtype"), given, strict=True):
            if dtype is not None and dtype not in _ITEMSIZES:
                raise ArgumentError(
                    f"`{name}`={dtype!r} is no type to gather or reduce in; use one of"
                    f" {', '.join(_ITEMSIZES)}."
                )
        if given[0] and _ITEMSIZES[str(given[1])] < _ITEMSIZES[given[0]]:
            raise UnsupportedError(
                f"`reduce_dtype`={given[1]!r} is narrower than `param_dtype`="
                f"{given[0]!r}: autograd then casts each gradient, which is not"
                " modelled. Reduce in the type of the parameters or a wider one."
            )

    def reshards_to(self, unit: FsdpUnit) -> int | None:
        """Ranks that share a unit's parameters between forward and backward.

        Returns:
            The shard degree if they are resharded in full, None if they are kept.
        """
        flag = unit.reshard_after_forward
        if isinstance(flag, bool):
            return self.shard_degree if flag else None
        return None if flag == 1 else flag

    def gathered_itemsize(self, parameter: Parameter) -> int:
        """Bytes of an element of a gathered parameter."""
        if self.param_dtype is None or not self.casts(parameter):
            return parameter.itemsize
        return _ITEMSIZES[self.param_dtype]

    def casts(self, parameter: Parameter) -> bool:
        """Whether a parameter is cast before it is gathered."""
        return (
            self.param_dtype is not None
            and parameter.dtype in _ITEMSIZES
            and parameter.dtype != self.param_dtype
        )

    def reduced_itemsize(self, parameter: Parameter) -> int:
        """Bytes of an element of a gradient that is being reduced."""
        if self.reduce_dtype is None:
            return parameter.itemsize
        return _ITEMSIZES[self.reduce_dtype]


def fsdp_units(
    fqns: Iterable[str], *, reshard_after_forward: bool | int = True
) -> tuple[FsdpUnit, ...]:
    """These modules and the model itself as units, with FSDP2's defaults.

    The model's own parameters stay gathered after forward.
    """
    flag = reshard_after_forward
    units = [FsdpUnit(fqn=fqn, reshard_after_forward=flag) for fqn in fqns if fqn]
    return (*units, FsdpUnit(fqn="", reshard_after_forward=False))


def mesh_bytes(num_ranks: int, device_type: str) -> int:
    """What a mesh of so many ranks holds on each of them: a number for each."""
    return _RANK_BYTES * num_ranks if device_type == "cpu" else 0


def chunk_numel(parameter: Parameter, degree: int) -> int:
    """Elements of the chunk that every rank allocates."""
    rows, *rest = parameter.shape
    return -(-rows // degree) * prod(rest)


def local_numel(parameter: Parameter, degree: int, rank: int) -> int:
    """Elements that a rank really has."""
    rows, *rest = parameter.shape
    chunk = -(-rows // degree)
    return min(max(rows - rank * chunk, 0), chunk) * prod(rest)


def is_uneven(parameter: Parameter, degree: int) -> bool:
    """Whether chunks are padded."""
    return parameter.shape[0] % degree != 0


def owned_parameters(tape: Tape, sharding: Sharding) -> dict[str, list[Parameter]]:
    """FQN of each unit -> the parameters that it holds, in FSDP2's order.

    That is the order of `_get_managed_modules`: a module's own parameters come after
    those of the modules inside it.

    Raises:
        ValueError: A unit is no module, or its parameters cannot be held by it.
    """
    owned: dict[str, list[Parameter]] = {unit.fqn: [] for unit in sharding.units}
    for fqn in owned:
        if fqn not in tape.modules.index:
            raise ValueError(
                f"`units` names `{fqn}`, which is no module of the model; use names"
                " from `model.named_modules()`."
            )
    for parameter in tape.parameters:
        owners = {unit_around(fqn, owned) for fqn in parameter.fqns}
        if len(owners) > 1:
            raise ValueError(
                f"Parameter `{parameter.fqns[0]}` is shared with `{parameter.fqns[-1]}`"
                " and would be held by several units; make a module around both of"
                " them the unit."
            )
        if not parameter.shape:
            raise ValueError(
                f"Parameter `{parameter.fqns[0]}` is a scalar, which FSDP2 cannot"
                " shard; give it one dimension of one element."
            )
        owned[owners.pop()].append(parameter)
    place = _places_after_inner(tape.modules)
    for fqn, parameters in owned.items():
        parameters.sort(key=lambda p: min(_places(p, place)))
        _check_dtypes(fqn, parameters)
    return owned


def _places(parameter: Parameter, place: Mapping[str, int]) -> list[int]:
    """Of the modules that have it; one that is there twice has a single name."""
    modules = [fqn.rpartition(".")[0] for fqn in parameter.fqns]
    return [place[fqn] for fqn in modules if fqn in place]


def _places_after_inner(modules: ModuleTree) -> dict[str, int]:
    """FQN of each module -> its place where every one comes after those inside it."""
    children: dict[int, list[int]] = {}
    for module in range(1, len(modules)):
        children.setdefault(modules[module].parent, []).append(module)
    # The reverse is: a module, then those inside it, from the last to the first.
    fqns, pending = [], [0]
    while pending:
        module = pending.pop()
        fqns.append(modules[module].fqn)
        pending += children.get(module, [])
    return {fqn: place for place, fqn in enumerate(reversed(fqns))}


def unit_around(fqn: str, units: Mapping[str, object]) -> str:
    """The innermost unit that is the named module or parameter or lies around it."""
    while fqn not in units:
        fqn = fqn.rpartition(".")[0]
    return fqn


def _check_dtypes(fqn: str, parameters: list[Parameter]) -> None:
    dtypes = sorted({p.dtype for p in parameters if p.trained})
    if len(dtypes) > 1:
        raise ValueError(
            f"FSDP unit `{fqn or 'the model itself'}` would hold parameters of types"
            f" {' and '.join(dtypes)}; FSDP2 wants one type per unit. Make the modules"
            " of one type units of their own."
        )


def check_ac_units(sharding: Sharding, chosen: Iterable[Unit]) -> None:
    """Refuse AC units whose rerun would meet parameters that are not gathered.

    Raises:
        ValueError: Names the unit.
    """
    fqns = {unit.fqn: unit for unit in sharding.units}
    for unit in chosen:
        names = [call.fqn for call in unit.calls]
        for name in names:
            inner = [fqn for fqn in fqns if fqn.startswith(f"{name}.")]
            if inner:
                raise ValueError(
                    f"AC unit `{name}` lies around FSDP unit `{inner[0]}`: a rerun"
                    " would gather its parameters anew. Choose AC units that are FSDP"
                    " units or lie inside one."
                )
        around = [unit.around] if unit.around else []
        owners = {unit_around(name, fqns) for name in [*names, *around]}
        if len(owners) > 1:
            raise ValueError(
                f"The chain of AC units {', '.join(names)} reaches over FSDP units"
                f" {', '.join(sorted(owners))}, whose parameters are not gathered at"
                " the same time. Make a module around the chain the FSDP unit, or use"
                " plain AC units."
            )
