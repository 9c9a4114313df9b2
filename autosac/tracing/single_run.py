"""One run of a step under fake tensors or for real, anew until nothing is to learn.

Tensors that autograd wants to save are taken away from it (a saved-tensors hook
keeps only their shape) and handed back as fresh fake tensors in backward. So the
tape knows two things that an ordinary run mixes up: until when the model itself
holds a storage, and until when autograd does. Recomputation changes only the
second; that is what makes simulating a plan on the tape exact.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from autosac import (
    _compat,
    _compat_compiler,
    _compat_dispatch,
    _compat_distributed,
    _compat_fakes,
    _compat_plain,
)
from autosac._compat_distributed import local
from autosac.devices.free_memory import available_bytes
from autosac.errors import AutosacError, TraceError
from autosac.lens.mode import lens
from autosac.pytrees import held_tensors, module_tensors
from autosac.step import copies_on_write
from autosac.step.ledger import Ledger
from autosac.step.random_streams import seeded_streams
from autosac.step.tape import Parameter, Tape
from autosac.step.training_step import (
    AnyOptimizer,
    OptimizerInBackward,
    check_optimizer,
    finish_step,
    micro_step,
    training_step,
)
from autosac.storages import storage_bytes
from autosac.tracing import memoized
from autosac.tracing.beside import keep_gradients, learn_gradients
from autosac.tracing.collecting import no_collections
from autosac.tracing.conversions import idle_conversions
from autosac.tracing.copying import copied
from autosac.tracing.cycles import collect_cycles, warn_of_cycles
from autosac.tracing.failures import explanation, too_large
from autosac.tracing.first_steps import covering
from autosac.tracing.later_steps import (
    MOST_EARLIER,
    allocations_of_steps,
    changed_number,
    dearest,
    num_until_full,
    numbers_of,
)
from autosac.tracing.learned import Retrace
from autosac.tracing.one_hot import real_one_hot
from autosac.tracing.parameters import find_parameters
from autosac.tracing.recorder import Recorder
from autosac.tracing.steady_state import (
    Copied,
    enter_steady_state,
    has_distributed,
    make_states,
    marker,
    register_outer,
)
from autosac.tracing.step import Step

_MUCH_BYTES = 2**26
_LITTLE_BYTES = 512  # what modules keep, and nobody traces another step for


def run(
    step: Step,
    prepare: Callable[[torch.nn.Module], Any],
    *,
    only_storages: bool,
    optimizes: bool = True,
    finds_draws: bool = False,
) -> Tape:
    """Run the step, anew until nothing is left to learn of it.

    Once more if functions remember what it made: later steps find it there.

    Args:
        step: The step.
        prepare: Called with the copy of the model before it runs.
        only_storages: The tape holds nothing but storages.
        optimizes: False ends it where the optimizer would begin.
        finds_draws: The tape tells which calls draw random numbers in Python.
    """
    options: Any = {
        "only_storages": only_storages,
        "optimizes": optimizes,
        "finds_draws": finds_draws,
    }
    while True:
        is_real, mode = step.learned.real, None
        if not is_real:
            mode = _compat_fakes.fake_mode(plain=step.learned.plain)
        left: set[int] | None = None  # unknown: it failed
        try:
            tape, left = _run_on(mode, step, prepare, **options)
            if left and memoized.remember(left):
                first, (tape, _) = tape, _run_on(mode, step, prepare, **options)
                tape = tape if only_storages else covering(tape, first)
            elif (
                (left or step.learned.counts)
                and not only_storages
                and not step.learned.earlier
            ):
                tape = _later(tape, mode, step, prepare, **options)
            return tape
        except Retrace:
            pass
        except torch.OutOfMemoryError as error:
            raise too_large("memory than is free") from error
        finally:
            if left is None or left:
                memoized.forget_fakes()
            _compat_plain.restore_keys(mode)
            let_go_of_copies(step, after_each=True)


def _later(
    tape: Tape,
    mode: _compat_fakes.FakeTensorMode | None,
    step: Step,
    *args: Any,
    **how: Any,
) -> Tape:
    """The tape of a second step, if what modules keep makes it another one.

    A model may make a table of positions in its first step only. And a second step may
    begin with more, such as the weight that `torch.nn.utils.spectral_norm` computed: it
    is alive until it is replaced. If steps go on to differ, the one is planned that
    takes most. What others take besides, it has as well.
    """
    learned, is_real = step.learned, step.learned.real
    begun_bytes = storage_bytes(module_tensors(step.model))

    def behind(number: int) -> Tape:
        learned.earlier = number
        return _run_on(mode, step, *args, **how)[0]

    try:
        tapes = {0: tape, 1: behind(1)}
        counts = learned.counts  # what other runs say of later steps is another matter
        kept_bytes = [*learned.kept_bytes]
        grows = kept_bytes[0] < kept_bytes[1]  # as a queue that fills
        if grows or counts:
            behind(MOST_EARLIER)
            until = num_until_full(learned.kept_bytes) if grows else 1
            if until == 0:
                learned.earlier = 0
                return tape
            number, *others = dearest([*learned.allocations], until, counts)
            if others or number > 1:
                numbers = [*others, number]  # the planned one last: it stays learned
                tapes |= {n: behind(n) for n in numbers if n not in tapes}
                learned.earlier, learned.covered = number, (0, *others)
                return covering(tapes[number], *(tapes[n] for n in learned.covered))
    except (Retrace, TraceError) as error:
        learned.earlier = 0
        if isinstance(error, Retrace) and learned.real == is_real:
            raise  # all is to run in the other way
        learned.real = is_real  # a second step may need what the first has lost
        return tape
    later = tapes[1]
    differs = _names(later) != _names(tape)
    differs |= counts is not None and _sizes(later) != _sizes(tape)
    begins_with_more = kept_bytes[0] - begun_bytes > _LITTLE_BYTES
    learned.earlier = int(begins_with_more or differs)
    return covering(later, tape) if learned.earlier else tape


def _names(tape: Tape) -> list[str]:
    return [op.name for op in tape.ops]


def _sizes(tape: Tape) -> list[int]:
    return [storage.nbytes for storage in tape.storages]


def _run_on(
    mode: _compat_fakes.FakeTensorMode | None,
    step: Step,
    prepare: Callable[[torch.nn.Module], Any],
    *,
    only_storages: bool,
    optimizes: bool,
    finds_draws: bool,
) -> tuple[Tape, set[int]]:
    """Run the step on fakes of a mode, or on real tensors if there is none.

    Returns:
        The tape; addresses of the storages that forward leaves alive.
    """
    seed = step.learned.seed
    with (
        seeded_streams(seed) as extremes,
        no_collections(),
        lens(mode, step.lens),
        copied(step, mode) as copies,
    ):
        model, optimizer, args, kwargs, loss_fn, modules = copies
        step = replace(step, loss_fn=loss_fn)
        check_optimizer(optimizer, step.accumulate, step.clip_grad_norm)
        _train(step, model, optimizer, args, kwargs)
        new_recorder = partial(
            Recorder,
            model,
            mode=mode,
            device_type=step.traced_type,
            granularity_bytes=step.granularity_bytes,
            target=step.lens,
            learned=step.learned,
            finds_draws=finds_draws or mode is None,
            most_bytes=_most_bytes(step) if mode is None else None,
        )
        recorder = new_recorder(only_storages=True)
        try:
            held = Copied(model)
            _take_earlier_steps(recorder, mode, step, model, args, kwargs)
            before = recorder
            prepare(model)
            recorder = new_recorder(only_storages=only_storages)
            register_outer(recorder, step, model, optimizer, (args, kwargs), held)
            recorder.register_left(before, before.left_alive(model))
            recorder.numbers.begin(step.optimizer, optimizer)
            leaves = keep_gradients(recorder, model, step.learned)
            numbers = numbers_of(modules)
            with _recorded(recorder, mode):
                if isinstance(optimizer, OptimizerInBackward):
                    make_states(recorder, optimizer)
                loss = _one_micro_step(recorder, step, model, args, kwargs)
                learn_gradients(leaves, step.learned)
                found = step.adds_gradients and step.finds_gradients
                enter_steady_state(recorder, model, optimizer, adds_gradients=found)
                recorder.mark("optimizer")
                parameters: tuple[Parameter, ...] = ()
                if not only_storages:  # with gradients, which optimizers may drop
                    parameters = find_parameters(recorder, step.model, model, optimizer)
                if optimizes:
                    finish_step(model, optimizer, step.clip_grad_norm)
                del loss  # alive until here, as in `training_step`
            step.learned.draws_extremes = bool(extremes and extremes.are_met())
            step.learned.counts = changed_number(numbers, numbers_of(modules))
        except (AutosacError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever the user's code raises
            is_final = mode is None or _compat_compiler.is_of_compiled_code(error)
            if step.is_present and not is_final:
                step.learned.real = True  # values decide, or a fake kernel refuses
                raise Retrace from error
            asks_for_value = isinstance(error, _compat.TRACE_ERRORS)
            is_first = recorder.phase == "optimizer" and step.learned.condition is None
            if asks_for_value and is_first:
                step.learned.condition = True
                raise Retrace from error
            failure = explanation(error, recorder.place(), step.compute_dtype)
            raise TraceError(failure, fqn=recorder.fqn) from error
        tape = replace(recorder.tape(), parameters=parameters)
        left = recorder.left_alive(model)
        if left and not only_storages:
            warn_of_cycles(recorder, tape, left)
            left = recorder.left_alive(model)
        if step.learned.earlier:
            step.learned.kept_bytes.append(_kept_bytes(step, model, before, recorder))
        step.learned.largest_write = step.learned.largest_write or 0
        return tape, left


def _take_earlier_steps(
    recorder: Recorder,
    mode: _compat_fakes.FakeTensorMode | None,
    step: Step,
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Take the steps before the one that is traced, for what modules keep of them."""
    learned = step.learned
    finds = step.finds_gradients and has_distributed(model)
    if not learned.earlier and not finds:
        return
    learned.kept_bytes.clear()
    begins = [len(recorder.nbytes)]
    for _ in range(max(learned.earlier, 1)):
        with _recorded(recorder, mode):
            _one_micro_step(recorder, step, model, args, kwargs)
        for index, parameter in enumerate(model.parameters()):
            if parameter.grad is not None:
                learned.trained.add(index)
        if not finds:
            model.zero_grad(set_to_none=True)
        for tensor in held_tensors((args, kwargs)):
            tensor.grad = None  # each micro-step gets others
        learned.kept_bytes.append(_kept_bytes(step, model, recorder))
        begins.append(len(recorder.nbytes))
    columns = (recorder.born, recorder.deaths(), recorder.nbytes)
    born, died, nbytes = (np.array(column, dtype=np.int64) for column in columns)
    ledger = Ledger(born=born, died=died, nbytes=nbytes)
    learned.allocations = allocations_of_steps(ledger, begins)


