"""The tape: everything one training step did, in execution order, as plain data.

Time on the tape is a *tick*: a counter that rises at every event (an op starts,
makes its outputs or ends; a storage dies; autograd saves, reads or drops a
tensor; a module is entered or left). Tick 0 is before the step.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autosac.step.modules import ModuleTree

IntArray = npt.NDArray[np.int64]

FORWARD_PHASES = ("forward", "loss")
CATEGORIES = (
    "parameter",
    "buffer",
    "optimizer",
    "input",
    "gradient",
    "activation",
    "temporary",
    "workspace",
)


# Why a module call is none to checkpoint: autograd asks the innermost hooks only.
OTHER_HOOKS = (
    "it runs under `saved_tensors_hooks` that the model has set, which keep what"
    " backward needs (leave them out, and the plan decides)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One block of device memory.

    Attributes:
        nbytes: Its size, rounded up to the device's allocation granularity.
        category: One of `CATEGORIES`.
        born: Tick of its allocation, 0 if it existed before the step.
        died: Tick when the last reference *other than autograd's saved tensors*
            vanished, or `Tape.num_ticks` if it outlives the step.
    """

    nbytes: int
    category: str
    born: int
    died: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator call.

    Attributes:
        name: Overload name, such as ``aten.addmm.default``.
        phase: forward, loss, backward or optimizer.
        module: Index of the module in the tree it belongs to (in backward: the
            module whose forward op it differentiates).
        start: Tick before the kernel runs.
        made: Tick when its outputs exist.
        end: Tick after it.
        reads: Storages of its tensor arguments.
        writes: Storages it mutates in place.
        creates: Storages it allocates for its outputs.
        random: Draws random numbers.
        flops: Floating point operations (PyTorch's flop_counter formulas).
        moved_bytes: Bytes of its tensor arguments and outputs, 0 for a view.
        workspace_bytes: Bytes its kernel allocates and frees inside itself.
        decides: Storages that it reads or makes whose values decide a shape: masks
            that it selects by, or what it finds.
        wrapped_numbers: Arguments that are Python numbers where a tensor is meant;
            each becomes a tensor of 8 bytes on the CPU, which autograd may save.
        dtype: Of its first floating-point output, such as ``float32``.
        shapes: Shapes of its tensor outputs.
        signature: Equal for calls that do the same work on the same shapes; `Copies`
            where the program waits for far memory.
        source: ``file:line`` of the user's code that runs it, if that is known.
        function: The autograd function that runs it in backward, with its number in
            the order of making, such as ``MaxBackward1 6``.
        may_draw: Draws random numbers, or may for all that it says: an op that is not
            PyTorch's own,
        varies: and makes something else when it runs again, as `calibrate` found.
        settings: Number of the global settings of PyTorch that it runs under.
    """

    name: str
    phase: str
    module: int
    start: int
    made: int
    end: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    creates: tuple[int, ...]
    random: bool
    flops: int
    moved_bytes: int
    workspace_bytes: int
    wrapped_numbers: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    signature: Hashable
    source: str = ""
    decides: tuple[int, ...] = ()
    function: str = ""
    may_draw: bool = False
    varies: bool = False
    settings: int = 0

    @property
    def is_view(self) -> bool:
        """Whether the op neither allocates nor mutates, so that it costs nothing."""
        return not (self.creates or self.writes or self.moved_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One tensor that autograd saved for the backward pass.

    Attributes:
        storage: What it keeps alive.
        packed: Tick when autograd saved it.
        unpacked: Tick when backward first read it, None if it never did.
        released: Tick when autograd dropped it.
        used_until: Tick when the tensor that backward read was gone: a moment
            before `released`, or later if a gradient is a view of it. Equals
            `released` if it was never read.
        used_again: Backward read it several times, or in a pass that can be gone
            backward through in turn.
        is_number: It is a single integer, such as a seed, which some kernels keep on
            the host and others on the device.
    """

    storage: int
    packed: int
    unpacked: int | None
    released: int
    used_until: int
    used_again: bool = False
    is_number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One execution of a module's ``forward``.

    Attributes:
        module: Index in the module tree.
        phase: Phase of the step it ran in.
        enter: Tick at its beginning.
        exit: Tick at its end.
        backward: Tick at which backward comes to it, before the autograd function of
            its first output that has one; None if it never does, or of a leaf.
        inputs: Storages of the tensors in its arguments.
        outputs: Storages of the tensors in its output.
        once: Why it must not be called again with the same arguments, if known.
        input_dtypes: Distinct types of its floating-point arguments.
        takes_gradients: Whether backward passes gradients on to its arguments,
        gives_gradients: and whether its output gets any.
        repeats_inputs: One tensor that requires a gradient is several arguments.
        settings: Number of the global settings of PyTorch that it begins under.
    """

    module: int
    phase: str
    enter: int
    exit: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    once: str | None
    input_dtypes: tuple[str, ...] = ()
    takes_gradients: bool = True
    gives_gradients: bool = True
    repeats_inputs: bool = False
    backward: int | None = None
    settings: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of the model, and what else exists because of it.

    Attributes:
        fqns: All its names; several if modules share it.
        shape: Its shape, of what a rank holds of it,
        dtype: and its type in the user's model, such as ``float32``.
        itemsize: Bytes of one of its elements in the user's model,
        traced_itemsize: and in the trace, which may hold it in another type.
        trained: Requires a gradient.
        storage: Its memory.
        gradient: Memory of its gradient after backward, None without one.
        states: Memory of its optimizer state, of tensors that have its shape,
        state_itemsizes: and the bytes of one element of each.
        other_states: Shapes of other state tensors of more than one element.
    """

    fqns: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    traced_itemsize: int
    trained: bool
    storage: int
    gradient: int | None
    states: tuple[int, ...]
    state_itemsizes: tuple[int, ...]
    other_states: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMemory:
    """What a loss takes by its graph: see `loss_graphs.py`.

    Attributes:
        peak_bytes: Most bytes alive besides what the model made,
        handed_bytes: and those of gradients as backward comes to the model.
        most_of: Name of its autograd function of the largest tensors.
    """

    peak_bytes: int
    handed_bytes: int
    most_of: str


@dataclass(frozen=True, slots=True)
class Excess:
    """What a step before the planned one takes besides, while that does the same.

    Attributes:
        begin: Tick of the planned step from which,
        end: and until which it is taken.
        nbytes: Its size.
    """

    begin: int
    end: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Tape:
    """One steady training step.

    Attributes:
        modules: The module tree.
        storages: All storages on the device, index is identity.
        ops: All operator calls in execution order.
        saved: All tensors saved by autograd, in the order of saving.
        calls: All module calls in the order of entering.
        phases: Phase name -> tick at which it began. Two marks are no phases: *model
            backward*, when the first op that differentiates the model itself had
            run, and *finish*, when the backward pass was done and its caller had
            not yet let go of the model's output.
        num_ticks: Number of ticks of the step.
        device_type: ``cpu`` or ``cuda``.
        library_bytes: Blocks that libraries hold all the time, such as the
            workspaces of cuBLAS; known from `calibrate` on.
        parameters: The model's parameters, in the order of ``parameters()``.
        opaque: FQNs of modules that must not be run again, nor cut inside.
        overlapped: As `Step.overlapped`.
        loss: What its loss takes; None if that is not known.
        earlier: What steps before it take besides: peaks count that.
        earlier_tapes: These steps, which `calibrate` measures, too.
    """

    modules: ModuleTree
    storages: tuple[Storage, ...]
    ops: tuple[Op, ...]
    saved: tuple[SavedTensor, ...]
    calls: tuple[ModuleCall, ...]
    phases: dict[str, int] = field(default_factory=dict)
    num_ticks: int
    device_type: str
    library_bytes: tuple[int, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    opaque: frozenset[str] = frozenset()
    overlapped: bool = False
    loss: LossMemory | None = None
    earlier: tuple[Excess, ...] = ()
    earlier_tapes: tuple[Tape, ...] = ()

    @cached_property
    def forward_bytes(self) -> int | None:
        """What ops of the model's first call make, added up.

        None if the step does not call it, or goes backward in there.
        """
        root = next(
            (c for c in self.calls if not self.modules.nodes[c.module].fqn), None
        )
        if root is None or any(
            (s.unpacked or root.exit) < root.exit for s in self.saved
        ):
            return None
        own = (op for op in self.ops if root.enter <= op.start <= root.exit)
        return sum(self.storages[made].nbytes for op in own for made in op.creates)

    @cached_property
    def born(self) -> IntArray:
        """Birth tick of every storage, shape (num_storages,)."""
        return np.array([s.born for s in self.storages], dtype=np.int64)

    @cached_property
    def died(self) -> IntArray:
        """Tick at which each storage dies if autograd saves nothing."""
        return np.array([s.died for s in self.storages], dtype=np.int64)

    @cached_property
    def nbytes(self) -> IntArray:
        """Size of every storage in bytes, shape (num_storages,)."""
        return np.array([s.nbytes for s in self.storages], dtype=np.int64)

    @cached_property
    def categories(self) -> IntArray:
        """Index into `CATEGORIES` of every storage, shape (num_storages,)."""
        own = [CATEGORIES.index(s.category) for s in self.storages]
        return np.array(own, dtype=np.int64)

    @cached_property
    def saved_storage(self) -> IntArray:
        """Storage of every saved tensor, shape (num_saved,)."""
        return np.array([s.storage for s in self.saved], dtype=np.int64)

    @cached_property
    def saved_until(self) -> IntArray:
        """Tick until which each saved tensor keeps its storage alive."""
        until = [max(s.released, s.used_until) for s in self.saved]
        return np.array(until, dtype=np.int64)

    @cached_property
    def freed(self) -> IntArray:
        """Tick at which each storage is really freed, shape (num_storages,)."""
        freed: IntArray = self.died.copy()
        np.maximum.at(freed, self.saved_storage, self.saved_until)
        return freed
