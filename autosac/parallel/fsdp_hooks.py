"""What FSDP2 allocates and frees in a step: its hooks, run on sizes alone.

The methods of `Replay` do what the functions of the same names do in
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _fsdp_collectives.py and
_fsdp_state.py of torch 2.10 to 2.15, in the order in which Python issues it. PyTorch
counts memory as allocated and freed when the host says so, whatever the streams; what
is free again stays reserved for the stream that it was made in.

What differs between devices and process groups:
    - on the CPU gradients of padded parameters are copied before they are packed, and
      gradients that are reduced in another type are cast one by one; CUDA has a kernel
      that does both in place (aten/src/ATen/native/TensorShape.cpp,
      aten/src/ATen/native/cuda/Shape.cu);
    - gloo gathers into a second buffer and reduces a copy of its input
      (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp). NCCL does neither; its own
      buffers do not come from PyTorch's allocator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from autosac.parallel.fsdp_schedule import Hooks
from autosac.parallel.sharding import FsdpUnit, Sharding, chunk_numel, is_uneven
from autosac.quantities import rounded_up
from autosac.step.tape import Parameter

PLACES = 2**20  # instants between two keys of the tape
_GATHERS, _REDUCTIONS = 1, 2  # streams beside that of compute, which is 0
# A tensor is divided by a Python number, which becomes a tensor of 8 bytes on the CPU
# and then one of 4 in the type of the other.
_DIVISOR_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """How collectives are carried out.

    Attributes:
        granularity_bytes: Allocations are rounded up to a multiple of it.
        on_cpu: On the CPU, not on a GPU.
        copies: The process group copies what it sends, as gloo does.
        frees_before_copy_out: The buffer that the unit before was gathered into is
            freed before the next unit is copied out of its own, not after that.
        holds_last_gradient: The last gradient that is packed to be reduced is freed
            when that is done, not with the others.
        adds_gradients: Gradients of earlier micro-steps are there, in shards; what is
            reduced is added to them.
        keeps_gradients: Those of the step before are there until backward begins.
        adds_unsharded: Gradients of several micro-batches add up before they are
            reduced, in the type in which they are.
    """

    granularity_bytes: int
    on_cpu: bool
    copies: bool
    frees_before_copy_out: bool
    holds_last_gradient: bool
    adds_gradients: bool = False
    keeps_gradients: bool = False
    adds_unsharded: bool = False

    def rounded(self, num_bytes: int) -> int:
        """Size of a block for so many bytes."""
        return rounded_up(num_bytes, self.granularity_bytes)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The parameters of one unit, which are gathered and reduced together.

    Attributes:
        unit: The unit.
        module: Its index in the module tree.
        hooks: When its hooks run, None if its module is never called.
        unsharded_bytes: Each gathered parameter,
        cast_bytes: and each parameter's chunk that is cast before it is gathered.
        kept_bytes: What is left of each between forward and backward, if they are
            then kept sharded over fewer ranks.
        resharded: Gathered parameters are freed after forward.
        gathered_bytes: The buffer that parameters are gathered into,
        flat_bytes: and the one they are cast into before.
        reduced_bytes: The buffer that gradients are reduced from,
        output_bytes: the one they are reduced into,
        gradient_bytes: and the sharded gradients, if they are cast after that.
        padded_bytes: Copies of padded gradients,
        largest_cast_bytes: and the largest one of a gradient in another type.
        gradients: Storages of the gradients,
        part_bytes: and what a rank takes of each before that, if it is whole or a part
            of a sum on ranks that share slices; 0 if it is taken as it is.
        sum_bytes: What each adds up in before it is reduced, 0 if in itself.
    """

    unit: FsdpUnit
    module: int
    hooks: Hooks | None
    unsharded_bytes: tuple[int, ...]
    cast_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    resharded: bool
    gathered_bytes: int
    flat_bytes: int
    kept_flat_bytes: int
    reduced_bytes: int
    output_bytes: int
    gradient_bytes: int
    padded_bytes: int
    largest_cast_bytes: int
    gradients: tuple[int, ...]
    part_bytes: tuple[int, ...]
    sum_bytes: tuple[int, ...]

    @property
    def late_bytes(self) -> int:
        """The most that a slow thread of gloo may still hold of it."""
        return max(self.gathered_bytes, self.reduced_bytes)