def _kept_bytes(step: Step, model: torch.nn.Module, *recorders: Recorder) -> int:
    """Bytes that modules hold, and what else steps have left to others, as to a loss.

    Nothing of reference cycles, which are collected if there is more than before.
    """
    module_bytes = storage_bytes(module_tensors(model))
    left_bytes = _left_bytes(model, recorders)
    before_bytes = step.learned.kept_bytes[-1:] or [module_bytes]
    if left_bytes and module_bytes + left_bytes > before_bytes[0]:
        for recorder in recorders:
            collect_cycles(recorder)
        left_bytes = _left_bytes(model, recorders)
    return module_bytes + left_bytes


def _left_bytes(model: torch.nn.Module, recorders: Sequence[Recorder]) -> int:
    """Bytes of what no module holds, but for small tensors, such as losses to print."""
    held = (local(tensor) for tensor in module_tensors(model))
    known = {t.untyped_storage()._cdata for t in held if t.layout is torch.strided}
    sizes = (
        recorder.nbytes[recorder.ids[address]]
        for recorder in recorders
        for address in recorder.left_alive(model) - known
    )
    return sum(nbytes for nbytes in sizes if nbytes > _LITTLE_BYTES)


def _one_micro_step(
    recorder: Recorder, step: Step, model: torch.nn.Module, args: Any, kwargs: Any
) -> torch.Tensor:
    """Run forward, loss and backward under a recorder; the loss."""
    return micro_step(
        model,
        args,
        kwargs,
        loss_fn=step.loss_fn,
        autocast=step.autocast,
        accumulate=step.accumulate,
        mark=marker(recorder, model, step),
    )


