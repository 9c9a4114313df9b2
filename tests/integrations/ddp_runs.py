"""Loops of one's own under `DistributedDataParallel`, as a rank of two runs them."""

import gc
import itertools
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import autosac
from autosac.errors import InfeasibleBudgetError
from benchmarks import allocator_shim as shim

EVEN = (64, 256, 64, 256, 64)
# ZeRO gives the first process the largest weight, and the other one the rest.
UNEVEN = (128, 640, 96, 600)  # 81,920 numbers, and 61,440 + 57,600
ONE_LARGE = (100, 256, 40, 256, 40)  # 25,600 numbers, and 3 x 10,240
_ROWS = {EVEN: 256, UNEVEN: 64, ONE_LARGE: 1}


def chain(widths, *, bias=True):
    """Linear modules of these widths, with GELU between them."""
    pairs = itertools.pairwise(widths)
    modules = [part for w, v in pairs for part in (nn.GELU(), nn.Linear(w, v, bias))]
    return nn.Sequential(*modules[1:])


def global_mean(output):
    """A mean over the rows of all processes."""
    num_rows = torch.tensor(float(output.shape[0]))
    dist.all_reduce(num_rows)
    return output.square().sum() / num_rows


def functional_mean(output):
    """The same by PyTorch's functional collectives."""
    num_rows = torch.tensor(float(output.shape[0]))
    name = dist.group.WORLD.group_name
    num_rows = torch.ops._c10d_functional.all_reduce(num_rows, "sum", name)
    num_rows = torch.ops._c10d_functional.wait_tensor(num_rows)
    return output.square().sum() / num_rows


def _mean(output):
    return output.square().mean()


def _zero(parameters):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW)


def _reducing(parameters):
    """An optimizer with a hook that waits for the other processes."""
    optimizer = torch.optim.AdamW(parameters)
    optimizer.register_step_pre_hook(_reduce_gradients)
    return optimizer


def _reduce_gradients(optimizer, *_):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            dist.all_reduce(parameter.grad)


def _train(rank, budget, widths, *, loss_fn, make_optimizer, **options):
    """Weights, peaks of steps that have the optimizer's state, and the plan."""
    gc.collect()
    before, peaks = shim.live_bytes(), []
    torch.manual_seed(0)
    model = chain(widths, bias=widths is EVEN)
    replica = DistributedDataParallel(model, **options)
    optimizer = make_optimizer(model.parameters())
    x = torch.randn(
        _ROWS[widths], widths[0], generator=torch.Generator().manual_seed(rank)
    )

    def step():
        output = replica(x)
        loss_fn(output).backward()
        del output
        optimizer.step()
        optimizer.zero_grad()

    if budget is not None:
        plan = autosac.plan_replicas(
            replica, x, memory_budget=budget, optimizer=optimizer, loss_fn=loss_fn
        )
        plan.apply(model)
    for _ in range(4):
        _, peak_bytes = shim.peak_of(step)
        peaks.append(peak_bytes - before)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    figures = (plan.peak_bytes, plan.budget_bytes) if budget is not None else None
    return weights, peaks[1:], figures


def least_feasible(
    rank, widths, *, loss_fn=_mean, make_optimizer=torch.optim.AdamW, **options
):
    """Peaks of a rank under the least budget, what was predicted, and equal bits."""
    how = {"loss_fn": loss_fn, "make_optimizer": make_optimizer, **options}
    plain, *_ = _train(rank, None, widths, **how)
    try:
        _train(rank, 1000, widths, **how)
    except InfeasibleBudgetError as error:
        lowest_bytes = error.lowest_peak_bytes
    weights, peaks, figures = _train(rank, lowest_bytes, widths, **how)
    is_equal = all(map(torch.equal, weights.values(), plain.values()))
    return max(peaks), *figures, is_equal


def static(rank):
    return least_feasible(rank, EVEN, static_graph=True)


def mean_of_all(rank):
    return least_feasible(rank, EVEN, loss_fn=global_mean)


def reducing(rank):
    return least_feasible(rank, EVEN, make_optimizer=_reducing)


def zero_uneven(rank):
    return least_feasible(rank, UNEVEN, make_optimizer=_zero)


def zero_one_large(rank):
    return least_feasible(rank, ONE_LARGE, make_optimizer=_zero)


def refused(rank):
    """What a rank is told of a collective that no other one can be left out of."""
    try:
        least_feasible(rank, EVEN, loss_fn=functional_mean)
    except autosac.UnsupportedError as error:
        return str(error)
    return ""


def hooked_later(rank):
    """Warnings of a rank whose DDP gets a hook once its step is planned."""
    model = chain(EVEN)
    replica = DistributedDataParallel(model)
    x = torch.randn(8, EVEN[0])
    plan = autosac.plan_replicas(replica, x, memory_budget="1GiB", loss_fn=_mean)
    plan.apply(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        replica.register_comm_hook(None, fp16_compress_hook)
        for _ in range(3):
            _mean(replica(x)).backward()
            model.zero_grad()
    return [(warning.filename, str(warning.message)) for warning in told]