def make_group(
    sharding: Sharding,
    unit: FsdpUnit,
    module: int,
    hooks: Hooks | None,
    parameters: list[Parameter],
    how: Collectives,
    undivided: Mapping[int, int],
) -> Group:
    """Sizes of what a unit gathers and reduces.

    Args:
        sharding: How the model is sharded.
        unit: The unit,
        module: its index in the module tree,
        hooks: when its hooks run,
        parameters: and what it holds.
        how: How collectives are carried out.
        undivided: Gradients that are whole or parts of sums on ranks that share slices,
            and their elements.
    """
    degree = sharding.shard_degree
    ranks = sharding.reshards_to(unit)
    chunks = [chunk_numel(p, degree) for p in parameters]
    sizes = [sharding.gathered_itemsize(p) for p in parameters]
    whole = [n * size * degree for n, size in zip(chunks, sizes, strict=True)]
    cast = [
        n * size if sharding.casts(p) else 0
        for p, n, size in zip(parameters, chunks, sizes, strict=True)
    ]
    is_partly = ranks is not None and ranks < degree
    kept = [n // ranks for n in whole] if is_partly and ranks else []
    return Group(
        unit=unit,
        module=module,
        hooks=hooks,
        unsharded_bytes=tuple(map(how.rounded, whole)),
        cast_bytes=tuple(map(how.rounded, cast)),
        kept_bytes=tuple(map(how.rounded, kept)),
        resharded=ranks is not None,
        gathered_bytes=how.rounded(sum(whole)) if degree > 1 else 0,
        flat_bytes=how.rounded(sum(cast)) if degree > 1 else 0,
        kept_flat_bytes=how.rounded(
            sum(n for n, c in zip(kept, cast, strict=False) if c)
        ),
        **_reduced(sharding, parameters, how, undivided),
    )


def _reduced(
    sharding: Sharding,
    parameters: list[Parameter],
    how: Collectives,
    undivided: Mapping[int, int],
) -> dict[str, Any]:
    """What a group reduces: its entries from `reduced_bytes` on."""
    degree = sharding.shard_degree
    reduced = [p for p in parameters if p.gradient is not None]
    numel = sum(chunk_numel(p, degree) for p in reduced)
    itemsize = sharding.reduced_itemsize(reduced[0]) if reduced else 0
    is_cast = bool(reduced) and sharding.reduce_dtype not in (None, reduced[0].dtype)
    other = sharding.reduce_dtype not in (None, sharding.param_dtype)
    is_summed = how.adds_unsharded and other
    sizes = [itemsize if is_summed else p.traced_itemsize for p in reduced]
    pairs = list(zip(reduced, sizes, strict=True))
    packed = [chunk_numel(p, degree) * degree * size for p, size in pairs]
    padded = [
        how.rounded(nbytes) * is_uneven(p, degree)
        for p, nbytes in zip(reduced, packed, strict=True)
    ]
    wholes = [undivided.get(p.gradient or 0, prod(p.shape)) for p in reduced]
    casts_apart = how.on_cpu and other and not is_summed
    return {
        "reduced_bytes": how.rounded(numel * degree * itemsize),
        "output_bytes": how.rounded(numel * itemsize),
        "gradient_bytes": how.rounded(numel * reduced[0].itemsize) if is_cast else 0,
        "padded_bytes": sum(padded) if how.on_cpu else 0,
        "largest_cast_bytes": max(packed, default=0) if casts_apart else 0,
        "gradients": tuple(p.gradient for p in reduced),
        "part_bytes": tuple(
            how.rounded(prod(p.shape) * size) if p.gradient in undivided else 0
            for p, size in pairs
        ),
        "sum_bytes": tuple(how.rounded(n * itemsize) * is_summed for n in wholes),
    }


@dataclass(slots=True, eq=False)
class _State:
    """Buffers that a group holds at the moment, and how far its hooks have come."""

    group: Group
    unsharded: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    pending: int | None = None  # gathered, and not yet copied out
    late: int | None = None
    all_reduced: int | None = None
    place: int | None = None  # in the order in which forward hooks ended
    held: dict[int, int] = field(default_factory=dict)  # instead of a gradient
    is_done: bool = False


class Replay:
    """Runs hooks and writes down what they allocate.

    Args:
        groups: All groups, in the order of ``named_modules()``.
        sharding: How the model is sharded.
        how: How collectives are carried out.

    Attributes:
        born: Instant of each allocation,
        died: when it is freed, -1 if it outlives the step,
        nbytes: its size,
        category: what it is,
        stream: and where it is made.
        gradient_died: Storage of an unsharded gradient -> when it is freed.
    """

    def __init__(
        self, groups: list[Group], sharding: Sharding, how: Collectives
    ) -> None:
        self.states = [_State(group) for group in groups]
        self.sharding = sharding
        self.how = how
        self.now = 0
        self.born: list[int] = []
        self.died: list[int] = []
        self.nbytes: list[int] = []
        self.category: list[str] = []
        self.stream: list[int] = []
        self.gradient_died: dict[int, int] = {}
        self.retained: int | None = None  # FSDPCommContext.all_gather_state
        self.reduced: int | None = None  # FSDPCommContext.reduce_scatter_states
        self.order: list[_State] = []  # FSDPCommContext.post_forward_order
        self.earlier: list[int] = []  # gradients
        if how.adds_gradients or how.keeps_gradients:
            for group in groups:
                nbytes = group.gradient_bytes or group.output_bytes
                self.earlier.append(self._allocate(nbytes, "gradient"))
                self.born[-1] = 0

    def at(self, key: int) -> None:
        """Move the replay on to a key of the tape, after what happens there."""
        self.now = max(self.now, key * PLACES)

    # --- hooks ------------------------------------------------------------

    def zero_gradients(self) -> None:
        """Drop the gradients of the step before, which a loop may do in between."""
        if not self.how.adds_gradients:
            self._free_all(self.earlier)

    def pre_forward(self, state: _State) -> None:
        """Gather; the buffer stays until the next unit's is full, or is copied out."""
        self._unshard(state)
        if self.how.frees_before_copy_out:
            self._release()
        gathered = self._copy_out(state)
        self._release()
        self.retained = gathered

    def unshard_all(self) -> None:
        """Begin to gather all units, each into a buffer of its own."""
        for state in self.states:
            self._unshard(state)

    def wait_for_all(self) -> None:
        """Wait for all of these: each buffer is freed when it is copied out."""
        for state in self.states:
            self._free(self._copy_out(state))

    def post_forward(self, state: _State) -> None:
        """Free or keep the gathered parameters."""
        group = state.group
        if group.unsharded_bytes:
            if group.kept_bytes:
                for i, nbytes in enumerate(group.kept_bytes):
                    state.kept.append(self._allocate(nbytes, "resharded parameter"))
                    if group.hooks is not None and group.hooks.pre_backward is None:
                        self._drop_stale(nbytes, "resharded parameter")
                    self._free(state.unsharded[i])
                state.unsharded = []
            elif group.resharded:
                self._free_all(state.unsharded)
            state.place = len(self.order)
            self.order.append(state)
        if not group.unit.fqn:
            self._release()

    def pre_backward(self, state: _State) -> None:
        """Gather parameters that are not there, and begin to gather the next unit's."""
        hooks = state.group.hooks
        if hooks is not None and hooks.late_bytes and hooks.post_backward is not None:
            state.late = self._allocate(hooks.late_bytes, "activation")
        if not state.unsharded:
            self._unshard(state)
            gathered = self._copy_out(state)
            self._free_all(state.kept)
            self._free(gathered)
        if state.place:
            self._unshard(self.order[state.place - 1])

    def post_backward(self, state: _State) -> None:
        """Free the gathered parameters and reduce the gradients."""
        group, how = state.group, self.how
        state.is_done = True
        self._divide(state)
        self._free_all(state.unsharded)
        self._free(self.reduced)
        self.reduced = None
        if not group.gradients:
            self._free(state.late)
            return
        degree = self.sharding.shard_degree
        self.reduced = self._allocate(group.reduced_bytes, "reduce-scatter buffer")
        self._spike(group.padded_bytes + group.largest_cast_bytes)
        last = group.gradients[-1]
        for gradient in group.gradients:
            if gradient != last or not how.holds_last_gradient or degree == 1:
                self._drop_gradient(state, gradient)
        output = self._allocate(group.output_bytes, "gradient", _REDUCTIONS)
        sharded = output
        if how.on_cpu:
            copies = group.reduced_bytes if how.copies and degree > 1 else 0
            self._spike(copies + _DIVISOR_BYTES)
        if group.gradient_bytes:
            sharded = self._allocate(group.gradient_bytes, "gradient", _REDUCTIONS)
        left = [b for b in {output, sharded} if b != sharded or how.adds_gradients]
        if self.sharding.replicate_degree > 1 and output in left:
            left.remove(output)
            state.all_reduced = output
        if how.holds_last_gradient and degree > 1:
            self._drop_gradient(state, last)
        self._free_all(left)
        self._free(state.late)

    def add_up(self, state: _State) -> dict[int, int]:
        """Add a micro-batch's gradients to the sums that are reduced in the end.

        Returns:
            Storage of each gradient -> when it is freed.
        """
        group = state.group
        died = {}
        for gradient, nbytes in zip(group.gradients, group.sum_bytes, strict=True):
            if gradient not in state.held:
                state.held[gradient] = self._allocate(nbytes, "gradient")
            elif self.how.on_cpu:
                self._spike(nbytes)  # CPUs cast what they add in another type
            self.now += 1
            died[gradient] = self.now
        return died

    def _divide(self, state: _State) -> None:
        """Take the rank's part of gradients that are whole or parts of sums."""
        group = state.group
        for gradient, nbytes in zip(group.gradients, group.part_bytes, strict=True):
            if nbytes:
                part = self._allocate(nbytes, "gradient")
                self._drop_gradient(state, gradient)
                state.held[gradient] = part

    def _drop_gradient(self, state: _State, gradient: int) -> None:
        """Free a gradient, or what is held instead."""
        if gradient in state.held:
            self._free(state.held.pop(gradient))
        else:
            self.now += 1
            self.gradient_died[gradient] = self.now

    def final(self) -> None:
        """Reduce the gradients that are left; drop all buffers."""
        for state in self.states:
            if not state.is_done and state.group.unsharded_bytes:
                self.post_backward(state)
        for state in self.states:
            self._free(state.all_reduced)
            self._free(state.pending)
        self._release()
        self._free(self.reduced)

    # --- their parts ------------------------------------------------------

    def _unshard(self, state: _State) -> None:
        """Gather a group into a buffer, unless that is under way or done."""
        group = state.group
        if state.unsharded or state.pending is not None or not group.gathered_bytes:
            return
        flat = group.kept_flat_bytes if state.kept else group.flat_bytes
        cast = self._allocate(flat, "all-gather buffer", _GATHERS)
        buffer = self._allocate(group.gathered_bytes, "all-gather buffer", _GATHERS)
        if self.how.copies:
            self._spike(group.gathered_bytes)
        self._free(cast)
        state.pending = buffer

    def _copy_out(self, state: _State) -> int | None:
        """Make the parameters out of the buffer, which is returned."""
        group = state.group
        last: int | None = None
        for nbytes, cast_bytes in zip(
            group.unsharded_bytes, group.cast_bytes, strict=True
        ):
            if self.sharding.shard_degree == 1 and cast_bytes:
                cast = self._allocate(cast_bytes, "all-gather buffer")
                self._free(last)
                last = cast
            state.unsharded.append(self._allocate(nbytes, "unsharded parameter"))
        self._free(last)
        buffer, state.pending = state.pending, None
        return buffer

    def _release(self) -> None:
        self._free(self.retained)
        self.retained = None

    # --- memory -----------------------------------------------------------

    def _allocate(self, nbytes: int, category: str, stream: int = 0) -> int:
        self.now += 1
        self.born.append(self.now)
        self.died.append(-1)
        self.nbytes.append(nbytes)
        self.category.append(category)
        self.stream.append(stream)
        return len(self.born) - 1

    def _free(self, index: int | None) -> None:
        if index is not None:
            self.now += 1
            self.died[index] = self.now

    def _drop_stale(self, nbytes: int, category: str) -> None:
        """Free what the step before this one left until it is replaced."""
        self._free(self._allocate(nbytes, category))
        self.born[-1] = 0

    def _free_all(self, indices: list[int]) -> None:
        for index in indices:
            self._free(index)
        indices.clear()

    def _spike(self, nbytes: int) -> None:
        """Hold memory for an instant."""
        if nbytes:
            self._free(self._allocate(nbytes, "collective's copy"))