def _train(
    step: Step,
    model: torch.nn.Module,
    optimizer: AnyOptimizer | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Train real copies as often as is known of the step."""
    if step.learned.num_updates:
        copies_on_write.copy_all()
    for number in range(1, step.learned.num_updates + 1):
        try:
            training_step(
                model,
                args,
                kwargs,
                loss_fn=step.loss_fn,
                optimizer=optimizer,
                autocast=step.autocast,
                accumulate=step.accumulate,
                clip_grad_norm=step.clip_grad_norm,
                gradients_in_forward=step.gradients_in_forward,
                keeps_gradients=step.keeps_gradients,
            )
        except (AutosacError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever the user's code raises
            place = f"training step {number}"
            raise TraceError(explanation(error, place)) from error
        model.zero_grad(set_to_none=True)


@contextmanager
def _recorded(
    recorder: Recorder, mode: _compat_fakes.FakeTensorMode | None
) -> Iterator[None]:
    """Record a step, on fakes of a mode or on real tensors."""
    # On a GPU backward would run on a thread of its own, whose last references go at
    # any moment after it.
    one_thread = torch.autograd.set_multithreading_enabled(False)
    _compat_distributed.hide_propagation()
    with (
        real_one_hot(recorder),
        idle_conversions(),
        _compat_compiler.without_compiled_code(on_fakes=mode is not None),
        _compat_plain.fakes_of(mode),
        _compat_distributed.short_lists(),
        _compat_dispatch.as_a_step_begins(),
        one_thread,
        recorder.recording(),
    ):
        yield


def _takes_much(step: Step) -> bool:
    """Whether a copy of the model takes much memory."""
    return sum(p.nbytes for p in step.model.parameters()) > _MUCH_BYTES


def _most_bytes(step: Step) -> int | None:
    """Memory that a real step may take."""
    return available_bytes(torch.device(step.device_type))


def let_go_of_copies(step: Step, *, after_each: bool) -> None:
    """Free the copies of a step that ran on real tensors: they hang in cycles.

    Args:
        step: The step.
        after_each: After one of several runs, not behind the last: only large copies
            are worth a search through all of Python's objects, but at once.
    """
    if step.learned.real and _takes_much(step) == after_each:
        gc.collect()
