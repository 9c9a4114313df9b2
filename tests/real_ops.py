"""What a real step runs, op by op, as the dispatcher sees it."""

import copy

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autosac import _compat
from autosac.step.random_streams import seeded_streams
from autosac.step.training_step import micro_step

_DETACH = "aten.detach.default"
# Under a dispatch mode autograd never adds gradients in place.
_SUM, _SUM_IN_PLACE = "aten.add.Tensor", "aten.add_.Tensor"


class _Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.phase = "forward"
        self.ops = []

    def mark(self, phase, loss=None):
        self.phase = phase

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if id(func) not in _compat.METADATA_IDS and not _compat.is_profiling(func):
            self.ops.append((self.phase, str(func)))
        return func(*args, **(kwargs or {}))


def real_ops(step):
    """Phase and name of every op of forward, loss and backward of a real step."""
    model, args, kwargs = copy.deepcopy((step.model, step.args, step.kwargs))
    log = _Log()
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with seeded_streams(), one_thread, log:
        micro_step(
            model,
            args,
            kwargs,
            loss_fn=step.loss_fn,
            autocast=step.autocast,
            accumulate=step.accumulate,
            mark=log.mark,
        )
    return _comparable(log.ops)


def traced_ops(tape):
    """The same of a trace."""
    ops = [(op.phase, op.name) for op in tape.ops if op.phase != "optimizer"]
    return _comparable(ops)


def _comparable(ops):
    return [
        (phase, _SUM if phase == "backward" and name == _SUM_IN_PLACE else name)
        for phase, name in ops
        if name != _DETACH and phase != "finish"
    ]
