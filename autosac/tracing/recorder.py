"""A dispatch mode that writes down a training step while it runs, on fakes or for real.

Real tensors are for steps that values decide: on fakes nothing is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from autosac import _compat, _compat_autograd, _compat_dispatch, _compat_fakes
from autosac._compat_distributed import WAITS, are_distributed
from autosac.devices.cuda_matmuls import Library, library_of, runs_blas
from autosac.devices.specs import DeviceSpec
from autosac.errors import TraceError
from autosac.fake_tensors.foreach import run_distinct
from autosac.fake_tensors.op_facts import VIEW, Costs, Facts, costs
from autosac.fake_tensors.repeated_calls import RepeatedCalls, kept_results
from autosac.fake_tensors.resizing import RESIZING_IDS, resized
from autosac.fake_tensors.values import refuse_sparse, run_op
from autosac.pytrees import tensors_in
from autosac.quantities import format_bytes
from autosac.step import copies_on_write, source_lines
from autosac.step.loss_graphs import loss_memory
from autosac.step.tape import FORWARD_PHASES, LossMemory, Op, Storage, Tape
from autosac.tracing import untold
from autosac.tracing.account import blas_storages
from autosac.tracing.ambient_settings import AmbientSettings
from autosac.tracing.attribution import Attribution
from autosac.tracing.failures import bypasses, differentiates, place_of, too_large
from autosac.tracing.learned import Learned, LiveViews, Retrace
from autosac.tracing.probing import DRAWS, Call, Probe, module_tree, random_numbers
from autosac.tracing.read_numbers import ReadNumbers
from autosac.tracing.real_tensors import RealCalls
from autosac.tracing.saving import Holder, SavedTensors
from autosac.tracing.threads import OneThread
from autosac.tracing.writing_in_place import RealOps

_LITERAL, _ZEROS = torch.ops.aten.lift_fresh.default, torch.ops.aten.zeros.default
# Seed and offset of its dropout, its last results, lie on the host.
_HOST_SEEDS = torch.ops.aten._scaled_dot_product_efficient_attention.default
_OVERWRITTEN = object()  # in place of the key of a call whose values must not be known


class Recorder(_compat.PlainDispatchMode, SavedTensors):
    """Records storages, and on request ops, saved tensors and module calls.

    Args:
        model: The copy of the model that will run.
        mode: The mode of its fake tensors; None if they are real.
        device_type: Only storages on this type of device count.
        granularity_bytes: Allocations are rounded up to a multiple of this.
        only_storages: Track memory as a real run holds it and nothing else.
        target: The GPU that the tensors stand for though they are on the CPU.
        learned: What earlier runs of the step have taught.
        finds_draws: Tell which calls of modules draw random numbers in Python, not
            only whether an outermost one does: asking takes a while.
        most_bytes: What real tensors may take.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        mode: Any,
        device_type: str,
        granularity_bytes: int,
        only_storages: bool,
        target: DeviceSpec | None = None,
        learned: Learned | None = None,
        finds_draws: bool = False,
        most_bytes: int | None = None,
    ) -> None:
        _compat.PlainDispatchMode.__init__(self)
        SavedTensors.__init__(self, device_type, granularity_bytes, mode)
        self.model = model
        self.finds_draws = finds_draws
        self.learned = learned or Learned()
        self.retraces = False
        self.is_real = mode is None
        self.most_bytes = most_bytes
        results = kept_results(on_gpu=target is not None)
        self.repeated = (
            RealCalls()
            if mode is None
            else RepeatedCalls(mode, self.learned.calls, results)
        )
        self.only_storages = only_storages
        self.target, self.counts_foreign = target, target is not None
        self._costs = partial(costs, device_type=device_type, target=target)
        self.products: set[tuple[str, Library]] = set()
        self.tree = module_tree(model)
        self.muted = self.answers_zero = False
        self.phase = "forward"
        self.phases: dict[str, int] = {}
        self.loss: LossMemory | None = None
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.running: list[Call] = []
        self.met: set[int] = set()  # storages from elsewhere that modules handed on
        self.failed_in = 0
        self.modules = Attribution(model)
        self.views = LiveViews()
        self.real_ops = RealOps()
        self.thread = OneThread()
        self.numbers = ReadNumbers()
        self.settings = AmbientSettings(target.type if target else device_type)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside."""
        hooks: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if not self.only_storages:
            for index, module in enumerate(self.model.modules()):
                if not isinstance(module, torch.jit.ScriptModule):
                    module.forward = Probe(self, index, module.forward)
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self.unpack)
        try:
            with hooks, untold.noting(self.note_state, self.note_dirty), self:
                yield
        finally:
            self.thread.check()
            if self.retraces:
                raise Retrace  # again: the model may have caught it
        self.tick()

    def note_dirty(self) -> None:
        """Refuse the modules that run: an autograd function marks a tensor as dirty."""
        for call in self.running:
            call.once = call.once or untold.DIRTY

    def note_state(self, state: torch.Tensor) -> None:
        """Count a copy of the CPU generator's state, which a step holds for a while."""
        if self.target is None:
            category = "activation" if self.phase in FORWARD_PHASES else "temporary"
            self._indices([state], self.tick(), category)

    def mark(self, phase: str, loss: torch.Tensor | None = None) -> None:
        """Begin a phase of the step; backward begins at a loss."""
        if loss is not None:
            self.real_ops = RealOps(loss)
            self.loss = loss_memory([loss.grad_fn], self.modules.first_loss_node)
        if phase == "loss":
            self.modules.begin_loss()
        self.phase = phase
        self.phases[phase] = self.tick()

    def place(self) -> str:
        """Where the step is, or failed, in words."""
        return place_of(self.fqn, self.phase)

    @property
    def fqn(self) -> str:
        """The innermost module where the step is, or failed."""
        in_backward = self.phase == "backward"
        module = self.modules.last_backward if in_backward else self.failed_in
        return self.tree[module].fqn

    def tape(self) -> Tape:
        """What was recorded, as plain data."""
        end = self.clock
        if self.met:  # what modules handed on and no op read is not of the step
            read = {i for op in self.ops for i in (*op.reads, *op.writes)}
            for index in self.met - read:
                self.nbytes[index] = 0
        storages = tuple(
            Storage(nbytes=nbytes, category=category, born=born, died=died)
            for nbytes, category, born, died in zip(
                self.nbytes, self.categories, self.born, self.deaths(), strict=True
            )
        )
        return Tape(
            modules=self.tree,
            storages=storages + blas_storages(self.target, self.products, end),
            ops=tuple(self.ops),
            saved=tuple(saved.finished(end) for saved in self.saved),
            calls=tuple(call.finished() for call in self.calls),
            phases=self.phases,
            num_ticks=end,
            device_type=self.target.type if self.target else self.device_type,
            loss=self.loss,
        )

    # --- operators --------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if are_distributed(types):
            return NotImplemented
        kwargs = kwargs or {}
        if func is _compat.DEVICE:  # PyTorch asks for it all the time
            return args[0].device
        if _compat.op_name(func) in WAITS:
            return args[0]
        if id(func) in _compat.METADATA_IDS:
            return func(*args, **kwargs)
        if self.phase != "optimizer":
            return self._run_or_record(func, args, kwargs)
        if func is _compat.ITEM:
            condition = None if self.is_real else self.learned.condition
            number = self.numbers.of(args[0], condition)
            if number is not None:
                return number
        return self.numbers.run(self._run_or_record, func, args, kwargs)

    def _run_or_record(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op, and record it if that is what a real step does."""
        copies_on_write.before_op(func, args, kwargs)
        if self.muted:
            return self._unrecorded(func, args, kwargs)
        if self.phase == "backward":
            func, args = self.real_ops.of(func, args)
        start = self.tick()
        inputs: list[torch.Tensor] = []
        key = self.repeated.key(func, args, kwargs, inputs)
        strided = key is not None
        if self._is_overwritten(func, inputs):
            key = _OVERWRITTEN
        self._refuse_original(func, inputs)
        read = [] if func is _LITERAL else inputs  # its memory is born with the output
        reads = self.indices_read(read, strided=strided)
        call, out = self._run(key, func, args, kwargs, inputs)
        if self.target is not None or func is _HOST_SEEDS:
            self._note_gpu(func, args, kwargs, inputs, out)
        born = self.tick()
        outputs = [out] if isinstance(out, torch.Tensor) else list(tensors_in(out))
        category = "activation" if self.phase in FORWARD_PHASES else "temporary"
        first_new = len(self.nbytes)
        made_ids = self._indices(outputs, born, category, strided=True)
        if func is _LITERAL:
            self.leave_out_foreign(outputs, first_new)
        hands_on = made_ids and made_ids[0] < first_new and not self.is_real
        if hands_on and self.views.are_written(func, inputs, outputs, made_ids):
            self.needs_plain_fakes()  # autograd follows writes to such memory
        if id(func) in RESIZING_IDS and self.grow(resized(func, args)):
            self.learned.earlier = 1
        if not self.only_storages:
            call.facts = call.facts or Facts(func, args, kwargs, inputs, outputs)
            creates = tuple(i for i in made_ids if i >= first_new)
            written = [inputs[i] for i in call.facts.written]
            writes = self._indices(written, 0, "input", strided=strided)
            self.copies.forget(writes)
            spent = VIEW
            if creates or writes:
                spent = call.facts.costs or self._costs(
                    func, args, kwargs, inputs + outputs, out
                )
                call.facts.costs = spent
            decides = creates if call.facts.finds else ()
            if call.facts.masks:
                masks = [inputs[i] for i in call.facts.masks]
                decides = self._indices(masks, 0, "input", strided=strided)
            ticks = (start, born)
            self._write(call.facts, spent, ticks, reads, writes, creates, decides)
        return out

    def _run(
        self,
        key: Hashable,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
    ) -> tuple[Any, Any]:
        """What is known of a call from now on, and its result."""
        call = self.repeated.find(key, func, args, kwargs, inputs)
        if call is not None:
            return call, self.repeated.repeat(call, func, args, kwargs, inputs)
        out = self._call(key, func, args, kwargs, inputs)
        refuse_sparse(func, tensors_in((out,)))
        return self.repeated.learn(key, func, args, kwargs, out), out

    def _write(
        self,
        facts: Facts,
        spent: Costs,
        ticks: tuple[int, int],
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        creates: tuple[int, ...],
        decides: tuple[int, ...],
    ) -> None:
        """Write an op down that has just run."""
        module = self._module()
        self.ops.append(
            Op(
                name=facts.name,
                phase=self.phase,
                module=module,
                start=ticks[0],
                made=ticks[1],
                end=self.tick(),
                reads=reads,
                writes=writes,
                creates=creates,
                random=facts.random,
                may_draw=facts.may_draw,
                flops=spent.flops,
                moved_bytes=spent.moved_bytes,
                workspace_bytes=spent.workspace_bytes,
                wrapped_numbers=facts.wrapped if self.phase in FORWARD_PHASES else 0,
                dtype=facts.dtype,
                shapes=facts.shapes,
                signature=spent.signature,
                decides=decides,
                source=source_lines.running(self.phase),
                function=self.modules.function if self.phase == "backward" else "",
                settings=self.settings.number(self.phase),
            )
        )

    def _refuse_original(self, func: Any, inputs: list[torch.Tensor]) -> None:
        """Refuse what bypasses the copy, such as a loss that closes over the model."""
        shape = self.original_parameter(inputs)
        if shape is not None:
            raise TraceError(bypasses(func, self.phase, shape))

    def _note_gpu(
        self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], out: Any
    ) -> None:
        """Note what an op does otherwise on the GPU that the tensors stand for."""
        if func is _HOST_SEEDS:
            self.exempt(out[2:])
        # What is computed from CPU scalars alone stays on the CPU.
        if self.phase == "optimizer" and (func is _LITERAL or self.are_exempt(inputs)):
            self.exempt(tensors_in((out,)))
        if runs_blas(func):
            self.products.add((self.phase, library_of(func, args, kwargs)))

    def _unrecorded(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op that a real step does not."""
        tensors: list[torch.Tensor] = []
        key = self.repeated.key(func, args, kwargs, tensors)
        call = self.repeated.find(key, func, args, kwargs, tensors)
        if call is not None:
            return self.repeated.repeat(call, func, args, kwargs, tensors)
        is_marginal = self._is_count(func, args) or _compat.is_profiling(func)
        if not self.is_real and (key is not None or is_marginal):
            out = self._call(key, func, args, kwargs, tensors)
            self.repeated.learn(key, func, args, kwargs, out)
            return out
        out = func(*args, **kwargs)
        if self.phase == "optimizer":
            # Nobody reads step counts (see `ReadNumbers`), and counting takes long.
            _compat_fakes.forget_values(tensors_in((out,)))
        return out

    def _call(
        self,
        key: Hashable,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
    ) -> Any:
        """Run an op of which no equal call is known."""
        if self.is_real:
            self._refuse_too_much()
            return func(*args, **kwargs)
        mode = self.repeated.mode
        if self._is_count(func, args):
            return _compat_fakes.new_fake(mode, (), (), args[0].dtype, args[0].device)
        if self.answers_zero and func is _compat.ITEM:
            return 0
        if key is _OVERWRITTEN:
            out = func(*args, **kwargs)
            _compat_fakes.forget_values(tensors_in((out,)))
            return out
        if key is None:
            self._look_for_overwritten(func, args, kwargs, inputs)

        def run(args: Any) -> Any:
            on_gpu, floats = self.target is not None, self.phase != "optimizer"
            return run_op(func, args, kwargs, inputs, on_gpu=on_gpu, floats=floats)

        return run(args) if key is None else run_distinct(mode, func, args, kwargs, run)

    def _refuse_too_much(self) -> None:
        """Stop a step that would take more memory than there is."""
        taken_bytes = self.live_bytes + self.copies.nbytes
        if self.most_bytes is not None and taken_bytes > self.most_bytes:
            free = format_bytes(self.most_bytes)
            raise too_large(f"than the {free} of memory that are free")

    def _is_overwritten(self, func: Any, inputs: list[torch.Tensor]) -> bool:
        """Whether the values of a result must not be known: see `Learned`.

        Of zeros that a formula of backward fills in place they need not be.
        """
        if func is _ZEROS and self.phase == "backward":
            return not self.is_real and _compat_autograd.is_the_engines_own()
        if not self.learned.overwritten:
            return False
        line = (_compat.op_name(func), source_lines.of_caller())
        return line in self.learned.overwritten and not any(
            map(_compat_fakes.is_fake, inputs)
        )

    def _look_for_overwritten(
        self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> None:
        """Begin anew if an op writes unknown values over known ones."""
        if self.only_storages or not any(map(_compat_fakes.is_fake, inputs)):
            return
        for tensor in tensors_in(_compat.written_arguments(func, args, kwargs)):
            index = self.ids.get(tensor.untyped_storage()._cdata)
            if index is None or _compat_fakes.is_fake(tensor):
                continue
            made_by = next((op for op in self.ops if index in op.creates), None)
            if made_by is not None and made_by.source:
                self.learned.overwritten.add((made_by.name, made_by.source))
                self._retrace()

    def needs_plain_fakes(self) -> None:
        """Begin anew if the fakes are not such that autograd takes for plain."""
        if not self.learned.plain:
            self.learned.plain = True
            self._retrace()

    @contextlib.contextmanager
    def answering_zero(self) -> Iterator[None]:
        """Tell whoever looks at a value that it is 0."""
        self.answers_zero = True
        try:
            yield
        finally:
            self.answers_zero = False

    def _retrace(self) -> None:
        self.retraces = True
        raise Retrace

    def _is_count(self, func: Any, args: Any) -> bool:
        """Whether a number becomes a tensor: `ReadNumbers` knows its value."""
        return self.phase == "optimizer" and func is _LITERAL and not args[0].dim()

    def _module(self) -> int:
        """Index of the module that the running op belongs to."""
        if self.phase == "backward":
            module, is_of_model = self.modules.of_backward()
            if is_of_model:
                self.phases.setdefault("model backward", self.clock)
            return module
        is_forward = self.phase in FORWARD_PHASES
        return self.modules.of_forward() if is_forward else self.modules.stack[-1]

    # --- saved tensors ----------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Holder | torch.Tensor:
        if _compat_dispatch.is_forward_mode():
            place = place_of(self.tree[self.modules.stack[-1]].fqn, self.phase)
            raise TraceError(differentiates(place, source_lines.of_caller()))
        return self.pack(tensor)

    # --- modules ----------------------------------------------------------

    def enter(self, module: int, args: Any, kwargs: Any) -> Call:
        """A module's ``forward`` begins."""
        self.thread.note(self.tree[module].fqn)
        call = Call(module, self.phase, self.tick())
        call.settings = self.settings.number(self.phase)
        if _compat_dispatch.is_transformed():
            call.once = "it runs under a transform of torch.func, torch.vmap or jvp"
            args = kwargs = None  # such tensors have no memory of their own
        if self.finds_draws or len(self.modules.stack) == 1:
            call.random = random_numbers()
        tensors = list(tensors_in((args, kwargs)))
        call.inputs = self._handed_on(tensors)
        call.look_at_arguments((args, kwargs), tensors, self._pack)
        self.calls.append(call)
        self.modules.stack.append(module)
        self.running.append(call)
        return call

    def leave(self, call: Call, args: Any, kwargs: Any, output: Any) -> None:
        """A module's ``forward`` ends."""
        self.modules.stack.pop()
        self.running.pop()
        if _compat_dispatch.is_transformed():
            args = kwargs = output = None
        if self._handed_on(list(tensors_in((args, kwargs)))) != call.inputs:
            call.once = call.once or "it changes a container that it is given"
        if call.random is not None and call.random != random_numbers():
            call.once = call.once or DRAWS
        outputs = output if isinstance(output, (list, tuple, Mapping)) else [output]
        call.gives_gradients = any(t.requires_grad for t in tensors_in((output,)))
        call.outputs = self._handed_on(list(tensors_in(outputs)))
        call.finish(output, self.tick, is_leaf=self.tree[call.module].is_leaf)

    def _handed_on(self, tensors: list[torch.Tensor]) -> tuple[int, ...]:
        """Indices of the storages of tensors that a module gets or returns."""
        first_new = len(self.nbytes)
        indices = self._indices(tensors, 0, "input")
        self.met.update(range(first_new, len(self.nbytes)))
        return indices
